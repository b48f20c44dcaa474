"""Attention on CPU, compiled by Numba: every query walks its own keys in their own order.

A query is a (token, head) pair. Queries of one cache row and KV head are taken together, key tile
by key tile, so that a tile is read into the nearest cache once for all of them; each query's own
sums are the same as if it were alone. Letters as in ``layout.py``, G query heads a KV head.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forespeak.kernels.cache import kernel
from forespeak.kernels.vector import LANES
from forespeak.models.kernels.layout import Array, Shape
from forespeak.models.kernels.rows import REDUCE
from forespeak.models.kernels.simd import exp_tile
from forespeak.models.kernels.simd_attention import (
    KEYS_PER_TILE,
    score_tile_1,
    score_tile_4,
    weigh_values_16,
    weigh_values_64,
    weigh_values_64_of_4,
)

_MOST_QUERIES = 64  # taken together; bounds the scratch memory
_F0, _F1 = np.float32(0), np.float32(1)


@kernel(fastmath=REDUCE)
def _sum(x: Array, at: int, n: int) -> Any:
    total = _F0
    for i in range(n):
        total += x[at + i]
    return total


@kernel(fastmath=REDUCE)
def _max(x: Array, at: int, n: int) -> Any:
    top = x[at]
    for i in range(n):
        top = max(top, x[at + i])
    return top


@kernel()
def _score(
    queries: Array, query_at: Array, dim: int, keys: Array, keys_at: int, end: int, scores: Array
) -> None:
    """scores[i, slot] for all queries and the slots of the tiles up to ``end``.

    queries: flat floats, query i begins at query_at[i]. keys: flat from ``keys_at`` [C/64, D, 64].
    """
    count, width = query_at.shape[0], scores.shape[1]
    for tile in range(0, end, KEYS_PER_TILE):
        k_at = keys_at + tile * dim
        i = 0
        while i + 4 <= count:
            score_tile_4(queries, query_at, i, keys, k_at, dim, scores, i * width + tile, width)
            i += 4
        while i < count:
            score_tile_1(queries, query_at, i, keys, k_at, dim, scores, i * width + tile, width)
            i += 1


@kernel()
def _weigh(
    weights: Array, w_at: int, values: Array, v_at: int, stride: int, n: int, out: Array, o_at: int
) -> None:
    """out[o_at : o_at + stride] += sum of n value vectors, in order."""
    part = 0
    while part + 64 <= stride:
        weigh_values_64(weights, w_at, 0, values, v_at + part, stride, n, out, o_at + part, 0)
        part += 64
    while part < stride:
        weigh_values_16(weights, w_at, 0, values, v_at + part, stride, n, out, o_at + part, 0)
        part += LANES


@kernel()
def _weigh_tile(
    scores: Array, first: Array, last: Array, tokens: Array, values: Array, values_at: int,
    stride: int, tile: int, out: Array,
) -> None:  # fmt: skip
    """The keys of one tile for all queries. Four queries that see all of it go together."""
    count, width = tokens.shape[0], scores.shape[1]
    end = tile + KEYS_PER_TILE
    i = 0
    while i < count:
        together = stride % 64 == 0 and i + 4 <= count
        if together:
            for m in range(4):
                t = tokens[i + m]
                together = together and first[t] <= tile and last[t] >= end
        if together:
            for part in range(0, stride, 64):
                weigh_values_64_of_4(
                    scores, i * width + tile, width, values, values_at + tile * stride + part,
                    stride, KEYS_PER_TILE, out, i * stride + part, stride,
                )  # fmt: skip
            i += 4
            continue
        begin, stop = max(tile, first[tokens[i]]), min(end, last[tokens[i]])
        if begin < stop:
            _weigh(scores, i * width + begin, values, values_at + begin * stride, stride,
                   stop - begin, out, i * stride)  # fmt: skip
        i += 1


@kernel()
def _softmax(scores: Array, first: int, last: int, extra: Array) -> Any:
    """Weights of one query in place, not normalised; returns what to multiply the result with.

    The visible scores are moved together: slots first..last-1, then those of ``extra`` behind them.
    """
    for i in range(extra.shape[0]):  # extra[i] >= last + i, so nothing unread is overwritten
        scores[last + i] = scores[extra[i]]
    n = last - first + extra.shape[0]
    top = _max(scores, first, n)
    for i in range(first, first + n, LANES):
        exp_tile(scores, i, top)
    return _F1 / _sum(scores, first, n)


@kernel()
def _attend_together(
    queries: Array, query_at: Array, dim: int, keys: Array, keys_at: int, values: Array,
    values_at: int, tokens: Array, first: Array, last: Array, extra_at: Array, extra: Array,
    scores: Array, out: Array,
) -> None:  # fmt: skip
    """Queries of one cache row and KV head. out [queries, Dp], overwritten.

    tokens[i] is the token of query i; first, last, extra_at, extra as in ``Plan``.
    """
    count, stride, width = query_at.shape[0], values.shape[3], scores.shape[1]
    end = 0
    for i in range(count):
        t = tokens[i]
        end = max(end, last[t])
        if extra_at[t + 1] > extra_at[t]:
            end = max(end, extra[extra_at[t + 1] - 1] + 1)
    _score(queries, query_at, dim, keys, keys_at, end, scores)
    scale = np.empty(count, np.float32)
    lowest, highest = last[tokens[0]], 0
    for i in range(count):
        t = tokens[i]
        listed = extra[extra_at[t] : extra_at[t + 1]]
        scale[i] = _softmax(scores[i], first[t], last[t], listed)
        lowest, highest = min(lowest, first[t]), max(highest, last[t])
        for j in range(stride):
            out[i, j] = _F0
    tile = lowest // KEYS_PER_TILE * KEYS_PER_TILE
    while tile < highest:
        _weigh_tile(scores, first, last, tokens, values, values_at, stride, tile, out)
        tile += KEYS_PER_TILE
    for i in range(count):
        t = tokens[i]
        for j in range(extra_at[t + 1] - extra_at[t]):
            slot = extra[extra_at[t] + j]
            _weigh(scores, i * width + last[t] + j, values, values_at + slot * stride, stride, 1,
                   out, i * stride)  # fmt: skip
        for j in range(stride):
            out[i, j] *= scale[i]


@kernel()
def attend(
    qkv: Array, keys: Array, values: Array, shape: Shape, rows: Array, first: Array, last: Array,
    extra_at: Array, extra: Array, mixed: Array, first_query: int, last_query: int,
) -> None:  # fmt: skip
    """Queries ``first_query .. last_query-1`` of all (KV head, token, head of the group), KV heads
    outermost. qkv [T, ..] with rotated queries; keys [R, kv, C/64, D, 64]; values [R, kv, C, Dp];
    mixed [T, heads * D]."""
    num_tokens, dim = qkv.shape[0], shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    capacity, stride = values.shape[2], values.shape[3]
    scores = np.empty((_MOST_QUERIES, capacity + KEYS_PER_TILE), np.float32)
    out = np.empty((_MOST_QUERIES, stride), np.float32)
    query_at = np.empty(_MOST_QUERIES, np.int64)
    tokens = np.empty(_MOST_QUERIES, np.int64)
    heads = np.empty(_MOST_QUERIES, np.int64)
    query = first_query
    while query < last_query:
        kv_head = query // (num_tokens * group)
        row = rows[query // group % num_tokens]
        count = 0
        while (
            query < last_query and count < _MOST_QUERIES
            and query // (num_tokens * group) == kv_head
            and rows[query // group % num_tokens] == row
        ):  # fmt: skip
            tokens[count] = query // group % num_tokens
            heads[count] = kv_head * group + query % group
            query_at[count] = tokens[count] * qkv.shape[1] + heads[count] * dim
            count += 1
            query += 1
        at = row * shape.num_kv_heads + kv_head
        _attend_together(
            qkv, query_at[:count], dim, keys, at * capacity * dim, values, at * capacity * stride,
            tokens[:count], first, last, extra_at, extra, scores, out,
        )  # fmt: skip
        for i in range(count):
            for j in range(dim):
                mixed[tokens[i], heads[i] * dim + j] = out[i, j]
