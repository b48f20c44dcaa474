"""The draft model's laws against plain forwards over the whole text, whatever was accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forespeak.drafters.draft_model import DraftModelDrafter
from forespeak.models.base import TargetModel
from forespeak.types import Frontier
from tests.drafters.random_rounds import Rounds, observation
from tests.tiny import random_tokens, run, tiny_config, tiny_decoder, tiny_int8

V = 83
FLOAT32_ROUNDING = 1e-3
SMALL = tiny_config(num_layers=2, max_position_embeddings=2048)


@pytest.fixture(scope="module", params=["float32", "int8", "qwen3", "sliding"])
def model(request: pytest.FixtureRequest) -> TargetModel:
    """A model of each kind of forward: plain, row-ordered, normed heads, a window of 7 tokens."""
    if request.param == "int8":
        return tiny_int8(SMALL)
    family = {"sliding": "mistral", "qwen3": "qwen3"}.get(request.param, "llama")
    return tiny_decoder(tiny_config(family, num_layers=2, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def plain() -> TargetModel:
    return tiny_decoder(SMALL)


def started(model: TargetModel, lengths: Sequence[int], seed: int) -> Rounds:
    drafter = DraftModelDrafter(model, target_vocab_size=V, num_rows=len(lengths))
    for row in range(len(lengths)):
        drafter.admit(row)
    prompts = {row: random_tokens(n, seed + row) for row, n in enumerate(lengths)}
    return Rounds(drafter, prompts, random.Random(seed), V)


def check_laws(model: TargetModel, rounds: Rounds) -> None:
    """Each law is that of the model run plainly on prefix and path."""
    assert rounds.laws
    for text, law in rounds.laws:
        expected = run(model, text).logits[-1]
        if model.dtype_name == "int8":
            assert torch.equal(law, expected), len(text)
        else:
            torch.testing.assert_close(law, expected, atol=FLOAT32_ROUNDING, rtol=0)
    rounds.laws.clear()


@pytest.mark.parametrize("seed", range(2))
def test_random_trees_with_random_acceptance(model, seed):
    rounds = started(model, [1, 9, 4], seed)
    for _ in range(4):
        rounds.propose()
        for _ in range(rounds.rng.randint(0, 3)):
            rounds.expand(3)
        check_laws(model, rounds)
        rounds.accept_at_random()


def test_chains_with_full_and_with_no_acceptance(model):
    rounds = started(model, [5], 7)
    for share in (1, 0, 1, 1, 0.5):
        rounds.propose()
        for _ in range(3):
            rounds.expand(1, chain=True)
        check_laws(model, rounds)
        path = rounds.deepest(0)
        # Full acceptance ends with a draft token that was never an input of the drafter.
        last = (rounds.rng.randrange(V),) if share == 1 else ()
        rounds.accept(0, (*path[: int(len(path) * share)], *last))
    rounds.propose()
    check_laws(model, rounds)


@pytest.mark.parametrize("length", [511, 512, 513, 1100])
def test_prompts_around_and_beyond_one_chunk(plain, length):
    rounds = started(plain, [length, 3], 1)
    rounds.propose()
    rounds.expand(2)
    rounds.accept_at_random()
    rounds.propose()
    check_laws(plain, rounds)


def test_rounds_without_a_proposal_are_caught_up(plain):
    """In a cascade another drafter may have proposed: nothing here ran, everything was observed."""
    rounds = started(plain, [4], 2)
    for _ in range(3):
        rounds.accept(0, tuple(random_tokens(3)))
    rounds.propose()
    rounds.expand(2)
    check_laws(plain, rounds)


def test_a_prompt_in_chunks(plain):
    rounds = started(plain, [6], 3)
    more = random_tokens(5, 9)
    rounds.drafter.observe([observation(more)])
    rounds.rows[0].text += more
    rounds.propose()
    check_laws(plain, rounds)


def test_some_rows_may_sit_a_round_out(plain):
    rounds = started(plain, [3, 5], 4)
    rounds.propose()
    rounds.expand(2)
    check_laws(plain, rounds)
    rounds.accept_at_random()
    resting = rounds.rows.pop(0)
    rounds.propose()
    rounds.expand(2)
    rounds.accept_at_random()
    rounds.rows[0] = resting
    rounds.propose()
    check_laws(plain, rounds)


def test_a_released_row_starts_anew(plain):
    rounds = started(plain, [6, 2], 5)
    rounds.propose()
    rounds.expand(2)
    rounds.laws.clear()
    rounds.drafter.release(0)
    rounds.drafter.admit(0)
    rounds.accept(1, rounds.deepest(1))
    rounds.drafter.observe([observation([11, 12], 0)])
    rounds.rows[0].text = [11, 12]
    rounds.propose()
    check_laws(plain, rounds)


def test_two_nodes_with_one_token_and_one_parent(plain):
    drafter = DraftModelDrafter(plain, target_vocab_size=V)
    drafter.admit(0)
    drafter.observe([observation([3, 4])])
    drafter.propose([0], [5], 3)
    laws = drafter.expand([Frontier(0, (1, 2), (7, 7), (0, 0))]).logits[:, 0]
    torch.testing.assert_close(laws[0], laws[1], atol=FLOAT32_ROUNDING, rtol=0)
    drafter.expand([Frontier(0, (3,), (8,), (2,))])
    drafter.observe([observation([5, 7, 8])])
    law = drafter.propose([0], [9], 1).logits[0, 0]
    expected = run(plain, [3, 4, 5, 7, 8, 9]).logits[-1]
    torch.testing.assert_close(law, expected, atol=FLOAT32_ROUNDING, rtol=0)


@given(seed=st.integers(0, 10_000), num_rows=st.integers(1, 3), num_rounds=st.integers(1, 5))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_the_cache_equals_one_computed_from_scratch(plain, seed, num_rows, num_rounds):
    rounds = started(plain, [2 + 5 * row for row in range(num_rows)], seed)
    for _ in range(num_rounds):
        rounds.propose()
        for _ in range(rounds.rng.randint(0, 2)):
            rounds.expand(3)
        rounds.accept_at_random()
    cache = rounds.drafter._cache  # type: ignore[attr-defined]
    for number, row in rounds.rows.items():
        length = cache.lengths[number]
        assert cache.pending[number] == 0
        fresh = started(plain, [1], 0).drafter._cache  # type: ignore[attr-defined]
        kept = row.text[:length]
        _fill(plain, fresh, kept)
        for ours, expected in zip(cache.snapshot(number), fresh.snapshot(0), strict=True):
            torch.testing.assert_close(ours, expected, atol=FLOAT32_ROUNDING, rtol=0)


def _fill(model, cache, tokens) -> None:
    from forespeak.types import Segment

    ids = torch.tensor(tokens, dtype=torch.long)
    model.forward(ids, torch.arange(len(tokens)), cache, [Segment(0, len(tokens))])
    cache.commit_all(0)


@pytest.mark.parametrize("size", [60, 83, 100])
def test_vocabularies_of_other_sizes(size):
    """A wider head is cut to the target's; a narrower one names its tokens."""
    model = tiny_decoder(tiny_config(num_layers=1, vocab_size=size))
    drafter = DraftModelDrafter(model, target_vocab_size=V)
    drafter.admit(0)
    drafter.observe([observation([3, 4])])
    laws = drafter.propose([0], [5], 2)
    width = min(size, V)
    expected = run(model, [3, 4, 5]).logits[-1, :width]
    torch.testing.assert_close(laws.logits[0, 0], expected, atol=FLOAT32_ROUNDING, rtol=0)
    if size < V:
        assert laws.token_ids is not None and laws.token_ids.tolist() == list(range(size))
    else:
        assert laws.token_ids is None


def test_tokens_that_the_draft_model_lacks():
    """Padding ids of the target's head: no tokenizer writes them, but a model may draw one."""
    model = tiny_decoder(tiny_config(num_layers=1, vocab_size=60))
    drafter = DraftModelDrafter(model, target_vocab_size=V)
    drafter.admit(0)
    drafter.observe([observation([3, 82, 4])])
    laws = drafter.propose([0], [70], 2)
    assert laws.logits.shape == (1, 1, 60) and bool(laws.logits.isfinite().all())
    drafter.expand([Frontier(0, (1,), (5,), (0,))])
    drafter.observe([observation([70, 5, 80])])
    again = drafter.propose([0], [6], 2)
    assert bool(again.logits.isfinite().all())
