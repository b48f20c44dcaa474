"""Medusa heads: the official runs, the formulas written out, rows, vocabularies, whole texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.drafters.base import TargetParts
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.medusa import MedusaDrafter, MedusaHeads, random_drafter
from forespeak.drafters.starting import spread_vocabulary
from forespeak.engine.llm import LLM
from forespeak.engine.target import load_target
from forespeak.errors import DrafterError, OptionError
from forespeak.formats.medusa import MedusaConfig, write
from forespeak.models.base import TargetModel
from forespeak.models.blocks import load_parameters
from forespeak.sampling import SamplingParams
from forespeak.spec.builders import TreeShape, build_static_tree
from forespeak.types import DenseLaws, Observation, SpeculationConfig
from tests.drafters import golden
from tests.engine.tiny_text import SIZE, characters, write_checkpoint
from tests.tiny import random_tokens, random_weights, run, tiny_config, tiny_decoder, tiny_int8

CONFIG = tiny_config(vocab_size=SIZE, eos_token_ids=(0,))
BUILDERS = ("chain", "ddtree", "static_tree")


def medusa(folder: Path | None) -> SpeculationConfig:
    return SpeculationConfig(method="medusa", drafter=None if folder is None else str(folder))


def opened(folder: Path, model: TargetModel) -> MedusaDrafter:
    drafter = load_drafter(medusa(folder), TargetParts(model))
    assert isinstance(drafter, MedusaDrafter)
    return drafter


def written(folder: Path, model: TargetModel, seed: int = 0, **changes) -> tuple[Path, dict]:
    """A drafter of random weights that are large enough to matter, with its tensors."""
    config = replace(MedusaConfig.for_target(model.config), num_heads=3, **changes)
    tensors = random_drafter(config, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if "blocks" in name:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * 0.3
    if config.draft_vocab_size is not None:
        tensors["d2t"] = spread_vocabulary(model.config.vocab_size, config.draft_vocab_size)
    write(folder, config, tensors)
    return folder, tensors


def laws(drafter: MedusaDrafter, rows: list[int], depth: int = 99) -> Tensor:
    found = drafter.propose(rows, [0] * len(rows), depth)
    assert isinstance(found, DenseLaws) and found.logits.dtype == torch.float32
    return found.logits


# --- the official code's runs --------------------------------------------------------------------


def open_case(case: golden.Case) -> tuple[MedusaDrafter, TargetParts]:
    parts = golden.target_of(case).parts
    drafter = load_drafter(medusa(golden.drafter_folder(case)), parts)
    assert isinstance(drafter, MedusaDrafter)
    drafter.admit(0)
    return drafter, parts


@pytest.mark.golden
@pytest.mark.parametrize("folder", golden.cases("medusa"))
def test_golden_head_logits(folder):
    case = golden.load(folder)
    drafter, parts = open_case(case)
    assert drafter.info.max_depth == case.facts["config"]["medusa_num_heads"]
    tokens = case.tensors["heads.input_ids"][0].tolist()
    for at in range(len(tokens)):
        drafter.release(0)
        drafter.admit(0)
        golden.observe(drafter, parts, tokens[: at + 1])
        expected = case.tensors["heads.medusa_logits"][:, at]
        torch.testing.assert_close(laws(drafter, [0])[0], expected, atol=1e-4, rtol=0)


@pytest.mark.golden
@pytest.mark.parametrize("folder", golden.cases("medusa"))
def test_golden_files_of_both_kinds(folder, tmp_path):
    """medusa_lm_head.pt, the release's own form, where the folder has the other one too."""
    case = golden.load(folder)
    both = golden.drafter_folder(case)
    for name in ("config.json", "medusa_lm_head.pt"):
        (tmp_path / name).write_bytes((both / name).read_bytes())
    parts = golden.target_of(case).parts
    found = []
    for place in (both, tmp_path):
        drafter = opened(place, parts.model)
        drafter.admit(0)
        golden.observe(drafter, parts, [3, 1, 4])
        found.append(laws(drafter, [0]))
    assert torch.equal(*found)


@pytest.mark.golden
@pytest.mark.parametrize("folder", golden.cases("medusa"))
def test_golden_tree_of_every_round(folder):
    case = golden.load(folder)
    shape = TreeShape(tuple(tuple(path) for path in case.facts["config"]["choices"]))
    for key in case.keys("gen", "round_tree_tokens"):
        drafter, parts = open_case(case)
        text = [*case.tensors[f"{key}.prompt_ids"][0].tolist(), *case.tensors[f"{key}.new_ids"]]
        tokens = [int(token) for token in text]
        at = case.tensors[f"{key}.prompt_ids"].shape[1]
        for length, expected in zip(
            case.tensors[f"{key}.accept_lengths"].tolist(),
            case.tensors[f"{key}.round_tree_tokens"].tolist(),
            strict=True,
        ):
            drafter.release(0)
            drafter.admit(0)
            golden.observe(drafter, parts, tokens[:at])
            found = drafter.propose([0], [tokens[at]], shape.depth)
            (tree,) = build_static_tree([tokens[at]], found, None, [0], shape=shape)
            assert list(tree.tokens) == expected
            at += length


@pytest.mark.golden
@pytest.mark.parametrize("folder", golden.cases("medusa"))
def test_golden_greedy_texts_round_by_round(folder, tmp_path):
    case = golden.load(folder)
    shape = tmp_path / "tree.json"
    shape.write_text(json.dumps(case.facts["config"]["choices"]))
    llm = LLM(
        golden.target_of(case), method="medusa", drafter=str(golden.drafter_folder(case)),
        builder="static_tree", tree_shape=str(shape),
    )  # fmt: skip
    keys = case.keys("gen", "new_ids")
    assert keys
    for key in keys:
        ids = case.tensors[f"{key}.new_ids"].tolist()
        lengths = case.tensors[f"{key}.accept_lengths"].tolist()
        # Room for one whole round more, so that no tree is cut at the end of the text.
        spoken = golden.write(llm, case.tensors[f"{key}.prompt_ids"][0].tolist(), len(ids) + 6)
        assert spoken.tokens[: len(ids)] == ids
        assert spoken.rounds[: len(lengths)] == lengths


# --- the formulas written out --------------------------------------------------------------------


def heads_by_hand(tensors: dict[str, Tensor], hidden: Tensor, target_head: Tensor) -> Tensor:
    """Paper, section 2.1.1, in float64: [..., H] to [..., K, V]."""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    laws = []
    for head in range(3):
        x = hidden.double()
        block = 0
        while f"heads.{head}.blocks.{block}.weight" in wide:
            inner = x @ wide[f"heads.{head}.blocks.{block}.weight"].T
            inner = inner + wide.get(f"heads.{head}.blocks.{block}.bias", torch.zeros(()))
            x = x + inner / (1 + torch.exp(-inner))
            block += 1
        own = wide.get(f"heads.{head}.output.weight", wide.get("output.weight"))
        laws.append(x @ (target_head.double() if own is None else own).T)
    return torch.stack(laws, dim=-2)


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("reduced", [None, 20])
@pytest.mark.parametrize(("num_blocks", "bias"), [(1, True), (2, False)])
def test_heads_are_the_formulas(tmp_path, device, output, reduced, num_blocks, bias):
    model = tiny_decoder(device=device)
    target_head = random_weights(model.config)["lm_head.weight"]
    folder, tensors = written(
        tmp_path, model, output=output, draft_vocab_size=reduced, num_blocks=num_blocks, bias=bias
    )
    drafter = opened(folder, model)
    drafter.admit(4)
    tokens = random_tokens(9)
    golden.observe(drafter, TargetParts(model), tokens, row=4)
    if reduced is not None:
        target_head = target_head[tensors["d2t"] + torch.arange(reduced)]
    hidden = run(model, tokens).hidden[-1].cpu()
    found = drafter.propose([4], [0], 99)
    torch.testing.assert_close(
        found.logits[0].cpu().double(), heads_by_hand(tensors, hidden, target_head),
        atol=1e-4, rtol=0,
    )  # fmt: skip
    if reduced is None:
        assert found.token_ids is None
    else:
        assert found.token_ids is not None
        assert torch.equal(found.token_ids.cpu(), tensors["d2t"] + torch.arange(reduced))


def test_a_shallow_round_runs_the_first_heads_only(tmp_path):
    model = tiny_decoder()
    for output in ("own", "target"):
        drafter = opened(written(tmp_path / output, model, output=output)[0], model)
        drafter.admit(0)
        golden.observe(drafter, TargetParts(model), [1, 2])
        whole = laws(drafter, [0])
        assert whole.shape == (1, 3, 83)
        torch.testing.assert_close(laws(drafter, [0], 2), whole[:, :2], atol=1e-5, rtol=0)


def test_only_the_newest_token_counts(tmp_path):
    """Chunks of a prompt, rows of other lengths beside it, rows that were used before."""
    model = tiny_decoder()
    drafter = opened(written(tmp_path, model)[0], model)
    texts = {0: random_tokens(12, 1), 3: random_tokens(5, 2), 1: random_tokens(1, 3)}
    alone = {}
    for row, text in texts.items():
        drafter.admit(row)
        golden.observe(drafter, TargetParts(model), text, row=row)
        alone[row] = laws(drafter, [row])[0]
        drafter.release(row)
    output = {row: run(model, text) for row, text in texts.items()}
    for row, text in texts.items():
        drafter.admit(row)
        for start in range(0, len(text), 4):
            part = slice(start, start + 4)
            drafter.observe([Observation(row, tuple(text[part]), output[row].hidden[part])])
    together = laws(drafter, [3, 0, 1])
    for at, row in enumerate([3, 0, 1]):
        torch.testing.assert_close(together[at], alone[row], atol=1e-5, rtol=0)


def test_the_heads_can_be_trained():
    config = replace(MedusaConfig.for_target(tiny_config()), num_heads=2, output="own")
    heads = MedusaHeads(config)
    assert all(bool(p.isnan().all()) for p in heads.parameters())
    load_parameters(heads, random_drafter(config, torch.Generator().manual_seed(0)), "here")
    states = heads(torch.randn(2, 5, config.hidden_size, generator=torch.Generator()))
    assert states.shape == (2, 5, 2, config.hidden_size)
    states.square().sum().backward()
    for name, parameter in heads.named_parameters():
        used = "blocks" in name  # the matrices are the loss's affair
        assert (parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)) == used, name


def test_heads_of_a_fresh_drafter_differ():
    config = MedusaConfig.for_target(tiny_config())
    heads = MedusaHeads(config)
    load_parameters(heads, random_drafter(config, torch.Generator().manual_seed(0)), "here")
    hidden = torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(1))
    states = heads(hidden).detach()
    for a in range(config.num_heads):
        for b in range(a):
            assert float((states[a] - states[b]).abs().max()) > 1e-3


# --- texts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("medusa")
    return write_checkpoint(root / "target", CONFIG, characters())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("changes", [{}, {"output": "own", "draft_vocab_size": 12}])
def test_texts_equal_plain_decoding(target_folder, tmp_path, dtype, changes):
    target = load_target(str(target_folder), dtype=dtype, device="cpu", threads=1)
    folder, _ = written(tmp_path, target.model, **changes)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    plain = LLM(target).generate("abcab", params)
    for builder in BUILDERS:
        llm = LLM(target, method="medusa", drafter=str(folder), builder=builder)
        spoken = llm.generate("abcab", params)
        assert spoken.token_ids == plain.token_ids, builder
        assert spoken.stats.num_drafted > 0


@pytest.mark.parametrize("rule", [None, "typical"])
def test_sampled_texts(target_folder, tmp_path, rule):
    target = load_target(str(target_folder), dtype="float32", device="cpu")
    folder, _ = written(tmp_path, target.model)
    llm = LLM(target, method="medusa", drafter=str(folder), rule=rule)
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    assert llm.generate("abc", params).token_ids == llm.generate("abc", params).token_ids
    if rule is None:
        drawn = LLM(
            target, method="medusa", drafter=str(folder), draft_sampling="probabilistic"
        ).generate("abc", params)
        assert len(drawn.token_ids) == 12


def test_a_target_that_carries_its_heads(target_folder, tmp_path):
    """A Medusa-2 model: no drafter is named, and the target loads as if there were no heads."""
    from safetensors.torch import load_file, save_file

    plain = load_target(str(target_folder), dtype="float32", device="cpu")
    _, tensors = written(tmp_path / "alone", plain.model, output="own")
    joint = write_checkpoint(tmp_path / "joint", CONFIG, characters())
    heads = {}
    for name, tensor in tensors.items():
        _, head, part, *rest = name.split(".")
        inner = "1.weight" if part == "output" else f"{rest[0]}.linear.{rest[1]}"
        heads[f"medusa_head.{head}.{inner}"] = tensor
    save_file(load_file(joint / "model.safetensors") | heads, joint / "model.safetensors")
    values = json.loads((joint / "config.json").read_text())
    extra = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    (joint / "config.json").write_text(json.dumps(values | extra))
    target = load_target(str(joint), dtype="float32", device="cpu")
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    carried = LLM(target, method="medusa").generate("abc", params)
    alone = LLM(plain, method="medusa", drafter=str(tmp_path / "alone")).generate("abc", params)
    assert carried.token_ids == LLM(plain).generate("abc", params).token_ids
    assert carried.stats.round_lengths == alone.stats.round_lengths


# --- refusals ------------------------------------------------------------------------------------


def test_a_target_that_carries_no_heads(target_folder):
    target = load_target(str(target_folder), dtype="float32", device="cpu")
    with pytest.raises(DrafterError, match="carries none of its modules; name a folder"):
        LLM(target, method="medusa")
    with pytest.raises(DrafterError, match="comes from no folder"):
        load_drafter(medusa(None), TargetParts(tiny_decoder()))


def test_heads_of_another_target(tmp_path):
    folder, _ = written(tmp_path, tiny_decoder())
    with pytest.raises(DrafterError, match="for a target of hidden size 40; this one has 48"):
        opened(folder, tiny_decoder(tiny_config(hidden_size=48)))
    with pytest.raises(DrafterError, match="for a vocabulary of 83 tokens; this target has 90"):
        opened(folder, tiny_decoder(tiny_config(vocab_size=90)))


def test_more_tokens_than_heads(target_folder, tmp_path):
    target = load_target(str(target_folder), dtype="float32", device="cpu")
    folder, _ = written(tmp_path, target.model)
    with pytest.raises(OptionError, match="num_speculative_tokens is 4; allowed: 1 to 3"):
        LLM(target, method="medusa", drafter=str(folder), num_speculative_tokens=4)


def test_beside_an_int8_target_the_heads_run_in_float32(tmp_path):
    model = tiny_int8()
    drafter = opened(written(tmp_path, model)[0], model)
    drafter.admit(0)
    golden.observe(drafter, TargetParts(model), [1, 2, 3])
    assert bool(laws(drafter, [0]).isfinite().all())
