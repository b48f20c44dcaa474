"""The int8 forward on CPU: all layers in one compiled function, rows independent bit for bit.

Kernels work on numpy views of torch storage. Everything that touches one token's values is done
token by token in a fixed order; tokens share only the reading of weights and keys. Letters as in
``layout.py``.

``portable`` is None for the VNNI product and anything else for plain arithmetic (see ``simd.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from forespeak.kernels.cache import kernel
from forespeak.kernels.vector import LANES
from forespeak.models.kernels.attention import attend
from forespeak.models.kernels.layout import Array, LayerStack, Plan, Shape, Workspace
from forespeak.models.kernels.rows import (
    add_bias,
    gate_quantize,
    norm_quantize,
    norm_row,
    product,
    quantize_rows,
    quantize_tile_rows,
    rotate_append,
)
from forespeak.models.kernels.simd import BLOCK
from forespeak.models.kernels.team import meet

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


@kernel()
def _tap(hidden: Array, layer: int, tap_layers: Array, taps: Array, first: int, last: int) -> None:
    for k in range(tap_layers.shape[0]):
        if tap_layers[k] == layer:
            for t in range(first, last):
                for i in range(taps.shape[2]):
                    taps[t, k, i] = hidden[t, i]


@kernel()
def _program(
    part: int, threads: int, barrier: Array, portable: Any, shape: Shape, hidden: Array, cos: Array,
    sin: Array, stack: LayerStack, keys: Array, values: Array, plan: Plan, work: Workspace,
    tap_layers: Array, taps: Array,
) -> None:  # fmt: skip
    """What one member of the team does in a forward: its share of every phase of every layer."""
    n, eps, tokens = shape.hidden, np.float32(shape.eps), hidden.shape[0]
    t0, t1 = tokens * part // threads, tokens * (part + 1) // threads
    queries = tokens * shape.num_heads
    q0, q1 = queries * part // threads, queries * (part + 1) // threads
    q_h, start_h, scale_h = work.q_hidden, work.start_hidden, work.scale_hidden
    q_m, start_m, scale_m = work.q_mixed, work.start_mixed, work.scale_mixed
    q_g, start_g, scale_g = work.q_gated, work.start_gated, work.scale_gated
    for i in range(stack.attention_norm.shape[0]):
        norm_quantize(hidden, stack.attention_norm[i], n, eps, work.normed, q_h, start_h, scale_h,
                      t0, t1)  # fmt: skip
        meet(barrier, threads)
        _share(portable, part, threads, q_h, start_h, scale_h, stack.qkv_weight[i],
               stack.qkv_scale[i], work.qkv, False)  # fmt: skip
        meet(barrier, threads)
        rotate_append(work.qkv, stack.qkv_bias[i], stack.query_norm[i], stack.key_norm[i], cos, sin,
                      shape, keys[i], values[i], plan.row, plan.slot, t0, t1)  # fmt: skip
        meet(barrier, threads)
        kind = plan.windowed[i]
        attend(work.qkv, keys[i], values[i], shape, plan.row, plan.first[kind], plan.last[kind],
               plan.extra_at[kind], plan.extra[kind], work.mixed, q0, q1)  # fmt: skip
        meet(barrier, threads)
        quantize_rows(work.mixed, q_m, start_m, scale_m, t0, t1)
        meet(barrier, threads)
        _share(portable, part, threads, q_m, start_m, scale_m, stack.out_weight[i],
               stack.out_scale[i], hidden, True)  # fmt: skip
        meet(barrier, threads)
        add_bias(hidden, stack.out_bias[i], t0, t1)
        norm_quantize(hidden, stack.mlp_norm[i], n, eps, work.normed, q_h, start_h, scale_h,
                      t0, t1)  # fmt: skip
        meet(barrier, threads)
        _share(portable, part, threads, q_h, start_h, scale_h, stack.gate_up_weight[i],
               stack.gate_up_scale[i], work.gate_up, False)  # fmt: skip
        meet(barrier, threads)
        gate_quantize(
            work.gate_up, stack.gate_up_bias[i], work.gated, q_g, start_g, scale_g, t0, t1
        )
        meet(barrier, threads)
        _share(portable, part, threads, q_g, start_g, scale_g, stack.down_weight[i],
               stack.down_scale[i], hidden, True)  # fmt: skip
        meet(barrier, threads)
        add_bias(hidden, stack.down_bias[i], t0, t1)
        _tap(hidden, i, tap_layers, taps, t0, t1)


@kernel()
def _share(
    portable: Any, part: int, threads: int, q: Array, start: Array, scale: Array, weight: Array,
    channel_scale: Array, out: Array, add: bool,
) -> None:  # fmt: skip
    """One member's tiles of a product."""
    tiles = out.shape[1] // LANES
    product(portable, q, start, scale, weight, channel_scale, out, add,
            tiles * part // threads, tiles * (part + 1) // threads)  # fmt: skip


@kernel(parallel=True)
def run_layers(
    portable: Any,
    threads: int,
    barrier: Array,
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
    """All decoder layers over T new tokens; appends their keys and values to the cache.

    ``threads`` members must be able to run at once, see ``team.runs_as_team``.
    """
    for part in prange(threads):
        _program(part, threads, barrier, portable, shape, hidden, cos, sin, stack, keys, values,
                 plan, work, tap_layers, taps)  # fmt: skip


@kernel(parallel=True)
def quantize_tiles(threads: int, weight: Array, tiles: Array, scale: Array, first_row: int) -> None:
    """``quantize_tile_rows`` over all rows."""
    rows = weight.shape[0]
    for part in prange(threads):
        quantize_tile_rows(weight, tiles, scale, first_row,
                           rows * part // threads, rows * (part + 1) // threads)  # fmt: skip
