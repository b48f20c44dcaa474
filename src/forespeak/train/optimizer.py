"""How weights move: AdamW, or Muon for matrices, under a schedule, with clipping.

Weights and all that the optimizer keeps are float32; products run in bfloat16 under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forespeak.train.recipe import OptimizerSettings, ScheduleSettings


class Optimizer:
    """Moves the parameters of a network.

    Args:
        network: its parameters that ask for gradients.
        settings: of the recipe.
        rates: learning rates relative to the recipe's, of parameters whose names begin so.
    """

    def __init__(
        self,
        network: nn.Module,
        settings: OptimizerSettings,
        rates: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._settings = settings
        named = [(n, p) for n, p in network.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        uses_muon = settings.name == "muon"
        matrices = [(n, p) for n, p in named if uses_muon and _is_matrix_inside(n, p)]
        others = [(n, p) for n, p in named if not (uses_muon and _is_matrix_inside(n, p))]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if others:
            made = _adamw(_groups(others, rates), settings)
            self._parts.append((made, settings.learning_rate))
        if matrices:
            made = _muon(_groups(matrices, rates), settings)
            self._parts.append((made, settings.muon_learning_rate))

    def step(self, scale: float) -> None:
        """Move along the gradients.

        Args:
            scale: share of the peak learning rates.
        """
        for part, peak in self._parts:
            for group in part.param_groups:
                group["lr"] = peak * scale * group["rate"]
            part.step()

    def clear(self) -> None:
        """Forget the gradients."""
        for part, _ in self._parts:
            part.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Scale the gradients down where their norm is over the limit, and give the norm before.

        It is not finite when one of them is not; then nothing is changed.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = float(_norm(gradients)) if gradients else 0.0
        limit = self._settings.clip_norm
        if math.isfinite(norm) and 0 < limit < norm:
            for gradient in gradients:
                gradient.mul_(limit / norm)
        return norm

    def state(self) -> list[dict[str, Any]]:
        """All that it keeps, for a checkpoint."""
        return [part.state_dict() for part, _ in self._parts]

    def load(
        self,
        state: Iterable[Mapping[str, Any]],
        shards: Callable[[Mapping[str, Any], list[Tensor]], Mapping[str, Any]],
    ) -> None:
        """Take up what :meth:`state` gave.

        Args:
            state: of all parts.
            shards: see ``Devices``.
        """
        for (part, _), kept in zip(self._parts, state, strict=True):
            parameters = [p for group in part.param_groups for p in group["params"]]
            part.load_state_dict(dict(shards(kept, parameters)))


def rate_at(progress: float, settings: ScheduleSettings) -> float:
    """Share of the peak learning rate.

    Args:
        progress: share of the run that is behind, 0 to 1; of a step, counted with the step itself.
        settings: the shape.
    """
    if progress < settings.warmup:
        return progress / settings.warmup
    if settings.shape == "constant":
        return 1.0
    rest = 1.0 if settings.warmup >= 1 else 1 - settings.warmup
    fallen = min(1.0, (progress - settings.warmup) / rest)
    left = (1 + math.cos(math.pi * fallen)) / 2 if settings.shape == "cosine" else 1 - fallen
    return settings.final + (1 - settings.final) * left


def _is_matrix_inside(name: str, parameter: Tensor) -> bool:
    """Whether Muon moves it: embeddings and heads, whose rows are words, are AdamW's."""
    words = any(part in name for part in ("embed", "head.", "lm_head", "markov", "output"))
    return parameter.ndim == 2 and not words


def _groups(
    named: Iterable[tuple[str, nn.Parameter]], rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Parameters by their relative learning rate."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named:
        rate = next((rate for first, rate in rates.items() if name.startswith(first)), 1.0)
        groups.setdefault(rate, []).append(parameter)
    return [{"params": parameters, "rate": rate} for rate, parameters in groups.items()]


def _adamw(parameters: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    first, second = settings.betas
    return torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=(first, second), eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )  # fmt: skip


def _muon(parameters: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        parameters, lr=settings.muon_learning_rate, weight_decay=settings.weight_decay
    )


def _norm(gradients: list[Tensor]) -> Tensor:
    whole = torch.nn.utils.get_total_norm(gradients)
    return whole.full_tensor() if isinstance(whole, DTensor) else whole
