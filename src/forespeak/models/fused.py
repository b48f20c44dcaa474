"""The int8 forward on CPU: all layers in one compiled function, rows independent bit for bit.

Kernels work on numpy views of torch storage. Everything that touches one token's values is done
token by token in a fixed order; tokens share only the reading of weights and keys. Letters as in
``int8_layout.py``.

``portable`` is None for the VNNI product and anything else for plain arithmetic (see ``simd.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from forespeak.models.attention_kernels import attend
from forespeak.models.int8_layout import Array, LayerStack, Plan, Shape, Workspace
from forespeak.models.kernel_cache import kernel
from forespeak.models.row_kernels import (
    add_bias,
    gate_quantize,
    norm_quantize,
    norm_row,
    product,
    quantize_rows,
    quantize_tile_rows,
    rotate_append,
)
from forespeak.models.simd import BLOCK, LANES

_SERIAL_ROWS = 3  # up to so many tokens, splitting small work over threads costs more


@kernel(parallel=True)
def multiply(
    portable: Any, threads: int, x: Array, weight: Array, channel_scale: Array, out: Array
) -> None:
    """``out = x @ weight.T`` for float rows x [T, K]; weight of one layer of a ``Matrix``."""
    rows, k = x.shape
    q = np.empty((rows, k), np.int8)
    start = np.empty((rows, k // BLOCK), np.int32)
    scale = np.empty((rows, k // BLOCK), np.float32)
    quantize_rows(x, q, start, scale, 0, rows)
    tiles = out.shape[1] // LANES
    for part in prange(threads):
        product(portable, q, start, scale, weight, channel_scale, out, False,
                tiles * part // threads, tiles * (part + 1) // threads)  # fmt: skip


@kernel(parallel=True)
def norm_rows(threads: int, hidden: Array, gain: Array, n: int, eps: Any, out: Array) -> None:
    """RMSNorm of each row: hidden [T, H], out [T, n]."""
    tokens = hidden.shape[0]
    parts = 1 if tokens <= _SERIAL_ROWS else threads
    for part in prange(parts):
        for t in range(tokens * part // parts, tokens * (part + 1) // parts):
            norm_row(hidden[t], gain, n, eps, out[t])


@kernel(parallel=True)
def _normed(
    threads: int, n: int, eps: Any, hidden: Array, gain: Array, normed: Array,
    q: Array, start: Array, scale: Array,
) -> None:  # fmt: skip
    tokens = hidden.shape[0]
    if tokens <= _SERIAL_ROWS:
        norm_quantize(hidden, gain, n, eps, normed, q, start, scale, 0, tokens)
        return
    for part in prange(threads):
        norm_quantize(hidden, gain, n, eps, normed, q, start, scale,
                      tokens * part // threads, tokens * (part + 1) // threads)  # fmt: skip


@kernel(parallel=True)
def _multiplied(
    portable: Any, threads: int, q: Array, start: Array, scale: Array,
    weight: Array, channel_scale: Array, out: Array, add: bool,
) -> None:  # fmt: skip
    tiles = out.shape[1] // LANES
    for part in prange(threads):
        product(portable, q, start, scale, weight, channel_scale, out, add,
                tiles * part // threads, tiles * (part + 1) // threads)  # fmt: skip


@kernel(parallel=True)
def _rotated(
    threads: int, qkv: Array, bias: Array, query_norm: Array, key_norm: Array, cos: Array,
    sin: Array, shape: Shape, keys: Array, values: Array, rows: Array, slots: Array,
) -> None:  # fmt: skip
    tokens = qkv.shape[0]
    if tokens <= _SERIAL_ROWS:
        rotate_append(qkv, bias, query_norm, key_norm, cos, sin, shape, keys, values, rows, slots,
                      0, tokens)  # fmt: skip
        return
    for part in prange(threads):
        rotate_append(qkv, bias, query_norm, key_norm, cos, sin, shape, keys, values, rows, slots,
                      tokens * part // threads, tokens * (part + 1) // threads)  # fmt: skip


@kernel(parallel=True)
def _attended(
    threads: int, qkv: Array, keys: Array, values: Array, shape: Shape, rows: Array, first: Array,
    last: Array, extra_at: Array, extra: Array, mixed: Array,
) -> None:  # fmt: skip
    queries = qkv.shape[0] * shape.num_heads
    for part in prange(threads):
        attend(qkv, keys, values, shape, rows, first, last, extra_at, extra, mixed,
               queries * part // threads, queries * (part + 1) // threads)  # fmt: skip


@kernel(parallel=True)
def _quantized(threads: int, x: Array, q: Array, start: Array, scale: Array) -> None:
    tokens = x.shape[0]
    if tokens <= _SERIAL_ROWS:
        quantize_rows(x, q, start, scale, 0, tokens)
        return
    for part in prange(threads):
        quantize_rows(x, q, start, scale,
                      tokens * part // threads, tokens * (part + 1) // threads)  # fmt: skip


@kernel(parallel=True)
def _gated(
    threads: int, gate_up: Array, bias: Array, gated: Array, q: Array, start: Array, scale: Array
) -> None:
    tokens = gate_up.shape[0]
    if tokens <= _SERIAL_ROWS:
        gate_quantize(gate_up, bias, gated, q, start, scale, 0, tokens)
        return
    for part in prange(threads):
        gate_quantize(gate_up, bias, gated, q, start, scale,
                      tokens * part // threads, tokens * (part + 1) // threads)  # fmt: skip


@kernel()
def _tap(hidden: Array, layer: int, tap_layers: Array, taps: Array) -> None:
    for k in range(tap_layers.shape[0]):
        if tap_layers[k] == layer:
            for t in range(hidden.shape[0]):
                for i in range(taps.shape[2]):
                    taps[t, k, i] = hidden[t, i]


@kernel()
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
    work: Workspace,
    tap_layers: Array,  # [K] int64
    taps: Array,  # [T, K, H without padding] float32, filled
) -> None:
    """All decoder layers over T new tokens; appends their keys and values to the cache."""
    n, eps = shape.hidden, np.float32(shape.eps)
    q_h, start_h, scale_h = work.q_hidden, work.start_hidden, work.scale_hidden
    q_m, start_m, scale_m = work.q_mixed, work.start_mixed, work.scale_mixed
    q_g, start_g, scale_g = work.q_gated, work.start_gated, work.scale_gated
    qkv, out, gate_up, down = stack.qkv, stack.out, stack.gate_up, stack.down
    for i in range(stack.attention_norm.shape[0]):
        _normed(threads, n, eps, hidden, stack.attention_norm[i], work.normed,
                q_h, start_h, scale_h)  # fmt: skip
        _multiplied(portable, threads, q_h, start_h, scale_h, qkv.weight[i], qkv.scale[i],
                    work.qkv, False)  # fmt: skip
        _rotated(threads, work.qkv, qkv.bias[i], stack.query_norm[i], stack.key_norm[i], cos, sin,
                 shape, keys[i], values[i], plan.row, plan.slot)  # fmt: skip
        kind = plan.windowed[i]
        _attended(threads, work.qkv, keys[i], values[i], shape, plan.row, plan.first[kind],
                  plan.last[kind], plan.extra_at[kind], plan.extra[kind], work.mixed)  # fmt: skip
        _quantized(threads, work.mixed, q_m, start_m, scale_m)
        _multiplied(portable, threads, q_m, start_m, scale_m, out.weight[i], out.scale[i],
                    hidden, True)  # fmt: skip
        add_bias(hidden, out.bias[i])
        _normed(threads, n, eps, hidden, stack.mlp_norm[i], work.normed,
                q_h, start_h, scale_h)  # fmt: skip
        _multiplied(portable, threads, q_h, start_h, scale_h, gate_up.weight[i], gate_up.scale[i],
                    work.gate_up, False)  # fmt: skip
        _gated(threads, work.gate_up, gate_up.bias[i], work.gated, q_g, start_g, scale_g)
        _multiplied(portable, threads, q_g, start_g, scale_g, down.weight[i], down.scale[i],
                    hidden, True)  # fmt: skip
        add_bias(hidden, down.bias[i])
        _tap(hidden, i, tap_layers, taps)


@kernel(parallel=True)
def quantize_tiles(threads: int, weight: Array, tiles: Array, scale: Array, first_row: int) -> None:
    """``quantize_tile_rows`` over all rows."""
    rows = weight.shape[0]
    for part in prange(threads):
        quantize_tile_rows(weight, tiles, scale, first_row,
                           rows * part // threads, rows * (part + 1) // threads)  # fmt: skip
