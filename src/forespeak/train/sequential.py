"""Heads on one trunk, differentiated one after another (Gloeckle et al., arXiv 2404.19737).

Each head's loss is made and differentiated at once, by its own parameters and by the trunk states
it reads; then its graph is gone. The trunk is differentiated at the end, by the sum. So memory
holds one head at a time instead of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

HeadLoss = Callable[[Tensor], Tensor]
"""Trunk states to a head's weighted loss, a scalar."""


def add_heads(
    trunk: Tensor, heads: Sequence[tuple[HeadLoss, Sequence[Tensor]]]
) -> tuple[Tensor, list[float]]:
    """The sum of the heads' losses.

    Args:
        trunk: states that all heads read, with the trunk's graph.
        heads: each one's loss and the parameters that it, and no graph below the trunk, has; heads
            may share them.

    Returns:
        The sum, with gradient by the trunk and by all parameters that ask for it; each head's.
    """
    if not torch.is_grad_enabled():
        values = [loss(trunk) for loss, _ in heads]
        return torch.stack(values).sum(), [float(value) for value in values]
    leaf = trunk.detach().requires_grad_(True)
    by_trunk = torch.zeros_like(leaf)
    by_parameter: dict[Tensor, Tensor] = {}
    total, found = leaf.new_zeros((), dtype=torch.float32), []
    for loss, parameters in heads:
        asked = [parameter for parameter in parameters if parameter.requires_grad]
        value = loss(leaf)
        slopes = torch.autograd.grad(value, [leaf, *asked], allow_unused=True)
        if slopes[0] is not None:
            by_trunk += slopes[0]
        for parameter, slope in zip(asked, slopes[1:], strict=True):
            if slope is not None:
                before = by_parameter.get(parameter)
                by_parameter[parameter] = slope if before is None else before + slope
        total = total + value.detach()
        found.append(float(value.detach()))
    tensors = [trunk, *by_parameter]
    gradients = [by_trunk, *by_parameter.values()]
    joined: Tensor = _Known.apply(total, gradients, *tensors)  # type: ignore[no-untyped-call]
    return joined, found


class _Known(torch.autograd.Function):
    """A number whose gradients by some tensors are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *[gradient * slope for gradient in ctx.saved_tensors])
