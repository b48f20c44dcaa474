"""The vector kernels against plain arithmetic: the int8 product bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from forespeak.kernels.vector import LANES
from forespeak.models.kernels import simd
from forespeak.models.kernels.rows import product, quantize_row
from forespeak.models.kernels.simd import BLOCK, has_int8_product

Array = np.ndarray[Any, Any]

PATHS = [
    pytest.param(True, id="portable"),
    pytest.param(
        None,
        id="vnni",
        marks=pytest.mark.skipif(not has_int8_product(), reason="this CPU has no AVX-512 VNNI"),
    ),
]


# The tiles are intrinsics, callable from compiled code only; the type checker knows neither kind.
compiled: Any = njit
tiles: Any = simd


@compiled
def _exp(x: Array, shift: Any) -> None:
    for at in range(0, x.shape[0], 16):
        tiles.exp_tile(x, at, shift)


@compiled
def _gate(gate: Array, up: Array, out: Array) -> None:
    for at in range(0, gate.shape[0], 16):
        tiles.gate_tile(gate, at, up, at, out, at)


def quantize_plainly(x: Array) -> tuple[Array, Array]:
    """int8 [T, K] and float32 scales [T, B], by the definition: block maximum / 127."""
    blocks = x.reshape(len(x), -1, BLOCK)
    top = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(127) / top, np.float32(0))
    q = np.rint(blocks * inverse[..., None]).astype(np.int8)
    return q.reshape(x.shape), top / np.float32(127)


def multiply_plainly(q: Array, scale: Array, weight: Array, channel: Array) -> Array:
    """Block after block, each product and each sum rounded to float32."""
    total = np.zeros((len(q), len(weight)), np.float32)
    for block in range(scale.shape[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        dots = q[:, part].astype(np.int64) @ weight[:, part].astype(np.int64).T
        term = dots.astype(np.float32) * scale[:, block, None]
        total = total + term
    result: Array = total * channel
    assert result.dtype == np.float32
    return result


def _tiled(weight: Array) -> Array:
    """[N, K] int8 to flat [N/16][K/4][16][4] of value + 128, element by element."""
    n, k = weight.shape
    out = np.empty((n // 16, k // 4, 16, 4), np.uint8)
    for channel in range(n):
        for i in range(k):
            out[channel // 16, i // 4, channel % 16, i % 4] = int(weight[channel, i]) + 128
    return out.reshape(-1)


def _aligned(array: Array) -> Array:
    """A copy that begins at a multiple of 64 bytes, as the kernel's weights must."""
    store = np.empty(array.nbytes + 64, np.uint8)
    start = -store.ctypes.data % 64
    copy = store[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.parametrize("portable", PATHS)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", [*range(1, 18), 33])
def test_product_is_the_plain_product(portable: bool | None, add: bool, rows: int):
    rng = np.random.default_rng(rows)
    n, k = 48, 160
    weight = rng.integers(-127, 128, (n, k)).astype(np.int8)
    weight[0], weight[1] = 127, -127
    x = (rng.standard_normal((rows, k)) * 10 ** rng.uniform(-3, 3, (rows, 1))).astype(np.float32)
    x[0, :BLOCK] = 1  # the largest sums there are
    q, scale = quantize_plainly(x)
    start = -128 * q.reshape(rows, -1, BLOCK).sum(-1, dtype=np.int32)
    channel = rng.uniform(0.001, 0.1, n).astype(np.float32)
    before = rng.standard_normal((rows, n)).astype(np.float32)
    expected = multiply_plainly(q, scale, weight, channel)
    if add:
        expected = before + expected
    out = before.copy()
    product(portable, q, start, scale, _aligned(_tiled(weight)), channel, out, add, 0, n // LANES)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("portable", PATHS)
def test_product_fills_its_tiles_only(portable: bool | None):
    q, scale = quantize_plainly(np.ones((3, 32), np.float32))
    start = np.full((3, 1), -128 * 127 * 32, np.int32)
    weight = _aligned(_tiled(np.ones((64, 32), np.int8)))
    out = np.full((3, 64), -7, np.float32)
    product(portable, q, start, scale, weight, np.ones(64, np.float32), out, False, 1, 3)
    assert (out[:, :16] == -7).all() and (out[:, 48:] == -7).all()
    assert out[:, 16:48] == pytest.approx(32)


def test_activations_are_quantised_by_the_definition():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((200, 96)) * 10 ** rng.uniform(-8, 8, (200, 1))).astype(np.float32)
    x[0] = 0
    x[1, :40] = 0
    q, start, scale = (
        np.empty((200, 96), np.int8),
        np.empty((200, 3), np.int32),
        np.empty((200, 3), "f4"),
    )
    for t in range(200):
        quantize_row(x[t], q[t], start[t], scale[t])
    expected_q, expected_scale = quantize_plainly(x)
    assert np.array_equal(q, expected_q)
    assert np.array_equal(scale, expected_scale)
    assert np.array_equal(start, -128 * q.reshape(200, 3, 32).sum(-1, dtype=np.int32))
    assert q[2:].max() == 127 and q[2:].min() == -127


def test_exponential():
    x = np.linspace(-87, 88, 16 * 20_000, dtype=np.float32)
    found = x.copy()
    _exp(found, np.float32(0))
    true = np.exp(x.astype(np.float64))
    assert np.abs(found / true - 1).max() < 1e-6


def test_exponential_beyond_its_range():
    x = np.array(
        [0, -87, -100, -1e4, -1e30, -np.inf, 88, 89, 1e4, 1e30, np.inf, 1, 2, 3, 4, 5], "f4"
    )
    found = x.copy()
    _exp(found, np.float32(0))
    assert found[0] == 1
    assert (found[1:6] == found[1]).all() and 0 < found[1] < 2e-38
    assert (found[6:11] == found[6]).all() and np.isfinite(found[6])


def test_exponential_of_shifted_scores():
    x = np.linspace(-20, 20, 64, dtype=np.float32)
    found = x.copy()
    _exp(found, np.float32(20))
    true = np.exp((x - np.float32(20)).astype(np.float64))
    assert np.abs(found / true - 1).max() < 1e-6


def test_gate():
    gate = np.linspace(-80, 80, 16 * 1000, dtype=np.float32)
    up = np.random.default_rng(0).standard_normal(len(gate)).astype(np.float32)
    out = np.empty_like(gate)
    _gate(gate, up, out)
    wide = gate.astype(np.float64)
    true = wide / (1 + np.exp(-wide)) * up
    np.testing.assert_allclose(out, true, rtol=1e-6, atol=0)


def test_gate_of_extreme_values():
    gate = np.tile(np.array([-1e30, -1e4, -100, 0, 100, 1e4, 1e30, 1], np.float32), 2)
    out = np.empty_like(gate)
    _gate(gate, np.ones_like(gate), out)
    assert np.abs(out[:3]).max() < 1e-6
    assert out[3] == 0
    assert np.array_equal(out[4:7], gate[4:7])
