"""Heads and target trained together: what stays, what moves, and the folder that comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forespeak.drafters.base import TargetParts
from forespeak.drafters.loader import load_drafter
from forespeak.errors import OptionError
from forespeak.models.config import ModelConfig, weight_shapes
from forespeak.models.decoder import Decoder
from forespeak.train.lora import head_products
from forespeak.train.objective import (
    Batch,
    Objective,
    Start,
    drafter_config,
    make_objective,
    settings_class,
    write_drafter,
)
from forespeak.train.objectives.medusa import MedusaTraining
from forespeak.train.objectives.medusa2 import Medusa2Objective, Medusa2Training
from forespeak.train.optimizer import Optimizer
from forespeak.train.recipe import OptimizerSettings
from forespeak.types import DenseLaws, SpeculationConfig
from tests.drafters.golden import observe
from tests.tiny import random_tokens, random_weights, run, tiny_config, tiny_decoder
from tests.train.training import batch_of, seeded, tiny_view

CONFIG = tiny_config()


def objective(config: ModelConfig = CONFIG, **settings) -> Medusa2Objective:
    made = settings_class("medusa2")(rank=4, **settings)
    whole = drafter_config("medusa2", config, {"heads.num_heads": "3"})
    found = make_objective("medusa2", whole, tiny_view(config), made, Start(seeded()))
    assert isinstance(found, Medusa2Objective)
    return found


def texts(config: ModelConfig = CONFIG) -> Batch:
    spoken = [False] * 4 + [True] * 16
    model = tiny_decoder(config)
    return batch_of(model, [random_tokens(20, 1), random_tokens(20, 2)], [spoken, spoken])


def train(made: Objective, batch: Batch, steps: int = 30) -> list[dict[str, float]]:
    optimizer = Optimizer(made.network, OptimizerSettings(learning_rate=1e-3), made.rates)
    seen = []
    for step in range(steps):
        made.progress = step / steps
        loss = made.loss(batch, seeded(step))
        loss.total.backward()
        optimizer.step(1.0)
        optimizer.clear()
        seen.append(dict(loss.parts))
    return seen


def test_it_begins_as_the_target_and_medusa():
    made, batch = objective(), texts()
    loss = made.loss(batch, seeded())
    assert loss.parts["divergence"] == pytest.approx(0, abs=1e-5)
    heads = made.network.heads.state_dict()
    alone = make_objective(
        "medusa", made.config.heads, tiny_view(CONFIG), MedusaTraining(), Start(seeded(), heads)
    )
    expected = alone.loss(batch, seeded())
    assert loss.parts["heads"] == pytest.approx(float(expected.total.detach()), rel=1e-4)
    assert loss.acceptance_length == pytest.approx(expected.acceptance_length, rel=1e-4)


def test_heads_learn_and_the_target_stays_near():
    made, batch = objective(), texts()
    seen = train(made, batch)
    assert seen[-1]["heads"] < 0.8 * seen[0]["heads"]
    assert 0 < seen[-1]["divergence"] < 0.2
    weights, now = random_weights(CONFIG), made.tensors()
    assert set(now) == set(weight_shapes(CONFIG)) | {n for n in now if n.startswith("heads.")}
    assert not torch.equal(now["lm_head.weight"], weights["lm_head.weight"])
    same = "model.embed_tokens.weight"
    assert torch.equal(now[same], weights[same])


def test_heads_train_alone_at_first():
    made, batch = objective(heads_first=0.5), texts()
    made.progress = 0.4
    made.loss(batch, seeded()).total.backward()
    moved = {n for n, p in made.network.named_parameters() if p.grad is not None}
    assert moved and all(name.startswith("heads.") for name in moved)
    made.progress = 0.5
    made.loss(batch, seeded()).total.backward()
    moved = {n for n, p in made.network.named_parameters() if p.grad is not None}
    assert any("lora_b" in name for name in moved)


def test_the_ramp_begins_at_nothing():
    made, batch = objective(ramp="sine"), texts()
    loss = made.loss(batch, seeded())
    assert float(loss.total.detach()) == pytest.approx(0, abs=1e-5)
    made.progress = 1.0
    full = made.loss(batch, seeded())
    assert float(full.total.detach()) == pytest.approx(0.2 * full.parts["heads"], rel=1e-3)


def test_rates_are_relative_to_the_runs():
    made = objective()
    optimizer = Optimizer(made.network, OptimizerSettings(learning_rate=1e-3), made.rates)
    optimizer.step(0.5)
    groups = optimizer._parts[0][0].param_groups
    assert sorted(group["lr"] for group in groups) == pytest.approx([0.5e-3, 2e-3])


@pytest.mark.parametrize("tied", [False, True])
def test_its_folder_is_a_target_with_its_heads(tmp_path: Path, tied: bool):
    config = tiny_config(tie_word_embeddings=tied)
    made, batch = objective(config), texts(config)
    train(made, batch, 5)
    folder = tmp_path / "both"
    write_drafter("medusa2", folder, made.config, made.tensors())
    read = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    stored = load_file(folder / "model.safetensors")
    model = Decoder(read, ((n, t) for n, t in stored.items() if not n.startswith("medusa_head")))
    text = random_tokens(14, 7)
    with torch.no_grad():
        states = made.network.backbone(torch.tensor([text]))[0]
        logits = torch.stack(
            [x @ w.T for x, w in head_products(made.network.backbone, states)]
        ).sum(0)
        read_by_heads = made.network.heads(states[-1])
        heads = torch.stack(
            [x @ w.T for x, w in head_products(made.network.backbone, read_by_heads)]
        ).sum(0)
    torch.testing.assert_close(run(model, text).logits, logits, atol=1e-4, rtol=1e-4)
    parts = TargetParts(model)
    drafter = load_drafter(SpeculationConfig(method="medusa", drafter=str(folder)), parts)
    drafter.admit(0)
    observe(drafter, parts, text)
    laws = drafter.propose([0], [1], 3)
    assert isinstance(laws, DenseLaws)
    torch.testing.assert_close(laws.logits[0], heads, atol=1e-4, rtol=1e-4)


def test_what_cannot_be():
    wrong: dict[str, Any] = {
        "rank": 0,
        "alpha": 0.0,
        "ramp": "odd",
        "heads_first": 1.0,
        "heads_rate": 0.0,
    }
    for name, value in wrong.items():
        with pytest.raises(OptionError, match=f"(?i){name}"):
            Medusa2Training(**{name: value})
    with pytest.raises(OptionError, match="from_target"):
        Medusa2Training(from_target=False)
    with pytest.raises(OptionError, match="model.num_layers"):
        drafter_config("medusa2", CONFIG, {"model.num_layers": "2"})
    with pytest.raises(OptionError, match="heads.output"):
        drafter_config("medusa2", CONFIG, {"heads.output": "own"})
