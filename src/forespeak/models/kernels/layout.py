"""Data that the int8 kernels read: weights, sizes, what each token sees. Importing needs no Numba.

Legend: T new tokens, L layers, N outputs, K inputs, H hidden (padded to 32), D head size,
C slots of a cache row, B blocks of 32 inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Matrix(NamedTuple):
    """int8 weights of one kind for all layers. Rows (outputs) and columns padded to 32."""

    weight: Array  # [L, N * K] uint8, value + 128, each layer tiled [N/16][K/4][16][4]
    scale: Array  # [L, N] float32, per output channel
    bias: Array  # [L, N] float32, or [L, 0] when there is none


class LayerStack(NamedTuple):
    """Weights of all decoder layers: four matrices and the norms.

    Flat, because Numba hands only flat tuples to its threads.
    """

    qkv_weight: Array
    qkv_scale: Array
    qkv_bias: Array
    out_weight: Array
    out_scale: Array
    out_bias: Array
    gate_up_weight: Array  # gate rows first, then up rows, each padded to 32
    gate_up_scale: Array
    gate_up_bias: Array
    down_weight: Array
    down_scale: Array
    down_bias: Array
    attention_norm: Array  # [L, H] float32
    mlp_norm: Array  # [L, H]
    query_norm: Array  # [L, D], or [L, 0]
    key_norm: Array  # [L, D], or [L, 0]


def first_layers(stack: LayerStack, num_layers: int) -> LayerStack:
    """The first layers of a stack, memory shared."""
    return LayerStack(*(array[:num_layers] for array in stack))


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


class Workspace(NamedTuple):
    """Buffers of one forward over T tokens; every layer uses them again."""

    normed: Array  # [T, H] float32
    qkv: Array  # [T, N of qkv]
    mixed: Array  # [T, K of out]
    gate_up: Array  # [T, N of gate_up]
    gated: Array  # [T, K of down]
    q_hidden: Array  # [T, H] int8, with start and scale the int8 form of normed
    start_hidden: Array  # [T, B] int32
    scale_hidden: Array  # [T, B] float32
    q_mixed: Array
    start_mixed: Array
    scale_mixed: Array
    q_gated: Array
    start_gated: Array
    scale_gated: Array


def make_workspace(num_tokens: int, hidden_width: int, stack: LayerStack, block: int) -> Workspace:
    """Buffers for ``num_tokens`` tokens; ``block`` inputs share a scale."""
    mixed_width = stack.out_weight.shape[1] // stack.out_scale.shape[1]
    inner = stack.gate_up_scale.shape[1] // 2

    def floats(width: int) -> Array:
        return np.zeros((num_tokens, width), np.float32)

    def integers(width: int) -> tuple[Array, Array, Array]:
        return (
            np.empty((num_tokens, width), np.int8),
            np.empty((num_tokens, width // block), np.int32),
            np.empty((num_tokens, width // block), np.float32),
        )

    return Workspace(
        floats(hidden_width), floats(stack.qkv_scale.shape[1]), floats(mixed_width),
        floats(2 * inner), floats(inner), *integers(hidden_width), *integers(mixed_width),
        *integers(inner),
    )  # fmt: skip
