"""Sequential temperature scaling: confidences that mean what they say (DSpark, arXiv 2607.05147).

A confidence head gives logits z_k, and sigmoid(z_k) is to be the chance that draft k is accepted
given those before it. Heads are over-confident when they come out of training. From left to right
each depth gets a temperature::

    T_k = the one of a grid whose running product  prod_{i <= k} sigmoid(z_i / T_i)
          is best calibrated against "drafts 1 .. k were all accepted", T_1 .. T_{k-1} being fixed

Calibration is the expected calibration error (ECE): chances go into 20 bins of equal width, and
the distance between mean chance and observed share in a bin is weighed by how many are in it.

The paper leaves grid and bins open. N observed blocks, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.errors import OptionError

_BINS = 20
_GRID_POINTS = 101  # an odd number, so that 1 is among them
_SAME = 1e-9  # errors so close are one
_GRID_END = 5.0  # from 1 / 5 to 5


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes:
        temperatures: for each depth.
        ece_before, ece_after: expected calibration error of the running product at each depth.
        num_blocks: N.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    num_blocks: int


def calibrate(
    logits: Tensor, accepted: Tensor, *, grid: Sequence[float] | None = None
) -> Calibration:
    """Temperatures from drafted blocks.

    Args:
        logits: [N, D] of the confidences, as the head gives them. Only depths that were drafted
            count: NaN where a block was shorter.
        accepted: [N] int64, how many of the block's drafts were accepted.
        grid: temperatures to try; None takes 101 from 0.2 to 5, evenly in their logarithm.

    Raises:
        OptionError: no blocks, shapes that do not fit, or a grid with a number not above 0.
    """
    if logits.ndim != 2 or accepted.shape != logits.shape[:1] or not len(logits):
        raise OptionError(
            f"Confidences have shape {list(logits.shape)} and accepted lengths "
            f"{list(accepted.shape)}; expected are [blocks, depths] and [blocks], one block at "
            "least."
        )
    tried = default_grid() if grid is None else torch.tensor(grid, dtype=torch.float64)
    if not len(tried) or bool((tried <= 0).any()):
        raise OptionError("A temperature of the grid is not above 0; allowed: numbers above 0.")
    tried = tried[(tried.log().abs()).argsort(stable=True)]  # of equals the one nearest to 1
    logits = logits.double()
    before = torch.sigmoid(logits).cumprod(1)
    product = torch.ones(len(logits), dtype=torch.float64)
    found: list[float] = []
    errors: list[tuple[float, float]] = []
    for depth in range(logits.shape[1]):
        happened = accepted > depth
        products = product * torch.sigmoid(logits[:, depth] / tried[:, None])  # [grid, N]
        scores = torch.stack([calibration_error(row, happened) for row in products])
        best = int((scores <= scores.min() + _SAME).nonzero()[0])
        product = products[best]
        found.append(float(tried[best]))
        errors.append((float(calibration_error(before[:, depth], happened)), float(scores[best])))
    firsts, lasts = zip(*errors, strict=True)
    return Calibration(tuple(found), firsts, lasts, len(logits))


def default_grid() -> Tensor:
    """[101] float64"""
    end = torch.tensor(_GRID_END, dtype=torch.float64).log()
    return torch.linspace(-float(end), float(end), _GRID_POINTS, dtype=torch.float64).exp()


def calibration_error(chances: Tensor, happened: Tensor) -> Tensor:
    """Expected calibration error of chances [N] of what happened [N]; NaN chances do not count."""
    counted = ~chances.isnan()
    chances, happened = chances[counted].double(), happened[counted].double()
    if not len(chances):
        return torch.zeros((), dtype=torch.float64)
    bins = (chances * _BINS).long().clamp(0, _BINS - 1)
    apart = torch.zeros(_BINS, dtype=torch.float64).index_add(0, bins, chances - happened)
    return apart.abs().sum() / len(chances)
