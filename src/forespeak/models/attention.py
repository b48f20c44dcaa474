"""What each new token of a forward sees, in the two forms that the attention paths read.

Index map of one cache row with n new tokens, m = pending before them + n::

    slot:   0 .......... length-1 | length ........... length+m-1
            committed: all seen   | pending: seen through the segment's mask [n, m]
            (in a windowed layer: only positions > own position - window)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.models.kernels.layout import Array, Plan
from forespeak.models.kv_cache import KVCache
from forespeak.types import Segment


def _pending_mask(segment: Segment, before: int) -> Array:
    """[n, before + n] bool; causal when the segment has no mask."""
    n = segment.num_tokens
    if segment.mask is None:
        return np.tri(n, before + n, before, dtype=bool)
    assert segment.mask.shape == (n, before + n), (segment.mask.shape, n, before)
    mask: Array = segment.mask.cpu().numpy()
    return mask


def build_plan(
    cache: KVCache, segments: Sequence[Segment], window: int | None, windowed: Array
) -> Plan:
    """The visible slots of every token, for the row-ordered kernels.

    To be called after ``cache.append``. Committed slots are one range; of the pending ones those
    that directly follow it are joined to it and the others are listed.
    """
    rows: list[int] = []
    slots: list[int] = []
    bounds: list[list[tuple[int, int, list[int]]]] = [[], []]
    for segment in segments:
        row, n = segment.row, segment.num_tokens
        length = cache.lengths[row]
        before = cache.pending[row] - n
        positions = cache.pending_positions[row]
        mask = None if segment.mask is None else _pending_mask(segment, before)
        for i in range(n):
            rows.append(row)
            slots.append(length + before + i)
            for kind, span in enumerate((None, window)):
                if mask is None:
                    bounds[kind].append(_causal_bounds(length + before + i, span))
                else:
                    seen = np.flatnonzero(mask[i]).tolist()
                    position = positions[before + i]
                    bounds[kind].append(_bounds(length, seen, positions, position, span))
    firsts = [[b[0] for b in kind] for kind in bounds]
    lasts = [[b[1] for b in kind] for kind in bounds]
    counts = [np.cumsum([0] + [len(b[2]) for b in kind]) for kind in bounds]
    extra = np.zeros((2, max(int(counts[0][-1]), int(counts[1][-1]), 1)), np.int64)
    for kind in range(2):
        flat = [slot for b in bounds[kind] for slot in b[2]]
        extra[kind, : len(flat)] = flat
    as_int = np.int64
    return Plan(
        np.array(rows, as_int), np.array(slots, as_int), np.array(firsts, as_int),
        np.array(lasts, as_int), np.array(counts, as_int), extra, windowed,
    )  # fmt: skip


def _causal_bounds(slot: int, window: int | None) -> tuple[int, int, list[int]]:
    """As ``_bounds`` for a token that sees every slot up to its own."""
    return (0 if window is None else max(0, slot - window + 1)), slot + 1, []


def _bounds(
    length: int, seen: Sequence[int], positions: Sequence[int], position: int, window: int | None
) -> tuple[int, int, list[int]]:
    """(first slot, end of the range, further slots) of one token."""
    first = 0
    if window is not None:
        first = min(length, max(0, position - window + 1))
        seen = [j for j in seen if positions[j] > position - window]
    joined = 0
    while joined < len(seen) and seen[joined] == joined:
        joined += 1
    if joined == 0 and first == length and seen:  # nothing committed is in the window
        return length + seen[0], length + seen[0] + 1, [length + j for j in seen[1:]]
    return first, length + joined, [length + j for j in seen[joined:]]


def dense_mask(
    cache: KVCache, segment: Segment, window: int | None, device: torch.device
) -> Tensor:
    """[n, used slots] bool: what each new token of one row sees, for the library kernels."""
    row, n = segment.row, segment.num_tokens
    length, before = cache.lengths[row], cache.pending[row] - n
    mask = torch.ones((n, length + before + n), dtype=torch.bool)
    mask[:, length:] = torch.from_numpy(np.ascontiguousarray(_pending_mask(segment, before)))
    if window is not None:
        pending = cache.pending_positions[row]
        keys = torch.cat([torch.arange(length), torch.tensor(pending)])
        own = torch.tensor(pending[before:])
        mask &= keys[None, :] > own[:, None] - window
    return mask.to(device)


def attend(
    query: Tensor,  # [n, heads, D]
    keys: Tensor,  # [kv, used, D]
    values: Tensor,  # [kv, used, D]
    mask: Tensor,  # [n, used] bool
    *,
    plain: bool = False,
) -> Tensor:
    """Attention of one row's new tokens, [n, heads, D]; ``plain`` spells it out as the oracle."""
    n, heads, dim = query.shape
    groups = heads // keys.shape[0]
    q = query.transpose(0, 1)  # [heads, n, D]
    if not plain:
        mixed = F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask[None, None], enable_gqa=groups > 1
        )
        return mixed[0].transpose(0, 1)
    k, v = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = (q.float() @ k.float().transpose(1, 2)) * dim**-0.5
    weights = scores.masked_fill(~mask[None], float("-inf")).softmax(-1)
    summed: Tensor = weights @ v.float()
    return summed.to(query.dtype).transpose(0, 1)


def attend_rows(
    query: Tensor,  # [T, heads, D]
    keys: Tensor,  # [T, kv, D]
    values: Tensor,  # [T, kv, D]
    layer: int,
    cache: KVCache,
    segments: Sequence[Segment],
    masks: Sequence[Tensor],
    *,
    plain: bool = False,
) -> Tensor:
    """Writes new keys and values to the slots that ``cache.append`` made, and attends row by row.

    Args:
        masks: of each segment, [n, used slots] bool (``dense_mask``).

    Returns:
        [T, heads * D].
    """
    write_rows(keys, values, layer, cache, segments)
    mixed, at = [], 0
    for segment, mask in zip(segments, masks, strict=True):
        row, used = segment.row, cache.used(segment.row)
        span = slice(at, at + segment.num_tokens)
        stored = cache.keys[layer, row, :, :used], cache.values[layer, row, :, :used]
        mixed.append(attend(query[span], *stored, mask, plain=plain))
        at += segment.num_tokens
    return torch.cat(mixed).flatten(1)


def write_rows(
    keys: Tensor,  # [T, kv, D]
    values: Tensor,  # [T, kv, D]
    layer: int,
    cache: KVCache,
    segments: Sequence[Segment],
) -> None:
    """Writes new keys and values to the slots that ``cache.append`` made."""
    at = 0
    for segment in segments:
        row, n = segment.row, segment.num_tokens
        place = slice(cache.used(row) - n, cache.used(row))
        cache.keys[layer, row, :, place] = keys[at : at + n].transpose(0, 1)
        cache.values[layer, row, :, place] = values[at : at + n].transpose(0, 1)
        at += n
