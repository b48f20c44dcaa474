"""Sources of decisions: inverse of the cumulative law, recorded lists, generators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forespeak.spec.uniforms import RecordedUniforms, SeededUniforms, invert

ALMOST_ONE = 1.0 - 2.0**-53


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 0.25, 1.0]), min_size=1, max_size=8),
    st.floats(0, ALMOST_ONE),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_invert_never_gives_an_impossible_token(
    weights: list[float], uniform: float, dtype: torch.dtype
) -> None:
    law = torch.tensor(weights, dtype=dtype)
    if law.sum() > 0:
        for value in (uniform, 0.0, ALMOST_ONE):
            assert law[invert(law, value)] > 0


def test_invert_is_the_inverse_of_the_cumulative_law() -> None:
    law = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0], dtype=torch.float64)
    given_uniforms = [0.0, 0.49, 0.5, 0.74, 0.75, ALMOST_ONE]
    assert [invert(law, uniform) for uniform in given_uniforms] == [1, 1, 3, 3, 4, 4]
    assert [invert(law * 3, uniform) for uniform in given_uniforms] == [1, 1, 3, 3, 4, 4]


def test_small_probabilities_at_the_end_of_a_large_float32_law_can_be_drawn() -> None:
    law = torch.cat([torch.full((1,), 1.0), torch.full((150_000,), 1e-9)])
    assert invert(law, 0.99999) > 50_000


def test_recorded_uniforms_replay_and_run_out() -> None:
    source = RecordedUniforms([0.3, 0.3, 0.9])
    assert source.accept(0.5)
    assert not source.accept(0.3)  # accepted where u < probability
    assert source.choose(torch.tensor([0.5, 0.5])) == 1
    assert source.num_used == 3
    with pytest.raises(IndexError, match="all 3 recorded uniforms are used"):
        source.accept(1.0)


def test_probability_one_always_and_zero_never() -> None:
    assert RecordedUniforms([ALMOST_ONE]).accept(1.0)
    assert not RecordedUniforms([0.0]).accept(0.0)


def test_a_seed_gives_the_same_decisions_and_another_seed_others() -> None:
    def draws(seed: int) -> list[float]:
        source = SeededUniforms(torch.Generator().manual_seed(seed))
        return [source.next() for _ in range(100)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert all(0 <= uniform < 1 for uniform in draws(3))
    assert abs(sum(draws(4)) / 100 - 0.5) < 0.15


def laws(size: int) -> list[torch.Tensor]:
    """Flat, peaked, with holes, and with all mass at one place."""
    generator = torch.Generator().manual_seed(size)
    made = [(torch.randn(size, generator=generator) * scale).softmax(0) for scale in (0.1, 3, 30)]
    holed = made[1].clone()
    holed[torch.rand(size, generator=generator) < 0.999] = 0
    holed[size // 2] = 0.25
    return [*made, holed, *(torch.eye(size)[at] for at in (0, 255, 256, size - 1))]


@pytest.mark.parametrize("size", [4096, 4097, 5000, 9_999])
def test_compiled_inverse_is_the_plain_one(size: int) -> None:
    uniforms = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for law in laws(size):
        cumulative = law.cumsum(0, dtype=torch.float64)
        for uniform in (0.0, ALMOST_ONE, *uniforms.tolist()):
            found, plain = invert(law, uniform), invert(law, uniform, compiled=False)
            assert law[found] > 0
            if found != plain:  # the sums run in another order, so a border may fall to either side
                border = cumulative[min(found, plain)] / cumulative[-1]
                assert abs(float(border) - uniform) < 1e-12


def test_a_law_without_mass_is_our_mistake() -> None:
    for size in (8, 5000):
        with pytest.raises(AssertionError, match="without any mass"):
            invert(torch.zeros(size), 0.5)
