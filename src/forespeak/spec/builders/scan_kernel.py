"""One pass over draft logits: best K and log-sum-exp. CPU; importing this file loads numba.

Loops are written so that LLVM turns them into vector code: fixed-size blocks that stay in the
first-level cache, no branches in the inner bodies, reductions that may be reordered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

_BLOCK = 2048  # floats; with its scratch 24 KB
_LANES = 64  # each block has so many interleaved lanes; a lane is looked at if its maximum counts
_FASTMATH = {"nnan", "nsz", "reassoc", "contract"}  # infinities stay: masked logits have them


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _lane_maxima(block: Floats, lanes: Floats) -> None:
    """lanes[j] = maximum of block[j], block[j + _LANES], block[j + 2 _LANES], ..."""
    lanes[:] = -np.inf
    whole = block.shape[0] // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for lane in range(_LANES):
            lanes[lane] = max(lanes[lane], block[start + lane])
    for at in range(whole, block.shape[0]):
        lanes[at - whole] = max(lanes[at - whole], block[at])


@njit(cache=True, nogil=True, fastmath=_FASTMATH)
def _sum_exp(values: Floats, shift: Any, bits: Any, powers: Floats) -> Any:
    """Sum of exp(values - shift), relative error about 1e-7 a term.

    exp(x) = 2^n exp(f) with n = round(x / ln 2): 2^n is put together as bits of a float (``powers``
    is ``bits`` seen as floats) and exp(f), |f| <= ln(2) / 2, is its Taylor polynomial.
    """
    log2e, ln2_high, ln2_low = (
        np.float32(1.4426950408889634),
        np.float32(0.693359375),
        np.float32(-2.12194440e-4),
    )
    for i in range(values.shape[0]):
        x = max(values[i] - shift, np.float32(-87.0))
        bits[i] = (np.int32(x * log2e - np.float32(0.5)) + np.int32(127)) << np.int32(23)
    total = np.float32(0.0)
    for i in range(values.shape[0]):
        x = max(values[i] - shift, np.float32(-87.0))
        n = np.float32(np.int32(x * log2e - np.float32(0.5)))
        f = (x - n * ln2_high) - n * ln2_low
        e = np.float32(1.0 / 720.0)
        e = e * f + np.float32(1.0 / 120.0)
        e = e * f + np.float32(1.0 / 24.0)
        e = e * f + np.float32(1.0 / 6.0)
        e = e * f + np.float32(0.5)
        e = e * f + np.float32(1.0)
        e = e * f + np.float32(1.0)
        total += e * powers[i]
    return total


@njit(cache=True, nogil=True)
def _worse(value: Any, token: Any, other_value: Any, other_token: Any) -> Any:
    return value < other_value or (value == other_value and token > other_token)


@njit(cache=True, nogil=True)
def _sink(values: Floats, tokens: Ints, size: int, value: Any, token: Any) -> None:
    """Puts a pair in the place of the worst one, at the top of a heap whose top is the worst."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _worse(
            values[child + 1], tokens[child + 1], values[child], tokens[child]
        ):
            child += 1
        if not _worse(values[child], tokens[child], value, token):
            break
        values[at], tokens[at] = values[child], tokens[child]
        at = child
    values[at], tokens[at] = value, token


@njit(cache=True, nogil=True)
def _rise(values: Floats, tokens: Ints, size: int, value: Any, token: Any) -> None:
    """Adds a pair at the end of such a heap."""
    at = size
    while at > 0:
        parent = (at - 1) // 2
        if not _worse(value, token, values[parent], tokens[parent]):
            break
        values[at], tokens[at] = values[parent], tokens[parent]
        at = parent
    values[at], tokens[at] = value, token


@njit(cache=True, nogil=True)
def _sort_best_first(values: Floats, tokens: Ints) -> None:
    for size in range(values.shape[0] - 1, 0, -1):
        value, token = values[size], tokens[size]
        values[size], tokens[size] = values[0], tokens[0]
        _sink(values, tokens, size, value, token)


@njit(cache=True, nogil=True)
def _collect(
    block: Floats, lanes: Floats, first: int, values: Floats, tokens: Ints, count: int
) -> int:
    """Takes what belongs to the best K of the row so far; the heap is full at K.

    Lanes that do not beat the worst pair that was there *before this block* are skipped: K pairs
    at least as good with lower ids are known. Within the block ids do not come in order, so
    pairs are compared whole.
    """
    top_k, floor = values.shape[0], values[0]
    filling = count < top_k
    for lane in range(_LANES):
        if not filling and lanes[lane] <= floor:
            continue
        for at in range(lane, block.shape[0], _LANES):
            value, token = block[at], first + at
            if count < top_k:
                _rise(values, tokens, count, value, token)
                count += 1
            elif _worse(values[0], tokens[0], value, token):
                _sink(values, tokens, top_k, value, token)
    return count


@njit(cache=True, nogil=True)
def scan_rows(logits: Floats, values: Floats, tokens: Ints, log_sums: Doubles) -> None:
    """Best K logits and log-sum-exp of each row in one pass over memory.

    Args:
        logits: [F, V], read once, block by block.
        values, tokens: [F, K] written, best first, of equal values the lower id first.
        log_sums: [F] written.
    """
    bits = np.empty(_BLOCK, np.int32)
    powers = bits.view(np.float32)
    lanes = np.empty(_LANES, np.float32)
    for row in range(logits.shape[0]):
        count, high, total = 0, np.float32(-np.inf), 0.0
        for first in range(0, logits.shape[1], _BLOCK):
            block = logits[row, first : first + _BLOCK]
            _lane_maxima(block, lanes)
            best = np.float32(-np.inf)
            for lane in range(_LANES):
                best = max(best, lanes[lane])
            if count < values.shape[1] or best > values[row, 0]:
                count = _collect(block, lanes, first, values[row], tokens[row], count)
            if best > high:
                total *= np.exp(np.float64(high) - np.float64(best))
                high = best
            if high > -np.inf:
                total += _sum_exp(block, high, bits, powers)
        _sort_best_first(values[row], tokens[row])
        log_sums[row] = np.float64(high) + np.log(total) if total > 0 else -np.inf
