"""Law 1: greedy text is plain decoding, token for token, for every drafter under every builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from forespeak.engine.llm import LLM
from forespeak.engine.reference import decode_greedy
from forespeak.engine.target import Target, in_memory
from forespeak.models.base import TargetModel
from forespeak.sampling import SamplingParams
from forespeak.types import Completion
from tests.engine.scripted import check_counts, scripted, write
from tests.engine.tables import TableModel
from tests.engine.tiny_text import SIZE, tokenizer
from tests.tiny import random_tokens, tiny_config, tiny_decoder, tiny_int8

CONTEXT = 128
CONFIG = tiny_config(max_position_embeddings=CONTEXT, eos_token_ids=())
V = CONFIG.vocab_size
MAKERS: dict[str, Callable[[], TargetModel]] = {
    "float32": lambda: tiny_decoder(CONFIG),
    "int8": lambda: tiny_int8(CONFIG),
    "table": lambda: TableModel(V, context_length=CONTEXT, likeness=0.8),
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "lookup_min": 1, "lookup_max": 3},
    "draft_model": {"method": "draft_model", "drafter": "truncate:2"},
    "cascade": {
        "method": "ngram+draft_model", "drafter": "truncate:1", "lookup_min": 1, "lookup_max": 2,
    },
}  # fmt: skip
BUILDERS = {
    "ngram": ["chain"],
    "draft_model": ["chain", "static_tree", "dynamic_tree"],
    "cascade": ["chain", "static_tree", "dynamic_tree"],
}
PAIRS = [(method, builder) for method, names in BUILDERS.items() for builder in names]
SCRIPTED = [
    ("forward", "chain"),
    ("forward", "static_tree"),
    ("forward", "dynamic_tree"),
    ("forward", "ddtree"),
    ("none", "chain"),
    ("none", "static_tree"),
    ("none", "dynamic_tree"),
    ("none", "ddtree"),
]
LONGEST = {"chain": 6, "static_tree": 5, "dynamic_tree": 5, "ddtree": 5}  # with the bonus
ONE_TOKEN, SHORT, LOOP = (5,), tuple(random_tokens(9, 3)), (7, 8, 9) * 6


@cache
def target_of(kind: str) -> Target:
    return in_memory(MAKERS[kind]())


@cache
def plain_text(kind: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The oracle's text; where its two best logits are close, float32 might differ: there is no
    such place here, which ``test_the_float32_texts_have_clear_gaps`` holds."""
    return tuple(decode_greedy(target_of(kind).model, prompt, count))


def check(kind: str, prompt: Sequence[int], count: int, completion: Completion) -> None:
    assert completion.token_ids == plain_text(kind, tuple(prompt), count)
    assert completion.finish_reason == "length"
    check_counts(completion)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("method", "builder"), PAIRS)
def test_methods(kind, method, builder):
    options = METHODS[method] | ({} if method == "ngram" else {"builder": builder})
    llm = LLM(target_of(kind), **options)
    for prompt in (ONE_TOKEN, SHORT, LOOP):
        completion = llm.generate(list(prompt), SamplingParams(max_new_tokens=40))
        check(kind, prompt, 40, completion)
    # A text up to the last token of the context, asked for more than there is room.
    completion = llm.generate(list(SHORT), SamplingParams(max_new_tokens=1000))
    check(kind, SHORT, CONTEXT - len(SHORT), completion)


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize(("expansion", "builder"), SCRIPTED)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_scripted_drafters(kind, expansion, builder, right):
    count = 60
    known = [*SHORT, *plain_text(kind, SHORT, CONTEXT - len(SHORT))]
    proposer = scripted(known, right, builder=builder, expansion=expansion, vocab_size=V)
    params = SamplingParams(max_new_tokens=count)
    completion = write(target_of(kind).model, SHORT, params, proposer).completion
    check(kind, SHORT, count, completion)
    stats = completion.stats
    if right == 0:
        assert stats.num_accepted == 0 and stats.num_rounds == count - 1
    elif right < 1:
        assert 0 < stats.num_accepted < stats.num_drafted and stats.num_rounds < count - 1
    else:
        assert set(stats.round_lengths[:-1]) == {LONGEST[builder]}


def test_the_float32_texts_have_clear_gaps():
    llm = LLM(target_of("float32"))
    for prompt in (ONE_TOKEN, SHORT, LOOP):
        text = plain_text("float32", prompt, 40)
        gaps = [llm.gap(list(prompt), text, at) for at in range(len(text))]
        assert min(gaps) > 1e-3


def test_texts_are_not_all_one_token():
    """Else the tests above would hold for drafters and caches of any quality."""
    for kind in MAKERS:
        texts = [plain_text(kind, prompt, 40) for prompt in (ONE_TOKEN, SHORT, LOOP)]
        assert len(set(texts)) == 3 and all(len(set(text)) > 5 for text in texts)


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("length", [511, 512, 513, 1030])
def test_prompts_around_and_beyond_the_prefill_chunk(kind, length):
    config = tiny_config(max_position_embeddings=2048, num_layers=2, eos_token_ids=())
    model = tiny_decoder(config) if kind == "float32" else tiny_int8(config)
    prompt = random_tokens(length, 8)
    expected = tuple(decode_greedy(model, prompt, 10))
    params = SamplingParams(max_new_tokens=10)
    for options in (METHODS["ngram"], {"method": "draft_model", "drafter": "truncate:1"}):
        completion = LLM(in_memory(model), **options).generate(prompt, params)
        assert completion.token_ids == expected
    known = [*prompt, *expected, 0, 0, 0]
    proposer = scripted(known, 1.0, builder="dynamic_tree", vocab_size=V)
    completion = write(model, prompt, params, proposer).completion
    assert completion.token_ids == expected and completion.stats.num_rounds <= 3


def test_stream_gives_what_generate_gives_and_rows_are_free_again():
    model = TableModel(SIZE, seed=4, favourites=range(1, 5), eos_ids=())
    llm = LLM(in_memory(model, tokenizer=tokenizer()), method="ngram", lookup_min=1)
    params = SamplingParams(max_new_tokens=30)
    whole = llm.generate("abc", params)
    stream = llm.stream("abc", params)
    next(stream)
    del stream  # left half read: its row must be free again
    assert "".join(llm.stream("abc", params)) == whole.text and whole.text
