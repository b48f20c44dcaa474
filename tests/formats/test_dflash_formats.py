"""Layouts of block drafters: each as its own tools write it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forespeak.errors import CheckpointError, OptionError
from forespeak.formats.dflash import CONFIGS, write
from forespeak.formats.dflash_config import (
    DFlashConfig,
    copy_shapes,
    default_layer_ids,
    tensor_shapes,
)
from forespeak.formats.drafters import DrafterCheckpoint, read_drafter
from tests.tiny import tiny_config

TARGET = tiny_config(num_layers=8)
LAYERS: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu",
    "hidden_size": 40, "initializer_range": 0.02, "intermediate_size": 72,
    "layer_types": ["full_attention"] * 2, "max_position_embeddings": 512,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 83,
}  # fmt: skip
OLD_ROPE = {"rope_scaling": None, "rope_theta": 1000000.0}
NEW_ROPE = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}
INNER = {"mask_token_id": 80, "target_layer_ids": [1, 4]}
ZLAB = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 8, "bos_token_id": 1, "dflash_config": INNER, "dtype": "bfloat16",
    "eos_token_id": 2, "num_target_layers": 8, "transformers_version": "4.57.1",
    **LAYERS, **OLD_ROPE,
}  # fmt: skip
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "confidence_head_with_markov": True,
    "enable_confidence_head": True, "markov_head_type": "gated", "markov_rank": 6,
    "mask_token_id": 80, "num_anchors": 512, "num_target_layers": 8, "pad_token_id": None,
    "target_layer_ids": [-1, 4], **LAYERS, **NEW_ROPE,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DSparkDraftModel"], "auto_map": {"": "config.DSparkSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 5], "block_size": 6, "confidence_head_with_markov": True,
    "draft_vocab_size": 50, "dtype": "float32", "enable_confidence_head": True,
    "markov_head_type": "rnn", "markov_rank": 6, "mask_token_id": 80, "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dspark", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "org/target"},
    },
    "speculators_model_type": "dspark", "speculators_version": "0.6.0",
    "target_hidden_size": None, "tie_word_embeddings": False,
    "transformer_layer_config": {**LAYERS, **NEW_ROPE}, "transformers_version": "5.10.2",
}  # fmt: skip
BLOCK_NAMES = {
    "fc.weight", "hidden_norm.weight", "norm.weight",
    *[f"layers.{layer}.{name}.weight" for layer in range(2) for name in (
        "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )],
}  # fmt: skip


def config_of(**changes: Any) -> DFlashConfig:
    """What the z-lab folder says, changed."""
    base = DFlashConfig.for_target(TARGET)
    layers = replace(
        base.layers, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip
    defaults: dict[str, Any] = {
        "layers": layers, "block_size": 8, "mask_token_id": 80, "target_layer_ids": (1, 4),
    }  # fmt: skip
    return replace(base, **{**defaults, **changes})


def tensors_of(config: DFlashConfig, *, copies: bool = False) -> dict[str, Tensor]:
    """Random ones; a map to every second token below 100, or the last tokens."""
    generator = torch.Generator().manual_seed(3)
    shapes = {**tensor_shapes(config), **(copy_shapes(config) if copies else {})}
    tensors = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    if config.draft_vocab_size is not None:
        offset = config.vocab_size - config.draft_vocab_size
        tensors["d2t"] = torch.full((config.draft_vocab_size,), offset)
    return tensors


def folder_with(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], sts: object = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    if sts is not None:
        (folder / "sts.json").write_text(json.dumps(sts))
    return folder


def read(folder: Path) -> DrafterCheckpoint:
    return read_drafter(folder, modules=["forespeak.formats.dflash"])


def check(found: DrafterCheckpoint, config: DFlashConfig, tensors: dict[str, Tensor]) -> None:
    layers = replace(found.config.layers, bos_token_id=None, eos_token_ids=())
    assert replace(found.config, layers=layers) == config
    read_back = found.tensors()
    assert read_back.keys() == tensors.keys()
    assert all(torch.equal(read_back[name], tensors[name]) for name in tensors)


def dspark(config: DFlashConfig, **changes: Any) -> DFlashConfig:
    """The same as the config of a drafter with heads."""
    values = {**vars(config), **changes}
    return CONFIGS["dspark"](**values)


def test_zlab(tmp_path: Path) -> None:
    config = config_of()
    tensors = tensors_of(config)
    assert tensors.keys() == BLOCK_NAMES
    found = read(folder_with(tmp_path, ZLAB, tensors))
    assert (found.method, found.dialect) == ("dflash", "z-lab")
    assert not found.config.sample_from_anchor and found.config.max_depth == 7
    check(found, config, tensors)


@pytest.mark.parametrize("rope", [OLD_ROPE, NEW_ROPE])
def test_both_layouts_of_rotary_settings(tmp_path: Path, rope: dict[str, Any]) -> None:
    values = {k: v for k, v in ZLAB.items() if k not in OLD_ROPE} | rope
    found = read(folder_with(tmp_path, values, tensors_of(config_of())))
    assert found.config.layers.rope_parameters["rope_theta"] == 1000000.0


def test_settings_may_lie_inside_or_outside(tmp_path: Path) -> None:
    inner = {**INNER, "block_size": 4, "causal": False}
    values = {k: v for k, v in ZLAB.items() if k != "block_size"} | {"dflash_config": inner}
    assert read(folder_with(tmp_path, values, tensors_of(config_of()))).config.block_size == 4
    outside = {k: v for k, v in ZLAB.items() if k != "dflash_config"} | INNER
    assert read(folder_with(tmp_path, outside, tensors_of(config_of()))).config == read(
        folder_with(tmp_path, ZLAB, tensors_of(config_of()))
    ).config  # fmt: skip


def test_layers_that_a_release_does_not_name(tmp_path: Path) -> None:
    values = {**ZLAB, "dflash_config": {"mask_token_id": 80}}
    found = read(folder_with(tmp_path, values, tensors_of(config_of())))
    assert found.config.target_layer_ids == (1, 5)


@pytest.mark.parametrize(
    ("targets", "layers", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (32, 5, (1, 8, 15, 22, 29)),
        (64, 5, (1, 16, 31, 46, 61)),
        (28, 1, (14,)),
        (10, 5, (1, 2, 4, 6, 7)),  # 2.5 and 5.5 go to the even number
    ],
)
def test_default_layers(targets: int, layers: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(targets, layers) == ids


def test_deepspec(tmp_path: Path) -> None:
    config = dspark(
        config_of(), block_size=7, target_layer_ids=(-1, 4), sample_from_anchor=True,
        markov_rank=6, markov_head_type="gated", confidence_head=True,
        confidence_with_markov=True, temperatures=(1.5,) * 7,
    )  # fmt: skip
    tensors = tensors_of(config, copies=True)
    assert tensors["markov_head.gate_proj.weight"].shape == (6, 46)
    assert tensors["confidence_head.proj.weight"].shape == (1, 46)
    sts = {"temperatures": [1.5] * 7, "dataset": "x", "ece_before": 0.1}
    found = read(folder_with(tmp_path, DEEPSPEC, tensors, sts))
    assert (found.method, found.dialect) == ("dspark", "DeepSpec")
    check(found, config, tensors)


def test_deepspec_dflash_and_heads_that_are_off(tmp_path: Path) -> None:
    """The class of DeepSpec without heads, its rows of either kind; copies may be left out."""
    off = {
        k: v for k, v in DEEPSPEC.items()
        if k not in ("markov_head_type", "confidence_head_with_markov")
    } | {"markov_rank": 0, "enable_confidence_head": False}  # fmt: skip
    config = config_of(block_size=7, target_layer_ids=(-1, 4), sample_from_anchor=True)
    found = read(folder_with(tmp_path, off, tensors_of(config, copies=True)))
    assert (found.method, found.dialect) == ("dflash", "DeepSpec")
    check(found, config, tensors_of(config, copies=True))
    zlab = {**off, "sample_from_anchor": False}
    found = read(folder_with(tmp_path, zlab, tensors_of(config)))
    check(found, replace(config, sample_from_anchor=False), tensors_of(config))


def test_a_confidence_head_without_bias(tmp_path: Path) -> None:
    config = dspark(
        config_of(), block_size=7, target_layer_ids=(-1, 4), sample_from_anchor=True,
        markov_rank=6, markov_head_type="gated", confidence_head=True,
        confidence_with_markov=True, confidence_bias=False,
    )  # fmt: skip
    tensors = tensors_of(config)
    assert "confidence_head.proj.bias" not in tensors
    check(read(folder_with(tmp_path, DEEPSPEC, tensors)), config, tensors)


def test_speculators(tmp_path: Path) -> None:
    config = dspark(
        config_of(), block_size=6, num_target_layers=None, sample_from_anchor=True,
        markov_rank=6, markov_head_type="rnn", confidence_head=True,
        confidence_with_markov=True, draft_vocab_size=50,
    )  # fmt: skip
    tensors = tensors_of(config, copies=True)
    assert tensors["markov_head.markov_w1.weight"].shape == (83, 6)
    assert tensors["markov_head.markov_w2.weight"].shape == (50, 6)
    assert tensors["markov_head.joint_proj.weight"].shape == (18, 52)
    assert tensors["lm_head.weight"].shape == (50, 40)
    tensors["t2d"] = torch.arange(83) >= 33
    found = read(folder_with(tmp_path, SPECULATORS, tensors))
    assert (found.method, found.dialect) == ("dspark", "speculators")
    check(found, config, tensors)


def test_speculators_leave_out_what_equals_their_defaults(tmp_path: Path) -> None:
    """Here: the sizes of transformers' Qwen3Config and the heads of the package's own class."""
    inner = {k: v for k, v in LAYERS.items() if k not in ("max_position_embeddings", "model_type")}
    left_out = ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
    values = {k: v for k, v in SPECULATORS.items() if k not in left_out}
    values["transformer_layer_config"] = {**inner, **NEW_ROPE}
    config = dspark(
        config_of(), block_size=6, sample_from_anchor=True, markov_rank=6,
        markov_head_type="rnn", confidence_head=True, confidence_with_markov=True,
        draft_vocab_size=50,
    )  # fmt: skip
    found = read(folder_with(tmp_path, values, tensors_of(config))).config
    assert found.max_positions == 32768
    assert found.sample_from_anchor and found.confidence_head and found.confidence_with_markov


def test_speculators_dflash_with_windows(tmp_path: Path) -> None:
    windows = {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64,
        "use_sliding_window": True,
    }  # fmt: skip
    values = {
        **{k: v for k, v in SPECULATORS.items() if "markov" not in k and "confidence" not in k},
        "speculators_model_type": "dflash", "draft_vocab_size": 83, "sample_from_anchor": False,
        "transformer_layer_config": {**LAYERS, **NEW_ROPE, **windows},
    }  # fmt: skip
    tensors = tensors_of(config_of())
    found = read(folder_with(tmp_path, values, tensors)).config
    assert found.causal_windows and found.anchored_windows and found.draft_vocab_size is None
    assert found.layers.sliding_layers == (True, False) and found.layers.sliding_window == 64
    values["sliding_window_non_causal"] = True
    found = read(folder_with(tmp_path, values, tensors)).config
    assert not found.causal_windows and found.anchored_windows


WINDOWED: dict[str, Any] = {"sliding_window": 6, "sliding_layers": (True, False)}
WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "z-lab"),
    "windows": ({"windows": True}, "z-lab"),
    "anchored windows": (
        {"windows": True, "anchored_windows": True, "causal_windows": True,
         "num_target_layers": None},
        "speculators",
    ),
    "next token": ({"sample_from_anchor": True, "target_layer_ids": (-1, 2)}, "DeepSpec"),
    "heads": (
        {"sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "rnn",
         "confidence_head": True, "temperatures": (1.0, 2.0, 0.5) + (1.0,) * 5},
        "DeepSpec",
    ),
    "fill-in with a head": ({"markov_rank": 4}, "DeepSpec"),
    "draft vocabulary": ({"draft_vocab_size": 50, "num_target_layers": None}, "speculators"),
    "draft vocabulary and heads": (
        {"draft_vocab_size": 50, "num_target_layers": None, "markov_rank": 4,
         "sample_from_anchor": True, "confidence_head": True, "confidence_with_markov": True},
        "speculators",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_reads_back(name: str, tmp_path: Path) -> None:
    changes, dialect = WRITTEN[name]
    changes = dict(changes)
    if changes.pop("windows", False):
        changes["layers"] = replace(config_of().layers, **WINDOWED)
    config = config_of(**changes)
    config = dspark(config) if config.has_heads else config
    tensors = tensors_of(config)
    (tmp_path / "sts.json").write_text('{"temperatures": [9]}')  # of a drafter that was here before
    write(tmp_path, config, tensors)
    found = read(tmp_path)
    assert found.dialect == dialect
    assert found.method == ("dspark" if config.has_heads else "dflash")
    check(found, config, tensors)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".part")]
    assert found.config.context_values == 2 * 2 * 2 * 16
    assert all(isinstance(value, str) for value in found.config.facts().values())


def test_what_no_layout_can_say(tmp_path: Path) -> None:
    layers = replace(config_of().layers, **WINDOWED)
    config = config_of(layers=layers, draft_vocab_size=50)
    with pytest.raises(OptionError, match="anchored_windows=true"):
        write(tmp_path, config, tensors_of(config))


@pytest.mark.parametrize("method", CONFIGS)
def test_configs_to_start_from(method: str, tmp_path: Path) -> None:
    config = CONFIGS[method].for_target(TARGET)
    config.check_target(TARGET)
    write(tmp_path, config, tensors_of(config))
    found = read(tmp_path)
    assert found.method == method and type(found.config) is CONFIGS[method]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ZLAB, {"dflash_config": {**INNER, "target_layer_ids": [1, 7]}}, "up to 6 for a target of 8"),
    (ZLAB, {"dflash_config": {**INNER, "target_layer_ids": [4, 1]}}, "rising"),
    (ZLAB, {"dflash_config": {**INNER, "target_layer_ids": "1"}}, "list of layer numbers"),
    (ZLAB, {"dflash_config": {**INNER, "target_layer_ids": [-2, 1]}}, "-1 for the output"),
    (ZLAB, {"dflash_config": 3}, "must be an object"),
    (ZLAB, {"dflash_config": {**INNER, "mask_token_id": 83}}, "0 to 82"),
    (ZLAB, {"dflash_config": {"target_layer_ids": [1, 4]}}, "mask_token_id is missing"),
    (ZLAB, {"dflash_config": {**INNER, "output_multiplier": 2.0}}, "output_multiplier"),
    (ZLAB, {"dflash_config": {**INNER, "causal": True}}, "causal is true"),
    (ZLAB, {"is_causal": True}, "is_causal is true"),
    (ZLAB, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (ZLAB, {"block_size": 1}, "2 to 256 rows"),
    (ZLAB, {"block_size": None}, "block_size is None"),
    (ZLAB, {"num_hidden_layers": 3, "layer_types": None}, "lacks the tensor layers.2"),
    (ZLAB, {"model_type": "gpt_oss"}, "model_type is 'gpt_oss'"),
    (ZLAB, {"architectures": ["DFlash2DraftModel"]}, "convolutions"),
    (ZLAB, {"layer_types": ["sliding_attention"] * 2}, "no window is on"),
    (DEEPSPEC, {"architectures": ["Gemma4DSparkModel"]}, "Gemma 4's layers have four norms"),
    (DEEPSPEC, {"markov_head_type": "transformer"}, "gated, rnn, vanilla"),
    (DEEPSPEC, {"markov_rank": -1}, "from 0 on"),
    (DEEPSPEC, {"markov_rank": 0}, "without the Markov input"),
    (DEEPSPEC, {"markov_rank": 7}, "shape"),
    (DEEPSPEC, {"enable_confidence_head": "yes"}, "true or false"),
    (SPECULATORS, {"speculators_model_type": "dflash2"}, "dflash2"),
    (SPECULATORS, {"projector_type": "domino"}, "allowed: dflash"),
    (SPECULATORS, {"shift_label": True}, "sample_from_anchor"),
    (SPECULATORS, {"target_hidden_size": 64}, "allowed: 40"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "must be a list of layers"),
    (SPECULATORS, {"transformer_layer_config": None}, "must be an object"),
    (SPECULATORS, {"draft_vocab_size": 90}, "1 to 83"),
    (SPECULATORS, {"num_experts": 4}, "num_experts"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "message"), REFUSED)
def test_refusals(
    base: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kinds = {
        id(ZLAB): config_of(),
        id(DEEPSPEC): config_of(
            block_size=7, markov_rank=6, markov_head_type="gated", confidence_head=True,
            confidence_with_markov=True,
        ),
        id(SPECULATORS): config_of(
            block_size=6, sample_from_anchor=True, markov_rank=6, markov_head_type="rnn",
            confidence_head=True, confidence_with_markov=True, draft_vocab_size=50,
        ),
    }  # fmt: skip
    folder = folder_with(tmp_path, {**base, **changes}, tensors_of(kinds[id(base)]))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(folder)
    assert str(tmp_path) in str(caught.value)


def test_unknown_tensors(tmp_path: Path) -> None:
    tensors = {**tensors_of(config_of()), "layers.0.self_attn.sinks": torch.zeros(4)}
    with pytest.raises(CheckpointError, match="self_attn.sinks"):
        read(folder_with(tmp_path, ZLAB, tensors))


@pytest.mark.parametrize(
    ("sts", "message"),
    [
        ({"temperatures": [1.0] * 6}, "6 temperatures; expected are 7"),
        ({"temperatures": [1.0] * 6 + [0.0]}, "above 0"),
        ({"temperatures": "1"}, "no list of temperatures"),
        ({"values": []}, "no list of temperatures"),
        ([1.0], "object is expected"),
    ],
)
def test_temperatures(sts: object, message: str, tmp_path: Path) -> None:
    config = config_of(
        block_size=7, target_layer_ids=(-1, 4), sample_from_anchor=True, markov_rank=6,
        markov_head_type="gated", confidence_head=True, confidence_with_markov=True,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        read(folder_with(tmp_path, DEEPSPEC, tensors_of(config), sts))


def test_temperatures_of_nothing(tmp_path: Path) -> None:
    sts = {"temperatures": [1.0] * 7}
    with pytest.raises(CheckpointError, match="there is none"):
        read(folder_with(tmp_path, ZLAB, tensors_of(config_of()), sts))
