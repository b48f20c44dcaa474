"""What layers see while they are trained: all texts of a batch at once.

Padding is on the right, so a causal layer never shows it to a token that counts. B texts, S tokens,
N starts of a text, G query heads, kv key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.models.blocks import Rotation
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import RopeTable, window_flags


class Rotations:
    """cos and sin of positions on a device.

    Args:
        config: rotary settings of the layers.
        context_length: tokens a text may have, for dynamic rotary embedding; None takes the
            layers' limit.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, context_length: int | None = None
    ) -> None:
        self._table = RopeTable(config, context_length or config.max_position_embeddings)
        self._device = device

    def __call__(self, positions: Tensor) -> Rotation:
        """[..., D / 2] each, of positions [...]."""
        cos, sin = self._table.lookup(positions.flatten().cpu())
        shape = (*positions.shape, -1)
        return cos.view(shape).to(self._device), sin.view(shape).to(self._device)


class CausalAttention:
    """An ``Attend`` over whole texts [B, S]; keeps each layer's keys and values.

    Args:
        config: of the layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config, self._windowed = config, window_flags(config)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept[layer] = k, v
        mask = None
        if self._windowed[layer % len(self._windowed)]:
            assert self._config.sliding_window is not None
            places = torch.arange(q.shape[1], device=q.device)
            back = places[:, None] - places
            mask = (back >= 0) & (back < self._config.sliding_window)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
            is_causal=mask is None, enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return mixed.transpose(1, 2).flatten(-2)


@dataclass
class DraftAttention:
    """An ``Attend`` for draft steps: N tokens of a text that each continue the text at their start.

    A query sees the verified keys of its module up to ``lag`` places before its start, and the keys
    that earlier steps of the module and this one made at the same start: the training-time test of
    EAGLE-3, whose later keys are seen on the diagonal alone.

    Attributes:
        config: of the layers.
        verified: layer -> keys and values [B, S, kv, D] of verified text.
        starts: [B, N] int64, their places in it.
        lag: 0 where the start's own pair is verified.
        first: position of place 0.
        positions: [B, N] of the step to come; see :meth:`step`.
        own: layer -> keys and values [B, N, kv, D] of the steps so far, filled here.
    """

    config: ModelConfig
    verified: dict[int, tuple[Tensor, Tensor]]
    starts: Tensor
    lag: int = 0
    first: int = 0
    positions: Tensor = field(default_factory=lambda: torch.zeros(0))
    own: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def step(self, positions: Tensor) -> DraftAttention:
        """Sets the positions [B, N] of the step to come."""
        self.positions = positions
        return self

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = self.own.setdefault(layer, [])
        own.append((k, v))
        keys, values = self.verified[layer]  # [B, S, kv, D]
        grouped = q.view(*q.shape[:2], keys.shape[2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        before = torch.einsum("bnkgd,bskd->bkgns", grouped, keys).float()
        before = before.masked_fill(~self._seen(layer, keys.shape[1])[:, None, None], -torch.inf)
        mine = [torch.einsum("bnkgd,bnkd->bkgn", grouped, key)[..., None] for key, _ in own]
        scores = torch.cat([before, *[score.float() for score in mine]], -1)
        weights = scores.softmax(-1).to(values.dtype)
        mixed = torch.einsum("bkgns,bskd->bnkgd", weights[..., : keys.shape[1]], values)
        for at, (_, value) in enumerate(own):
            share = weights[..., keys.shape[1] + at].permute(0, 3, 1, 2)  # [B, N, kv, g]
            mixed = mixed + share[..., None] * value[:, :, :, None]
        return mixed.flatten(2)

    def _seen(self, layer: int, count: int) -> Tensor:
        """[B, N, S] bool"""
        places = torch.arange(count, device=self.starts.device)
        seen = places <= self.starts[..., None] - self.lag
        if window_flags(self.config)[layer]:
            assert self.config.sliding_window is not None
            # The cache of inference takes the slot of a verified pair plus ``first`` for its place.
            seen = seen & (
                places + self.first > self.positions[..., None] - self.config.sliding_window
            )
        return seen
