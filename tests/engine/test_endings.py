"""Ends of texts inside a block: end-of-sequence, stop strings, stop tokens, the length limit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from forespeak.engine.llm import LLM
from forespeak.engine.reference import decode_greedy
from forespeak.engine.target import Target, in_memory
from forespeak.errors import CheckpointError, OptionError, PromptError
from forespeak.sampling import SamplingParams
from forespeak.types import Completion, Expansion
from tests.engine.scripted import check_counts, scripted, write
from tests.engine.tables import TableModel
from tests.engine.tiny_text import SIZE, tokenizer
from tests.tiny import tiny_config, tiny_int8

pytestmark = pytest.mark.slow

PROMPT = [1, 2, 3, 4]
LENGTH = 60
LETTERS = range(1, 9)  # likely everywhere, so that texts are readable and repeat themselves
BLOCK = 6  # five draft tokens and the bonus
KINDS: list[tuple[Expansion, str]] = [
    ("forward", "chain"),
    ("none", "chain"),
    ("forward", "dynamic_tree"),
    ("none", "ddtree"),
]


def model(eos_ids: tuple[int, ...] = ()) -> TableModel:
    return TableModel(SIZE, seed=2, favourites=LETTERS, eos_ids=eos_ids)


@cache
def known_ids() -> list[int]:
    """The text without any end. Its tokens stand where they would in a longer prompt."""
    return decode_greedy(model(), PROMPT, LENGTH)


@cache
def text_target() -> Target:
    made = in_memory(model(), tokenizer=tokenizer())
    made.eos_ids = ()
    return made


def spoken(
    target: Target, params: SamplingParams, expansion: Expansion, builder: str
) -> Completion:
    proposer = scripted(
        [*PROMPT, *known_ids()], 1.0, builder=builder, expansion=expansion, vocab_size=SIZE
    )
    return write(
        target.model, PROMPT, params, proposer, vocabulary=target.vocabulary(params)
    ).completion


def first_places() -> list[int]:
    """Places at which a token stands for the first time: there it could end the text."""
    ids = known_ids()
    return [at for at in range(len(ids)) if ids[at] not in ids[:at]]


def is_inside_a_block(at: int) -> bool:
    """Prefill yields token 0; every right chain of five yields six more."""
    return at > 0 and at % BLOCK != 0


@pytest.mark.parametrize(("expansion", "builder"), KINDS)
def test_end_of_sequence_inside_a_block(expansion, builder):
    places = first_places()
    assert sum(map(is_inside_a_block, places)) >= 5
    for at in places:
        target = in_memory(model((known_ids()[at],)))
        completion = spoken(target, SamplingParams(max_new_tokens=LENGTH), expansion, builder)
        assert list(completion.token_ids) == known_ids()[: at + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        check_counts(completion)
        if builder == "chain" and is_inside_a_block(at):
            lengths = completion.stats.round_lengths
            assert lengths[-1] == at % BLOCK and set(lengths[:-1]) <= {BLOCK}


@pytest.mark.parametrize(("expansion", "builder"), KINDS)
def test_stop_tokens_inside_a_block(expansion, builder):
    for at in first_places():
        params = SamplingParams(max_new_tokens=LENGTH, stop_token_ids=(known_ids()[at],))
        completion = spoken(in_memory(model()), params, expansion, builder)
        assert list(completion.token_ids) == known_ids()[: at + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", known_ids()[at])
        check_counts(completion)


@pytest.mark.parametrize(("expansion", "builder"), KINDS)
def test_length_limit_inside_a_block(expansion, builder):
    for count in range(1, 2 * BLOCK + 3):
        params = SamplingParams(max_new_tokens=count)
        completion = spoken(in_memory(model()), params, expansion, builder)
        assert list(completion.token_ids) == known_ids()[:count]
        assert completion.finish_reason == "length"
        check_counts(completion)
        if builder == "chain":  # all drafts are right: one that was lost would be past the limit,
            stats = completion.stats  # and the last token is a bonus, which costs no draft
            assert stats.num_drafted == stats.num_accepted == stats.num_tokens - stats.num_rounds


def cut_by_hand(ids: list[int], stop: str, include: bool) -> tuple[list[int], str]:
    """The tokens up to the one that completes the string, and the text up to the string."""
    for count in range(1, len(ids) + 1):
        text = tokenizer().decode(ids[:count])
        if stop in text:
            end = text.index(stop) + (len(stop) if include else 0)
            return ids[:count], text[:end]
    raise AssertionError(f"{stop!r} does not stand in the text")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("expansion", "builder"), KINDS)
def test_stop_strings_inside_and_across_blocks(expansion, builder, include):
    whole = tokenizer().decode(known_ids())
    for start in range(0, len(whole) - 5, 4):
        for length in (1, 2, 5):
            stop = whole[start : start + length]
            ids, text = cut_by_hand(known_ids(), stop, include)
            params = SamplingParams(
                max_new_tokens=LENGTH, stop=(stop, "never"), include_stop_str=include
            )
            completion = spoken(text_target(), params, expansion, builder)
            assert (list(completion.token_ids), completion.text) == (ids, text)
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            check_counts(completion)


def test_a_character_that_the_end_cuts_in_two():
    """Half of it comes with the stop string's token: it is after the end. Else it is shown."""
    letters = tokenizer(["a", "b", "Ã", "©", "bÃ"])  # the last one is b and the first byte of é
    llm = LLM(in_memory(TableModel(6, eos_ids=(0,)), tokenizer=letters))
    params = SamplingParams(max_new_tokens=2, allowed_token_ids=(5,))
    assert llm.generate([1], params).text == letters.decode([5, 5]) == "b\ufffdb\ufffd"
    for include in (False, True):
        params = replace(params, stop=("b",), include_stop_str=include)
        completion = llm.generate([1], params)
        assert (completion.text, completion.token_ids) == ("b" if include else "", (5,))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_methods_end_where_plain_decoding_ends(method):
    """With drafts that are right now and then, through LLM."""
    options = {"lookup_min": 1} if method == "ngram" else {"drafter": "truncate:1"}
    plain, llm = LLM(text_target()), LLM(text_target(), method=method, **options)
    whole = tokenizer().decode(known_ids())
    for start in range(3, 50, 5):
        for params in (
            SamplingParams(max_new_tokens=LENGTH, stop=(whole[start : start + 3],)),
            SamplingParams(max_new_tokens=start, stop=("zzz",)),
            SamplingParams(max_new_tokens=LENGTH, stop=(whole[2:4],), min_tokens=start),
        ):
            expected, found = plain.generate(PROMPT, params), llm.generate(PROMPT, params)
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert found.finish_reason == expected.finish_reason
            assert found.stop_reason == expected.stop_reason
            check_counts(found)


def test_the_last_place_of_the_context():
    short = TableModel(SIZE, seed=2, context_length=16, eos_ids=())
    llm = LLM(in_memory(short), method="draft_model", drafter="truncate:1")
    for length in (1, 8, 14, 15):
        completion = llm.generate([1] * length, SamplingParams(max_new_tokens=100))
        assert len(completion.token_ids) == 16 - length
        assert completion.finish_reason == "length"
    with pytest.raises(PromptError, match="16 tokens; allowed: up to 15"):
        llm.generate([1] * 16)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "empty"), ([1, SIZE], "not in the vocabulary"), ([-1], "not in the vocabulary")],
)
def test_impossible_prompts(prompt, reason):
    with pytest.raises(PromptError, match=reason):
        LLM(in_memory(model())).generate(prompt)


@pytest.mark.parametrize(
    "prompt",
    [3, 1.5, [1.5], ["a"], [[1]], [{}], [{"role": "user"}], [True], b"x", {"role": "user"}, None],
)
def test_prompts_of_no_known_kind_are_refused(prompt: Any) -> None:
    with pytest.raises(PromptError, match="cannot be read; allowed"):
        LLM(in_memory(tiny_int8())).generate(prompt)


def test_parameters_are_sampling_params() -> None:
    params: Any = {"max_new_tokens": 3}
    with pytest.raises(OptionError, match="allowed: SamplingParams"):
        LLM(in_memory(tiny_int8())).generate([1, 2], params)


def test_an_end_of_sequence_beyond_the_vocabulary_is_a_damaged_config() -> None:
    with pytest.raises(CheckpointError, match="end-of-sequence"):
        in_memory(tiny_int8(tiny_config(eos_token_ids=(10**9,))))
