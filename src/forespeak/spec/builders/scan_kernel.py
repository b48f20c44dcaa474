"""One pass over draft logits: best K and log-sum-exp. CPU; importing this file loads numba.

Rows are read in blocks that stay in the first-level cache, twice each: for the maxima and for the
exponentials, with vector code of our own (LLVM left most of the width unused).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from forespeak.kernels.cache import kernel
from forespeak.kernels.vector import (
    LANES,
    V16F,
    cgutils,
    constant,
    exp,
    load,
    pointer_to,
    prefetch,
    splat,
    store,
    sum_lanes,
    vector_intrinsic,
)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

_BLOCK = 4096  # floats, 16 KB
_FIRST_BLOCK = 256  # until K are known, every value must be looked at
_STREAMS = 4  # vectors in flight: an exponential is a chain of a dozen dependent steps
# Each block has so many interleaved lanes; a lane is looked at if its maximum counts.
_LANES = _STREAMS * LANES


@vector_intrinsic
def _max_tiles(typingctx: Any, values: Any, at: Any, num_tiles: Any, lanes: Any) -> Any:
    """lanes[j] = maximum of values[at + j + 64 i] over whole tiles i; ``lanes`` has 64 places."""
    signature = types.void(values, types.intp, types.intp, lanes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = pointer_to(context, builder, signature.args[0], args[0], args[1])
        zero = ir.Constant(args[1].type, 0)
        out = pointer_to(context, builder, signature.args[3], args[3], zero)
        lowest = constant(-np.inf)
        tops = [cgutils.alloca_once_value(builder, lowest) for _ in range(_STREAMS)]
        with cgutils.for_range(builder, args[2]) as loop:
            for stream, top in enumerate(tops):
                place = builder.mul(loop.index, loop.index.type(_STREAMS * LANES))
                place = builder.add(place, loop.index.type(stream * LANES))
                x, best = load(builder, builder.gep(start, [place]), V16F), builder.load(top)
                higher = builder.fcmp_ordered(">", x, best)
                builder.store(builder.select(higher, x, best), top)
        for stream, top in enumerate(tops):
            store(builder, builder.load(top), builder.gep(out, [zero.type(stream * LANES)]))
        return context.get_dummy_value()

    return signature, codegen


@kernel(nogil=True)
def _lane_maxima(block: Floats, lanes: Floats) -> None:
    """lanes[j] = maximum of block[j], block[j + _LANES], block[j + 2 _LANES], ..."""
    num_tiles = block.shape[0] // _LANES
    _max_tiles(block, 0, num_tiles, lanes)
    for at in range(num_tiles * _LANES, block.shape[0]):
        lane = at - num_tiles * _LANES
        lanes[lane] = max(lanes[lane], block[at])


@vector_intrinsic
def _sum_exp_tiles(typingctx: Any, values: Any, at: Any, num_tiles: Any, shift: Any) -> Any:
    """Sum of exp(values - shift) over whole tiles of 64 floats from ``at``."""
    signature = types.float32(values, types.intp, types.intp, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = pointer_to(context, builder, signature.args[0], args[0], args[1])
        shift = splat(builder, args[3])
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(_STREAMS)]
        with cgutils.for_range(builder, args[2]) as loop:
            for stream, sum_ in enumerate(sums):
                place = builder.mul(loop.index, loop.index.type(_STREAMS * LANES))
                place = builder.add(place, loop.index.type(stream * LANES))
                here = builder.gep(start, [place])
                x = builder.fsub(load(builder, here, V16F), shift)
                prefetch(builder, builder.gep(here, [place.type(_BLOCK)]))
                builder.store(builder.fadd(builder.load(sum_), exp(builder, x)), sum_)
        low, high = (builder.fadd(builder.load(sums[i]), builder.load(sums[i + 1])) for i in (0, 2))
        return sum_lanes(builder, builder.fadd(low, high))

    return signature, codegen


@kernel(nogil=True)
def _sum_exp(values: Floats, shift: Any) -> Any:
    """Sum of exp(values - shift), relative error about 2e-7 a term; -inf counts as exp(-87)."""
    num_tiles = values.shape[0] // _LANES
    total = _sum_exp_tiles(values, 0, num_tiles, shift)
    for at in range(num_tiles * _LANES, values.shape[0]):
        total += np.exp(values[at] - shift)
    return total


@kernel(nogil=True)
def _worse(value: Any, token: Any, other_value: Any, other_token: Any) -> Any:
    return value < other_value or (value == other_value and token > other_token)


@kernel(nogil=True)
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


@kernel(nogil=True)
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


@kernel(nogil=True)
def _sort_best_first(values: Floats, tokens: Ints) -> None:
    for size in range(values.shape[0] - 1, 0, -1):
        value, token = values[size], tokens[size]
        values[size], tokens[size] = values[0], tokens[0]
        _sink(values, tokens, size, value, token)


@kernel(nogil=True)
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


@kernel(nogil=True)
def scan_rows(logits: Floats, values: Floats, tokens: Ints, log_sums: Doubles) -> None:
    """Best K logits and log-sum-exp of each row in one pass over memory.

    Args:
        logits: [F, V], read once, block by block.
        values, tokens: [F, K] written, best first, of equal values the lower id first.
        log_sums: [F] written; if empty, only the best are looked for.
    """
    lanes, summing = np.empty(_LANES, np.float32), log_sums.shape[0] > 0
    for row in range(logits.shape[0]):
        count, high, total = 0, np.float32(-np.inf), 0.0
        first, step = 0, _FIRST_BLOCK
        while first < logits.shape[1]:
            block = logits[row, first : first + step]
            _lane_maxima(block, lanes)
            best = np.float32(-np.inf)
            for lane in range(_LANES):
                best = max(best, lanes[lane])
            if count < values.shape[1] or best > values[row, 0]:
                count = _collect(block, lanes, first, values[row], tokens[row], count)
            if summing and best > high:
                total *= np.exp(np.float64(high) - np.float64(best))
                high = best
            if summing and high > -np.inf:
                total += _sum_exp(block, high)
            first += step
            step = _FIRST_BLOCK if count < values.shape[1] else _BLOCK
        _sort_best_first(values[row], tokens[row])
        if summing:
            log_sums[row] = np.float64(high) + np.log(total) if total > 0 else -np.inf


@kernel(nogil=True)
def best_of_rows(logits: Floats, tokens: Ints) -> None:
    """Index of the largest value of each row [N, V], of equals the lowest; [N] written."""
    lanes = np.empty(_LANES, np.float32)
    for row in range(logits.shape[0]):
        high, place = np.float32(-np.inf), 0
        for first in range(0, logits.shape[1], _BLOCK):
            block = logits[row, first : first + _BLOCK]
            _lane_maxima(block, lanes)
            best = np.float32(-np.inf)
            for lane in range(_LANES):
                best = max(best, lanes[lane])
            if best > high:
                high, place = best, first
        tokens[row] = 0
        for at in range(place, min(place + _BLOCK, logits.shape[1])):
            if logits[row, at] == high:
                tokens[row] = at
                break
