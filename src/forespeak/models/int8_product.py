"""Int8Product: a product of a drafter in the arithmetic of the int8 target, on a CPU.

A drafter's step is a handful of products with few rows, bound by how many bytes of weights are
read: int8 reads a quarter of float32. Weights are quantised by channel, activations by row and
block of 32, as in ``int8_decoder.py``. What a drafter proposes moves a little; texts do not.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forespeak.models.blocks import Linear
from forespeak.models.kernels.fused import multiply
from forespeak.models.kernels.simd import has_int8_product
from forespeak.models.kernels.team import runs_as_team
from forespeak.models.quantize import padded, single_matrix


class Int8Product:
    """x W^T + b for a weight that does not change.

    Args:
        weight: [outputs, inputs].
        bias: [outputs].
        threads: CPU threads of a product.
        portable: plain arithmetic instead of the AVX-512 VNNI product; None chooses by this CPU.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        threads: int,
        portable: bool | None = None,
    ) -> None:
        self._outputs, self._inputs = weight.shape
        self._threads = threads if runs_as_team(threads) else 1
        portable = not has_int8_product() if portable is None else portable
        self._portable = True if portable else None
        self._matrix = single_matrix(weight)
        self._bias = None if bias is None else bias.detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, inputs] to [n, outputs] float32."""
        numba.set_num_threads(self._threads)
        more = padded(self._inputs) - self._inputs
        rows = F.pad(x.float(), (0, more)) if more else x.float().contiguous()
        out = np.empty((len(x), self._matrix.scale.shape[1]), np.float32)
        multiply(
            self._portable, self._threads, rows.numpy(), self._matrix.weight[0],
            self._matrix.scale[0], out,
        )  # fmt: skip
        product = torch.from_numpy(out)[:, : self._outputs]
        return product if self._bias is None else product + self._bias


class _Int8Linear(nn.Module):
    """A ``Linear`` of a network, through :class:`Int8Product`."""

    def __init__(self, linear: Linear, threads: int) -> None:
        super().__init__()
        bias = linear.bias
        self._product = Int8Product(linear.weight.detach(), bias, threads=threads)

    def forward(self, x: Tensor) -> Tensor:
        product = self._product(x.reshape(-1, x.shape[-1]))
        return product.view(*x.shape[:-1], product.shape[-1])


def quantize_products(network: nn.Module, threads: int, *, kept: tuple[str, ...] = ()) -> None:
    """Replace the products of a network, in place.

    Args:
        network: on the CPU.
        threads: of a product.
        kept: names of products, without their modules, whose weights are used otherwise.
    """
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear) and name not in kept:
                setattr(module, name, _Int8Linear(child, threads))
