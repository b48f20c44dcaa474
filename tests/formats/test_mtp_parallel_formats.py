"""Parallel heads on disk: written and read back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forespeak.drafters.mtp_parallel import random_drafter
from forespeak.errors import CheckpointError, OptionError
from forespeak.formats.drafters import read_drafter
from forespeak.formats.mtp_parallel import MtpParallelConfig, tensor_shapes, write
from tests.tiny import FAMILIES, tiny_config

TARGET = tiny_config()
CONFIG = replace(MtpParallelConfig.for_target(TARGET), num_heads=2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reduced", [None, 4])
def test_what_is_written_is_read(tmp_path: Path, family: str, reduced: int | None):
    config = MtpParallelConfig.for_target(tiny_config(family))
    config = replace(config, draft_vocab_size=reduced)
    tensors = random_drafter(config, torch.Generator().manual_seed(0))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(config)
    if reduced is not None:
        tensors["d2t"] = torch.tensor([1, 1, 4, 5])
    write(tmp_path, config, tensors)
    found = read_drafter(tmp_path)
    assert (found.method, found.config) == ("mtp_parallel", config)
    read_back = found.tensors()
    assert read_back.keys() == tensors.keys()
    assert all(torch.equal(read_back[name], tensor) for name, tensor in tensors.items())


def test_heads_of_a_target():
    config = MtpParallelConfig.for_target(TARGET)
    assert (config.num_heads, config.trunk_layer, config.layer.num_layers) == (3, 1, 1)
    assert config.context_values == 3 * 2 * 2 * 16
    assert (config.hidden_size, config.vocab_size, config.max_positions) == (40, 83, 512)
    assert config.facts()["reads"] == "the output of the target's layer 1 (from 0)"
    mixed = tiny_config("qwen2", sliding_window=9, sliding_layers=(False, False, True))
    assert MtpParallelConfig.for_target(mixed).layer.sliding_layers == (True,)
    mixed = replace(mixed, sliding_layers=(True, True, False))
    assert MtpParallelConfig.for_target(mixed).layer.sliding_window is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (replace(TARGET, num_layers=1), "targets of 2 layers or more"),
        (replace(TARGET, model_type="gemma3"), "a gemma3 model runs through transformers"),
    ],
)
def test_targets_that_get_no_heads(target, message):
    with pytest.raises(OptionError, match=message):
        MtpParallelConfig.for_target(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; allowed: 1 or more"),
        ({"trunk_layer": -1}, "trunk_layer is -1; allowed: 0 or more"),
        ({"layer": replace(CONFIG.layer, num_layers=2)}, "a head is one layer"),
    ],
)
def test_settings_of_a_new_drafter_that_cannot_be(changes, message):
    with pytest.raises(OptionError, match=message):
        replace(CONFIG, **changes)


def changed(folder: Path, field: str, value: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    if value is None:
        del values[field]
    else:
        values[field] = value
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_heads", 3, "lacks the tensor heads.2"),
        ("num_heads", 1, "heads.1.* no place for"),
        ("num_heads", None, "num_heads is missing"),
        ("trunk_layer", -1, "trunk_layer is -1"),
        ("layer", None, "layer is None; it must be an object"),
        ("layer", {"model_type": "llama"}, r"config.json \(layer\): .*missing"),
        ("shared_norm", True, "a field shared_norm"),
        ("draft_vocab_size", 4, "lacks the tensor d2t"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, field: str, value: Any, message: str):
    write(tmp_path, CONFIG, random_drafter(CONFIG, torch.Generator().manual_seed(0)))
    changed(tmp_path, field, value)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(tmp_path)


def test_a_head_of_several_layers_is_refused(tmp_path: Path):
    write(tmp_path, CONFIG, random_drafter(CONFIG, torch.Generator().manual_seed(0)))
    layer = json.loads((tmp_path / "config.json").read_text())["layer"]
    changed(tmp_path, "layer", layer | {"num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="num_hidden_layers of layer is 2; a head is one"):
        read_drafter(tmp_path)


def test_tensors_that_are_refused(tmp_path: Path):
    tensors = random_drafter(CONFIG, torch.Generator().manual_seed(0))
    write(tmp_path, CONFIG, tensors)
    path = tmp_path / "model.safetensors"
    for change, message in (
        ({"heads.0.mlp.up_proj.weight": torch.ones(3, 3)}, r"of shape \[3, 3\]"),
        ({"norm.weight": torch.ones(40)}, "norm.weight, which.* no place for"),
    ):
        save_file(tensors | change, path)
        with pytest.raises(CheckpointError, match=message):
            read_drafter(tmp_path)
    save_file(tensors, path)
    assert load_file(path).keys() == read_drafter(tmp_path).tensors().keys()
