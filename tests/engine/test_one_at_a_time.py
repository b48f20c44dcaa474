"""One LLM writes one text at a time, says so, and is free again whatever ends a text."""

from __future__ import annotations

import pytest

from forespeak import LLM, OptionError, SamplingParams
from forespeak.engine.target import in_memory
from tests.tiny import tiny_int8

PROMPT = [1, 2, 3, 1, 2]
PARAMS = SamplingParams(max_new_tokens=12)


@pytest.fixture
def llm() -> LLM:
    return LLM(in_memory(tiny_int8()), method="ngram")


def test_a_second_text_is_refused_while_one_is_open(llm: LLM) -> None:
    stream = llm._written(*llm._start(PROMPT, PARAMS, raw=False)[1:])
    next(stream)
    with pytest.raises(OptionError, match="one at a time"):
        llm.generate(PROMPT, PARAMS)
    stream.close()
    assert len(llm.generate(PROMPT, PARAMS).token_ids) > 0


def test_two_llms_of_one_target_do_not_disturb_each_other(llm: LLM) -> None:
    other = LLM(llm.target, method="ngram")
    alone = llm.generate(PROMPT, PARAMS).token_ids
    stream = llm._written(*llm._start(PROMPT, PARAMS, raw=False)[1:])
    next(stream)
    assert other.generate(PROMPT, PARAMS).token_ids == alone
    stream.close()


def test_an_error_in_the_caller_leaves_the_llm_free(llm: LLM) -> None:
    class Stop(Exception):
        pass

    def stop(piece: str) -> None:
        raise Stop

    decoding = llm._start(PROMPT, PARAMS, raw=False)[1]
    with pytest.raises(Stop):
        for _ in llm._written(decoding, PROMPT):
            stop("")
    assert llm.generate(PROMPT, PARAMS).token_ids
