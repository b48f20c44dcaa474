"""Chained modules with layers of ours: every law against the formulas, and whole texts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forespeak.drafters.base import TargetParts
from forespeak.drafters.feature_chain import FeatureChain
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.mtp import MtpModules, random_drafter
from forespeak.engine.llm import LLM
from forespeak.engine.target import in_memory, load_target
from forespeak.errors import DrafterError, OptionError
from forespeak.formats.layer_fields import layer_fields
from forespeak.formats.mtp import write
from forespeak.formats.mtp_config import MtpConfig
from forespeak.models.base import TargetModel
from forespeak.models.blocks import load_parameters
from forespeak.sampling import SamplingParams
from forespeak.types import SpeculationConfig
from tests.drafters.feature_rounds import FeatureRounds
from tests.drafters.mtp_cases import (
    LAYOUTS,
    MIMO,
    NEXTN,
    QWEN,
    SPECULATORS,
    Formulas,
    Layout,
    config_of,
    plain_block,
    random_modules,
    write_folder,
)
from tests.tiny import random_tokens, random_weights, tiny_config, tiny_decoder, tiny_int8

pytestmark = pytest.mark.slow

V = 83
BUILDERS = ("chain", "dynamic_tree", "static_tree")
CASES = [
    (MIMO, "qwen2", "mimo", 1),
    (MIMO, "llama", "llama", 2),
    (MIMO, "qwen3", "qwen3", 3),
    (NEXTN, "llama", "llama", 1),
    (NEXTN, "qwen3", "qwen3", 2),
    (QWEN, "qwen3", "qwen3", 1),
    (QWEN, "llama", "llama", 2),
    (SPECULATORS, "qwen3", "qwen3", 1),
]


def opened(
    folder: Path | None, model: TargetModel, rows: int = 1, state: str | None = None
) -> FeatureChain:
    asked = SpeculationConfig(
        method="mtp", drafter=None if folder is None else str(folder), recursion_state=state
    )
    drafter = load_drafter(asked, TargetParts(model), num_rows=rows)
    assert isinstance(drafter, FeatureChain)
    return drafter


def formulas(layout: Layout, tensors: dict[str, Tensor], count: int, **changes: bool) -> Formulas:
    weights = random_weights(tiny_config())
    blocks = [plain_block(layout, tensors, module) for module in range(count)]
    conventions = {"normed": layout.normed, "zeros": layout.zeros} | changes
    return Formulas(
        layout, tensors, weights["model.embed_tokens.weight"], weights["lm_head.weight"], blocks,
        **conventions,
    )  # fmt: skip


def made(
    folder: Path, layout: Layout, family: str, model_type: str, count: int
) -> tuple[Path, Formulas]:
    tensors = random_modules(layout, family, count)
    write_folder(folder, config_of(layout, family, count, model_type), tensors)
    return folder, formulas(layout, tensors, count)


# --- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "family", "model_type", "count"), CASES)
def test_laws_are_the_formulas(tmp_path, layout, family, model_type, count):
    """Trees, several rounds, rows that come and go, from the first token on."""
    folder, judge = made(tmp_path, layout, family, model_type, count)
    drafter = opened(folder, tiny_decoder(), rows=3)
    rounds = FeatureRounds(drafter, judge.observe, random.Random(count), V)
    rounds.start(0, 1)
    rounds.start(2, 6)
    for _ in range(3):
        rounds.round(depth=4, width=2)
    rounds.stop(0)
    rounds.start(0, 3)
    rounds.round(depth=2, width=1)
    judge.check(rounds.laws)


@pytest.mark.parametrize("layout", [MIMO, NEXTN])
@pytest.mark.parametrize("state", ["normed", "raw"])
def test_what_is_handed_on_can_be_chosen(tmp_path, layout, state):
    folder, judge = made(tmp_path, layout, "llama", "llama", 2)
    judge.normed = state == "normed"
    drafter = opened(folder, tiny_decoder(), state=state)
    rounds = FeatureRounds(drafter, judge.observe, random.Random(1), V)
    rounds.start(0, 4)
    rounds.round(depth=3, width=1)
    judge.check(rounds.laws)


@pytest.mark.parametrize("layout", [MIMO, QWEN])
def test_fields_of_ours_change_the_conventions(tmp_path, layout):
    folder, judge = made(tmp_path, layout, "llama", "llama", 1)
    values = json.loads((folder / "config.json").read_text())
    values["mtp_zero_first_embedding"] = judge.zeros = not layout.zeros
    values["mtp_recursion_state"] = "raw"
    judge.normed = False
    (folder / "config.json").write_text(json.dumps(values))
    rounds = FeatureRounds(opened(folder, tiny_decoder()), judge.observe, random.Random(2), V)
    rounds.start(0, 3)
    rounds.round(depth=3, width=2)
    judge.check(rounds.laws)


def test_prompts_in_chunks(tmp_path, device):
    folder, judge = made(tmp_path, MIMO, "qwen2", "mimo", 2)
    drafter = opened(folder, tiny_decoder(device=device))
    rounds = FeatureRounds(drafter, judge.observe, random.Random(3), V, chunk=3)
    rounds.start(0, 10)
    rounds.round(depth=2, width=2)
    rounds.round(depth=2, width=2)
    judge.check(rounds.laws)


def test_windows_count_positions(tmp_path):
    """Layers that see 7 positions, in texts that are longer."""
    folder, judge = made(tmp_path, MIMO, "mistral", "mistral", 2)
    judge.blocks = [plain_block(MIMO, dict(judge.tensors), m, window=7) for m in range(2)]
    rounds = FeatureRounds(opened(folder, tiny_decoder()), judge.observe, random.Random(6), V)
    rounds.start(0, 12)
    for _ in range(3):
        rounds.round(depth=4, width=2)
    judge.check(rounds.laws)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_part_of_the_vocabulary(tmp_path, name):
    layout, ids = LAYOUTS[name], torch.arange(20) * 4 + 1
    tensors = random_modules(layout, "qwen3")
    judge = formulas(layout, tensors, 1)
    tensors |= {"d2t": ids - torch.arange(20), "t2d": torch.isin(torch.arange(V), ids)}
    write_folder(tmp_path, config_of(layout, "qwen3", 1) | {"draft_vocab_size": 20}, tensors)
    drafter = opened(tmp_path, tiny_decoder())
    rounds = FeatureRounds(drafter, judge.observe, random.Random(4), V)
    rounds.start(0, 4)
    rounds.round(depth=2, width=2)
    judge.check(rounds.laws, ids)
    found = drafter.propose([0], [3], 1)
    assert found.token_ids is not None and torch.equal(found.token_ids, ids)


def test_copies_of_the_target_are_shared_and_others_are_used(tmp_path):
    layout, target = NEXTN, random_weights(tiny_config())
    other = random_weights(tiny_config(), seed=9)
    for seed, weights in enumerate([target, other]):
        tensors = random_modules(layout)
        judge = formulas(layout, tensors, 1)
        judge.embedding = weights["model.embed_tokens.weight"]
        judge.head = weights["lm_head.weight"]
        tensors["model.layers.3.embed_tokens.weight"] = judge.embedding
        tensors["model.layers.3.shared_head.head.weight"] = judge.head
        folder = write_folder(tmp_path / str(seed), config_of(layout, "llama", 1), tensors)
        rounds = FeatureRounds(opened(folder, tiny_decoder()), judge.observe, random.Random(5), V)
        rounds.start(0, 4)
        rounds.round(depth=2, width=2)
        judge.check(rounds.laws)


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"num_modules": 2, "recursion_state": "raw"}])
def test_the_modules_can_be_trained(changes):
    config = replace(MtpConfig.for_target(tiny_config("qwen2")), **changes)
    modules = MtpModules(config)
    assert all(bool(p.isnan().all()) for p in modules.parameters())
    load_parameters(modules, random_drafter(config, torch.Generator().manual_seed(0)), "here")
    assert config.layer is not None
    size, dim = config.hidden_size, config.layer.head_dim
    angles = torch.arange(5)[:, None] * torch.rand(dim // 2)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))  # [B, heads, T, D]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(-2, -3).flatten(-2)

    states = torch.randn(3, 5, size)
    for number in range(config.num_modules):
        embedded = torch.randn(3, 5, size)
        rotation = (angles.cos(), angles.sin())
        outputs = modules.module(number)(embedded, states, rotation, attend)
        assert outputs.shape == (3, 5, size)
        states = modules.hand_on(outputs, number)
    loss: Any = modules.finish(outputs, number).square().sum()
    loss.backward()
    for name, parameter in modules.named_parameters():
        # The norm of an inner module is passed by when raw states are handed on.
        passed_by = name == "layers.0.final_layernorm.weight" and len(changes) > 0
        assert (parameter.grad is not None) != passed_by, name


# --- texts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafters(tmp_path_factory) -> dict[str, Path]:
    """Modules for the tiny target: one, and two over a part of the vocabulary."""
    root = tmp_path_factory.mktemp("mtp")
    one = MtpConfig.for_target(tiny_config())
    two = replace(one, num_modules=2, draft_vocab_size=30)
    for name, config in {"one": one, "two": two}.items():
        tensors = random_drafter(config, torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(2)
        for key, tensor in tensors.items():
            if "proj" in key:
                tensors[key] = torch.randn(tensor.shape, generator=generator) * 0.2
        write(root / name, config, tensors)
    return {name: root / name for name in ("one", "two")}


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("make", [tiny_decoder, tiny_int8])
def test_texts_equal_plain_decoding(drafters, name, make):
    target = in_memory(make())
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompt = random_tokens(6, 3)
    plain = LLM(target).generate(prompt, params)
    for builder in BUILDERS:
        llm = LLM(target, method="mtp", drafter=str(drafters[name]), builder=builder)
        spoken = llm.generate(prompt, params)
        assert spoken.token_ids == plain.token_ids, builder
        assert spoken.stats.num_drafted > 0


def test_sampled_texts_and_deep_chains(drafters):
    target = in_memory(tiny_decoder())
    llm = LLM(
        target, method="mtp", drafter=str(drafters["two"]), num_speculative_tokens=7,
        draft_sampling="probabilistic",
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=4, ignore_eos=True)
    first = llm.generate([5, 6], params)
    assert first.token_ids == llm.generate([5, 6], params).token_ids and len(first.token_ids) == 20


@pytest.mark.parametrize("family", ["mimo", "llama"])
def test_a_target_that_carries_its_modules(tmp_path, family):
    """No drafter is named; the target loads as if there were no modules, and so does its text."""
    inner = "qwen2" if family == "mimo" else family
    layout = MIMO if family == "mimo" else NEXTN
    config = replace(tiny_config(inner), model_type=family)
    weights, modules = random_weights(config), random_modules(layout, inner)
    values = layer_fields(config) | {"num_nextn_predict_layers": 1}
    write_folder(tmp_path / "target", values, weights | modules)
    write_folder(tmp_path / "alone", values, modules)
    target = load_target(str(tmp_path / "target"), dtype="float32", device="cpu")
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    plain = LLM(target).generate([4, 5, 6], params)
    carried = LLM(target, method="mtp").generate([4, 5, 6], params)
    alone = LLM(target, method="mtp", drafter=str(tmp_path / "alone")).generate([4, 5, 6], params)
    assert plain.token_ids == carried.token_ids == alone.token_ids
    assert carried.stats.round_lengths == alone.stats.round_lengths


def test_a_long_text_to_the_end_of_the_context(tmp_path):
    config = tiny_config(max_position_embeddings=40)
    drafter = MtpConfig.for_target(config)
    write(tmp_path, drafter, random_drafter(drafter, torch.Generator().manual_seed(0)))
    target = in_memory(tiny_decoder(config))
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    spoken = LLM(target, method="mtp", drafter=str(tmp_path)).generate([1, 2, 3], params)
    assert spoken.token_ids == LLM(target).generate([1, 2, 3], params).token_ids
    assert len(spoken.token_ids) == 37


# --- refusals ------------------------------------------------------------------------------------


def test_modules_of_another_target(tmp_path):
    folder, _ = made(tmp_path, MIMO, "llama", "llama", 1)
    with pytest.raises(DrafterError, match="hidden size 40; this one has 48"):
        opened(folder, tiny_decoder(tiny_config(hidden_size=48)))
    with pytest.raises(DrafterError, match="vocabulary of 83"):
        opened(folder, tiny_decoder(tiny_config(vocab_size=90)))
    with pytest.raises(DrafterError, match="comes from no folder"):
        opened(None, tiny_decoder())


def test_copies_that_differ_between_modules(tmp_path):
    tensors = random_modules(NEXTN, count=2)
    for layer in (3, 4):
        name = f"model.layers.{layer}.embed_tokens.weight"
        tensors[name] = torch.full((V, 40), float(layer))
    write_folder(tmp_path, config_of(NEXTN, "llama", 2), tensors)
    with pytest.raises(DrafterError, match="different embed_tokens"):
        opened(tmp_path, tiny_decoder())


def test_an_unknown_recursion_state(drafters):
    with pytest.raises(OptionError, match="normed, raw"):
        LLM(
            in_memory(tiny_decoder()), method="mtp", drafter=str(drafters["one"]),
            recursion_state="cooked",
        )  # fmt: skip
