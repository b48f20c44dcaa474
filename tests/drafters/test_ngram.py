"""Prompt lookup against the slow, obvious search over the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forespeak.drafters.ngram import NgramDrafter
from forespeak.errors import OptionError
from forespeak.types import Observation


def observation(tokens: Sequence[int], row: int = 0) -> Observation:
    return Observation(row, tuple(tokens), torch.zeros(len(tokens), 1))


def drafter_after(tokens: Sequence[int], low: int, high: int, adaptive: bool = False):
    drafter = NgramDrafter(lookup_min=low, lookup_max=high, adaptive=adaptive)
    drafter.admit(0)
    drafter.observe([observation(tokens)])
    return drafter


def proposed(drafter: NgramDrafter, root: int, depth: int) -> tuple[int, ...]:
    (tokens,) = drafter.propose([0], [root], depth).tokens
    return tokens


def slow_lookup(tokens: Sequence[int], root: int, low: int, high: int, depth: int):
    """Longest match first, of equal lengths the most recent; the copy reads what it writes."""
    text = [*tokens, root]
    for n in range(high, low - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # the match ends before place ``end``
            if n <= len(text) and text[end - n : end] == text[len(text) - n :]:
                for _ in range(depth):
                    text.append(text[end])
                    end += 1
                return tuple(text[len(text) - depth :])
    return ()


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=25),
    root=st.integers(0, 2),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    depth=st.integers(1, 9),
)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_equals_a_search_of_the_whole_text(tokens, root, low, more, depth):
    drafter = drafter_after(tokens, low, low + more)
    assert proposed(drafter, root, depth) == slow_lookup(tokens, root, low, low + more, depth)


@pytest.mark.parametrize("seed", range(5))
def test_the_table_grown_round_by_round_equals_one_of_the_whole_text(seed):
    rng = random.Random(seed)
    text = [rng.randrange(3) for _ in range(60)]
    drafter = drafter_after(text[:4], 1, 4)
    done = 4
    while done < 50:
        found = proposed(drafter, text[done], 6)
        assert found == slow_lookup(text[:done], text[done], 1, 4, 6)
        step = rng.randint(1, 4)
        drafter.observe([observation(text[done : done + step])])
        done += step


def test_longest_match_wins_over_a_newer_shorter_one():
    tokens = [1, 2, 3, 9, 4, 3, 8, 1, 2]
    assert proposed(drafter_after(tokens, 1, 3), 3, 1) == (9,)
    assert proposed(drafter_after(tokens, 1, 1), 3, 1) == (8,)


def test_the_most_recent_of_equal_matches_wins():
    assert proposed(drafter_after([1, 2, 7, 1, 2, 8, 1], 2, 2), 2, 1) == (8,)


def test_the_copy_runs_into_what_it_writes():
    assert proposed(drafter_after([5, 1, 2, 1], 2, 2), 2, 5) == (1, 2, 1, 2, 1)
    assert proposed(drafter_after([7], 1, 1), 7, 4) == (7, 7, 7, 7)


def test_nothing_below_the_shortest_match():
    assert proposed(drafter_after([1, 2, 3, 9, 9], 2, 4), 3, 4) == ()
    assert proposed(drafter_after([1, 2, 3, 9, 2], 2, 4), 3, 4) == (9, 2, 3, 9)


def test_proposes_right_after_a_prompt_of_one_token():
    assert proposed(drafter_after([4], 1, 3), 4, 2) == (4, 4)
    assert proposed(drafter_after([4], 1, 3), 5, 2) == ()


def test_what_was_won_whole_is_doubled_and_what_was_lost_is_cut_back():
    drafter = drafter_after([7] * 5, 1, 3, adaptive=True)
    lengths = []
    for num_accepted in (4, 8, 7, 1, 4, 0, 0, 0):
        found = proposed(drafter, 7, 32)
        assert set(found) == {7}
        lengths.append(len(found))
        drafter.observe([observation([7] * (1 + num_accepted))])
    assert lengths == [4, 8, 16, 9, 4, 8, 4, 2]
    assert len(proposed(drafter, 7, 32)) == 2


def test_a_failed_short_match_limits_only_its_own_row():
    drafter = NgramDrafter(lookup_min=1, lookup_max=2)
    for row in (0, 1):
        drafter.admit(row)
        drafter.observe([observation([1, 2, 3, 4, 5, 6, 7, 8], row)])
    drafter.propose([0, 1], [1, 1], 8)
    drafter.observe([observation([1], 0), observation([1, 2, 3, 4, 5], 1)])
    short, long = drafter.propose([0, 1], [2, 6], 8).tokens
    assert (len(short), len(long)) == (2, 8)


def test_without_adaptivity_every_match_is_copied_in_full():
    drafter = drafter_after([1, 2, 3] * 4, 1, 3, adaptive=False)
    for _ in range(3):
        assert len(proposed(drafter, 1, 7)) == 7
        drafter.observe([observation([1, 2, 3])])


def test_rows_are_apart_and_a_released_row_starts_anew():
    drafter = NgramDrafter(lookup_min=1, lookup_max=2)
    drafter.admit(3)
    drafter.admit(5)
    drafter.observe([observation([1, 2], 3), observation([1, 9], 5)])
    assert drafter.propose([5, 3], [1, 1], 1).tokens == ((9,), (2,))
    drafter.release(3)
    drafter.admit(3)
    drafter.observe([observation([4], 3)])
    assert drafter.propose([3, 5], [1, 1], 1).tokens == ((), (9,))


@pytest.mark.parametrize("lengths", [(0, 2), (3, 2), (-1, -1)])
def test_impossible_lengths_are_refused(lengths):
    with pytest.raises(OptionError, match="1 <= lookup_min <= lookup_max"):
        NgramDrafter(lookup_min=lengths[0], lookup_max=lengths[1])
