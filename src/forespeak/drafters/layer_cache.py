"""LayerCache: keys and values of a drafter's own decoder layers, and the attention over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.models.attention import attend_rows, dense_mask
from forespeak.models.blocks import Attend, Rotation
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import RopeTable, window_flags
from forespeak.models.kv_cache import KVCache
from forespeak.types import Segment


class LayerCache:
    """A :class:`KVCache` for ``config.num_layers`` layers with rotary positions.

    Args:
        config: head counts, windows and rotary settings of the layers.
        num_rows: most rows at a time.
        context_length: tokens a row may hold; fixes the frequencies of dynamic RoPE.
        dtype, device: of keys and values.
        first_position: where the first token of a row stands.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_rows: int,
        *,
        context_length: int,
        dtype: torch.dtype,
        device: torch.device,
        first_position: int = 0,
    ) -> None:
        self._config, self._device, self._first = config, device, first_position
        self._rope = RopeTable(config, context_length)
        self._windowed = window_flags(config)
        self.rows = KVCache(
            config.num_layers, num_rows, config.num_kv_heads, config.head_dim, 64,
            dtype=dtype, device=device,
        )  # fmt: skip

    def rotation(self, positions: Tensor) -> Rotation:
        """cos and sin [T, D / 2] of positions [T]."""
        cos, sin = self._rope.lookup(positions)
        return cos.to(self._device), sin.to(self._device)

    def append(self, segments: Sequence[Segment], positions: Tensor) -> Attend:
        """Make room for new tokens; the function returned attends for each layer in turn."""
        # The cache takes the slot of a committed token for its position when it applies a window.
        self.rows.append(segments, (positions - self._first).tolist())
        spans = [None, self._config.sliding_window] if self._windowed.any() else [None]
        masks = [
            [dense_mask(self.rows, segment, span, self._device) for segment in segments]
            for span in spans
        ]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kind = int(self._windowed[layer])
            return attend_rows(q, k, v, layer, self.rows, segments, masks[kind])

        return attend
