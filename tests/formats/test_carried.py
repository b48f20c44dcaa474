"""Targets that carry a drafter: its tensors are passed over, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forespeak.errors import CheckpointError
from forespeak.formats.carried import foreign_tensors
from forespeak.models.loading import load_checkpoint
from tests.formats.tiny_checkpoints import (
    TINY,
    TINY_HF,
    random_weights,
    write_folder,
    write_sharded,
)

MEDUSA = ["medusa_head.0.0.linear.weight", "medusa_head.0.0.linear.bias", "medusa_head.11.1.weight"]
MIMO = ["model.mtp_layers.0.token_layernorm.weight", "model.mtp_layers.0.self_attn.q_proj.bias"]
QWEN = ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"]
DEEPSEEK = ["model.layers.61.enorm.weight", "model.layers.61.eh_proj.weight"]


@pytest.mark.parametrize("names", [MEDUSA, MIMO, QWEN, DEEPSEEK])
def test_drafters_of_every_layout_are_known(names):
    assert foreign_tensors(names, 61) == []


@pytest.mark.parametrize(
    "name",
    [
        "medusa_head.0.weights",
        "medusa_head.weight",
        "medusa_heads.0.0.linear.weight",
        "model.mtp.fc.weight",
        "mtp_fc.weight",
        "model.extra.weight",
        "model.layers.61.self_attn.q_proj.weight",  # a layer too many, with no eh_proj beside it
        "model.layers.60.eh_proj.weight",  # the target's own last layer
        "model.layers.x.eh_proj.weight",
    ],
)
def test_other_names_are_not(name):
    assert foreign_tensors([*MEDUSA, name], 61) == [name]


@pytest.mark.parametrize("write", [write_folder, write_sharded])
@pytest.mark.parametrize("names", [MEDUSA, MIMO, QWEN, ["model.layers.1.eh_proj.weight"]])
def test_a_target_loads_without_the_drafter_that_it_carries(tmp_path: Path, write, names):
    weights = random_weights(TINY)
    carried = {name: torch.ones(3, dtype=torch.bfloat16) for name in names}
    checkpoint = load_checkpoint(write(tmp_path, TINY_HF, weights | carried))
    loaded = dict(checkpoint.weights())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_an_unknown_tensor_beside_a_carried_drafter_is_refused(tmp_path: Path):
    extra = {name: torch.ones(3) for name in [*MEDUSA, "model.layers.1.input_layernorm.weight"]}
    checkpoint = load_checkpoint(write_folder(tmp_path, TINY_HF, random_weights(TINY) | extra))
    with pytest.raises(CheckpointError, match=r"layers\.1\.input_layernorm.*no place for"):
        dict(checkpoint.weights())
