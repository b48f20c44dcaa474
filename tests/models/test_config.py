"""ModelConfig against transformers' own classes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from forespeak.errors import CheckpointError
from forespeak.formats.weights import read_json_object
from forespeak.models.config import OUR_FAMILIES, ModelConfig, weight_shapes
from forespeak.models.loading import config_from_folder, load_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "hidden_act": "silu",
}

CASES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "head_dim": 6, "tie_word_embeddings": True},
    {"model_type": "llama", "num_key_value_heads": None, "head_dim": None},
    {"model_type": "mistral"},
    {"model_type": "mistral", "sliding_window": None, "num_attention_heads": 4, "head_dim": 8},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "qwen2"},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
    {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 7},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "attention_bias": True, "head_dim": 4},
    {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
]


def _name(case: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in case.items())


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_same_tensors_and_switches_as_transformers(tmp_path: Path, case: dict[str, Any]):
    values = SIZES | case
    config = ModelConfig.from_hf(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = AutoConfig.from_pretrained(tmp_path)
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(theirs)
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    assert weight_shapes(config) == {name: tuple(value.shape) for name, value in state.items()}
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert config.qk_norm == (config.model_type == "qwen3")
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    if config.model_type == "mistral":
        windows = [theirs.sliding_window] * config.num_layers
    ours = config.sliding_layers or (False,) * config.num_layers
    assert [config.sliding_window if slides else None for slides in ours] == windows


def test_both_layouts_of_rotary_settings():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = SIZES | {"model_type": "llama", "rope_theta": 5.0, "rope_scaling": scaling}
    older = old | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    new = SIZES | {"model_type": "llama", "rope_parameters": scaling | {"rope_theta": 5.0}}
    expected = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    for values in (old, older, new):
        assert ModelConfig.from_hf(values).rope_parameters == expected


def test_scaled_kinds_know_their_original_length():
    yarn = SIZES | {"model_type": "qwen3", "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert ModelConfig.from_hf(yarn).rope_parameters["original_max_position_embeddings"] == 32
    yarn["original_max_position_embeddings"] = 8
    assert ModelConfig.from_hf(yarn).rope_parameters["original_max_position_embeddings"] == 8


@pytest.mark.parametrize(
    ("given", "expected"), [(5, (5,)), ([5, 6, 5], (5, 6)), (None, ()), ("absent", (2,))]
)
def test_end_tokens(given: object, expected: tuple[int, ...]):
    values = SIZES | {"model_type": "llama", "eos_token_id": given}
    if given == "absent":
        del values["eos_token_id"]
    assert ModelConfig.from_hf(values).eos_token_ids == expected


def test_generation_config_names_the_end_tokens(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    config = config_from_folder(tmp_path)
    assert config is not None and config.eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "runs llama, mimo, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None; it must be a name"),
        ({"hidden_size": None}, "hidden_size is None; it must be a whole number"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": 10**9}, "from 1 to 4096"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the built-in decoder has silu"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"hidden_size": 9}, "not a multiple of num_attention_heads"),
        ({"head_dim": 5}, "an even number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": []}, None),
        ({"rope_scaling": [1]}, "rope_scaling is"),
        ({"rope_scaling": {"type": "longrope"}}, "allowed: default, dynamic, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor is '4'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_parameters": {"full_attention": {}}}, None),
    ],
)
def test_refusals_are_one_sentence(change: dict[str, Any], message: str | None):
    values = SIZES | {"model_type": "llama"} | change
    if message is None:
        ModelConfig.from_hf(values)
        return
    with pytest.raises(CheckpointError, match=message) as raised:
        ModelConfig.from_hf(values, origin="folder/config.json")
    assert str(raised.value).startswith("folder/config.json: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "a list of 4"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "no window is on"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
    ],
)
def test_impossible_windows(change: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(SIZES | {"model_type": "qwen3", "head_dim": 4} | change)


def test_missing_size(tmp_path: Path):
    values = SIZES | {"model_type": "llama"}
    del values["vocab_size"]
    with pytest.raises(CheckpointError, match="vocab_size is missing"):
        ModelConfig.from_hf(values)


def test_folders_that_are_not_models(tmp_path: Path):
    with pytest.raises(CheckpointError, match="has no config.json; a folder in Hugging Face"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a JSON list; an object is expected"):
        load_checkpoint(tmp_path)


def test_other_architectures_go_to_the_adapter(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    checkpoint = load_checkpoint(tmp_path)
    assert (checkpoint.family, checkpoint.path, checkpoint.config) == ("adapter", tmp_path, None)


def test_reference_targets(shared_dir: Path):
    folders = sorted((shared_dir / "golden" / "targets").glob("*/config.json"))
    assert folders
    for path in folders:
        config = ModelConfig.from_hf(read_json_object(path), origin=str(path))
        assert config.model_type in OUR_FAMILIES
        checkpoint = load_checkpoint(path.parent)
        assert checkpoint.tokenizer is None
        names = [name for name, _ in checkpoint.weights()]
        assert set(names) == set(weight_shapes(config))
