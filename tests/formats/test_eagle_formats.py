"""Layouts of EAGLE-1 drafters, written as their own programs write them and read back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.formats import eagle
from forespeak.formats.drafters import read_drafter
from forespeak.formats.eagle import EagleConfig
from tests.formats.eagle_files import (
    BASE,
    D2T,
    HEADS,
    IDS,
    KV,
    TARGET,
    VD,
    D,
    H,
    V,
    block,
    but,
    numbers,
    official_eagle,
    put,
    random,
    refused,
    same,
    small,
)


def test_the_official_layout(tmp_path):
    read = read_drafter(put(tmp_path, BASE, official_eagle()))
    assert (read.method, read.dialect) == ("eagle", "eagle")
    config = read.config
    assert isinstance(config, EagleConfig) and config.fc_bias and config.draft_vocab_size is None
    assert (config.hidden_size, config.vocab_size, config.max_positions) == (H, V, 2048)
    assert config.layers.rope_parameters["rope_theta"] == 5000.0
    assert config.layers.rms_norm_eps == 1e-5 and config.layers.num_kv_heads == KV
    assert config.context_values == 2 * KV * D
    same(read, official_eagle())


def test_the_official_layout_as_a_pickle(tmp_path):
    put(tmp_path, BASE, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(official_eagle(), tmp_path / "pytorch_model.bin")
    same(read_drafter(tmp_path), official_eagle())


def test_no_bias_where_the_config_says_so(tmp_path):
    config = {**BASE, "bias": False}
    tensors = but(official_eagle(), "fc.bias", "embed_tokens.weight")
    read = read_drafter(put(tmp_path, config, tensors))
    assert not read.config.fc_bias
    same(read, tensors)
    refused(tmp_path, config, official_eagle(), "has a tensor fc.bias, which")
    refused(tmp_path, BASE, tensors, "lacks the tensor fc.bias")


@pytest.mark.parametrize("values", [{"qkv_bias": True}, {"model_type": "qwen2"}, {}])
def test_biases_of_qwen2(tmp_path, values):
    biases = {f"layers.0.self_attn.{part}_proj.bias": random(n * D)
              for part, n in (("q", HEADS), ("k", KV), ("v", KV))}  # fmt: skip
    read = read_drafter(put(tmp_path, {**BASE, **values}, {**official_eagle(), **biases}))
    assert read.config.layers.attention_bias and not read.config.layers.output_bias
    same(read, {**official_eagle(), **biases})


def test_biases_that_are_promised_must_be_there(tmp_path):
    for name in ("qkv_bias", "attention_bias"):
        refused(tmp_path, {**BASE, name: True}, official_eagle(), "lacks .*q_proj.bias")


def test_layers_after_the_first_have_their_norm(tmp_path):
    tensors = official_eagle() | block("layers.1.", norms=("input_layernorm",))
    read = read_drafter(put(tmp_path, {**BASE, "num_hidden_layers": 2}, tensors))
    assert read.config.layers.num_layers == 2
    same(read, tensors)
    refused(tmp_path, BASE, tensors, "has a tensor layers.1.")
    tensors["layers.0.input_layernorm.weight"] = random(H)
    refused(tmp_path, {**BASE, "num_hidden_layers": 2}, tensors, "layers.0.input_layernorm")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"novel_switch": 3}, "has a field novel_switch"),
        ({"hidden_size": 32}, r"has fc.weight of shape \[24, 48\]; by its config"),
        ({"vocab_size": 41}, r"has embed_tokens.weight of shape \[40, 24\]"),
        ({"use_sliding_window": True, "sliding_window": 8}, "the layers have sliding windows"),
        ({"layer_types": ["sliding_attention"]}, "the layers have sliding windows"),
        ({"draft_vocab_size": 50}, "draft_vocab_size is 50; allowed: 1 to 40"),
        ({"draft_vocab_size": 12}, "lacks the tensor d2t"),
        ({"bias": "no"}, "bias is 'no'; it must be true or false"),
        ({"quantization_config": {"bits": 4}}, "the checkpoint is quantised"),
    ],
)
def test_refusals_of_the_official_layout(tmp_path, changes, message):
    refused(tmp_path, {**BASE, **changes}, official_eagle(), message)


def test_what_the_official_code_has_no_use_for(tmp_path):
    """Fields that come with a target's config and change nothing in a Llama layer."""
    values = {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 4096, "attention_dropout": 0.0, "output_router_logits": False,
    }  # fmt: skip
    read = read_drafter(put(tmp_path, {**BASE, **values}, official_eagle()))
    assert read.config.layers.model_type == "llama" and read.config.layers.sliding_window is None


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
@pytest.mark.parametrize("inside", [True, False])
def test_early_vllm(tmp_path, prefix, inside):
    """A copy of the head, and the bias announced outside or, by its conversion script, inside."""
    bias = {"eagle_fc_bias": True}
    config: dict[str, Any] = {"model_type": "eagle", "model": {**BASE, **(bias if inside else {})}}
    config |= {} if inside else bias
    tensors = {prefix + name: tensor for name, tensor in official_eagle().items()}
    tensors[f"{prefix}lm_head.weight"] = random(V, H)
    # Written by vLLM's own tools and left out by its model.
    unused = {f"{prefix}norm.weight": random(H), f"{prefix}layers.0.input_layernorm.weight":
              random(H)}  # fmt: skip
    read = read_drafter(put(tmp_path, config, tensors | unused))
    assert (read.method, read.dialect) == ("eagle", "vllm eagle") and read.config.fc_bias
    same(read, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    refused(tmp_path, but(config, model=BASE, eagle_fc_bias=False), tensors, "fc.bias")


@pytest.mark.parametrize("rows", [V, VD])
def test_the_token_map_of_early_vllm(tmp_path, rows):
    """Ids in order of frequency; rows of the head in the same order, or of the whole vocabulary."""
    order = torch.randperm(VD, generator=torch.Generator().manual_seed(1))
    head = random(V, H)
    tensors = official_eagle() | {"token_map": IDS[order]}
    tensors["lm_head.weight"] = head if rows == V else head[IDS[order]]
    config = {"model_type": "eagle", "model": BASE, "eagle_fc_bias": True,
              "truncated_vocab_size": VD}  # fmt: skip
    read = read_drafter(put(tmp_path, config, tensors))
    found = read.tensors()
    assert read.config.draft_vocab_size == VD
    assert torch.equal(found["d2t"], D2T)
    assert torch.equal(found["lm_head.weight"], head if rows == V else head[IDS])


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        ({}, {"add_para_norm": True}, "add_para_norm is True, which asks for norms"),
        ({}, {"skip_prenorm": False}, "skip_prenorm is False"),
        ({"logit_scale": 0.5}, {}, "logit_scale is 0.5; allowed: 1"),
        ({"truncated_vocab_size": 12}, {}, "is 12 and there is no token_map"),
        ({"novel": 1}, {}, "has a field novel"),
        ({}, {"novel": 1}, "has a field novel"),
    ],
)
def test_refusals_of_early_vllm(tmp_path, outer, inner, message):
    config = {"model_type": "eagle", "model": {**BASE, **inner}, "eagle_fc_bias": True, **outer}
    refused(tmp_path, config, official_eagle(), message)


# --- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        EagleConfig.for_target(TARGET),
        EagleConfig(layers=small(num_layers=2), draft_vocab_size=VD),
        EagleConfig(layers=small(attention_bias=True)),
        EagleConfig(layers=small(attention_bias=True, output_bias=True, mlp_bias=True)),
        EagleConfig(layers=small(qk_norm=True, tie_word_embeddings=True)),
    ],
)
def test_eagle_is_read_back(config, tmp_path):
    tensors = numbers(eagle.tensor_shapes(config))
    eagle.write(tmp_path, config, tensors)
    read = read_drafter(tmp_path)
    assert (read.dialect, read.config) == ("eagle", config)
    same(read, tensors)


def test_windows_are_refused():
    with pytest.raises(OptionError, match="have no sliding window"):
        EagleConfig(layers=small(sliding_window=4))
