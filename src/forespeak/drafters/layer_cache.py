"""LayerCache: keys and values of a drafter's own decoder layers, and the attention over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.models.attention import attend, attend_rows, dense_mask, write_rows
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
        masks = self._append(segments, positions, segments)

        def attend_all(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kind = int(self._windowed[layer])
            return attend_rows(q, k, v, layer, self.rows, segments, masks[kind])

        return attend_all

    def append_newest(self, segments: Sequence[Segment], positions: Tensor) -> Attend:
        """As :meth:`append` where only each segment's newest token asks.

        The function returned takes q [S, G, D] of the S segments beside k and v [T, kv, D] of all
        tokens; with q [0, G, D] it keeps keys and values and returns nothing, [0, G * D].
        """
        newest = [Segment(segment.row, 1) for segment in segments]
        masks = self._append(segments, positions, newest)

        def attend_newest(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            write_rows(k, v, layer, self.rows, segments)
            if not len(q):
                return q.flatten(1)
            mixed = []
            for segment, query, mask in zip(
                segments, q, masks[int(self._windowed[layer])], strict=True
            ):
                used = self.rows.used(segment.row)
                keys = self.rows.keys[layer, segment.row, :, :used]
                values = self.rows.values[layer, segment.row, :, :used]
                mixed.append(attend(query[None], keys, values, mask))
            return torch.cat(mixed).flatten(1)

        return attend_newest

    def _append(
        self, segments: Sequence[Segment], positions: Tensor, asking: Sequence[Segment]
    ) -> list[list[Tensor]]:
        """Makes room; what the asking tokens see in layers without and with a window."""
        # The cache takes the slot of a committed token for its position when it applies a window.
        self.rows.append(segments, (positions - self._first).tolist())
        spans = [None, self._config.sliding_window] if self._windowed.any() else [None]
        return [
            [dense_mask(self.rows, segment, span, self._device) for segment in asking]
            for span in spans
        ]
