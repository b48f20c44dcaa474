"""Draft vocabularies from counts."""

from __future__ import annotations

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.train.vocabulary import choose_words, count_tokens

TEXTS = [((1, 2, 2, 5, 5, 5), ((1, 6),)), ((7, 7, 5, 1, 3), ((0, 2), (3, 4)))]


def test_only_answers_are_counted():
    assert count_tokens(TEXTS, 9).tolist() == [0, 1, 2, 0, 0, 3, 0, 2, 0]


def test_the_most_frequent_words_in_order_of_their_ids():
    words = choose_words(count_tokens(TEXTS, 9), 3)
    assert words.token_ids.tolist() == [2, 5, 7]
    assert words.d2t.tolist() == [2, 4, 5]
    assert words.coverage == pytest.approx(7 / 8)


def test_unseen_words_fill_up_from_the_lowest():
    assert choose_words(count_tokens(TEXTS, 9), 6).token_ids.tolist() == [0, 1, 2, 3, 5, 7]


def test_some_words_are_always_inside():
    words = choose_words(count_tokens(TEXTS, 9), 3, always=(8, 0, 8))
    assert words.token_ids.tolist() == [0, 5, 8]


def test_nothing_counted_is_no_coverage():
    assert choose_words(torch.zeros(5, dtype=torch.long), 2).coverage == 0


@pytest.mark.parametrize(("size", "always"), [(0, ()), (9, ()), (1, (1, 2))])
def test_sizes_that_cannot_be(size: int, always: tuple[int, ...]):
    with pytest.raises(OptionError, match=f"draft_vocab_size is {size}"):
        choose_words(count_tokens(TEXTS, 9), size, always=always)
