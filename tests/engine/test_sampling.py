"""Sampling through the whole engine against exact probabilities, by chi-square.

The target's laws come from a table, so that thousands of texts cost seconds; drafter, builders,
rules, processors and the loop are the engine's own. What is expected is enumerated with the slow
form of the processors.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats

from forespeak.engine import text as text_module
from forespeak.engine.llm import LLM
from forespeak.engine.target import Target, in_memory
from forespeak.engine.text import TextState, Vocabulary
from forespeak.sampling import SamplingParams
from forespeak.spec.processors_reference import reference_law
from forespeak.spec.uniforms import SeededUniforms
from tests.engine.tables import TableModel
from tests.engine.tiny_text import tokenizer
from tests.spec.exactness_cases import EXHAUSTIVE

pytestmark = pytest.mark.slow

V, EOS = 8, 0  # the end and the letters a to g
PROMPT = [1, 2, 3, 1, 4, 1, 2, 5, 4, 1]  # look-up finds something here
NUM_COUNTED = 3
LEAST_EXPECTED = 5  # of a cell of the chi-square test
NUM_DRAWS = 20_000 if EXHAUSTIVE else 1_500

DRAFT_MODEL = {"method": "draft_model", "drafter": "truncate:1"}
SIZES = {"node_budget": 6, "tree_depth": 3, "tree_top_k": 3}
DRAWN = {"draft_sampling": "probabilistic"}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram", "lookup_min": 1, "lookup_max": 3},
    "ngram_siblings": {
        "method": "ngram", "lookup_min": 1, "lookup_max": 3, "rule": "point_siblings",
    },
    "greedy_chain": {**DRAFT_MODEL, "num_speculative_tokens": 3},
    "rejection": {**DRAFT_MODEL, **DRAWN, "num_speculative_tokens": 3, "rule": "rejection"},
    "block": {**DRAFT_MODEL, **DRAWN, "num_speculative_tokens": 3, "rule": "block"},
    "drawn_match": {**DRAFT_MODEL, **DRAWN, "num_speculative_tokens": 3, "rule": "match"},
    "siblings": {
        **DRAFT_MODEL, **DRAWN, **SIZES, "builder": "static_tree", "rule": "siblings",
    },
    "static_match": {**DRAFT_MODEL, **SIZES, "builder": "static_tree", "rule": "match"},
    "dynamic_match": {**DRAFT_MODEL, **SIZES, "builder": "dynamic_tree", "rule": "match"},
    "dynamic_siblings": {
        **DRAFT_MODEL, **SIZES, "builder": "dynamic_tree", "rule": "point_siblings",
    },
    "cascade": {
        **DRAFT_MODEL, **DRAWN, "method": "ngram+draft_model", "lookup_min": 2,
        "num_speculative_tokens": 3,
    },
    "cascade_tree": {
        **DRAFT_MODEL, **DRAWN, **SIZES, "method": "ngram+draft_model", "lookup_min": 2,
        "builder": "static_tree",
    },
}  # fmt: skip
GROUPS: dict[str, dict[str, Any]] = {
    "none": {"temperature": 1.0},
    "top": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "rare": {"temperature": 1.4, "min_p": 0.08, "typical_p": 0.9},
    "penalties": {
        "temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.6,
        "frequency_penalty": 0.9,
    },
    "words": {
        "temperature": 1.0, "logit_bias": {2: 1.2, 5: -1.0}, "bad_words": ("ab", "c", "bda"),
        "min_tokens": 2,
    },
}  # fmt: skip
BAD_WORDS = {"words": ((1, 2), (3,), (2, 4, 1))}
SHARE = [
    ("block", "top"), ("siblings", "penalties"), ("ngram", "words"), ("cascade", "penalties"),
]  # fmt: skip
ONCE = ("plain", "ngram_siblings", "drawn_match", "static_match")  # their kin take every group
WHOLE = [
    (method, group)
    for method, group in itertools.product(METHODS, GROUPS)
    if method not in ONCE or group == "penalties"
]
PAIRS = WHOLE if EXHAUSTIVE else SHARE


@cache
def target() -> Target:
    model = TableModel(V, seed=26, spread=1.3, eos_ids=(EOS,), likeness=0.6)
    return in_memory(model, tokenizer=tokenizer(list("abcdefg")))


def params_of(group: str, seed: int) -> SamplingParams:
    # Longer than what is counted, so that drafts reach beyond it as in any long text.
    return SamplingParams(max_new_tokens=NUM_COUNTED + 2, seed=seed, **GROUPS[group])


def expected_law(group: str) -> dict[tuple[int, ...], float]:
    """Probability of each beginning of a text: three tokens, or fewer up to end-of-sequence."""
    params, model = params_of(group, 0), target().model
    assert isinstance(model, TableModel)
    law: dict[tuple[int, ...], float] = {}

    def descend(path: tuple[int, ...], mass: float) -> None:
        if len(path) == NUM_COUNTED or EOS in path:
            law[path] = mass
            return
        following = reference_law(
            params, model.law_row([*PROMPT, *path]).double(), prompt_ids=PROMPT, output_ids=path,
            eos_ids=(EOS,), bad_word_ids=BAD_WORDS.get(group, ()),
        )  # fmt: skip
        for token in range(V):
            if following[token] > 0:
                descend((*path, token), mass * float(following[token]))

    descend((), 1.0)
    assert sum(law.values()) == pytest.approx(1)
    return law


def drawn(llm: LLM, group: str, count: int, first_seed: int = 0) -> Counter[tuple[int, ...]]:
    return Counter(
        llm.generate(PROMPT, params_of(group, seed)).token_ids[:NUM_COUNTED]
        for seed in range(first_seed, first_seed + count)
    )


def chi_square(
    found: Mapping[tuple[int, ...], int],
    law: Mapping[tuple[int, ...], float],
    *,
    least_cells: int = 20,
) -> float:
    """The p value; beginnings that are too rare to count alone are counted together."""
    total = sum(found.values())
    assert set(found) <= set(law), "a text that the target cannot write"
    counts: dict[tuple[int, ...] | None, list[float]] = {}
    for path, mass in law.items():
        cell = counts.setdefault(path if mass * total >= LEAST_EXPECTED else None, [0.0, 0.0])
        cell[0] += found.get(path, 0)
        cell[1] += mass * total
    assert len(counts) > least_cells, "too few cells to say anything"
    observed, expected = zip(*counts.values(), strict=True)
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


@pytest.mark.parametrize(("method", "group"), PAIRS)
def test_texts_follow_the_law_of_the_target(method, group, capsys):
    found = drawn(LLM(target(), **METHODS[method]), group, NUM_DRAWS)
    p_value = chi_square(found, expected_law(group))
    if EXHAUSTIVE:
        with capsys.disabled():  # for the log that is kept
            print(f"\n{method:17} {group:10} {NUM_DRAWS} texts, p = {p_value:.4f}", end="")  # noqa: T201
    assert p_value > 1e-3


def test_drafts_are_accepted_and_rejected():
    """Else the laws above would be those of plain decoding by another name."""
    for method, options in METHODS.items():
        num_accepted = num_drafted = 0
        for seed in range(40):
            spent = LLM(target(), **options).generate(PROMPT, params_of("none", seed)).stats
            num_accepted += spent.num_accepted
            num_drafted += spent.num_drafted
        assert (num_drafted == 0) if method == "plain" else (0 < num_accepted < num_drafted)


def test_one_stream_for_draft_and_verification_would_show(monkeypatch):
    """Law 8 broken on purpose: the test above must notice."""

    def same(seed: int) -> tuple[SeededUniforms, SeededUniforms]:
        one, other = (SeededUniforms(torch.Generator().manual_seed(seed)) for _ in range(2))
        return one, other

    monkeypatch.setattr(text_module, "_streams", same)
    found = drawn(LLM(target(), **METHODS["rejection"]), "none", 600)
    assert chi_square(found, expected_law("none")) < 1e-6


def test_the_two_streams_are_independent():
    def uniforms(seed: int) -> tuple[list[float], list[float]]:
        state = TextState(SamplingParams(seed=seed), [1], Vocabulary(V, (EOS,)))
        draft, verify = state.draft_uniforms, state._uniforms
        return [draft.next() for _ in range(5)], [verify.next() for _ in range(5)]

    pairs = [uniforms(seed) for seed in range(400)]
    draft = torch.tensor([one for one, _ in pairs])
    verify = torch.tensor([other for _, other in pairs])
    together = torch.cat([draft, verify, draft.roll(1, 0), verify.roll(1, 0)], 1)  # also next seeds
    correlations = torch.corrcoef(together.T) - torch.eye(20)
    assert float(correlations.abs().max()) < 5 / 400**0.5


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_its_text_and_another_gives_another(method):
    first, second = LLM(target(), **METHODS[method]), LLM(target(), **METHODS[method])
    texts = []
    for seed in range(12):
        params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
        texts.append(first.generate(PROMPT, params).token_ids)
        assert second.generate(PROMPT, params).token_ids == texts[-1]
        assert first.generate(PROMPT, params).token_ids == texts[-1]
    assert len(set(texts)) == len(texts)


def test_match_writes_the_very_text_of_plain_sampling():
    """It takes one draw a token, and each is the target's own: nothing can tell the texts apart."""
    plain = LLM(target())
    for method in ("ngram", "greedy_chain", "drawn_match", "static_match", "dynamic_match"):
        for group, seed in itertools.product(GROUPS, range(5)):
            params = SamplingParams(max_new_tokens=15, seed=seed, **GROUPS[group])
            found = LLM(target(), **METHODS[method]).generate(PROMPT, params)
            assert found.token_ids == plain.generate(PROMPT, params).token_ids
