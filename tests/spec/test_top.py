"""Best tokens of a law: the compiled pass against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forespeak.spec.builders.top import scan, top_log_probs

NEG_INF = float("-inf")


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 255, 257, 4095, 4352, 4353, 10_000])
@pytest.mark.parametrize("top_k", [1, 7, 64, 5000])
def test_compiled_pass_is_torch(vocab_size: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator) * 4
    tokens, log_probs = top_log_probs(logits, top_k)
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(tokens, best)
    expected = logits.log_softmax(-1).gather(1, best)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, -3.0, NEG_INF]), min_size=200, max_size=200),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 210),
)
def test_ties_go_to_the_lower_id(rows: list[list[float]], top_k: int) -> None:
    logits = torch.tensor(rows)
    logits[:, 0] = 0.5
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    for compiled in (True, False):
        tokens, log_probs = top_log_probs(logits, top_k, compiled=compiled)
        assert torch.equal(tokens, order)
        expected = logits.log_softmax(-1).gather(1, order)
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)


def test_ties_across_blocks() -> None:
    """Equal values in the first and the last block of a long row, and rows that only rise."""
    logits = torch.zeros(2, 5000)
    logits[0, [10, 4990, 3000]] = 1.0
    logits[1] = torch.arange(5000.0) / 100
    tokens, _ = top_log_probs(logits, 6)
    assert tokens[0].tolist() == [10, 3000, 4990, 0, 1, 2]
    assert tokens[1].tolist() == [4999, 4998, 4997, 4996, 4995, 4994]


@pytest.mark.parametrize("shift", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_log_sums_are_sound_for_large_logits(shift: float) -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)) * 20 + shift
    logits[1, :2900] = NEG_INF
    logits[2] = NEG_INF
    _, _, log_sums = scan(logits.numpy(), 3)
    expected = logits.double().logsumexp(-1)
    torch.testing.assert_close(torch.from_numpy(log_sums), expected, atol=1e-5, rtol=1e-7)


def test_without_sums_the_best_are_the_same() -> None:
    logits = torch.randn(5, 30_000, generator=torch.Generator().manual_seed(2)).numpy()
    values, tokens, log_sums = scan(logits, 16)
    only_values, only_tokens, none = scan(logits, 16, log_sums=False)
    assert len(log_sums) == 5 and not len(none)
    assert (values == only_values).all() and (tokens == only_tokens).all()
