"""Layouts of EAGLE-3 drafters, written as their own programs write them and read back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.formats import eagle3
from forespeak.formats.drafters import read_drafter
from forespeak.formats.eagle3_config import Eagle3Config
from tests.formats.eagle_files import (
    BASE,
    IDS,
    T2D,
    TARGET,
    VD,
    D,
    H,
    V,
    but,
    numbers,
    official_eagle3,
    put,
    random,
    refused,
    same,
    small,
)

# --- EAGLE-3: the official layout, and SGLang's --------------------------------------------------

OFFICIAL = {**BASE, "draft_vocab_size": VD}


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_the_official_layout_of_eagle3(tmp_path, prefix):
    tensors = official_eagle3(prefix)
    read = read_drafter(put(tmp_path, OFFICIAL, tensors))
    assert (read.method, read.dialect, read.notes) == ("eagle3", "eagle3", ())
    config = read.config
    assert isinstance(config, Eagle3Config)
    assert config == Eagle3Config(layers=config.layers, draft_vocab_size=VD)
    assert config.layers_of(32) == (1, 15, 28) and config.layers_of(7) == (1, 2, 3)
    same(read, tensors)


def test_the_whole_vocabulary(tmp_path):
    tensors = but(official_eagle3(), "d2t", "t2d") | {"lm_head.weight": random(V, H)}
    for values in ({"draft_vocab_size": V}, {}):
        read = read_drafter(put(tmp_path, {**BASE, **values}, tensors))
        assert read.config.draft_vocab_size is None and read.config.own_head
        same(read, tensors)


def test_a_head_that_is_left_out(tmp_path):
    read = read_drafter(put(tmp_path, OFFICIAL, but(official_eagle3(), "lm_head.weight", "t2d")))
    assert not read.config.own_head and read.config.draft_vocab_size == VD


SGLANG = {**OFFICIAL, "architectures": ["LlamaForCausalLMEagle3"]}


def test_layers_that_sglang_names(tmp_path):
    """By their outputs, in any order: an engine walks through the layers."""
    inner = {"eagle_aux_hidden_state_layer_ids": [21, 1, 11], "use_aux_hidden_state": True}
    read = read_drafter(put(tmp_path, {**SGLANG, "eagle_config": inner}, official_eagle3()))
    assert read.dialect == "sglang eagle3" and read.config.target_layer_ids == (1, 11, 21)
    four = official_eagle3() | {"fc.weight": random(H, 4 * H)}
    inner["eagle_aux_hidden_state_layer_ids"] = [1, 11, 21, 5]
    read = read_drafter(put(tmp_path, {**SGLANG, "eagle_config": inner}, four))
    assert read.config.num_features == 4 and read.config.target_layer_ids == (1, 5, 11, 21)
    refused(tmp_path, {**SGLANG, "eagle_config": inner}, official_eagle3(), "has fc.weight of")


def test_norm_output_means_two_things(tmp_path):
    norms = {f"fc_norm.{i}.weight": random(H) for i in range(3)}
    read = read_drafter(put(tmp_path, {**SGLANG, "norm_output": True}, official_eagle3()))
    assert not read.config.norm_output and "SpecForge's word" in read.notes[0]
    config = {**SGLANG, "norm_output": True, "fc_norm": True}
    read = read_drafter(put(tmp_path, config, official_eagle3() | norms))
    assert read.config.norm_output and read.config.fc_norm and "EAGLE-3.1's" in read.notes[0]
    read = read_drafter(put(tmp_path, {**SGLANG, "fc_norm": True}, official_eagle3() | norms))
    assert read.config.fc_norm and not read.config.norm_output and not read.notes
    same(read, official_eagle3() | norms)


def test_switches_inside_eagle_config(tmp_path):
    """NVIDIA's releases put them there."""
    inner = {"norm_before_fc": True, "norm_before_residual": True}
    tensors = official_eagle3() | {"input_norm.weight": random(3 * H)}
    read = read_drafter(put(tmp_path, {**SGLANG, "eagle_config": inner}, tensors))
    assert read.config.norm_before_fc and read.config.norm_before_residual
    same(read, tensors)


def test_a_drafter_narrower_than_its_target(tmp_path):
    tensors = official_eagle3() | {"fc.weight": random(H, 3 * 56), "embed_tokens.weight":
                                   random(V, H)}  # fmt: skip
    read = read_drafter(put(tmp_path, {**SGLANG, "target_hidden_size": 56}, tensors))
    assert (read.config.hidden_size, read.config.layers.hidden_size) == (56, H)
    same(read, tensors)
    config = {**SGLANG, "target_hidden_size": 56}
    refused(tmp_path, config, but(tensors, "embed_tokens.weight"), "lacks the tensor embed_tokens")
    refused(tmp_path, config, but(tensors, "lm_head.weight"), "it cannot take the target's head")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads the final state as EAGLE-1"),
        ({"eagle_config": {"novel": 1}}, "has a field novel"),
        ({"eagle_config": 3}, "eagle_config is 3; it must be an object"),
        ({"eagle_config": {"fc_norm": True}, "fc_norm": False}, "fc_norm is False and in eagle_c"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}}, "different layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "different layer numbers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-2, 1, 3]}}, "rising numbers"),
        ({"fc_norm": True}, "lacks the tensor fc_norm.0.weight"),
        ({"norm_before_fc": True}, "lacks the tensor input_norm.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; allowed in this layout: 1"),
        ({"bias": True}, "lacks the tensor fc.bias"),
        ({"draft_vocab_size": 13}, r"has lm_head.weight of shape \[12, 24\]"),
        ({"novel_switch": 3}, "has a field novel_switch"),
    ],
)
def test_refusals_of_the_official_layout_of_eagle3(tmp_path, changes, message):
    refused(tmp_path, {**SGLANG, **changes}, official_eagle3(), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": torch.zeros(VD, dtype=torch.int64)}, "d2t is all zero"),
        ({"d2t": IDS}, "d2t leads to"),
        ({"t2d": ~T2D}, "t2d marks other tokens"),
        ({"midlayer.novel.weight": torch.ones(1)}, "has a tensor midlayer.novel.weight"),
        ({"norm.weight": torch.ones(H + 1)}, r"has norm.weight of shape \[25\]"),
    ],
)
def test_refusals_of_tensors(tmp_path, changes, message):
    refused(tmp_path, OFFICIAL, official_eagle3() | changes, message)


# --- EAGLE-3: the layout of the speculators package ----------------------------------------------

PACKAGE: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": VD, "dtype": "float32", "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
    "embed_requires_grad": False, "fc_norm": False, "norm_before_fc": False,
    "norm_before_residual": True, "norm_output": True,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "eagle3", "speculators_version": "0.6.0", "target_hidden_size": None,
    "tie_word_embeddings": False, "transformers_version": "5.10.2",
    "transformer_layer_config": but(BASE, "architectures", "rope_theta", rope_parameters={
        "rope_type": "default", "rope_theta": 5000.0}, attention_bias=False, mlp_bias=False),
}  # fmt: skip


def with_layers(**changes: Any) -> dict[str, Any]:
    return {**PACKAGE, "transformer_layer_config": PACKAGE["transformer_layer_config"] | changes}


@pytest.mark.parametrize("architecture", ["Eagle3DraftModel", "Eagle3Speculator"])
def test_the_speculators_layout(tmp_path, architecture):
    """Layers are named by their inputs there."""
    tensors = official_eagle3("layers.0.") | {"embed_tokens.weight": random(V, H)}
    config = {**PACKAGE, "architectures": [architecture]}
    read = read_drafter(put(tmp_path, config, tensors))
    assert (read.method, read.dialect, read.notes) == ("eagle3", "speculators", ())
    assert read.config == Eagle3Config(
        layers=read.config.layers, target_layer_ids=(1, 15, 28), draft_vocab_size=VD,
        norm_before_residual=True, norm_output=True,
    )  # fmt: skip
    assert read.config.layers.rope_parameters["rope_theta"] == 5000.0
    same(read, tensors)


def test_defaults_of_the_package(tmp_path):
    """It leaves out what equals a default: of the class, and of transformers' Llama."""
    names = ("norm_before_residual", "norm_output", "eagle_aux_hidden_state_layer_ids", "fc_norm")
    inner = but(PACKAGE["transformer_layer_config"], "max_position_embeddings", "rope_parameters",
                "rms_norm_eps", "hidden_act", "model_type")  # fmt: skip
    config = but(PACKAGE, *names, transformer_layer_config=inner)
    read = read_drafter(put(tmp_path, config, official_eagle3("layers.0.")))
    layers = read.config.layers
    assert layers.max_position_embeddings == 2048 and layers.rms_norm_eps == 1e-6
    assert layers.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert not read.config.norm_before_residual and read.config.target_layer_ids is None
    assert "vLLM takes it for true" in read.notes[0]
    assert not read.config.norm_output


def test_sizes_of_the_class_where_they_are_left_out(tmp_path):
    inner = but(PACKAGE["transformer_layer_config"], "hidden_size")
    refused(
        tmp_path, {**PACKAGE, "transformer_layer_config": inner}, official_eagle3("layers.0."),
        r"by its config it is \[4096",
    )  # fmt: skip


def test_layers_of_qwen3(tmp_path):
    tensors = official_eagle3("layers.0.")
    tensors |= {f"layers.0.self_attn.{n}_norm.weight": random(D) for n in "qk"}
    read = read_drafter(put(tmp_path, with_layers(model_type="qwen3"), tensors))
    assert read.config.layers.qk_norm
    same(read, tensors)
    refused(tmp_path, with_layers(model_type="llama"), tensors, "has a tensor .*k_norm")
    refused(tmp_path, with_layers(model_type="gemma3"), tensors, "model_type 'gemma3'; allowed")


def test_windows_of_llama_layers(tmp_path):
    window = {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True}
    tensors = official_eagle3("layers.0.")
    read = read_drafter(put(tmp_path, with_layers(**window), tensors))
    assert read.config.layers.sliding_window == 8
    assert read.config.layers.sliding_layers == (True,)
    full = with_layers(layer_types=["full_attention"], sliding_window=8)
    assert read_drafter(put(tmp_path, full, tensors)).config.layers.sliding_window is None
    for changes, message in (
        ({**window, "use_sliding_window": False}, "use_sliding_window is false"),
        ({**window, "sliding_window": None}, "sliding_window is None; it must be"),
        ({**window, "layer_types": ["sliding_attention"] * 2}, "must be a list of 1 of"),
        ({**window, "layer_types": ["chunked"]}, "must be a list of 1 of"),
    ):
        refused(tmp_path, with_layers(**changes), tensors, message)


def test_norms_of_the_package(tmp_path):
    tensors = official_eagle3("layers.0.") | {"input_norm.weight": random(3 * H)}
    read = read_drafter(put(tmp_path, {**PACKAGE, "norm_before_fc": True}, tensors))
    assert read.config.norm_before_fc
    same(read, tensors)
    tensors = official_eagle3("layers.0.")
    tensors |= {f"fc_norm.{i}.weight": random(H) for i in range(3)}
    read = read_drafter(put(tmp_path, {**PACKAGE, "fc_norm": True}, tensors))
    assert read.config.fc_norm
    same(read, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
        ({"novel_switch": 3}, "has a field novel_switch"),
        ({"fc_norm": "per layer"}, "fc_norm is 'per layer'; it must be true or false"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16]}, "has fc.weight of"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 16]}, "different layer numbers"),
        ({"eagle_aux_hidden_state_layer_ids": "2,16,29"}, "different layer numbers"),
        ({"draft_vocab_size": None}, "draft_vocab_size is 32000; allowed: 1 to 40"),
    ],
)
def test_refusals_of_the_speculators_layout(tmp_path, changes, message):
    refused(tmp_path, {**PACKAGE, **changes}, official_eagle3("layers.0."), message)


def test_the_embedding_among_the_layers(tmp_path):
    config = {**PACKAGE, "eagle_aux_hidden_state_layer_ids": [0, 16, 29]}
    read = read_drafter(put(tmp_path, config, official_eagle3("layers.0.")))
    assert read.config.target_layer_ids == (-1, 15, 28)
    assert read.config.facts()["target layers read"] == "embedding, 15, 28"


# --- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        Eagle3Config.for_target(TARGET),
        Eagle3Config(layers=small(num_layers=2), draft_vocab_size=VD),
        Eagle3Config(layers=small(), own_head=False, draft_vocab_size=VD, norm_output=True),
        Eagle3Config(layers=small(sliding_window=9, sliding_layers=(True,))),
        Eagle3Config(layers=small(model_type="qwen3", qk_norm=True), norm_before_fc=True),
        Eagle3Config(layers=small(), fc_norm=True, norm_before_residual=True,
                     num_features=2, target_layer_ids=(-1, 4)),
        Eagle3Config(layers=small(), target_hidden_size=40),
    ],
)  # fmt: skip
def test_eagle3_is_read_back(config, tmp_path):
    tensors = numbers(eagle3.tensor_shapes(config))
    eagle3.write(tmp_path, config, tensors)
    read = read_drafter(tmp_path)
    assert (read.dialect, read.config, read.notes) == ("speculators", config, ())
    found = read.tensors()
    if config.draft_vocab_size is not None:  # other engines want the members too
        assert torch.equal(found.pop("t2d"), T2D)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_cannot_be_written_is_refused(tmp_path):
    config = Eagle3Config(layers=small(), fc_bias=True)
    with pytest.raises(OptionError, match="has no bias on fc"):
        eagle3.write(tmp_path, config, numbers(eagle3.tensor_shapes(config)))
    with pytest.raises(OptionError, match="as many layers as features"):
        Eagle3Config(layers=small(), target_layer_ids=(1, 2))
