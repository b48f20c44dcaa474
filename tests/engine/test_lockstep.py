"""Lockstep: the texts of one alone, with everything that decides on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forespeak.engine.batch import BatchText
from forespeak.engine.llm import LLM
from forespeak.engine.lockstep import LockstepDecoding, is_plain
from forespeak.engine.settings import choose_rules, resolve
from forespeak.engine.target import in_memory
from forespeak.engine.text import TextState, Vocabulary
from forespeak.models.decoder import Decoder
from forespeak.models.dense_rows import DenseRows
from forespeak.sampling import SamplingParams
from forespeak.types import Segment, SpeculationConfig
from tests.tiny import FAMILIES, ROPES, random_tokens, tiny_config, tiny_decoder

pytestmark = pytest.mark.slow

CONFIG = tiny_config(max_position_embeddings=256, eos_token_ids=(2, 5))
PROMPTS = [tuple(random_tokens(count, count)) for count in (1, 40, 7, 19, 3, 70, 2, 11, 1, 64)]
PARAMS = [
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=60, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=14, temperature=0.7, seed=4),
    SamplingParams(max_new_tokens=50, temperature=1.3, seed=9, ignore_eos=True),
    SamplingParams(max_new_tokens=40, temperature=1.0, seed=5, stop_token_ids=(7, 11, 13, 17)),
    SamplingParams(max_new_tokens=5, ignore_eos=True),
    SamplingParams(max_new_tokens=64, temperature=0.01, seed=1),
    SamplingParams(max_new_tokens=1, temperature=1.0, seed=2),
]


def entry(model: Decoder, prompt: tuple[int, ...], params: SamplingParams) -> BatchText:
    vocabulary = Vocabulary(model.config.vocab_size, model.config.eos_token_ids)
    rules = choose_rules(resolve(SpeculationConfig()), params.temperature)
    return BatchText(prompt, TextState(params, prompt, vocabulary), rules)


MODELS = [(family, "default") for family in FAMILIES] + [("llama", rope) for rope in ROPES]


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("check_every", [1, 8])
@pytest.mark.parametrize(("family", "rope"), MODELS)
def test_texts_are_those_of_one_alone(
    family: str, rope: str, num_rows: int, check_every: int, device: torch.device
) -> None:
    config = replace(
        tiny_config(family, rope, **FAMILIES[family]), max_position_embeddings=256,
        eos_token_ids=(2, 5),
    )  # fmt: skip
    model = tiny_decoder(config, device=device)
    llm = LLM(in_memory(model))
    entries = [entry(model, *pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
    lockstep = LockstepDecoding(model, num_rows=num_rows, check_every=check_every)
    ended = list(lockstep.run(entries))
    assert sorted(map(id, ended)) == sorted(map(id, entries)) and lockstep.num_unfinished == 0
    for one, prompt, params in zip(entries, PROMPTS, PARAMS, strict=True):
        alone = llm.generate(list(prompt), params)
        assert tuple(one.text.token_ids) == alone.token_ids
        assert one.text.end is not None and one.text.end.finish_reason == alone.finish_reason
        assert one.text.end.stop_reason == alone.stop_reason


def test_texts_submitted_on_the_way(device: torch.device) -> None:
    """As when a dialogue goes on: each text that ends brings one that continues it."""
    model = tiny_decoder(CONFIG, device=device)
    lockstep = LockstepDecoding(model, num_rows=2)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    first = [entry(model, prompt, params) for prompt in PROMPTS[:3]]
    ended, turns = [], 0
    for one in lockstep.run(first):
        ended.append(one)
        if turns < 4:
            turns += 1
            lockstep.submit(entry(model, (*one.prompt_ids, *one.text.token_ids), params))
    assert len(ended) == 7
    llm = LLM(in_memory(model))
    for one in ended:
        assert tuple(one.text.token_ids) == llm.generate(list(one.prompt_ids), params).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_see_what_the_engines_forward_sees(family: str, device: torch.device) -> None:
    model = tiny_decoder(tiny_config(family, **FAMILIES[family]), device=device)
    prompts = [random_tokens(count, count) for count in (5, 1, 90)]
    rows = DenseRows(model, 4)
    rows.reserve(100)
    rows.prefill([2, 0, 3], prompts)
    assert rows.lengths.tolist() == [1, 0, 5, 90]
    tokens = torch.tensor([3, 0, 4, 5], device=device)
    states = rows.step(tokens, 90)
    for row, prompt in zip([2, 0, 3], prompts, strict=True):
        text = [*prompt, int(tokens[row])]
        cache = model.new_cache(1, len(text))
        output = model.forward(
            torch.tensor(text), torch.arange(len(text)), cache, [Segment(0, len(text))]
        )
        torch.testing.assert_close(states[row], output.hidden[-1], rtol=1e-4, atol=1e-5)


def test_the_law_at_a_temperature(device: torch.device) -> None:
    """20,000 first tokens against the model's own law."""
    model = tiny_decoder(CONFIG, device=device)
    prompt, count = tuple(random_tokens(4, 4)), 20_000
    params = [SamplingParams(max_new_tokens=1, temperature=0.9, seed=n) for n in range(count)]
    lockstep = LockstepDecoding(model, num_rows=2000)
    ended = list(lockstep.run(entry(model, prompt, one) for one in params))
    counts = torch.zeros(CONFIG.vocab_size, dtype=torch.float64)
    for one in ended:
        counts[one.text.token_ids[0]] += 1
    cache = model.new_cache(1, 8)
    output = model.forward(torch.tensor(prompt), torch.arange(4), cache, [Segment(0, 4)])
    law = (output.logits[-1].double().cpu() / 0.9).softmax(0)
    square = float(((counts - count * law) ** 2 / (count * law)).sum())
    # Chi-square with 82 degrees of freedom: its 99.99 % point is 137.
    assert int(counts.sum()) == count and square < 137


@pytest.mark.parametrize(
    "change",
    [{"top_k": 3}, {"top_p": 0.9}, {"repetition_penalty": 1.1}, {"logprobs": 1}, {"min_tokens": 2},
     {"stop": ("a",)}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": (1,)},
     {"json_object": True}],
)  # fmt: skip
def test_controls_are_not_its_business(change) -> None:
    assert is_plain(SamplingParams(max_new_tokens=3, temperature=0.5, seed=1, stop_token_ids=(1,)))
    assert not is_plain(SamplingParams(**change))
