"""Continuous batching: every text is what it would be alone, whoever comes and goes beside it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from forespeak.drafters.loader import load_drafter
from forespeak.engine.batch import BatchDecoding, BatchText
from forespeak.engine.llm import LLM
from forespeak.engine.proposer import Cascade, Proposer, Proposing
from forespeak.engine.settings import choose_rules, resolve
from forespeak.engine.target import Target, in_memory
from forespeak.engine.text import TextState, Vocabulary
from forespeak.sampling import SamplingParams
from forespeak.types import SpeculationConfig
from tests.engine.scripted import check_counts
from tests.engine.tables import TableModel
from tests.tiny import random_tokens, tiny_config, tiny_decoder, tiny_int8

pytestmark = pytest.mark.slow

CONFIG = tiny_config(max_position_embeddings=128, eos_token_ids=(2,))
V = CONFIG.vocab_size
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram"},
    "chain": {"method": "draft_model", "drafter": "truncate:2"},
    "tree": {
        "method": "draft_model", "drafter": "truncate:2", "builder": "dynamic_tree",
        "node_budget": 7,
    },
    "static": {"method": "draft_model", "drafter": "truncate:2", "builder": "static_tree"},
    "tried": {
        "method": "draft_model", "drafter": "truncate:2", "builder": "dynamic_tree",
        "rule": "point_siblings",
    },
    "cascade": {"method": "ngram+draft_model", "drafter": "truncate:2"},
}  # fmt: skip
PROMPTS = [tuple(random_tokens(count, count)) for count in (1, 40, 7, 19, 3, 64, 2, 11)]
PARAMS = [
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=9, repetition_penalty=1.4),
    SamplingParams(max_new_tokens=25, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=14, temperature=0.7, top_k=9, presence_penalty=0.5, seed=4),
    SamplingParams(max_new_tokens=30, logprobs=2),
    SamplingParams(max_new_tokens=12, min_tokens=12),
    SamplingParams(max_new_tokens=5, ignore_eos=True),
]


@cache
def target_of(kind: str) -> Target:
    if kind == "table":
        return in_memory(TableModel(V, context_length=128, likeness=0.7, eos_ids=(2,)))
    return in_memory(tiny_int8(CONFIG) if kind == "int8" else tiny_decoder(CONFIG))


def proposer_of(kind: str, options: dict[str, Any], num_rows: int) -> Proposing | None:
    target = target_of(kind)
    members = [
        Proposer(
            load_drafter(member.config, target.parts, num_rows=num_rows), member.builder,
            member.config, vocab_size=V,
        )
        for member in resolve(SpeculationConfig(**options)).members
    ]  # fmt: skip
    return (Cascade(members) if len(members) > 1 else members[0]) if members else None


def entry(kind: str, options: dict[str, Any], number: int) -> BatchText:
    params, prompt = PARAMS[number], PROMPTS[number]
    resolved = resolve(SpeculationConfig(**options))
    drawn = options.get("draft_sampling") == "probabilistic" and params.temperature > 0
    vocabulary = Vocabulary(V, target_of(kind).eos_ids)
    return BatchText(
        prompt, TextState(params, prompt, vocabulary), choose_rules(resolved, params.temperature),
        sampled_drafts=drawn,
    )  # fmt: skip


# Methods whose draft tokens can be drawn are tried both ways.
WAYS = [(method, "greedy") for method in METHODS]
WAYS += [(method, "probabilistic") for method in ("chain", "static", "cascade")]


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize(("method", "sampling"), WAYS)
@pytest.mark.parametrize("kind", ["int8", "float32", "table"])
def test_texts_are_those_of_one_alone(kind: str, method: str, sampling: str, num_rows: int) -> None:
    options = dict(METHODS[method])
    if sampling == "probabilistic":
        options["draft_sampling"] = sampling
    llm = LLM(target_of(kind), **options)
    batch = BatchDecoding(
        target_of(kind).model, proposer_of(kind, options, num_rows), num_rows=num_rows,
        prefill_tokens=16,
    )  # fmt: skip
    entries = [entry(kind, options, number) for number in range(len(PROMPTS))]
    ended = list(batch.run(entries))
    assert sorted(map(id, ended)) == sorted(map(id, entries))
    for one, prompt, params in zip(entries, PROMPTS, PARAMS, strict=True):
        alone = llm.generate(list(prompt), params)
        assert tuple(one.text.token_ids) == alone.token_ids
        assert one.stats.round_lengths == alone.stats.round_lengths
        if params.logprobs is not None:
            assert alone.logprobs is not None
            for found, expected in zip(one.text.logprobs, alone.logprobs, strict=True):
                slack = 1e-4 if kind == "float32" else 0  # library kernels sum in another order
                assert found.logprob == pytest.approx(expected.logprob, abs=slack)


def test_a_cancelled_text_leaves_its_row_to_the_next() -> None:
    batch = BatchDecoding(target_of("table").model, num_rows=1)
    first, second, third = (entry("table", {}, number) for number in (0, 2, 4))
    for one in (first, second, third):
        batch.submit(one)
    for _ in range(5):
        batch.step()
    batch.cancel(first)
    batch.cancel(second)  # it still waited
    done = list(batch.run([]))
    assert done == [third] and first.text.end is None and not second.text.token_ids
    alone = LLM(target_of("table")).generate(list(PROMPTS[4]), PARAMS[4])
    assert tuple(third.text.token_ids) == alone.token_ids
    assert batch.num_unfinished == 0


def test_counts_of_each_text() -> None:
    options = METHODS["chain"]
    batch = BatchDecoding(target_of("int8").model, proposer_of("int8", options, 4), num_rows=4)
    for one in batch.run(entry("int8", options, number) for number in range(len(PROMPTS))):
        completion = LLM(target_of("int8"), **options).generate(
            list(one.prompt_ids), one.text.params
        )
        check_counts(completion)
        assert one.stats.num_drafted == completion.stats.num_drafted
        assert one.stats.num_accepted == completion.stats.num_accepted
