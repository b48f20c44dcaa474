"""The target's weights for losses, read from its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forespeak.errors import ModelError
from forespeak.train.target import LayersOnDemand, open_training_target, target_view
from tests.tiny import random_weights
from tests.train.tiny_run import CONFIG, write_target


def test_view_is_the_files(tmp_path: Path):
    target = open_training_target(str(write_target(tmp_path / "target")), threads=1)
    assert target.model.dtype_name == "int8" and target.config.num_layers == 5
    view, weights = target_view(target), random_weights(CONFIG)
    assert torch.equal(view.embedding, weights["model.embed_tokens.weight"])
    assert torch.equal(view.head, weights["lm_head.weight"])
    assert torch.equal(view.norm, weights["model.norm.weight"])
    for layer in (4, 0, 2):
        for name, tensor in view.layers[layer].items():
            assert torch.equal(tensor, weights[f"model.layers.{layer}.{name}"])
    low = target_view(target, dtype=torch.bfloat16)
    assert low.head.dtype == torch.bfloat16 and low.norm.dtype == torch.float32


def test_layers_cost_two_passes_at_most():
    passes = []

    def weights():
        passes.append(1)
        return iter(random_weights(CONFIG).items())

    layers = LayersOnDemand(weights, CONFIG.num_layers, torch.device("cpu"))
    assert len(layers) == 5 and list(layers) == [0, 1, 2, 3, 4] and not passes
    assert layers[4].keys() == layers[4].keys() and len(passes) == 1
    assert all(layers[layer] for layer in layers) and len(passes) == 2
    with pytest.raises(KeyError):
        layers[5]


def test_a_model_that_is_not_there(tmp_path: Path):
    with pytest.raises(ModelError):
        open_training_target(str(tmp_path / "none"))
