"""The weights that training begins from: fresh ones, with parts of the target's own put in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forespeak.drafters.loader import named
from forespeak.drafters.table import METHODS
from forespeak.errors import OptionError
from forespeak.formats.drafters import D2T, T2D, draft_token_ids
from forespeak.models.blocks import load_parameters
from forespeak.train.objective import Start, TargetView

Tensors = dict[str, Tensor]


def begin(
    method: str, config: Any, target: TargetView, start: Start
) -> tuple[Tensors, Tensor | None]:
    """The tensors that training begins with, and the draft vocabulary.

    Returns:
        Internal names to tensors, and [Vd] target ids, None for the whole vocabulary.

    Raises:
        OptionError: a reduced vocabulary and no ids, or ids that do not fit it.
    """
    if start.tensors is None:
        tensors: Tensors = named(METHODS[method].starts)(config, start.generator)
        tensors.pop(D2T, None)  # spread evenly, for want of frequencies
    else:
        tensors = dict(start.tensors)
    tensors.pop(T2D, None)
    stored = tensors.pop(D2T, None)
    size = config.draft_vocab_size
    if size is None:
        return tensors, None
    ids = start.token_ids if stored is None else draft_token_ids(stored)
    vocab_size = target.config.vocab_size
    if ids is None and size == vocab_size:
        ids = torch.arange(size)
    if ids is None:
        raise OptionError(
            f"draft_vocab_size is {size} and no vocabulary of that size was given; count the "
            "tokens of the training texts first, or leave draft_vocab_size out."
        )
    rising = len(ids) == size and bool((ids[1:] > ids[:-1]).all())
    if not rising or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise OptionError(
            f"The draft vocabulary has {len(ids)} ids from {int(ids.min())} to {int(ids.max())}; "
            f"expected are {size} rising ids from 0 to {vocab_size - 1}."
        )
    return tensors, ids.long()


def load(network: nn.Module, tensors: Mapping[str, Tensor], target: TargetView) -> None:
    """Puts weights into a network, in float32 on the target's device.

    Raises:
        CheckpointError: they are not the network's.
    """
    load_parameters(network, tensors, "what training begins from")
    network.to(device=target.device, dtype=torch.float32)


def last_layers(target: TargetView, count: int) -> list[Mapping[str, Tensor]]:
    """Up to ``count`` of the target's layers that are given, the last ones, in order."""
    return [target.layers[number] for number in sorted(target.layers)[-count:]]


def copy_layer(tensors: Tensors, prefix: str, layer: Mapping[str, Tensor]) -> None:
    """Puts the target's weights in where a name and shape is the drafter's, too.

    Args:
        tensors: the drafter's, changed.
        prefix: what the layer's names begin with, such as ``layers.0.``.
        layer: the target's.
    """
    for name, tensor in layer.items():
        own = tensors.get(prefix + name)
        if own is not None and own.shape == tensor.shape:
            tensors[prefix + name] = copied(tensor)


def copied(tensor: Tensor) -> Tensor:
    """Float32 on the CPU, for a network to be loaded with."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def pass_through(tensor: Tensor, first: int) -> Tensor:
    """A product's weight [H, I] that hands on the H inputs from ``first`` on, and of the others
    what it was made to (fresh weights are small)."""
    changed = tensor.clone()
    size = len(tensor)
    changed[:, first : first + size] = torch.eye(size)
    return changed
