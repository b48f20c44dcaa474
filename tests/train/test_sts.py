"""Calibration of confidences against known truths and brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.train.sts import calibrate, calibration_error, default_grid


def blocks(temperatures: list[float], count: int = 20000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are too large by these factors, and what is accepted by the true chances."""
    g = torch.Generator().manual_seed(seed)
    true = torch.randn(count, len(temperatures), generator=g) * 1.5 + 0.5
    drawn = torch.rand(true.shape, generator=g) < torch.sigmoid(true)
    accepted = drawn.long().cumprod(1).sum(1)
    return true * torch.tensor(temperatures), accepted


def test_finds_the_factors_that_logits_are_too_large_by():
    wanted = [2.0, 3.0, 1.0, 1.5]
    found = calibrate(*blocks(wanted))
    for depth, temperature in enumerate(wanted[:2]):
        assert found.temperatures[depth] == pytest.approx(temperature, rel=0.15)
    assert all(a <= b + 1e-12 for a, b in zip(found.ece_after, found.ece_before, strict=True))
    assert max(found.ece_after) < 0.012 < found.ece_before[0]
    assert found.num_blocks == 20000


def test_each_temperature_is_the_best_of_the_grid_given_those_before():
    logits, accepted = blocks([2.5, 0.5, 1.0], count=300)
    grid = [0.5, 0.7, 1.0, 1.6, 2.5]
    found = calibrate(logits, accepted, grid=grid)
    product = torch.ones(len(logits), dtype=torch.float64)
    for depth, chosen in enumerate(found.temperatures):
        scores = {}
        for temperature in grid:
            chances = product * torch.sigmoid(logits[:, depth].double() / temperature)
            scores[temperature] = plain_error(chances.tolist(), (accepted > depth).tolist())
        assert scores[chosen] == pytest.approx(min(scores.values()))
        assert found.ece_after[depth] == pytest.approx(scores[chosen])
        product = product * torch.sigmoid(logits[:, depth].double() / chosen)


def plain_error(chances: list[float], happened: list[bool]) -> float:
    total = 0.0
    for low in range(20):
        inside = [
            (c, h)
            for c, h in zip(chances, happened, strict=True)
            if low / 20 <= c < (low + 1) / 20 or (low == 19 and c == 1)
        ]
        if inside:
            total += abs(sum(c - h for c, h in inside))
    return total / len(chances)


def test_error_is_the_plain_sum():
    g = torch.Generator().manual_seed(3)
    chances, happened = torch.rand(200, generator=g), torch.rand(200, generator=g) < 0.4
    expected = plain_error(chances.double().tolist(), happened.tolist())
    assert float(calibration_error(chances, happened)) == pytest.approx(expected)


def test_of_equal_temperatures_the_nearest_to_one():
    logits = torch.full((4, 1), 30.0)  # the chance is 1 whatever the temperature
    assert calibrate(logits, torch.ones(4, dtype=torch.long)).temperatures == (1.0,)
    assert float(default_grid()[50]) == 1.0 and float(default_grid()[-1]) == pytest.approx(5.0)


def test_depths_that_were_not_drafted_do_not_count():
    logits, accepted = blocks([2.0, 2.0], count=500)
    short = torch.cat([logits, torch.tensor([[0.3, float("nan")]])])
    more = torch.cat([accepted, torch.tensor([0])])
    found = calibrate(short, more, grid=[0.5, 1.0, 2.0])
    assert found.temperatures[1] in (0.5, 1.0, 2.0) and found.ece_after[1] < 1


@pytest.mark.parametrize(
    ("logits", "accepted", "grid"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), None),
        (torch.zeros(4, 3), torch.zeros(3, dtype=torch.long), None),
        (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), [0.0]),
        (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), []),
    ],
)
def test_what_cannot_be_calibrated(logits, accepted, grid):
    with pytest.raises(OptionError):
        calibrate(logits, accepted, grid=grid)
