"""Parallel heads trained with their target: gradients head by head, what moves, the folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forespeak.drafters.base import TargetParts
from forespeak.drafters.loader import load_drafter
from forespeak.errors import OptionError
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import Decoder
from forespeak.train.attention import CausalAttention
from forespeak.train.objective import (
    Start,
    drafter_config,
    make_objective,
    settings_class,
    write_drafter,
)
from forespeak.train.objectives import mtp_parallel_joint
from forespeak.train.objectives.mtp_parallel import MtpParallelTraining
from forespeak.train.objectives.mtp_parallel_joint import JointObjective, JointTraining
from forespeak.train.sequential import add_heads
from forespeak.types import DenseLaws, SpeculationConfig
from tests.drafters.golden import observe
from tests.tiny import random_tokens, tiny_config, tiny_decoder
from tests.train.training import batch_of, seeded, tiny_view

CONFIG = tiny_config()


def objective(config: ModelConfig = CONFIG, **settings) -> JointObjective:
    whole = drafter_config("mtp_parallel_joint", config, {"heads.num_heads": "2"})
    made = settings_class("mtp_parallel_joint")(**settings)
    found = make_objective("mtp_parallel_joint", whole, tiny_view(config), made, Start(seeded()))
    assert isinstance(found, JointObjective)
    return found


def texts(config: ModelConfig = CONFIG):
    spoken = [False] * 4 + [True] * 16
    model = tiny_decoder(config)
    both = [random_tokens(20, 1), random_tokens(20, 2)]
    return batch_of(model, both, [spoken, spoken], (config.num_layers - 2,))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_head_by_head_is_all_at_once(rank: int, tied: bool, monkeypatch: pytest.MonkeyPatch):
    config = tiny_config(tie_word_embeddings=tied)
    batch = texts(config)
    found: list[tuple[Tensor, dict[str, Tensor]]] = []

    def at_once(trunk, heads):
        values = [loss(trunk) for loss, _ in heads]
        return torch.stack(values).sum(), [float(value.detach()) for value in values]

    for way in (add_heads, at_once):
        monkeypatch.setattr(mtp_parallel_joint, "add_heads", way)
        made = objective(config, rank=rank, teacher="text", heads_weight=0.7)
        loss = made.loss(batch, seeded())
        (2 * loss.total).backward()
        named = made.network.named_parameters()
        found.append((loss.total.detach(), {n: p.grad for n, p in named if p.grad is not None}))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys() and len(found[0][1]) > 20
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], atol=1e-5, rtol=1e-4)


def test_it_begins_as_the_target_and_its_heads():
    made, batch = objective(rank=4), texts()
    loss = made.loss(batch, seeded())
    assert loss.parts["keep"] == pytest.approx(0, abs=1e-5)
    alone = make_objective(
        "mtp_parallel", made.config.heads, tiny_view(CONFIG), MtpParallelTraining(),
        Start(seeded(), made.network.heads.state_dict()),
    )  # fmt: skip
    expected = alone.loss(batch, seeded())
    assert loss.parts["heads"] == pytest.approx(float(expected.total.detach()), rel=1e-4)
    assert loss.acceptance_length == pytest.approx(expected.acceptance_length, rel=1e-4)
    with torch.no_grad():
        quiet = made.loss(batch, seeded())
    assert float(quiet.total) == pytest.approx(float(loss.total.detach()), rel=1e-5)


def test_loss_falls_and_the_folders_draft(tmp_path: Path):
    made, batch = objective(rank=0), texts()
    optimizer = torch.optim.AdamW(made.network.parameters(), lr=2e-3)
    losses = []
    for step in range(30):
        loss = made.loss(batch, seeded(step))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(float(loss.total.detach()))
    assert losses[-1] < 0.7 * losses[0]
    folder = tmp_path / "target"
    write_drafter("mtp_parallel_joint", folder, made.config, made.tensors())
    read = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    model = Decoder(read, load_file(folder / "model.safetensors").items())
    parts = TargetParts(model)
    settings = SpeculationConfig(method="mtp_parallel", drafter=str(folder / "heads"))
    drafter = load_drafter(settings, parts)
    text = batch.tokens[0].tolist()
    drafter.admit(0)
    observe(drafter, parts, text[:9])
    laws = drafter.propose([0], [text[9]], 2)
    assert isinstance(laws, DenseLaws)
    network = made.network
    with torch.no_grad():
        trunk = network.backbone.below(batch.tokens[:1, :9], CONFIG.num_layers - 1)
        rotation = made._rotations(torch.arange(9))
        attend = CausalAttention(made.config.heads.layer)
        states = network.backbone.model.norm(network.heads(trunk, rotation, attend)[0, -1])
        expected = states @ network.backbone.head.T
    torch.testing.assert_close(laws.logits[0], expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be():
    wrong: dict[str, Any] = {"rank": -1, "alpha": 0.0, "teacher": "odd", "heads_weight": 0.0}
    for name, value in wrong.items():
        with pytest.raises(OptionError, match=f"(?i){name}"):
            JointTraining(**{name: value})
    with pytest.raises(OptionError, match="num_layers"):
        drafter_config("mtp_parallel_joint", CONFIG, {"num_layers": "2"})
    with pytest.raises(OptionError, match="draft_vocab_size"):
        drafter_config("mtp_parallel_joint", CONFIG, {"heads.draft_vocab_size": "20"})
