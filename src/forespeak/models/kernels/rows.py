"""Kernels over rows (tokens), compiled by Numba: norm, quantisation, product, rotation, gate.

Each handles the tokens ``first .. last-1`` and does, for one token, the same operations in the same
order whatever the other tokens are. Letters as in ``layout.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forespeak.kernels.cache import kernel
from forespeak.kernels.vector import LANES
from forespeak.models.kernels.layout import Array, Shape
from forespeak.models.kernels.simd import (
    BLOCK,
    dot_tile_1,
    dot_tile_2,
    dot_tile_3,
    dot_tile_4,
    dot_tile_5,
    dot_tile_6,
    dot_tile_7,
    dot_tile_8,
    gate_tile,
)
from forespeak.models.kernels.simd_attention import KEYS_PER_TILE

# Sums of one row may be reordered by the compiler (always the same way for the same length).
REDUCE = {"reassoc", "nnan", "nsz"}
_F0, _F1, _F127 = np.float32(0), np.float32(1), np.float32(127)


@kernel(fastmath=REDUCE)
def _square_sum(x: Array, at: int, n: int) -> Any:
    total = _F0
    for i in range(n):
        total += x[at + i] * x[at + i]
    return total


@kernel(fastmath=REDUCE)
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


@kernel()
def quantize_row(x: Array, q: Array, start: Array, scale: Array) -> None:
    """One row of K floats to int8 blocks; ``start`` = -128 * sum undoes the weights' offset."""
    for block in range(x.shape[0] // BLOCK):
        s, total = _quantize_block(x, block * BLOCK, q, block * BLOCK)
        scale[block] = s
        start[block] = np.int32(-128) * total


@kernel()
def norm_row(x: Array, gain: Array, n: int, eps: Any, out: Array) -> None:
    """RMSNorm of the first n values; the padding of ``out`` becomes zero."""
    scale = _F1 / np.sqrt(_square_sum(x, 0, n) / np.float32(n) + eps)
    for i in range(n):
        out[i] = x[i] * scale * gain[i]
    for i in range(n, out.shape[0]):
        out[i] = _F0


@kernel()
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
        if rows - t == 1:
            dot_tile_1(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
        elif rows - t == 2:
            dot_tile_2(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
        elif rows - t == 3:
            dot_tile_3(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
        elif rows - t == 4:
            dot_tile_4(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
        elif rows - t == 5:
            dot_tile_5(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
        elif rows - t == 6:
            dot_tile_6(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip
        elif rows - t == 7:
            dot_tile_7(portable, weight, w_at, q, t * k, k, start, scale, t * blocks, blocks,
                       channel_scale, c_at, out, t * n + c_at, n, add)  # fmt: skip


@kernel()
def norm_quantize(
    hidden: Array, gain: Array, n: int, eps: Any, scratch: Array,
    q: Array, start: Array, scale: Array, first: int, last: int,
) -> None:  # fmt: skip
    for t in range(first, last):
        norm_row(hidden[t], gain, n, eps, scratch[t])
        quantize_row(scratch[t], q[t], start[t], scale[t])


@kernel()
def _rotate(x: Array, cos: Array, sin: Array, factor: Any) -> None:
    """Half-split rotary embedding in place, times ``factor``."""
    half = cos.shape[0]
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = (a * cos[i] - b * sin[i]) * factor
        x[i + half] = (b * cos[i] + a * sin[i]) * factor


@kernel()
def rotate_append(
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
                norm_row(part, gain, dim, eps, part)
            _rotate(part, cos[t], sin[t], factor if is_query else _F1)
        row, slot = plan_row[t], plan_slot[t]
        tile, lane = slot // KEYS_PER_TILE, slot % KEYS_PER_TILE
        for head in range(kv_heads):
            k_at = (heads + head) * dim
            v_at = (heads + kv_heads + head) * dim
            for i in range(dim):
                keys[row, head, tile, i, lane] = x[k_at + i]
                values[row, head, slot, i] = x[v_at + i]


@kernel()
def quantize_rows(x: Array, q: Array, start: Array, scale: Array, first: int, last: int) -> None:
    for t in range(first, last):
        quantize_row(x[t], q[t], start[t], scale[t])


@kernel()
def gate_quantize(
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


@kernel()
def add_bias(x: Array, bias: Array, first: int, last: int) -> None:
    for t in range(first, last):
        for i in range(bias.shape[0]):
            x[t, i] += bias[i]


@kernel()
def quantize_tile_rows(
    weight: Array, tiles: Array, scale: Array, first_row: int, first: int, last: int
) -> None:
    """int8 weights of rows ``first .. last-1`` straight into the tiled layout.

    The fast form of ``quantize.quantize_channels`` and ``quantize.tile``, with the same numbers.

    Args:
        weight: [n, k] float32.
        tiles: [N/16, K/4, 16, 4] uint8; row r of weight is output ``first_row + r``. Cells that no
            weight falls on keep what they hold.
        scale: [N] float32, written for these rows; NaN or infinite where a weight is.
    """
    columns = weight.shape[1]
    for row in range(first, last):
        top = _F0
        for i in range(columns):
            value = abs(weight[row, i])
            if value > top or value != value:  # once NaN it stays NaN
                top = value
        step = top / _F127
        place = first_row + row
        scale[place] = step
        divisor = step if step > _F0 else _F1
        for i in range(columns):
            q = np.int32(np.rint(weight[row, i] / divisor))
            tiles[place // LANES, i // 4, place % LANES, i % 4] = np.uint8(q + np.int32(128))
