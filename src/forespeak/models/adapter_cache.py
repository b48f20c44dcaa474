"""TransformersCache: one cache of transformers for each row, made so that it can be cut back.

Every layer keeps all tokens, those with a sliding window too: what a window hides is the mask's
business, and a cache that has thrown tokens away could not drop a rejected path. A layer's tensors
have the sequence as their last but one axis, whatever stands before and after it (heads and head
size, or the compressed latent of MLA).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from forespeak.models.base import Cache
from forespeak.types import Segment

_BLOCK = 64  # slots are made in multiples of it


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own gap
    """One layer's keys and values of one row, in buffers that grow by doubling.

    ``keys`` and ``values`` are views of the used part, which is what transformers reads; None until
    the first tokens come. Layers that borrow another layer's keys never get any.
    """

    def __init__(self, capacity: int = _BLOCK) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [1, ..., n, D] keys and values; the further arguments are transformers' own."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.num_slots
        needed = used + key_states.shape[-2]
        keys, values = self._buffers or (key_states[..., :0, :], value_states[..., :0, :])
        self._buffers = (
            _grown(keys, used, needed, self._capacity),
            _grown(values, used, needed, self._capacity),
        )
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., used:needed, :] = new
        return self._show(self._buffers, needed)

    @property
    def num_slots(self) -> int:
        """Tokens held."""
        return 0 if self._buffers is None or self.keys is None else self.keys.shape[-2]

    def cut(self, length: int) -> None:
        """Keep the first ``length`` slots only."""
        if self._buffers is not None:
            self._show(self._buffers, length)

    def _show(self, buffers: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[..., :length, :] for buffer in buffers)
        self.keys, self.values = keys, values
        return keys, values

    def move(self, source: Tensor, target: slice) -> None:
        """Copy slots ``source`` to ``target`` through a temporary, because the two overlap."""
        for buffer in self._buffers or ():
            buffer[..., target, :] = buffer.index_select(-2, source.to(buffer.device))


def _grown(buffer: Tensor, used: int, needed: int, capacity: int) -> Tensor:
    """A buffer with room for ``needed`` slots, the first ``used`` ones kept."""
    if needed <= buffer.shape[-2]:
        return buffer
    slots = -(-max(needed, 2 * buffer.shape[-2], capacity) // _BLOCK) * _BLOCK
    grown = buffer.new_empty((*buffer.shape[:-2], slots, buffer.shape[-1]))
    grown[..., :used, :] = buffer[..., :used, :]
    return grown


class TransformersCache(Cache):
    """Rows of an adapter's cache. The slot of a committed token is its position.

    Args:
        num_rows: rows, all empty.
        capacity: slots that a row's layers get at first.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        make_layer: Any = partial(GrowingLayer, capacity)  # transformers calls it once a layer
        self.rows = [
            transformers.Cache(layer_class_to_replicate=make_layer) for _ in range(num_rows)
        ]
        self.lengths = [0] * num_rows
        self.pending = [0] * num_rows
        self.pending_positions: list[list[int]] = [[] for _ in range(num_rows)]

    def used(self, row: int) -> int:
        """Slots in use: committed and pending."""
        return self.lengths[row] + self.pending[row]

    def layers(self, row: int) -> list[GrowingLayer]:
        """The row's layers that hold something."""
        held = [layer for layer in self.rows[row].layers if isinstance(layer, GrowingLayer)]
        return [layer for layer in held if layer.is_initialized]

    def append(self, segment: Segment, positions: Sequence[int]) -> None:
        """Account for a row's new pending tokens; the model's forward fills their slots itself."""
        self.pending[segment.row] += segment.num_tokens
        self.pending_positions[segment.row] += positions

    @torch.inference_mode()  # the buffers were made in this mode and may only change in it
    def commit(self, row: int, kept: Sequence[int]) -> None:
        kept = list(kept)
        assert all(a < b for a, b in zip(kept, kept[1:], strict=False)), kept
        assert not kept or 0 <= kept[0] and kept[-1] < self.pending[row], (kept, self.pending[row])
        base = self.lengths[row]
        still = next((i for i, k in enumerate(kept) if k != i), len(kept))  # these stay in place
        if moved := kept[still:]:
            source = torch.tensor(moved) + base
            for layer in self.layers(row):
                layer.move(source, slice(base + still, base + len(kept)))
        self._cut(row, base + len(kept))

    def settle(self, row: int, count: int) -> None:
        super().settle(row, count)
        del self.pending_positions[row][:count]

    def truncate(self, row: int, length: int) -> None:
        assert 0 <= length <= self.lengths[row], (length, self.lengths[row])
        self._cut(row, length)

    def release(self, row: int) -> None:
        self.truncate(row, 0)

    @torch.inference_mode()
    def _cut(self, row: int, length: int) -> None:
        """Keep ``length`` slots, all of them committed."""
        for layer in self.layers(row):
            layer.cut(length)
        self.lengths[row] = length
        self.pending[row] = 0
        self.pending_positions[row] = []
