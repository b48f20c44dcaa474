"""DFlash against the formulas: rounds, rows, windows, copies of the target's parts, refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forespeak.drafters.base import TargetParts
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.sharing import OwnHead, SharedHead
from forespeak.engine.llm import LLM
from forespeak.engine.target import in_memory
from forespeak.errors import DrafterError, OptionError
from forespeak.formats.dflash import write
from forespeak.sampling import SamplingParams
from forespeak.types import SpeculationConfig
from tests.drafters.block_cases import TARGET, Case, H, V, block_config, random_tensors
from tests.tiny import random_tokens, tiny_config, tiny_decoder, tiny_int8

WINDOW: dict[str, Any] = {"layers__sliding_window": 6, "layers__sliding_layers": (True, False)}
CONFIGS: dict[str, dict[str, Any]] = {
    "fill-in": {},
    "next token": {"sample_from_anchor": True},
    "one layer, all heads": {"layers__num_layers": 1, "layers__num_kv_heads": 4},
    "biases": {"layers__attention_bias": True, "layers__output_bias": True},
    "embedding output": {"target_layer_ids": (-1, 1)},
    "only the embedding output": {"target_layer_ids": (-1,), "sample_from_anchor": True},
    "features in another order, one twice": {"target_layer_ids": (3, -1, 1, 1)},
    "windows": WINDOW,
    "tiny windows": {**WINDOW, "layers__sliding_window": 3},
    "anchored windows": {**WINDOW, "anchored_windows": True},
    "causal windows": {**WINDOW, "anchored_windows": True, "causal_windows": True},
    "draft vocabulary": {"draft_vocab_size": 50},
}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=0)


def expected_laws(case: Case, text: list[int], root: int) -> Tensor:
    """[D, Vd]"""
    return case.head(case.states(text, root)[case.first :])


@pytest.mark.parametrize("name", CONFIGS)
def test_rounds(name: str, tmp_path: Path, device: torch.device) -> None:
    """Rows of different lengths, some rows a call, prompts in pieces, rows that come and go."""
    model = tiny_decoder(TARGET, device=device)
    case = Case(tmp_path, block_config(**CONFIGS[name]), model=model)
    rng = random.Random(name)
    texts: dict[int, list[int]] = {}

    def observe(rows: list[int], counts: list[int]) -> None:
        made = []
        for row, count in zip(rows, counts, strict=True):
            tokens = [rng.randrange(V) for _ in range(count)]
            made.append(case.observation(row, tokens, len(texts[row])))
            texts[row] += tokens
        case.drafter.observe(made)

    checked = 0
    for number in range(12):
        for row in range(3):
            if row not in texts:
                case.drafter.admit(row)
                texts[row] = []
                observe([row], [rng.choice([1, 4, 11])])
        rows = sorted(rng.sample(range(3), rng.randint(1, 3)))
        roots = [rng.randrange(V) for _ in rows]
        depth = rng.choice([1, 3, 99])
        laws = case.drafter.propose(rows, roots, depth)
        assert laws.confidences is None and laws.logits.dtype == torch.float32
        for law, row, root in zip(laws.logits, rows, roots, strict=True):
            close(law, expected_laws(case, texts[row], root)[:depth])
            checked += 1
        observe(rows, [rng.randint(1, 5) for _ in rows])
        if number % 4 == 3:
            gone = rng.randrange(3)
            case.drafter.release(gone)
            del texts[gone]
    assert checked > 12 and max(len(text) for text in texts.values()) > 12


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    case = Case(tmp_path / "a", block_config(target_layer_ids=(-1, 0, 3)))
    info = case.drafter.info
    assert (info.max_depth, info.taps, info.expansion) == (4, (0, 3), "none")
    case = Case(tmp_path / "b", block_config(sample_from_anchor=True))
    assert case.drafter.info.max_depth == 5


def first_law(case: Case, tokens: list[int]) -> Tensor:
    case.drafter.admit(0)
    case.drafter.observe([case.observation(0, tokens[:-1], 0)])
    return case.drafter.propose([0], [tokens[-1]], 9).logits[0]


@pytest.mark.parametrize("vocabulary", [None, 50])
def test_copies_are_borrowed_and_others_kept(tmp_path: Path, vocabulary: int | None) -> None:
    model, config = tiny_decoder(TARGET), block_config(draft_vocab_size=vocabulary)
    head = model.head_rows(torch.arange(V))
    if vocabulary is not None:
        head = head[torch.arange(vocabulary) + random_tensors(config)["d2t"]]
    same = {"embed_tokens.weight": model.embed(torch.arange(V)), "lm_head.weight": head.bfloat16()}
    other = {name: torch.randn(tensor.shape) for name, tensor in same.items()}
    tokens = random_tokens(8)
    for name, copies, kind in (("a", same, SharedHead), ("b", other, OwnHead)):
        case = Case(tmp_path / name, config, copies=copies, model=model)
        assert case.drafter._embedding.is_shared == (kind is SharedHead)
        assert isinstance(case.drafter._head, kind)
        if kind is SharedHead:
            case.copies = {}
        close(first_law(case, tokens), expected_laws(case, tokens[:-1], tokens[-1]))


def test_a_copy_of_the_head_beside_an_int8_target(tmp_path: Path) -> None:
    copy = tiny_decoder(TARGET).head_rows(torch.arange(V))
    case = Case(tmp_path, block_config(), copies={"lm_head.weight": copy}, model=tiny_int8(TARGET))
    assert isinstance(case.drafter._head, SharedHead)


def test_dspark_checkpoints_draft_without_their_heads(tmp_path: Path) -> None:
    config = block_config(sample_from_anchor=True, markov_rank=6, confidence_head=True)
    case = Case(tmp_path, config)
    tokens = random_tokens(8)
    close(first_law(case, tokens), expected_laws(case, tokens[:-1], tokens[-1]))
    assert case.drafter.info.expansion == "none"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dflash", {}),
        ("dflash", {"builder": "ddtree", "node_budget": 7}),
        ("dflash", {"builder": "static_tree", "node_budget": 6, "tree_depth": 3}),
        ("ddtree", {"node_budget": 5}),
    ],
)
def test_texts_are_plain_decoding(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    """Up to the end of the context."""
    case = Case(tmp_path, block_config())
    target = in_memory(case.model)
    prompt = random_tokens(100)
    params = SamplingParams(max_new_tokens=99, ignore_eos=True)
    plain = LLM(target).generate(prompt, params)
    llm = LLM(target, method=method, drafter=str(tmp_path), **options)
    found = llm.generate(prompt, params)
    assert found.token_ids == plain.token_ids and len(found.token_ids) == 28
    assert found.stats.num_drafted > 0


def test_the_context_may_be_full(tmp_path: Path) -> None:
    """Positions of a block may lie beyond the last one of the context."""
    case = Case(tmp_path, block_config())
    tokens = random_tokens(TARGET.max_position_embeddings)
    close(first_law(case, tokens), expected_laws(case, tokens[:-1], tokens[-1]))


def open_for(folder: Path, target: Any) -> None:
    load_drafter(SpeculationConfig(method="dflash", drafter=str(folder)), TargetParts(target))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"num_layers": 4}, "5 layers; this one has 4"),
        ({"vocab_size": 90}, "vocabulary of 83"),
        ({"hidden_size": 48}, "hidden size 40"),
        ({"max_position_embeddings": 256}, "positions up to 128"),
    ],
)
def test_other_targets(tmp_path: Path, target: dict[str, Any], message: str) -> None:
    config = block_config()
    write(tmp_path, config, random_tensors(config))
    changed = {"num_layers": 5, "max_position_embeddings": 128, **target}
    with pytest.raises(DrafterError, match=message):
        open_for(tmp_path, tiny_decoder(tiny_config(**changed)))


def test_the_last_layer_is_not_read(tmp_path: Path) -> None:
    config = block_config(num_target_layers=None, target_layer_ids=(1, 4))
    write(tmp_path, config, random_tensors(config))
    with pytest.raises(DrafterError, match="up to 3 for a target of 5 layers"):
        open_for(tmp_path, tiny_decoder(TARGET))


@pytest.mark.parametrize("anchor", [False, True])
def test_more_draft_tokens_than_rows(tmp_path: Path, anchor: bool) -> None:
    config = block_config(sample_from_anchor=anchor)
    write(tmp_path, config, random_tensors(config))
    target = in_memory(tiny_decoder(TARGET))
    most = 5 if anchor else 4
    llm = LLM(target, method="dflash", drafter=str(tmp_path))
    assert llm.speculation.num_speculative_tokens == most
    with pytest.raises(OptionError, match=f"1 to {most}"):
        LLM(target, method="dflash", drafter=str(tmp_path), num_speculative_tokens=most + 1)


def test_damaged_weights(tmp_path: Path) -> None:
    config = block_config()
    tensors = random_tensors(config)
    tensors["fc.weight"][0, 0] = float("inf")
    write(tmp_path, config, tensors)
    with pytest.raises(Exception, match="not finite"):
        open_for(tmp_path, tiny_decoder(TARGET))


def test_config_for_small_targets() -> None:
    """A target of any depth gets a drafter that fits it."""
    for count in range(1, 9):
        target = replace(TARGET, num_layers=count)
        config = type(block_config()).for_target(target)
        config.check_target(target)
        assert config.layers.hidden_size == H
