"""Layouts of block drafters: each as its own tools write it, and what is written reads back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.formats.dflash import CONFIGS, write
from forespeak.formats.dflash_config import default_layer_ids
from tests.formats.dflash_folders import (
    BLOCK_NAMES,
    DEEPSPEC,
    INNER,
    LAYERS,
    NEW_ROPE,
    OLD_ROPE,
    SPECULATORS,
    TARGET,
    ZLAB,
    check,
    config_of,
    dspark,
    folder_with,
    read,
    tensors_of,
)


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
        (5, 3, (1, 2, 2)),
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


def test_notes(tmp_path: Path) -> None:
    """What a user should know: heads that can be left off, and what a config leaves open."""
    windows = {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64,
        "use_sliding_window": True,
    }  # fmt: skip
    tensors = tensors_of(config_of())
    (note,) = read(folder_with(tmp_path, {**ZLAB, **windows}, tensors)).notes
    assert "windowed layers" in note
    assert read(folder_with(tmp_path, {**ZLAB, **windows, "is_causal": False}, tensors)).notes == ()
    config = config_of(
        block_size=7, target_layer_ids=(-1, 4), markov_rank=6, markov_head_type="gated",
        confidence_head=True, confidence_with_markov=True,
    )  # fmt: skip
    (note,) = read(folder_with(tmp_path, DEEPSPEC, tensors_of(config))).notes
    assert "without its heads" in note
