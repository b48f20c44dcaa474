"""The int8 forward on CPU: all layers in one compiled function, rows independent bit for bit.

Kernels here work on numpy views of torch storage. Everything that touches one token's values is
done token by token in a fixed order; the only work shared between tokens is reading weights.

Legend: T new tokens, L layers, H hidden (padded to 32), D head size, G query heads a KV head,
C slots of a cache row, B blocks of 32 inputs, NT threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from forespeak.models.simd import (
    BLOCK,
    KEYS_PER_TILE,
    LANES,
    dot_tile_1,
    dot_tile_2,
    dot_tile_4,
    dot_tile_8,
    exp_tile,
    gate_tile,
    score_tile,
    weigh_values_16,
    weigh_values_64,
)

Array = np.ndarray[Any, Any]

# Sums of one row may be reordered by the compiler (always the same way for the same length).
_REDUCE = {"reassoc", "nnan", "nsz"}
_SERIAL_ROWS = 3  # up to so many rows, splitting small per-row work over threads costs more
_F0, _F1, _F127 = np.float32(0), np.float32(1), np.float32(127)


class Matrix(NamedTuple):
    """int8 weights of one kind for all layers. Rows (outputs) and columns padded to 32."""

    weight: Array  # [L, N * K] uint8, value + 128, each layer tiled [N/16][K/4][16][4]
    scale: Array  # [L, N] float32, per output channel
    bias: Array  # [L, N] float32, or [L, 0] when there is none


class LayerStack(NamedTuple):
    """Weights of all decoder layers."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix  # gate rows first, then up rows, each padded to 32
    down: Matrix
    attention_norm: Array  # [L, H] float32
    mlp_norm: Array  # [L, H]
    query_norm: Array  # [L, D], or [L, 0]
    key_norm: Array  # [L, D], or [L, 0]


class Shape(NamedTuple):
    """Sizes that cannot be read off the arrays."""

    hidden: int  # without padding
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


class Plan(NamedTuple):
    """What each token of a forward sees and where its key goes. Index 0: full, 1: windowed.

    A token sees the slots ``first .. last-1`` of its cache row, then those listed for it in
    ``extra[extra_at[t] : extra_at[t + 1]]``, in this order.
    """

    row: Array  # [T] int64 cache row
    slot: Array  # [T] int64 where its own key and value are written
    first: Array  # [2, T] int64
    last: Array  # [2, T] int64
    extra_at: Array  # [2, T + 1] int64
    extra: Array  # [2, E] int64
    windowed: Array  # [L] int64, 1 where the layer has a sliding window


@njit(cache=True, fastmath=_REDUCE)  # type: ignore[untyped-decorator]
def _square_sum(x: Array, at: int, n: int) -> Any:
    total = _F0
    for i in range(n):
        total += x[at + i] * x[at + i]
    return total


@njit(cache=True, fastmath=_REDUCE)  # type: ignore[untyped-decorator]
def _sum(x: Array, at: int, n: int) -> Any:
    total = _F0
    for i in range(n):
        total += x[at + i]
    return total


@njit(cache=True, fastmath=_REDUCE)  # type: ignore[untyped-decorator]
def _max(x: Array, at: int, n: int) -> Any:
    top = x[at]
    for i in range(n):
        top = max(top, x[at + i])
    return top


@njit(cache=True, fastmath=_REDUCE)  # type: ignore[untyped-decorator]
def _quantize_block(x: Array, at: int, q: Array, q_at: int) -> Any:
    """32 values to int8 with one scale; returns (scale, sum of the integers)."""
    top = _F0
    for i in range(BLOCK):
        top = max(top, abs(x[at + i]))
    inverse = _F127 / top if top > _F0 else _F0
    total = np.int32(0)
    for i in range(BLOCK):
        value = np.int32(np.rint(x[at + i] * inverse))
        q[q_at + i] = np.int8(value)
        total += value
    return top / _F127, total


@njit(cache=True)  # type: ignore[untyped-decorator]
def quantize_row(x: Array, q: Array, start: Array, scale: Array) -> None:
    """One row of K floats to int8 blocks; ``start`` = -128 * sum undoes the weights' offset."""
    for block in range(x.shape[0] // BLOCK):
        s, total = _quantize_block(x, block * BLOCK, q, block * BLOCK)
        scale[block] = s
        start[block] = np.int32(-128) * total


@njit(cache=True)  # type: ignore[untyped-decorator]
def _norm_row(x: Array, gain: Array, n: int, eps: Any, out: Array) -> None:
    """RMSNorm of the first n values; the padding of ``out`` becomes zero."""
    scale = _F1 / np.sqrt(_square_sum(x, 0, n) / np.float32(n) + eps)
    for i in range(n):
        out[i] = x[i] * scale * gain[i]
    for i in range(n, out.shape[0]):
        out[i] = _F0


@njit(cache=True)  # type: ignore[untyped-decorator]
def product(
    portable: Any,
    q: Array,  # [T, K] int8
    start: Array,  # [T, B] int32
    scale: Array,  # [T, B] float32
    weight: Array,  # [N * K] uint8
    channel_scale: Array,  # [N] float32
    out: Array,  # [T, N] float32
    add: bool,
    first_tile: int,
    last_tile: int,
) -> None:
    """Tiles ``first_tile .. last_tile-1`` of ``out (+)= q @ weight.T``."""
    rows, k = q.shape
    blocks = k // BLOCK
    n = out.shape[1]
    for tile in range(first_tile, last_tile):
        w_at, c_at = tile * k * LANES, tile * LANES
        t = 0
        while t + 8 <= rows:
            dot_tile_8(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
            t += 8
        if t + 4 <= rows:
            dot_tile_4(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
            t += 4
        if t + 2 <= rows:
            dot_tile_2(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
            t += 2
        if t < rows:
            dot_tile_1(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip


@njit(cache=True)  # type: ignore[untyped-decorator]
def _norm_quantize(
    hidden: Array, gain: Array, n: int, eps: Any, scratch: Array,
    q: Array, start: Array, scale: Array, first: int, last: int,
) -> None:  # fmt: skip
    for t in range(first, last):
        _norm_row(hidden[t], gain, n, eps, scratch[t])
        quantize_row(scratch[t], q[t], start[t], scale[t])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _rotate(x: Array, cos: Array, sin: Array, factor: Any) -> None:
    """Half-split rotary embedding in place, times ``factor``."""
    half = cos.shape[0]
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = (a * cos[i] - b * sin[i]) * factor
        x[i + half] = (b * cos[i] + a * sin[i]) * factor


@njit(cache=True)  # type: ignore[untyped-decorator]
def _rotate_append(
    qkv: Array, bias: Array, query_norm: Array, key_norm: Array, cos: Array, sin: Array,
    shape: Shape, keys: Array, values: Array, plan_row: Array, plan_slot: Array,
    first: int, last: int,
) -> None:  # fmt: skip
    """Bias, q/k norm and rotation in place; k and v of each token go to its slot.

    keys [R, kv, C/64, D, 64], values [R, kv, C, Dp]. Queries are scaled by 1/sqrt(D) on the way.
    """
    dim, eps = shape.head_dim, np.float32(shape.eps)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    factor = _F1 / np.sqrt(np.float32(dim))
    for t in range(first, last):
        x = qkv[t]
        for i in range(bias.shape[0]):
            x[i] += bias[i]
        for head in range(heads + kv_heads):
            part = x[head * dim : (head + 1) * dim]
            is_query = head < heads
            gain = query_norm if is_query else key_norm
            if gain.shape[0]:
                _norm_row(part, gain, dim, eps, part)
            _rotate(part, cos[t], sin[t], factor if is_query else _F1)
        row, slot = plan_row[t], plan_slot[t]
        tile, lane = slot // KEYS_PER_TILE, slot % KEYS_PER_TILE
        for head in range(kv_heads):
            k_at = (heads + head) * dim
            v_at = (heads + kv_heads + head) * dim
            for i in range(dim):
                keys[row, head, tile, i, lane] = x[k_at + i]
                values[row, head, slot, i] = x[v_at + i]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _weigh(
    weights: Array, w_at: int, values: Array, v_at: int, stride: int, n: int, out: Array
) -> None:
    part = 0
    while part + 64 <= stride:
        weigh_values_64(weights, w_at, values, v_at + part, stride, n, out, part)
        part += 64
    while part < stride:
        weigh_values_16(weights, w_at, values, v_at + part, stride, n, out, part)
        part += LANES


@njit(cache=True)  # type: ignore[untyped-decorator]
def _attend_one(
    query: Array, q_at: int, dim: int, keys: Array, values: Array, row: int, head: int,
    first: int, last: int, extra: Array, scores: Array, out: Array,
) -> None:  # fmt: skip
    """One query head over its visible keys: slots first..last-1, then ``extra`` (ascending).

    scores: scratch of at least C + 64 floats. out: [Dp] floats, overwritten.
    """
    num_extra = extra.shape[0]
    capacity, stride = values.shape[2], values.shape[3]
    keys_at = (row * keys.shape[1] + head) * capacity * dim
    values_at = (row * keys.shape[1] + head) * capacity * stride
    end = extra[num_extra - 1] + 1 if num_extra else last
    tile = first // KEYS_PER_TILE * KEYS_PER_TILE
    while tile < end:
        score_tile(query, q_at, keys, keys_at + tile * dim, dim, scores, tile)
        tile += KEYS_PER_TILE
    for i in range(num_extra):  # extra[i] >= last + i, so nothing unread is overwritten
        scores[last + i] = scores[extra[i]]
    n = last - first + num_extra
    top = _max(scores, first, n)
    for i in range(first, first + n, LANES):
        exp_tile(scores, i, top)
    inverse = _F1 / _sum(scores, first, n)
    out[:] = _F0
    _weigh(scores, first, values, values_at + first * stride, stride, last - first, out)
    for i in range(num_extra):
        _weigh(scores, last + i, values, values_at + extra[i] * stride, stride, 1, out)
    for i in range(stride):
        out[i] *= inverse


@njit(cache=True)  # type: ignore[untyped-decorator]
def _attend(
    qkv: Array, keys: Array, values: Array, shape: Shape, plan_row: Array, first: Array,
    last: Array, extra_at: Array, extra: Array, mixed: Array, first_unit: int, last_unit: int,
) -> None:  # fmt: skip
    """Units of work (kv head, token, query head of the group), kv heads outermost: they share keys."""
    tokens = qkv.shape[0]
    dim = shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    scores = np.empty(values.shape[2] + KEYS_PER_TILE, np.float32)
    result = np.empty(values.shape[3], np.float32)
    for unit in range(first_unit, last_unit):
        kv_head = unit // (tokens * group)
        t = unit // group % tokens
        head = kv_head * group + unit % group
        _attend_one(
            qkv, t * qkv.shape[1] + head * dim, dim, keys, values, plan_row[t], kv_head,
            first[t], last[t], extra[extra_at[t] : extra_at[t + 1]], scores, result,
        )  # fmt: skip
        for i in range(dim):
            mixed[t, head * dim + i] = result[i]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _quantize_rows(
    x: Array, q: Array, start: Array, scale: Array, first: int, last: int
) -> None:
    for t in range(first, last):
        quantize_row(x[t], q[t], start[t], scale[t])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _gate_quantize(
    gate_up: Array, bias: Array, scratch: Array, q: Array, start: Array, scale: Array,
    first: int, last: int,
) -> None:  # fmt: skip
    """silu(gate) * up, then to int8."""
    width = scratch.shape[1]
    for t in range(first, last):
        x, y = gate_up[t], scratch[t]
        for i in range(bias.shape[0]):
            x[i] += bias[i]
        for i in range(0, width, LANES):
            gate_tile(x, i, x, width + i, y, i)
        quantize_row(y, q[t], start[t], scale[t])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _add_bias(x: Array, bias: Array) -> None:
    for t in range(x.shape[0] if bias.shape[0] else 0):
        for i in range(bias.shape[0]):
            x[t, i] += bias[i]


@njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def multiply(
    portable: Any, threads: int, x: Array, weight: Array, channel_scale: Array, out: Array
) -> None:
    """``out = x @ weight.T`` for float rows x [T, K]; weight of one layer of a :class:`Matrix`."""
    rows, k = x.shape
    q = np.empty((rows, k), np.int8)
    start = np.empty((rows, k // BLOCK), np.int32)
    scale = np.empty((rows, k // BLOCK), np.float32)
    _quantize_rows(x, q, start, scale, 0, rows)
    tiles = out.shape[1] // LANES
    for part in prange(threads):
        product(portable, q, start, scale, weight, channel_scale, out, False,
                tiles * part // threads, tiles * (part + 1) // threads)  # fmt: skip


@njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def run_layers(
    portable: Any,
    threads: int,
    shape: Shape,
    hidden: Array,  # [T, H] float32, embeddings in, last layer's output out
    cos: Array,  # [T, D/2] float32
    sin: Array,  # [T, D/2]
    stack: LayerStack,
    keys: Array,  # [L, R, kv, C/64, D, 64] float32
    values: Array,  # [L, R, kv, C, Dp] float32
    plan: Plan,
    tap_layers: Array,  # [K] int64
    taps: Array,  # [T, K, H without padding] float32, filled
) -> None:
    """All decoder layers over T new tokens; appends their keys and values to the cache."""
    tokens, width = hidden.shape
    n, eps = shape.hidden, np.float32(shape.eps)
    qkv_width = stack.qkv.scale.shape[1]
    mixed_width = stack.out.weight.shape[1] // stack.out.scale.shape[1]
    inner = stack.gate_up.scale.shape[1] // 2
    widest = max(width, mixed_width, inner)
    q_store = np.empty(tokens * widest, np.int8)
    start_store = np.empty(tokens * widest // BLOCK, np.int32)
    scale_store = np.empty(tokens * widest // BLOCK, np.float32)
    normed = np.empty((tokens, width), np.float32)
    qkv = np.empty((tokens, qkv_width), np.float32)
    mixed = np.zeros((tokens, mixed_width), np.float32)
    gate_up = np.empty((tokens, 2 * inner), np.float32)
    gated = np.empty((tokens, inner), np.float32)

    q_h = q_store[: tokens * width].reshape(tokens, width)
    start_h = start_store[: tokens * width // BLOCK].reshape(tokens, width // BLOCK)
    scale_h = scale_store[: tokens * width // BLOCK].reshape(tokens, width // BLOCK)
    q_m = q_store[: tokens * mixed_width].reshape(tokens, mixed_width)
    start_m = start_store[: tokens * mixed_width // BLOCK].reshape(tokens, mixed_width // BLOCK)
    scale_m = scale_store[: tokens * mixed_width // BLOCK].reshape(tokens, mixed_width // BLOCK)
    q_i = q_store[: tokens * inner].reshape(tokens, inner)
    start_i = start_store[: tokens * inner // BLOCK].reshape(tokens, inner // BLOCK)
    scale_i = scale_store[: tokens * inner // BLOCK].reshape(tokens, inner // BLOCK)

    qkv_tiles, hidden_tiles, inner_tiles = qkv_width // LANES, width // LANES, inner // LANES * 2
    units = tokens * shape.num_heads
    parts = 1 if tokens <= _SERIAL_ROWS else threads

    w_qkv, s_qkv, b_qkv = stack.qkv.weight, stack.qkv.scale, stack.qkv.bias
    w_out, s_out, b_out = stack.out.weight, stack.out.scale, stack.out.bias
    w_gate, s_gate, b_gate = stack.gate_up.weight, stack.gate_up.scale, stack.gate_up.bias
    w_down, s_down, b_down = stack.down.weight, stack.down.scale, stack.down.bias
    norm_1, norm_2 = stack.attention_norm, stack.mlp_norm
    norm_q, norm_k = stack.query_norm, stack.key_norm
    rows, slots = plan.row, plan.slot

    for layer in range(norm_1.shape[0]):
        kind = plan.windowed[layer]
        first, last = plan.first[kind], plan.last[kind]
        extra_at, extra = plan.extra_at[kind], plan.extra[kind]
        layer_keys, layer_values = keys[layer], values[layer]
        if parts == 1:
            _norm_quantize(hidden, norm_1[layer], n, eps, normed, q_h, start_h, scale_h, 0, tokens)
        else:
            for part in prange(parts):
                _norm_quantize(hidden, norm_1[layer], n, eps, normed, q_h, start_h, scale_h,
                               tokens * part // parts, tokens * (part + 1) // parts)  # fmt: skip
        for part in prange(threads):
            product(portable, q_h, start_h, scale_h, w_qkv[layer], s_qkv[layer], qkv, False,
                    qkv_tiles * part // threads, qkv_tiles * (part + 1) // threads)  # fmt: skip
        if parts == 1:
            _rotate_append(qkv, b_qkv[layer], norm_q[layer], norm_k[layer], cos, sin, shape,
                           layer_keys, layer_values, rows, slots, 0, tokens)  # fmt: skip
        else:
            for part in prange(parts):
                _rotate_append(qkv, b_qkv[layer], norm_q[layer], norm_k[layer], cos, sin, shape,
                               layer_keys, layer_values, rows, slots,
                               tokens * part // parts, tokens * (part + 1) // parts)  # fmt: skip
        for part in prange(threads):
            _attend(qkv, layer_keys, layer_values, shape, rows, first, last, extra_at, extra,
                    mixed, units * part // threads, units * (part + 1) // threads)  # fmt: skip
        _quantize_rows(mixed, q_m, start_m, scale_m, 0, tokens)
        for part in prange(threads):
            product(portable, q_m, start_m, scale_m, w_out[layer], s_out[layer], hidden, True,
                    hidden_tiles * part // threads,
                    hidden_tiles * (part + 1) // threads)  # fmt: skip
        _add_bias(hidden, b_out[layer])
        if parts == 1:
            _norm_quantize(hidden, norm_2[layer], n, eps, normed, q_h, start_h, scale_h, 0, tokens)
        else:
            for part in prange(parts):
                _norm_quantize(hidden, norm_2[layer], n, eps, normed, q_h, start_h, scale_h,
                               tokens * part // parts, tokens * (part + 1) // parts)  # fmt: skip
        for part in prange(threads):
            product(portable, q_h, start_h, scale_h, w_gate[layer], s_gate[layer], gate_up, False,
                    inner_tiles * part // threads,
                    inner_tiles * (part + 1) // threads)  # fmt: skip
        if parts == 1:
            _gate_quantize(gate_up, b_gate[layer], gated, q_i, start_i, scale_i, 0, tokens)
        else:
            for part in prange(parts):
                _gate_quantize(gate_up, b_gate[layer], gated, q_i, start_i, scale_i,
                               tokens * part // parts, tokens * (part + 1) // parts)  # fmt: skip
        for part in prange(threads):
            product(portable, q_i, start_i, scale_i, w_down[layer], s_down[layer], hidden, True,
                    hidden_tiles * part // threads,
                    hidden_tiles * (part + 1) // threads)  # fmt: skip
        _add_bias(hidden, b_down[layer])
        for k in range(tap_layers.shape[0]):
            if tap_layers[k] == layer:
                for t in range(tokens):
                    for i in range(n):
                        taps[t, k, i] = hidden[t, i]


@njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def norm_rows(threads: int, hidden: Array, gain: Array, n: int, eps: Any, out: Array) -> None:
    """RMSNorm of each row: hidden [T, H], out [T, n]."""
    tokens = hidden.shape[0]
    parts = 1 if tokens <= _SERIAL_ROWS else threads
    for part in prange(parts):
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            _norm_row(hidden[t], gain, n, eps, out[t])
