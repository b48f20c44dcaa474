"""The pipeline against its slow form, node by node, and what each control promises."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams
from forespeak.spec.processors import LogitsPipeline, node_paths
from forespeak.spec.processors_reference import reference_law
from forespeak.spec.processors_words import BadWords, bad_word_sequences
from forespeak.spec.tree import CandidateTree

EOS = 1


def random_tree(rng: random.Random, num_nodes: int, vocab_size: int) -> CandidateTree:
    parents = [-1] + [rng.randrange(node) for node in range(1, num_nodes)]
    return CandidateTree(tuple(rng.randrange(vocab_size) for _ in range(num_nodes)), tuple(parents))


def random_controls(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Each control on with probability one half, in values that bite on a small vocabulary."""

    def some(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    return SamplingParams(
        min_tokens=some(rng.randrange(8), 0),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=some(rng.randrange(1, vocab_size + 2), 0),
        top_p=some(rng.uniform(0.05, 1), 1.0),
        min_p=some(rng.uniform(0, 0.6), 0.0),
        typical_p=some(rng.uniform(0.05, 1), 1.0),
        repetition_penalty=some(rng.uniform(0.5, 2), 1.0),
        presence_penalty=some(rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(rng.uniform(-2, 2), 0.0),
        logit_bias=some({rng.randrange(vocab_size): rng.uniform(-5, 5) for _ in range(3)}, {}),
        bad_words=("set in the test",),
        allowed_token_ids=some(tuple({0, EOS, *rng.sample(range(vocab_size), 4)}), None),
        stop_token_ids=some((rng.randrange(vocab_size),), ()),
    )


@pytest.mark.parametrize("seed", range(120))
def test_every_node_has_the_law_of_the_slow_form(seed):
    rng = random.Random(seed)
    vocab_size = rng.choice([6, 11, 40])
    controls = random_controls(rng, vocab_size)
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(6))]
    words = [[rng.randrange(2, 6) for _ in range(rng.randint(1, 3))] for _ in range(3)]
    pipeline = LogitsPipeline(
        controls, prompt, eos_ids=(EOS,), vocab_size=vocab_size, bad_word_ids=words
    )
    output: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        tree = random_tree(rng, rng.randint(1, 9), vocab_size)
        paths = node_paths(tree)
        logits = torch.randn(len(tree), vocab_size, generator=generator, dtype=torch.float64) * 2
        allowed = torch.rand(len(tree), vocab_size, generator=generator) < 0.8
        mask = allowed if rng.random() < 0.5 else None
        before = logits.clone()
        processed = pipeline.apply(logits, paths, allowed=mask)
        laws = pipeline.law(processed)
        assert laws.dtype == torch.float64
        assert torch.equal(logits, before)
        assert torch.equal(pipeline.best(processed), processed.argmax(-1))
        for node, path in enumerate(paths):
            slow = reference_law(
                controls,
                logits[node],
                prompt_ids=prompt,
                output_ids=[*output, *path],
                eos_ids=(EOS,),
                bad_word_ids=words,
                allowed=None if mask is None else set(mask[node].nonzero()[:, 0].tolist()),
            )
            torch.testing.assert_close(laws[node], slow, rtol=0, atol=1e-12)
        new = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 4))]
        pipeline.advance(new)
        output += new
    assert pipeline.num_output == len(output)


def test_a_row_does_not_depend_on_the_other_rows():
    controls = SamplingParams(
        temperature=0.8, top_p=0.8, frequency_penalty=1, repetition_penalty=1.3
    )
    pipeline = LogitsPipeline(controls, [3, 4], eos_ids=(EOS,), vocab_size=9)
    pipeline.advance([5, 5])
    logits = torch.randn(3, 9)
    paths = [(), (5, 2), (7,)]
    together = pipeline.apply(logits, paths)
    for row, path in enumerate(paths):
        assert torch.equal(together[row : row + 1], pipeline.apply(logits[row : row + 1], [path]))


def test_without_work_the_logits_come_back_untouched():
    logits = torch.randn(2, 9)
    for controls in (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(top_p=0.5, top_k=3),
    ):
        pipeline = LogitsPipeline(controls, [3], eos_ids=(EOS,), vocab_size=9)
        assert pipeline.apply(logits, [(), (2,)]) is logits


def test_filters_keep_the_best_token_and_greedy_skips_them():
    logits = torch.randn(50, 30)
    paths = [()] * 50
    greedy = LogitsPipeline(
        SamplingParams(top_k=3, top_p=0.1, min_p=0.9), eos_ids=(EOS,), vocab_size=30
    )
    for controls in (
        SamplingParams(temperature=0.7, top_k=1),
        SamplingParams(temperature=0.7, top_p=1e-9),
        SamplingParams(temperature=0.7, min_p=1.0),
    ):
        pipeline = LogitsPipeline(controls, eos_ids=(EOS,), vocab_size=30)
        law = pipeline.law(pipeline.apply(logits, paths))
        assert torch.equal(law, greedy.law(greedy.apply(logits, paths)))


def test_typical_p_keeps_the_best_token_as_the_temperature_falls():
    logits = torch.randn(50, 30, dtype=torch.float64)
    controls = SamplingParams(temperature=1e-3, typical_p=0.2)
    pipeline = LogitsPipeline(controls, eos_ids=(EOS,), vocab_size=30)
    law = pipeline.law(pipeline.apply(logits, [()] * 50))
    assert torch.equal(law.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-38, 1e-300, 1e-5])
def test_tiny_temperatures_do_not_overflow(temperature):
    pipeline = LogitsPipeline(SamplingParams(temperature=temperature), eos_ids=(EOS,), vocab_size=9)
    logits = torch.randn(4, 9) * 100
    law = pipeline.law(pipeline.apply(logits, [()] * 4))
    assert torch.equal(law.argmax(-1), logits.argmax(-1))
    torch.testing.assert_close(law.sum(-1), torch.ones(4))


def test_equals_go_to_the_lower_id_and_top_k_keeps_them_all():
    logits = torch.zeros(1, 8, dtype=torch.float64)
    half = LogitsPipeline(SamplingParams(temperature=1, top_p=0.5), eos_ids=(EOS,), vocab_size=8)
    assert half.law(half.apply(logits, [()]))[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    three = LogitsPipeline(SamplingParams(temperature=1, top_k=3), eos_ids=(EOS,), vocab_size=8)
    assert (three.law(three.apply(logits, [()])) == 1 / 8).all()
    greedy = LogitsPipeline(SamplingParams(), eos_ids=(EOS,), vocab_size=8)
    assert greedy.law(logits)[0, 0] == 1


def test_wide_sets_leave_the_candidates_and_give_the_same():
    """Sets of 512 tokens and of more than 4096 take the other branches of the search."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 9000, dtype=torch.float64, generator=generator)
    logits *= torch.tensor([[8.0], [2.0], [0.01]])
    for controls in (
        SamplingParams(temperature=1, top_p=0.9),
        SamplingParams(temperature=1, typical_p=0.9),
    ):
        pipeline = LogitsPipeline(controls, eos_ids=(EOS,), vocab_size=9000)
        law = pipeline.law(pipeline.apply(logits, [()] * 3))
        sizes = (law > 0).sum(-1).tolist()
        assert sizes[0] < 512 < sizes[1] < 4096 < sizes[2]
        p = logits.log_softmax(-1)
        entropy = -(p * p.exp()).sum(-1, keepdim=True)
        keys = -p if controls.top_p < 1 else (-p - entropy).abs()
        for row in range(3):
            order = keys[row].argsort()
            mass = p[row].exp()[order].cumsum(0)
            size = int((mass < 0.9).sum()) + 1
            assert set(law[row].nonzero()[:, 0].tolist()) == set(order[:size].tolist())


def test_half_precision_is_computed_in_float32():
    pipeline = LogitsPipeline(SamplingParams(temperature=0.5), eos_ids=(EOS,), vocab_size=9)
    assert pipeline.apply(torch.randn(1, 9).bfloat16(), [()]).dtype == torch.float32


def test_min_tokens_counts_tokens_of_output_and_path_and_not_rounds():
    controls = SamplingParams(min_tokens=4, stop_token_ids=(5,))
    pipeline = LogitsPipeline(controls, [2, 2, 2, 2], eos_ids=(EOS,), vocab_size=9)
    pipeline.advance([7, 7])
    processed = pipeline.apply(torch.zeros(3, 9), [(), (3,), (3, 4)])
    assert (processed[:, [EOS, 5]] == -math.inf).tolist() == [[True] * 2, [True] * 2, [False] * 2]


def test_bad_words_see_the_path_and_not_the_prompt():
    pipeline = LogitsPipeline(
        SamplingParams(),
        [3, 4],
        eos_ids=(EOS,),
        vocab_size=9,
        bad_word_ids=[[3, 4, 5], [6], [8, 8]],
    )
    paths = [(), (3,), (3, 4), (8,)]

    def banned() -> list[list[int]]:
        processed = pipeline.apply(torch.zeros(4, 9), paths)
        return [(row == -math.inf).nonzero()[:, 0].tolist() for row in processed]

    assert banned() == [[6], [6], [5, 6], [6, 8]]
    pipeline.advance([3, 4])
    assert banned() == [[5, 6], [6], [5, 6], [6, 8]]


def test_bad_words_are_forbidden_with_and_without_a_space():
    table = {"New York": [1, 2], " New York": [3, 2], "red": [4], " red": [5, 4], "a": [6]}
    table[" a"] = [7]

    def sequences(*words: str) -> set[tuple[int, ...]]:
        return set(bad_word_sequences(words, table.__getitem__))

    assert sequences("New York", " New York") == {(1, 2), (3, 2)}
    assert sequences("red") == {(4,)}  # " red" ends with it, so it is forbidden already
    assert sequences("a") == {(6,), (7,)}
    with pytest.raises(OptionError, match="no token at all"):
        bad_word_sequences(["x"], lambda text: [])
    assert BadWords([]).lookback == 0


def test_a_dead_end_ends_the_text():
    controls = SamplingParams(allowed_token_ids=(5, 6), temperature=1.0, min_tokens=3)
    pipeline = LogitsPipeline(
        controls, eos_ids=(EOS,), vocab_size=9, bad_word_ids=[[5, 5], [5, 6], [6, 6]]
    )
    law = pipeline.law(pipeline.apply(torch.zeros(3, 9), [(), (5,), (6,)]))
    assert law[0].nonzero()[:, 0].tolist() == [5, 6]
    assert law[1].nonzero()[:, 0].tolist() == [EOS]
    assert law[2].nonzero()[:, 0].tolist() == [5]
    endless = LogitsPipeline(
        SamplingParams(allowed_token_ids=(5,)), eos_ids=(), vocab_size=9, bad_word_ids=[[5, 5]]
    )
    with pytest.raises(OptionError, match="forbid every token"):
        endless.apply(torch.zeros(1, 9), [(5,)])


def test_impossible_masks_and_foreign_ids_are_refused():
    def build(words: Sequence[Sequence[int]] = (), **fields: Any) -> LogitsPipeline:
        return LogitsPipeline(
            SamplingParams(**fields), eos_ids=(EOS,), vocab_size=9, bad_word_ids=words
        )

    with pytest.raises(OptionError, match="no first token"):
        build(allowed_token_ids=(EOS,), min_tokens=1)
    with pytest.raises(OptionError, match="no first token"):
        build(allowed_token_ids=(4,), words=[[4]])
    for fields in (
        {"logit_bias": {9: 1.0}},
        {"allowed_token_ids": (9,)},
        {"stop_token_ids": (9,)},
    ):
        with pytest.raises(OptionError, match="token id 9; allowed: 0 to 8"):
            build(**fields)
    with pytest.raises(OptionError, match="bad_words has token id 9"):
        build(words=[[3, 9]])


def test_draft_rows_take_the_same_road_as_target_rows():
    controls = SamplingParams(
        temperature=0.9, frequency_penalty=1.5, min_p=0.1, logit_bias={2: 3.0}
    )
    pipeline = LogitsPipeline(controls, [1], eos_ids=(EOS,), vocab_size=7)
    pipeline.advance([4, 4])
    logits = torch.randn(1, 7)
    draft = pipeline.law(pipeline.apply(logits, [(2, 3)]))
    target = pipeline.law(pipeline.apply(logits.repeat(2, 1), [(), (2, 3)]))
    assert torch.equal(draft[0], target[1])


def test_more_columns_than_the_first_buffer_holds():
    controls = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    pipeline = LogitsPipeline(controls, range(40), eos_ids=(EOS,), vocab_size=400)
    pipeline.advance(list(range(30, 300)))
    pipeline.advance([299])
    processed = pipeline.apply(torch.ones(1, 400), [()])[0]
    assert processed[[0, 35, 299, 300]].tolist() == [0.5, -0.5, -1.5, 1.0]
