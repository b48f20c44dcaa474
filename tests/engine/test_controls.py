"""Every control through the engine: the text and log-probabilities of plain decoding."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from forespeak.engine.llm import LLM
from forespeak.engine.reference import next_logits
from forespeak.engine.target import Target, in_memory
from forespeak.sampling import SamplingParams
from forespeak.spec.processors_reference import reference_law
from forespeak.spec.processors_words import bad_word_sequences
from forespeak.types import Completion, Expansion
from tests.engine.control_cases import CONTROLS, GRAMMARS, ControlCase
from tests.engine.scripted import check_counts, scripted, write
from tests.engine.tiny_text import SIZE, tokenizer
from tests.tiny import tiny_config, tiny_decoder, tiny_int8

pytestmark = pytest.mark.slow

TOLERANCE = {"float32": 1e-4, "int8": 1e-6}
PROMPT = [1, 2, 3, 1, 2, 9, 10, 11, 1, 2, 3]
CONFIG = tiny_config(vocab_size=SIZE, eos_token_ids=(0,))
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "lookup_min": 1, "lookup_max": 3},
    "draft_model": {"method": "draft_model", "drafter": "truncate:2"},
    "draft_model_tree": {
        "method": "draft_model", "drafter": "truncate:2", "builder": "dynamic_tree",
    },
    "draft_model_static": {
        "method": "draft_model", "drafter": "truncate:1", "builder": "static_tree",
    },
    "cascade": {"method": "ngram+draft_model", "drafter": "truncate:2", "lookup_min": 1},
}  # fmt: skip

SCRIPTED: list[tuple[Expansion, str]] = [
    ("none", "chain"),
    ("forward", "dynamic_tree"),
    ("none", "ddtree"),
    ("forward", "static_tree"),
]


@cache
def target_of(dtype: str) -> Target:
    model = tiny_decoder(CONFIG, seed=3) if dtype == "float32" else tiny_int8(CONFIG, seed=3)
    return in_memory(model, tokenizer=tokenizer())


@cache
def llm_of(dtype: str, method: str) -> LLM:
    return LLM(target_of(dtype), **METHODS.get(method, {}))


_TEXTS: dict[tuple[str, str], Completion] = {}


def plain(dtype: str, params: SamplingParams) -> Completion:
    key = (dtype, repr(params))
    if key not in _TEXTS:
        _TEXTS[key] = llm_of(dtype, "plain").generate(PROMPT, params)
    return _TEXTS[key]


def case_of(dtype: str, name: str, **fields: Any) -> ControlCase:
    case = CONTROLS[name](plain(dtype, SamplingParams(max_new_tokens=40)))
    return dataclasses.replace(case, params=dataclasses.replace(case.params, **fields))


def check_same(dtype: str, found: Completion, expected: Completion) -> None:
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text
    assert (found.finish_reason, found.stop_reason) == (
        expected.finish_reason,
        expected.stop_reason,
    )
    check_counts(found)
    if expected.logprobs is None:
        assert found.logprobs is None
        return
    assert found.logprobs is not None
    near = TOLERANCE[dtype]
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=near)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=near)


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_control_bites(dtype, name):
    """Else the comparisons below would hold for an engine that forgets it."""
    case = case_of(dtype, name)
    assert plain(dtype, case.params).token_ids != plain(dtype, case.without).token_ids


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_methods_write_what_plain_decoding_writes(dtype, name):
    case = case_of(dtype, name, logprobs=3)
    expected = plain(dtype, case.params)
    num_accepted = num_drafted = 0
    for method in METHODS:
        found = llm_of(dtype, method).generate(PROMPT, case.params)
        check_same(dtype, found, expected)
        num_accepted += found.stats.num_accepted
        num_drafted += found.stats.num_drafted
    # No drafter is so bad, and none so good, that nothing was decided.
    assert 0 < num_accepted < num_drafted or len(expected.token_ids) < 4


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize(("expansion", "builder"), SCRIPTED)
def test_scripted_drafters_write_what_plain_decoding_writes(expansion, builder, name):
    params = case_of("int8", name, logprobs=2).params
    target, expected = target_of("int8"), plain("int8", params)
    known = [*PROMPT, *expected.token_ids]
    for right in (0.5, 1.0):
        proposer = scripted(
            known, right, builder=builder, expansion=expansion, vocab_size=SIZE, seed=5
        )
        vocabulary = target.vocabulary(params)
        written = write(target.model, PROMPT, params, proposer, vocabulary=vocabulary)
        check_same("int8", written.completion, expected)
        if right == 1 and len(expected.token_ids) > 12:
            assert (written.completion.stats.acceptance_length or 0) > 3


@pytest.mark.parametrize("name", [name for name in CONTROLS if name not in GRAMMARS])
@pytest.mark.parametrize("after", [False, True])
def test_plain_decoding_is_the_slow_loop(name, after):
    """The text and its log-probabilities, from whole forwards and the processors' slow form."""
    params = case_of("int8", name, logprobs=4, logprobs_after_processors=after).params
    target, found = target_of("int8"), plain("int8", params)
    words = bad_word_sequences(
        params.bad_words, lambda text: tokenizer().encode(text, add_special_tokens=False)
    )
    assert found.logprobs is not None
    written: list[int] = []
    for token, entry in zip(found.token_ids, found.logprobs, strict=True):
        logits = next_logits(target.model, [*PROMPT, *written])
        controls: dict[str, Any] = {
            "prompt_ids": PROMPT, "output_ids": written, "eos_ids": (0,), "bad_word_ids": words,
        }  # fmt: skip
        law = reference_law(params, logits, **controls)
        assert int(law.argmax()) == token == entry.token
        warm = dataclasses.replace(params, temperature=1.0, top_k=0, min_p=0.0)
        shown = reference_law(warm, logits.double(), **controls).log() if after else None
        shown = logits.double().log_softmax(-1) if shown is None else shown
        assert entry.logprob == pytest.approx(float(shown[token]), abs=1e-5)
        best = [i for i in shown.argsort(descending=True).tolist()[:4] if shown[i] > -torch.inf]
        assert [i for i, _ in entry.top] == best
        assert [v for _, v in entry.top] == pytest.approx(shown[best].tolist(), abs=1e-5)
        written.append(token)


def test_what_a_grammar_forbids_is_not_verified_and_counted_apart():
    params = case_of("int8", "regex").params
    target, expected = target_of("int8"), plain("int8", params)
    known = [*PROMPT, *expected.token_ids]
    proposer = scripted(known, 0.3, builder="chain", expansion="none", vocab_size=SIZE)
    # Draft rows go through the grammar too; look-up does not, so here its drafts are forbidden.
    shaped = write(
        target.model, PROMPT, params, proposer, vocabulary=target.vocabulary(params)
    ).completion
    assert shaped.stats.num_forbidden == 0
    looked_up = llm_of("int8", "ngram").generate(PROMPT, params)
    stats = looked_up.stats
    assert stats.num_forbidden > 0
    assert stats.num_accepted <= stats.num_drafted
