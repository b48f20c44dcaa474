"""Every control on a real model: n-gram and truncated draft model against plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forespeak.engine.llm import LLM
from forespeak.engine.target import Target, load_target
from forespeak.sampling import SamplingParams
from forespeak.types import Completion
from tests.engine.control_cases import LARK, SCHEMA
from tests.engine.scripted import scripted, write
from tests.engine.test_controls import TOLERANCE, check_same
from tests.spec.exactness_cases import EXHAUSTIVE

pytestmark = pytest.mark.slow

LENGTH = 64 if EXHAUSTIVE else 32
REPEATING = "Write this three times: the cat sat on the mat and the dog sat on the cat."
POEM = "Write a poem about the sea and the sun and the sand and the sky."
SHORT = "What is the capital of France? Answer with one word."
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"method": "ngram", "lookup_min": 1},
    "draft_model": {"method": "draft_model", "drafter": "truncate:20"},
}


@dataclass(frozen=True)
class RealCase:
    """A control and what it is asked on; ``make`` gets the text without it."""

    make: Callable[[Completion], dict[str, Any]]
    prompt: str = REPEATING


CASES = {
    "repetition_penalty": RealCase(lambda base: {"repetition_penalty": 1.4}),
    "presence_penalty": RealCase(lambda base: {"presence_penalty": 2.0}, POEM),
    "frequency_penalty": RealCase(lambda base: {"frequency_penalty": 1.5}, POEM),
    "logit_bias": RealCase(lambda base: {"logit_bias": {base.token_ids[3]: -100.0}}),
    "bad_words": RealCase(lambda base: {"bad_words": (base.text.split()[2], "dog")}),
    "allowed_token_ids": RealCase(lambda base: {"allowed_token_ids": tuple(range(300))}),
    "stop": RealCase(lambda base: {"stop": (base.text[14:18],)}),
    "stop_token_ids": RealCase(lambda base: {"stop_token_ids": (base.token_ids[5],)}),
    "min_tokens": RealCase(lambda base: {"min_tokens": len(base.token_ids) + 7}, SHORT),
    "ignore_eos": RealCase(lambda base: {"ignore_eos": True}, SHORT),
    "json_schema": RealCase(lambda base: {"json_schema": SCHEMA}),
    "json_object": RealCase(lambda base: {"json_object": True}),
    "regex": RealCase(lambda base: {"regex": r"([A-Z][a-z]+ ){2,4}[0-9]+\."}),
    "grammar": RealCase(lambda base: {"grammar": LARK}),
}


@pytest.fixture(scope="module", params=["int8", "float32"] if EXHAUSTIVE else ["int8"])
def llms(request: pytest.FixtureRequest, smollm2_path: Path) -> dict[str, LLM]:
    target = load_target(str(smollm2_path), dtype=request.param, device="cpu", threads=1)
    return {name: LLM(target, **options) for name, options in METHODS.items()}


@cache
def without(llm: LLM, prompt: str) -> Completion:
    return llm.generate(prompt, SamplingParams(max_new_tokens=LENGTH))


def right_drafts(target: Target, params: SamplingParams, prompt: str, text: Completion):
    """A drafter that knows the text, so that whatever ends it falls inside a block."""
    ids = target.encode(prompt)
    size = target.model.config.vocab_size
    proposer = scripted([*ids, *text.token_ids], 1.0, builder="chain", vocab_size=size)
    return write(target.model, ids, params, proposer, vocabulary=target.vocabulary(params))


@pytest.mark.parametrize("name", CASES)
def test_controls(llms, name):
    case, plain = CASES[name], llms["plain"]
    base = without(plain, case.prompt)
    params = replace(SamplingParams(max_new_tokens=LENGTH, logprobs=2), **case.make(base))
    expected = plain.generate(case.prompt, params)
    assert expected.token_ids != base.token_ids, "the control changed nothing"
    dtype = plain.target.dtype_name
    assert dtype in TOLERANCE
    for method in ("ngram", "draft_model"):
        found = llms[method].generate(case.prompt, params)
        check_same(dtype, found, expected)
    known = right_drafts(plain.target, params, case.prompt, expected).completion
    check_same(dtype, known, expected)
    assert len(known.token_ids) < 3 or known.stats.num_accepted > 0
