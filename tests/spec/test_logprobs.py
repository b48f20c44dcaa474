"""Log-probabilities of kept tokens are those of plain decoding."""

from __future__ import annotations

import math

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.spec.logprobs import token_logprobs


def test_rows_of_a_path_equal_one_row_at_a_time():
    logits = torch.randn(5, 40, dtype=torch.float64)
    path, tokens = [0, 2, 4], [7, 39, 0]
    together = token_logprobs(logits[path], tokens, 3)
    for node, token, got in zip(path, tokens, together, strict=True):
        row = [float(x) for x in logits[node]]
        log_sum = math.log(math.fsum(math.exp(x) for x in row))
        best = sorted(range(40), key=lambda i: (-row[i], i))[:3]
        assert got.token == token
        assert got.logprob == pytest.approx(row[token] - log_sum, abs=1e-12)
        assert [i for i, _ in got.top] == best
        assert [value for _, value in got.top] == pytest.approx([row[i] - log_sum for i in best])
        assert token_logprobs(logits[node : node + 1], [token], 3) == [got]


def test_equals_go_to_the_lower_id_and_impossible_tokens_are_left_out():
    logits = torch.zeros(1, 6)
    assert [i for i, _ in token_logprobs(logits, [5], 3)[0].top] == [0, 1, 2]
    logits[0, 1:] = -math.inf
    assert token_logprobs(logits, [0], 3)[0].top == ((0, 0.0),)


def test_only_the_chosen_one_and_too_many():
    assert token_logprobs(torch.zeros(2, 4), [1, 2], 0)[1].top == ()
    assert token_logprobs(torch.zeros(0, 4), [], 2) == []
    with pytest.raises(OptionError, match="allowed: 0 to 4"):
        token_logprobs(torch.zeros(1, 4), [1], 5)


def test_half_precision_is_computed_in_float32():
    logits = torch.randn(1, 50).bfloat16()
    assert token_logprobs(logits, [3], 1) == token_logprobs(logits.float(), [3], 1)
