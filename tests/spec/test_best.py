"""The best token of each law: the compiled form against torch."""

from __future__ import annotations

import pytest
import torch

from forespeak.spec.best import best_tokens

NEG_INF = float("-inf")


@pytest.mark.parametrize("vocab_size", [1, 63, 4096, 4097, 5000, 8192, 49_152])
def test_compiled_is_torch(vocab_size: int) -> None:
    logits = torch.randn(2, 3, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    found = best_tokens(logits)
    assert found.shape == (2, 3) and found.dtype == torch.int64
    assert torch.equal(found, best_tokens(logits, compiled=False))


def test_of_equals_the_lowest() -> None:
    logits = torch.full((4, 10_000), -1.0)
    logits[0, [9_999, 7, 5_000]] = 3.0
    logits[1, [4_095, 4_096]] = 0.5
    logits[2] = NEG_INF
    logits[3] = NEG_INF
    logits[3, 9_999] = -50.0
    assert best_tokens(logits).tolist() == [7, 4_095, 0, 9_999]


def test_a_view_of_wider_rows() -> None:
    logits = torch.randn(3, 9_000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(best_tokens(logits[:, :8_000]), logits[:, :8_000].argmax(-1))
