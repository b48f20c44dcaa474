"""A drafter with more words than it had: to go on from one whose draft vocabulary was too small.

Where the drafter predicts a state and the target's head makes words of it, nothing but the list of
words grows. Rows of a head of its own begin as the target's, rows of corrections at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.formats.drafters import D2T, T2D, draft_token_ids

_CORRECTION = "markov_w2"  # adds to logits that the head makes
_HEADS = ("lm_head.weight", "output.weight")


def widened(
    config: Any, tensors: Mapping[str, Tensor], counts: Tensor, size: int, head: Tensor
) -> tuple[Any, dict[str, Tensor]]:
    """A drafter over ``size`` words: its own, and of the others those that are counted most.

    Args:
        config: of any family with a reduced draft vocabulary.
        tensors: under internal names, with the map.
        counts: [V] how often each word is to be predicted.
        size: of the new draft vocabulary; the target's takes all words.
        head: [V, H] the target's.

    Raises:
        OptionError: the drafter has the whole vocabulary already, or as many words or more.
    """
    old = config.draft_vocab_size
    if old is None or D2T not in tensors:
        raise OptionError(
            "The drafter to start from has the whole vocabulary already; leave "
            "--draft-vocab-size out."
        )
    if not old < size <= len(counts):
        raise OptionError(
            f"--draft-vocab-size is {size}; allowed: above {old}, what the drafter has, up to the "
            f"target's {len(counts)}."
        )
    ids = draft_token_ids(tensors[D2T])
    ranked = counts.double()
    ranked[ids] = float("inf")
    new = ranked.argsort(descending=True, stable=True)[:size].sort().values
    places = torch.searchsorted(new, ids)
    made = {
        name: _grown(name, tensor, old, new, places, head)
        for name, tensor in tensors.items()
        if name not in (D2T, T2D)
    }
    made[D2T] = new - torch.arange(size)
    return replace(config, draft_vocab_size=size), made


def _grown(
    name: str, tensor: Tensor, old: int, new: Tensor, places: Tensor, head: Tensor
) -> Tensor:
    """A tensor with a row a word gets rows for the new ones; any other stays."""
    is_head = name.endswith(_HEADS)
    if not (is_head or _CORRECTION in name) or len(tensor) != old:
        return tensor
    grown = head[new].float().cpu() if is_head else torch.zeros(len(new), *tensor.shape[1:])
    grown[places] = tensor.float()
    return grown
