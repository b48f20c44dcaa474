"""int8 weights: nearness to the floats, layout, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forespeak.errors import CheckpointError
from forespeak.models.quantize import (
    MatrixBuilder,
    dequantize,
    padded,
    quantize_channels,
    single_matrix,
    tile,
)


def _weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand((rows, 1), generator=generator) - 2)
    return torch.randn((rows, columns), generator=generator) * sizes


def test_within_half_a_step_of_the_weights():
    weight = _weight(50, 70)
    q, scale = quantize_channels(weight)
    assert q.dtype == torch.int8
    assert torch.equal(q.abs().amax(1), torch.full((50,), 127, dtype=torch.int8))
    error = (q.float() * scale[:, None] - weight).abs()
    assert (error <= 0.5001 * scale[:, None]).all()


def test_each_channel_has_its_own_scale():
    weight = _weight(50, 70)
    louder = weight.clone()
    louder[7] *= 1024  # a power of two: the same integers
    q, scale = quantize_channels(weight)
    q_louder, scale_louder = quantize_channels(louder)
    assert torch.equal(q, q_louder)
    assert torch.equal(scale_louder[7], scale[7] * 1024)


def test_a_channel_of_zeros_stays_zero():
    weight = _weight(4, 32)
    weight[2] = 0
    q, scale = quantize_channels(weight)
    assert (q[2] == 0).all() and scale[2] == 0


def test_tiles_are_where_the_kernel_looks():
    q, _ = quantize_channels(_weight(64, 96))
    flat = tile(q)
    for channel, i in ((0, 0), (15, 3), (16, 4), (63, 95), (33, 50)):
        at = ((channel // 16 * 24 + i // 4) * 16 + channel % 16) * 4 + i % 4
        assert int(flat[at]) == int(q[channel, i]) + 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_matrix_holds_the_weights_it_was_given(dtype: torch.dtype):
    weight = (_weight(83, 40) / 100).to(dtype)
    back = dequantize(single_matrix(weight), 0, 83, 40)
    step = weight.float().abs().amax(1) / 127
    assert (np.abs(back - weight.float().numpy()) <= 0.5001 * step[:, None].numpy()).all()


@pytest.mark.parametrize(("rows", "columns"), [(64, 96), (83, 40), (1, 1), (33, 31)])
def test_the_fast_way_gives_the_same_integers(rows: int, columns: int):
    """Matrices are filled by a kernel; ``quantize_channels`` and ``tile`` say what it must do."""
    weight = _weight(rows, columns)
    weight[0] = 0
    matrix = single_matrix(weight)
    padding = (0, padded(columns) - columns, 0, padded(rows) - rows)
    q, scale = quantize_channels(torch.nn.functional.pad(weight, padding))
    assert np.array_equal(matrix.weight[0], tile(q).numpy())
    assert np.array_equal(matrix.scale[0], scale.numpy())


def test_parts_lie_one_under_the_other():
    parts = [_weight(40, 24, seed) for seed in range(3)]
    first, last = torch.arange(40.0), torch.arange(40.0) + 100
    builder = MatrixBuilder(2, [40] * 3, 24, bias=True)
    builder.set_layer(1, parts, [first, None, last])
    matrix = builder.build()
    back = torch.from_numpy(dequantize(matrix, 1, 120, 24))
    step = torch.cat(parts).abs().amax(1, keepdim=True) / 127
    assert ((back - torch.cat(parts)).abs() <= 0.5001 * step).all()
    assert matrix.bias[1, :40].tolist() == first.tolist()
    assert (matrix.bias[1, 40:80] == 0).all()
    assert matrix.bias[1, 80:120].tolist() == last.tolist()
    assert (matrix.scale[1, 120:] == 0).all()


def test_padded_parts_begin_at_blocks():
    gate, up = _weight(40, 24, 0), _weight(40, 24, 1)
    builder = MatrixBuilder(1, [40, 40], 24, bias=True, pad_parts=True)
    builder.set_layer(0, [gate, up], [None, torch.ones(40)])
    matrix = builder.build()
    assert matrix.scale.shape == (1, 128)
    back = torch.from_numpy(dequantize(matrix, 0, 128, 24))
    assert ((back[:40] - gate).abs() <= 0.5001 * gate.abs().amax(1, keepdim=True) / 127).all()
    assert ((back[64:104] - up).abs() <= 0.5001 * up.abs().amax(1, keepdim=True) / 127).all()
    assert matrix.bias[0].nonzero()[0].tolist() == list(range(64, 104))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value: float):
    weight = _weight(8, 32)
    weight[5, 6] = value
    for refuse in (quantize_channels, single_matrix):
        with pytest.raises(CheckpointError, match="not finite"):
            refuse(weight)


@pytest.mark.parametrize(("size", "expected"), [(1, 32), (32, 32), (33, 64), (576, 576)])
def test_sizes_are_padded_to_blocks(size: int, expected: int):
    assert padded(size) == expected
