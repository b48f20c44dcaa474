"""The target while a drafter is trained for it: the model that runs, and its weights as numbers.

The model gives features as it will serve (int8 on a CPU). Losses need its embedding, norm and head
in floating point: :func:`target_view` reads them from the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.errors import ModelError
from forespeak.models.base import TargetModel
from forespeak.models.config import ModelConfig
from forespeak.models.loading import Checkpoint, load_checkpoint
from forespeak.models.opening import open_model, pick_device, pick_dtype
from forespeak.models.tokenizer import Tokenizer
from forespeak.train.objective import TargetView

Weights = Callable[[], Iterator[tuple[str, Tensor]]]

_LAYERS = "model.layers."
_PROBE = (3, 1, 4, 1, 5, 9, 2, 6)  # any few tokens that every vocabulary has


@dataclass(frozen=True)
class TrainingTarget:
    """A target to train for.

    Attributes:
        name: as it was asked for.
        config: its sizes.
        model: runs it; None when features are cached already.
        weights: a new pass over its weights under HF names.
        tokenizer: None for a model of bare token ids.
        device: where training runs.
    """

    name: str
    config: ModelConfig
    model: TargetModel
    weights: Weights
    tokenizer: Tokenizer | None
    device: torch.device


def open_training_target(
    name: str, *, dtype: str = "auto", device: str = "auto", threads: int | None = None
) -> TrainingTarget:
    """Load a target.

    Args:
        name: ``smollm2-135m``, a folder, a GGUF file or a Hub id ORG/NAME.
        dtype: ``auto`` is int8 on cpu and bfloat16 on cuda, as it will serve.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads; None takes all cores.

    Raises:
        ModelError: no such model, it cannot be read, or it runs through transformers.
        OptionError: a setting that this model or machine cannot have.
    """
    place = pick_device(device)
    checkpoint = load_checkpoint(name)
    if checkpoint.config is None:
        raise ModelError(
            f"{name} runs through transformers, whose weights have names of their own; drafters "
            "are trained for the built-in families. Choose a model of one of these."
        )
    precision = pick_dtype(dtype, place, checkpoint.family)
    model = open_model(checkpoint, dtype=precision, device=place, threads=threads)
    torch.set_num_threads(threads or os.cpu_count() or 1)
    return of_checkpoint(name, checkpoint, model, place)


def of_checkpoint(
    name: str, checkpoint: Checkpoint, model: TargetModel, device: torch.device
) -> TrainingTarget:
    """A target from its parts."""
    return TrainingTarget(
        name, model.config, model, checkpoint.weights, checkpoint.tokenizer, device
    )


def target_view(target: TrainingTarget, *, dtype: torch.dtype = torch.float32) -> TargetView:
    """What losses need of a target, on the training device.

    Args:
        target: whose weights.
        dtype: of embedding and head, float32 or bfloat16.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in target.weights():
        if not name.startswith(_LAYERS):
            found[name] = tensor.to(target.device, torch.float32)
    embedding = found["model.embed_tokens.weight"].to(dtype)
    tied = "lm_head.weight" not in found
    return TargetView(
        config=target.config,
        embedding=embedding,
        head=embedding if tied else found["lm_head.weight"].to(dtype),
        norm=found["model.norm.weight"],
        norm_eps=target.config.rms_norm_eps,
        layers=LayersOnDemand(target.weights, target.config.num_layers, target.device),
    )


class LayersOnDemand(Mapping[int, Mapping[str, Tensor]]):
    """Weights of a target's layers under HF's names within a layer, read when they are asked for.

    A pass over the files costs seconds: one is made for the first layer that is asked for, and one
    for all others when a second is. They are kept as they are stored.

    Args:
        weights: a new pass over the target's weights.
        num_layers: of the target.
        device: where tensors are put, in float32.
    """

    def __init__(self, weights: Weights, num_layers: int, device: torch.device) -> None:
        self._weights, self._num_layers, self._device = weights, num_layers, device
        self._read: dict[int, dict[str, Tensor]] = {}

    def __getitem__(self, layer: int) -> Mapping[str, Tensor]:
        if not 0 <= layer < self._num_layers:
            raise KeyError(layer)
        if layer not in self._read:
            every = range(self._num_layers)
            self._read_layers({layer} if not self._read else set(every) - self._read.keys())
        kept = self._read[layer]
        return {name: t.to(self._device, torch.float32) for name, t in kept.items()}

    def _read_layers(self, wanted: set[int]) -> None:
        for name, tensor in self._weights():
            if name.startswith(_LAYERS):
                number, _, rest = name.removeprefix(_LAYERS).partition(".")
                if int(number) in wanted:
                    self._read.setdefault(int(number), {})[rest] = tensor

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_layers))

    def __len__(self) -> int:
        return self._num_layers


def probe_tokens(config: ModelConfig) -> Tensor:
    """[8] tokens whose features tell targets apart."""
    return torch.tensor(_PROBE) % config.vocab_size
