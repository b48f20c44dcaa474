"""Layouts of prediction modules: each read as its writer means it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forespeak.drafters.inspecting import inspect_drafter
from forespeak.drafters.mtp import random_drafter
from forespeak.drafters.starting import start_drafter
from forespeak.errors import CheckpointError, DrafterError, OptionError
from forespeak.formats.drafters import read_drafter
from forespeak.formats.layer_fields import layer_fields
from forespeak.formats.mtp import write
from forespeak.formats.mtp_config import MtpConfig, tensor_shapes
from tests.drafters.mtp_cases import (
    LAYOUTS,
    MIMO,
    NEXTN,
    QWEN,
    SPECULATORS,
    config_of,
    random_modules,
    write_folder,
)
from tests.tiny import random_weights, tiny_config

FAMILY = ["forespeak.formats.mtp"]


def folder_of(folder: Path, name: str, count: int = 1, **changes: Any) -> Path:
    layout = LAYOUTS[name]
    values = config_of(layout, "qwen3", count) | changes
    return write_folder(folder, values, random_modules(layout, "qwen3", count))


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(tmp_path, name, count):
    layout = LAYOUTS[name]
    found = read_drafter(folder_of(tmp_path, name, count))
    config = found.config
    assert (found.method, found.dialect) == ("mtp", name)
    assert config.num_modules == count and config.layer is not None
    assert config.hidden_first == layout.state_first
    assert config.recursion_state == ("normed" if layout.normed else "raw")
    assert config.zero_first_embedding == layout.zeros
    assert config.layer.qk_norm and config.layer.num_layers == 1
    assert config.max_positions == 512 and config.context_values == count * 2 * 2 * 16
    stored = random_modules(layout, "qwen3", count)
    tensors = found.tensors()
    assert tensors.keys() == tensor_shapes(config).keys()
    last = f"layers.{count - 1}."
    parts = {
        "token_layernorm": layout.embed_norm, "hidden_layernorm": layout.state_norm,
        "input_proj": layout.joint, "final_layernorm": layout.last_norm,
        "block.mlp.up_proj": layout.block + "mlp.up_proj.weight",
    }  # fmt: skip
    for part, template in parts.items():
        assert torch.equal(
            tensors[f"{last}{part}.weight"], stored[layout.place(template, count - 1)]
        )


@pytest.mark.parametrize("name", ["mimo", "nextn", "qwen"])
def test_in_a_whole_models_folder_only_the_modules_are_read(tmp_path, name):
    layout, config = LAYOUTS[name], tiny_config("qwen3")
    values = layer_fields(config) | {"num_nextn_predict_layers": 1}
    modules = random_modules(layout, "qwen3")
    write_folder(tmp_path, values, random_weights(config) | modules)
    found = read_drafter(tmp_path, modules=FAMILY)
    assert set(found.names.values()) == set(modules)


def test_a_composite_models_language_part(tmp_path):
    values = layer_fields(tiny_config("qwen3"))
    outer = {"model_type": "vision_and_text", "text_config": values | {"mtp_num_hidden_layers": 1}}
    write_folder(tmp_path, outer, random_modules(QWEN, "qwen3"))
    assert read_drafter(tmp_path).config.model_type == "qwen3"


def test_what_speculators_leaves_out_is_the_class_default(tmp_path):
    values = config_of(SPECULATORS, "qwen3", 1)
    inner = values["transformer_layer_config"]
    del inner["rms_norm_eps"], inner["num_key_value_heads"], inner["max_position_embeddings"]
    inner["num_attention_heads"] = 32
    with pytest.raises(CheckpointError, match=r"q_proj.weight of shape \[64, 40\]"):
        read_drafter(write_folder(tmp_path, values, random_modules(SPECULATORS, "qwen3")))


def test_notes_and_facts(tmp_path):
    one, two = folder_of(tmp_path / "1", "nextn"), folder_of(tmp_path / "2", "mimo", 2)
    first, second = inspect_drafter(str(one)), inspect_drafter(str(two))
    assert not first.problems and not second.problems
    assert "again and again" in first.notes[0] and "recursion_state" in first.notes[1]
    assert len(second.notes) == 1 and "2 modules" in second.notes[0]
    assert first.facts["handed on"] == "the raw state"
    assert second.facts["joined"] == "[state, embedding]"
    assert "draft vocabulary" not in first.facts


# --- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_written_again_in_mimos_names(tmp_path, name):
    """The halves of the joint change places where the other layout has them the other way."""
    found = read_drafter(folder_of(tmp_path / "first", name, 2))
    write(tmp_path / "second", found.config, found.tensors())
    again = read_drafter(tmp_path / "second")
    assert again.dialect == "mimo"
    assert again.config == replace(found.config, hidden_first=True)
    tensors = again.tensors()
    for key, tensor in found.tensors().items():
        if key.endswith("input_proj.weight") and not found.config.hidden_first:
            tensor = torch.cat([tensor[:, 40:], tensor[:, :40]], dim=1)
        assert torch.equal(tensors[key], tensor), key


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_fresh_drafter(tmp_path, family):
    target = tiny_config(family)
    changes = {"num_modules": "2", "draft_vocab_size": "20", "layer.intermediate_size": "48"}
    found = start_drafter("mtp", target, tmp_path / "d", changes=changes, seed=3)
    assert found.config.num_modules == 2 and found.config.layer.intermediate_size == 48
    assert found.config.layer.sliding_window == target.sliding_window
    assert found.tensors()["d2t"].shape == (20,)
    for name, tensor in found.tensors().items():
        assert bool(torch.isfinite(tensor).all()), name


def test_a_layer_of_a_mixed_model_has_no_window():
    mixed = tiny_config("qwen2", sliding_window=9, sliding_layers=(True, False, True))
    layer = MtpConfig.for_target(mixed).layer
    assert layer is not None and layer.sliding_window is None and layer.num_layers == 1


def test_random_tensors_follow_the_generator():
    config = MtpConfig.for_target(tiny_config())
    first, again, other = (
        random_drafter(config, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    name = "layers.0.input_proj.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mimo", {"num_nextn_predict_layers": 2}, "holds 1 prediction modules .* says 2"),
        ("mimo", {"num_nextn_predict_layers": 0}, "holds 1 prediction modules .* says 0"),
        ("mimo", {"model_type": None}, "model_type is None"),
        ("mimo", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mimo", {"mtp_recursion_state": "cooked"}, "normed or raw"),
        ("mimo", {"mtp_zero_first_embedding": 3}, "true or false"),
        ("mimo", {"draft_vocab_size": 20}, "lacks the tensor d2t"),
        ("mimo", {"intermediate_size": 73}, r"by its config it is \[73, 40\]"),
        ("qwen", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is on"),
        ("speculators mtp", {"num_centroids": 64}, "has a field num_centroids"),
        ("speculators mtp", {"transformer_layer_config": 3}, "transformer_layer_config is 3"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be(tmp_path, name, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_drafter(folder_of(tmp_path, name, **changes), modules=FAMILY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"self_attn.o_proj.weight": None}, "lacks the tensor"),
        ({"token_layernorm.bias": torch.zeros(40)}, "has a tensor"),
        ({"self_attn.q_proj.weight": torch.zeros(128, 40)}, "gated queries"),
        ({"mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}, "mixture of experts"),
        ({"mlp.up_proj.weight_scale_inv": torch.zeros(1)}, "quantised .* Dequantise"),
        ({"mlp.up_proj.weight": torch.zeros((72, 40), dtype=torch.float8_e4m3fn)}, "quantised"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be(tmp_path, change, message):
    tensors = random_modules(MIMO, "qwen3")
    for name, tensor in change.items():
        tensors.pop(f"model.mtp_layers.0.{name}", None)
        if tensor is not None:
            tensors[f"model.mtp_layers.0.{name}"] = tensor
    write_folder(tmp_path, config_of(MIMO, "qwen3", 1), tensors)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(tmp_path, modules=FAMILY)


def test_a_gap_in_the_modules(tmp_path):
    tensors = random_modules(MIMO, "qwen3", 3)
    kept = {n: t for n, t in tensors.items() if ".1." not in n}
    write_folder(tmp_path, config_of(MIMO, "qwen3", 2), kept)
    with pytest.raises(CheckpointError, match="lacks number 1"):
        read_drafter(tmp_path, modules=FAMILY)


def test_targets_and_configs_that_do_not_fit():
    gemma = replace(tiny_config(), model_type="gemma3_text")
    with pytest.raises(OptionError, match="runs through transformers; allowed targets: llama"):
        MtpConfig.for_target(gemma)
    config = MtpConfig.for_target(tiny_config())
    with pytest.raises(OptionError, match="num_modules is 0"):
        replace(config, num_modules=0)
    with pytest.raises(OptionError, match="normed, raw"):
        replace(config, recursion_state="x")
    with pytest.raises(OptionError, match="hidden size 40; it is one layer of 41"):
        replace(config, hidden_size=41)
    family = replace(config, layer=None, model_type="deepseek_v3")
    with pytest.raises(DrafterError, match="this target is a llama model"):
        family.check_target(tiny_config())


def test_layers_of_transformers_are_not_written(tmp_path):
    config = replace(MtpConfig.for_target(tiny_config()), layer=None, model_type="glm4_moe")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path, config, {})


def test_fields_are_plain_json(tmp_path):
    write(tmp_path, config := MtpConfig.for_target(tiny_config()), random_drafter(
        config, torch.Generator().manual_seed(0)
    ))  # fmt: skip
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["num_nextn_predict_layers"] == 1 and values["architectures"] == ["MiMoMTPModel"]
    assert NEXTN.first == 3  # the tiny targets' layers, which the names of nextn count from
