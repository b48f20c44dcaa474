"""KVCache: keys and values of rows that each have their own length.

One tensor holds all layers. The slot of a committed token is its position. Letters as in
``types.py``, and L layers, kv key-value heads, C slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.models.base import Cache
from forespeak.types import Segment

_TILE = 64  # keys of a score tile of the CPU kernels; capacities are multiples of it


class KVCache(Cache):
    """Keys and values of R rows.

    Args:
        num_layers, num_rows, num_kv_heads, head_dim: sizes.
        capacity: slots a row has at first; grows by doubling.
        dtype, device: of the stored keys and values.
        tiled_keys: store keys as [L, R, kv, C/64, D, 64] instead of [L, R, kv, C, D] and pad the
            values' head size to 16, as the CPU kernels want them.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tiled_keys: bool = False,
    ) -> None:
        slots = max(1, -(-capacity // _TILE)) * _TILE
        lead = (num_layers, num_rows, num_kv_heads)
        value_dim = -(-head_dim // 16) * 16 if tiled_keys else head_dim
        key_shape = (slots // _TILE, head_dim, _TILE) if tiled_keys else (slots, head_dim)
        self.tiled_keys = tiled_keys
        with torch.inference_mode(False):  # else nothing could write outside that mode
            self.keys = torch.zeros((*lead, *key_shape), dtype=dtype, device=device)
            self.values = torch.zeros((*lead, slots, value_dim), dtype=dtype, device=device)
        self.lengths = [0] * num_rows
        self.pending = [0] * num_rows
        self.pending_positions: list[list[int]] = [[] for _ in range(num_rows)]

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.values.shape[3]

    def used(self, row: int) -> int:
        """Slots in use: committed and pending."""
        return self.lengths[row] + self.pending[row]

    def append(self, segments: Sequence[Segment], positions: Sequence[int]) -> None:
        """Account for new pending tokens and make room; the forward fills their slots itself."""
        needed = max(self.used(s.row) + s.num_tokens for s in segments)
        if needed > self.capacity:
            self._grow(max(needed, 2 * self.capacity))
        at = 0
        for segment in segments:
            self.pending[segment.row] += segment.num_tokens
            self.pending_positions[segment.row] += positions[at : at + segment.num_tokens]
            at += segment.num_tokens

    def _grow(self, slots: int) -> None:
        extra = -(-slots // _TILE) * _TILE - self.capacity
        key_pad = (0, 0, 0, 0, 0, extra // _TILE) if self.tiled_keys else (0, 0, 0, extra)
        with torch.inference_mode(False):
            self.keys = torch.nn.functional.pad(self.keys, key_pad)
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def commit(self, row: int, kept: Sequence[int]) -> None:
        kept = list(kept)
        assert all(a < b for a, b in zip(kept, kept[1:], strict=False)), kept
        assert not kept or 0 <= kept[0] and kept[-1] < self.pending[row], (kept, self.pending[row])
        base = self.lengths[row]
        still = next((i for i, k in enumerate(kept) if k != i), len(kept))  # these stay in place
        if moved := kept[still:]:
            source = torch.tensor(moved, device=self.keys.device) + base
            target = slice(base + still, base + len(kept))
            if self.tiled_keys:
                self._move_tiled(row, source, torch.arange(target.start, target.stop))
            else:
                self.keys[:, row, :, target] = self.keys[:, row].index_select(2, source)
            self.values[:, row, :, target] = self.values[:, row].index_select(2, source)
        self.lengths[row] = base + len(kept)
        self._drop_pending(row)

    def settle(self, row: int, count: int) -> None:
        super().settle(row, count)
        del self.pending_positions[row][:count]

    def _move_tiled(self, row: int, source: Tensor, target: Tensor) -> None:
        keys = self.keys[:, row]  # [L, kv, C/64, D, 64]
        moved = keys[:, :, source // _TILE, :, source % _TILE]  # a copy, [n, L, kv, D]
        keys[:, :, target // _TILE, :, target % _TILE] = moved

    def truncate(self, row: int, length: int) -> None:
        assert 0 <= length <= self.lengths[row], (length, self.lengths[row])
        self.lengths[row] = length
        self._drop_pending(row)

    def release(self, row: int) -> None:
        self.truncate(row, 0)

    def _drop_pending(self, row: int) -> None:
        self.pending[row] = 0
        self.pending_positions[row] = []

    def snapshot(self, row: int) -> tuple[Tensor, Tensor]:
        """Committed (keys [L, kv, n, D], values [L, kv, n, D]) of a row, copied; for tests."""
        n = self.lengths[row]
        keys = self.keys[:, row]
        if self.tiled_keys:  # [L, kv, C/64, D, 64] -> [L, kv, C, D]
            keys = keys.transpose(-1, -2).flatten(2, 3)
        return keys[:, :, :n].clone(), self.values[:, row, :, :n, : keys.shape[-1]].clone()
