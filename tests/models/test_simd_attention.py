"""The vector kernels of attention against plain arithmetic, and against each other bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from forespeak.models.kernels import simd_attention
from forespeak.models.kernels.simd_attention import KEYS_PER_TILE

Array = np.ndarray[Any, Any]

# The tiles are intrinsics, callable from compiled code only; the type checker knows neither kind.
compiled: Any = njit
tiles: Any = simd_attention


@compiled
def _score_1(queries: Array, at: Array, keys: Array, scores: Array) -> None:
    dim, stride = keys.shape[0], scores.shape[1]
    for i in range(4):
        tiles.score_tile_1(queries, at, i, keys, 0, dim, scores, i * stride, stride)


@compiled
def _score_4(queries: Array, at: Array, keys: Array, scores: Array) -> None:
    tiles.score_tile_4(queries, at, 0, keys, 0, keys.shape[0], scores, 0, scores.shape[1])


@compiled
def _weigh_16(weights: Array, values: Array, out: Array) -> None:
    count, keys, width = weights.shape[0], weights.shape[1], values.shape[1]
    for i in range(count):
        for part in range(0, width, 16):
            tiles.weigh_values_16(
                weights, i * keys, 0, values, part, width, keys, out, i * width + part, 0
            )


@compiled
def _weigh_64(weights: Array, values: Array, out: Array) -> None:
    count, keys, width = weights.shape[0], weights.shape[1], values.shape[1]
    for i in range(count):
        for part in range(0, width, 64):
            tiles.weigh_values_64(
                weights, i * keys, 0, values, part, width, keys, out, i * width + part, 0
            )


@compiled
def _weigh_64_of_4(weights: Array, values: Array, out: Array) -> None:
    keys, width = weights.shape[1], values.shape[1]
    for part in range(0, width, 64):
        tiles.weigh_values_64_of_4(weights, 0, keys, values, part, width, keys, out, part, width)


@pytest.mark.parametrize("dim", [16, 24, 64, 80, 128])
def test_scores(dim: int):
    rng = np.random.default_rng(dim)
    queries = rng.standard_normal((6, dim)).astype(np.float32)
    keys = rng.standard_normal((dim, KEYS_PER_TILE)).astype(np.float32)
    order = np.array([3, 0, 5, 1])
    found = []
    for score in (_score_1, _score_4):
        scores = np.full((4, 80), 7, np.float32)
        score(queries, order * dim, keys, scores)
        assert (scores[:, KEYS_PER_TILE:] == 7).all()
        found.append(scores[:, :KEYS_PER_TILE])
    true = queries[order].astype(np.float64) @ keys
    np.testing.assert_allclose(found[0], true, atol=1e-6 * dim, rtol=0)
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("num_keys", [1, 37, 64])
@pytest.mark.parametrize("width", [64, 128])
def test_weighed_values_add_up(width: int, num_keys: int):
    rng = np.random.default_rng(num_keys)
    weights = rng.uniform(0, 1, (4, num_keys)).astype(np.float32)
    values = rng.standard_normal((num_keys, width)).astype(np.float32)
    found = []
    for weigh in (_weigh_16, _weigh_64, _weigh_64_of_4):
        out = np.full((4, width), 3, np.float32)
        weigh(weights, values, out)
        found.append(out)
    true = 3 + weights.astype(np.float64) @ values
    np.testing.assert_allclose(found[0], true, atol=1e-4, rtol=0)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
