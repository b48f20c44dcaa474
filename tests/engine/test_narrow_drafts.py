"""Drafters that know fewer tokens than the target, under controls that leave them nothing."""

from __future__ import annotations

import pytest

from forespeak.drafters.draft_model import DraftModelDrafter
from forespeak.engine.proposer import Proposer
from forespeak.engine.settings import RuleChoice
from forespeak.sampling import SamplingParams
from forespeak.spec.verify import RULES
from tests.engine.scripted import SIZES, check_counts, write
from tests.engine.tables import TableModel
from tests.tiny import random_tokens, tiny_config, tiny_decoder, tiny_int8

pytestmark = pytest.mark.slow

V, NARROW = 23, 9
PROMPT = [1, 20, 3]
BLOCK = RuleChoice(RULES["match"], RULES["block"])
SIBLINGS = RuleChoice(RULES["match"], RULES["siblings"])


def proposer(builder: str) -> Proposer:
    drafter = DraftModelDrafter(TableModel(NARROW, seed=3), target_vocab_size=V)
    return Proposer(drafter, builder, SIZES, vocab_size=V)


@pytest.mark.parametrize("eos_ids", [(), (21,), (4,)])
@pytest.mark.parametrize("allowed", [None, (20, 21, 22), (4, 8, 9, 20)])
@pytest.mark.parametrize("builder", ["chain", "static_tree", "dynamic_tree"])
def test_greedy_texts_are_plain(builder, allowed, eos_ids):
    model = TableModel(V, seed=5, eos_ids=eos_ids)
    for fields in ({}, {"repetition_penalty": 1.4}, {"min_tokens": 10}):
        params = SamplingParams(max_new_tokens=25, allowed_token_ids=allowed, **fields)
        plain = write(model, PROMPT, params).completion
        found = write(model, PROMPT, params, proposer(builder)).completion
        assert found.token_ids == plain.token_ids
        check_counts(found)


@pytest.mark.parametrize("eos_ids", [(), (21,)])
@pytest.mark.parametrize("allowed", [None, (20, 21, 22), (4, 8, 9, 20)])
@pytest.mark.parametrize(("builder", "rules"), [("chain", BLOCK), ("static_tree", SIBLINGS)])
def test_drawn_drafts_never_bring_in_what_is_not_allowed(builder, rules, allowed, eos_ids):
    model = TableModel(V, seed=5, eos_ids=eos_ids)
    num_drafted = 0
    for seed in range(10):
        params = SamplingParams(
            max_new_tokens=20, allowed_token_ids=allowed, temperature=1.0, seed=seed
        )
        found = write(
            model, PROMPT, params, proposer(builder), rules=rules, sampled_drafts=True
        ).completion
        assert set(found.token_ids) <= set(allowed or range(V))
        check_counts(found)
        num_drafted += found.stats.num_drafted
    assert num_drafted > 0


@pytest.mark.parametrize("make", [tiny_decoder, tiny_int8])
def test_texts_longer_than_the_draft_model_context(make):
    """It drafts worse there, and the text is the target's all the same."""
    target = make(tiny_config(max_position_embeddings=256, eos_token_ids=()))
    draft_model = make(tiny_config(max_position_embeddings=64, num_layers=1, eos_token_ids=()))
    size = target.config.vocab_size
    drafter = DraftModelDrafter(draft_model, target_vocab_size=size)
    params = SamplingParams(max_new_tokens=40)
    plain = write(target, random_tokens(50), params).completion
    spoken = write(
        target, random_tokens(50), params, Proposer(drafter, "chain", SIZES, vocab_size=size)
    ).completion
    assert spoken.token_ids == plain.token_ids and len(plain.token_ids) == 40
