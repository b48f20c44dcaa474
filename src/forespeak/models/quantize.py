"""int8 weights: quantisation per output channel, and the tiled layout that the kernels read.

A weight row w (one output channel) becomes round(w / s) with s = max|w| / 127. Activations are
quantised at run time, row by row, with one scale per block of 32 (as llama.cpp's Q8_0 does): on
SmolLM2 that keeps the KL divergence to float32 within 0.01 nat a token, where one scale for the
whole row costs 0.03. See ``fused.py`` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from forespeak.errors import CheckpointError
from forespeak.kernels.vector import LANES
from forespeak.models.kernels.fused import quantize_tiles
from forespeak.models.kernels.layout import Array, Matrix
from forespeak.models.kernels.simd import BLOCK


def padded(size: int) -> int:
    """``size`` rounded up to a whole number of blocks."""
    return -(-size // BLOCK) * BLOCK


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] to (int8 [N, K], float32 scales [N]).

    Raises:
        CheckpointError: a weight is not finite (or was never loaded: such weights start as NaN).
    """
    weight = weight.float()
    top = weight.abs().amax(dim=1)
    if not bool(torch.isfinite(top).all()):
        raise _not_finite()
    scale = top / 127
    steps = weight / torch.where(scale > 0, scale, torch.ones_like(scale))[:, None]
    return steps.round_().to(torch.int8), scale


def _not_finite() -> CheckpointError:
    return CheckpointError(
        "A weight to be quantised is not finite; int8 needs finite weights. "
        "Check the checkpoint, or use --dtype float32 to see where it goes wrong."
    )


def _threads() -> int:
    return int(numba.get_num_threads())


def tile(q: Tensor) -> Tensor:
    """int8 [N, K], both multiples of 32, to flat uint8 [N/16][K/4][16][4] of value + 128."""
    n, k = q.shape
    shifted = (q.to(torch.int16) + 128).to(torch.uint8)
    return shifted.view(n // LANES, LANES, k // 4, 4).permute(0, 2, 1, 3).contiguous().view(-1)


class MatrixBuilder:
    """Fills a :class:`Matrix` of all layers, one layer at a time, from float weights.

    Args:
        num_layers: L.
        parts: outputs of the matrices that lie one under the other (q, k, v; or gate, up).
        num_inputs: K without padding.
        bias: whether there is a bias.
        pad_parts: pad each part to 32 and not only their sum.
    """

    def __init__(
        self,
        num_layers: int,
        parts: Sequence[int],
        num_inputs: int,
        *,
        bias: bool,
        pad_parts: bool = False,
    ) -> None:
        self._parts = [padded(p) if pad_parts else p for p in parts]
        self._rows, self._columns = padded(sum(self._parts)), padded(num_inputs)
        size = self._rows * self._columns
        self._weight = torch.full((num_layers, size), 128, dtype=torch.uint8)  # 128 stands for 0
        self._scale = torch.zeros((num_layers, self._rows))
        self._bias = torch.zeros((num_layers, self._rows if bias else 0))

    def set_layer(
        self, layer: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()
    ) -> None:
        """Weights (and biases) of the parts, in order; a missing bias counts as zero."""
        at = 0
        for weight, rows in zip(weights, self._parts, strict=True):
            self._quantize(layer, at, weight)
            at += rows
        at = 0
        for rows, bias in zip(self._parts, biases, strict=False):
            if bias is not None:
                self._bias[layer, at : at + bias.shape[0]] = bias.float()
            at += rows

    def _quantize(self, layer: int, first_row: int, weight: Tensor) -> None:
        tiles = self._weight[layer].view(-1, self._columns // 4, LANES, 4)
        values = weight.float().contiguous().numpy()
        scale = self._scale[layer]
        quantize_tiles(_threads(), values, tiles.numpy(), scale.numpy(), first_row)
        if not bool(torch.isfinite(scale[first_row : first_row + len(values)]).all()):
            raise _not_finite()

    def build(self) -> Matrix:
        return Matrix(self._weight.numpy(), self._scale.numpy(), self._bias.numpy())


def single_matrix(weight: Tensor) -> Matrix:
    """A :class:`Matrix` of one layer from weight [N, K]."""
    builder = MatrixBuilder(1, [weight.shape[0]], weight.shape[1], bias=False)
    builder.set_layer(0, [weight])
    return builder.build()


def dequantize(matrix: Matrix, layer: int, num_outputs: int, num_inputs: int) -> Array:
    """The float32 weights [N, K] that the integers stand for (for tests and error measurement)."""
    rows = matrix.scale.shape[1]
    tiles = matrix.weight[layer].reshape(rows // LANES, -1, LANES, 4)
    q = tiles.transpose(0, 2, 1, 3).reshape(rows, -1).astype(np.float32) - 128
    weight: Array = (q * matrix.scale[layer][:, None])[:num_outputs, :num_inputs]
    return weight


def dequantize_rows(matrix: Matrix, outputs: Tensor, num_inputs: int) -> Tensor:
    """Some rows [n, K] of the float32 weights that a one-layer matrix stands for."""
    at = outputs.numpy()
    tiles = matrix.weight[0].reshape(matrix.scale.shape[1] // LANES, -1, LANES, 4)
    q = tiles[at // LANES, :, at % LANES].reshape(len(at), -1).astype(np.float32) - 128
    return torch.from_numpy((q * matrix.scale[0][at, None])[:, :num_inputs])
