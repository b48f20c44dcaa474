"""Distillation of a small decoder: its forward, what it starts from, that it learns, its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forespeak.drafters.draft_model import DraftModelDrafter
from forespeak.errors import OptionError
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import Decoder
from forespeak.train.network import DecoderNetwork, weights_of
from forespeak.train.objective import (
    Objective,
    Start,
    drafter_config,
    make_objective,
    settings_class,
    write_drafter,
)
from forespeak.train.objectives.draft_model import DraftModelTraining, spread
from forespeak.types import DenseLaws, Frontier
from tests.drafters.random_rounds import observation
from tests.tiny import random_tokens, random_weights, run, tiny_config, tiny_decoder
from tests.train.training import batch_of, seeded, tiny_view

CONFIG = tiny_config(num_layers=5)


def objective(changes: dict[str, str] | None = None, **settings) -> Objective:
    config = drafter_config("draft_model", CONFIG, changes or {"num_layers": "2"})
    made = settings_class("draft_model")(**settings)
    return make_objective("draft_model", config, tiny_view(CONFIG), made, Start(seeded()))


def texts():
    model = tiny_decoder(CONFIG)
    spoken = [False] * 4 + [True] * 16
    return batch_of(model, [random_tokens(20, 1), random_tokens(20, 2)], [spoken, spoken])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_network_is_the_decoder(family: str, tied: bool):
    config = tiny_config(family, tie_word_embeddings=tied)
    weights = random_weights(config)
    network = DecoderNetwork(config)
    network.load_state_dict(weights if not tied else dict(weights))
    first, second = random_tokens(19, 3), random_tokens(12, 4)
    padded = torch.tensor([first, second + [0] * 7])
    with torch.no_grad():
        states = network(padded)
    model = Decoder(config, weights.items())
    for row, text in enumerate((first, second)):
        theirs = run(model, text)
        torch.testing.assert_close(states[row, : len(text)], theirs.hidden, atol=1e-5, rtol=1e-5)
        logits = states[row, : len(text)] @ network.head.T
        torch.testing.assert_close(logits, theirs.logits, atol=1e-4, rtol=1e-4)


def test_training_forward_is_drafting():
    made = objective()
    model = Decoder(made.config, made.tensors().items())
    drafter = DraftModelDrafter(model, target_vocab_size=CONFIG.vocab_size)
    text = random_tokens(12, 5)
    with torch.no_grad():
        logits = made.network(torch.tensor([text]))[0] @ made.network.head.T
    drafter.admit(0)
    drafter.observe([observation(text[:8])])
    first = drafter.propose([0], [text[8]], 3)
    assert isinstance(first, DenseLaws)
    second = drafter.expand([Frontier(0, (1,), (text[9],), (0,))])
    torch.testing.assert_close(first.logits[0, 0], logits[8], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second.logits[0, 0], logits[9], atol=1e-4, rtol=1e-4)


def test_loss_falls_and_the_embedding_stays():
    made, batch = objective(), texts()
    before = {name: tensor.clone() for name, tensor in made.tensors().items()}
    trained = [p for p in made.network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for step in range(30):
        loss = made.loss(batch, seeded(step))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append((float(loss.total.detach()), loss.acceptance_length))
    assert losses[-1][0] < 0.7 * losses[0][0] and losses[-1][1] > losses[0][1]
    after = made.tensors()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"model.embed_tokens.weight", "lm_head.weight"}


def test_a_perfect_draft_model_is_always_accepted():
    made = objective({"num_layers": "5"})  # all of the target's layers
    loss = made.loss(texts(), seeded())
    assert float(loss.total.detach()) == pytest.approx(0, abs=1e-5)
    lengths = [1 + min(4, 15 - place) for place in range(15)]
    assert loss.acceptance_length == pytest.approx(sum(lengths) / 15, abs=1e-3)


def test_layers_are_spread_over_the_target():
    assert [spread(i, 3, 30) for i in range(3)] == [0, 14, 29]
    assert spread(0, 1, 30) == 29
    weights = weights_of(tiny_view(CONFIG))
    tensors = objective().tensors()
    assert torch.equal(
        tensors["model.layers.1.mlp.up_proj.weight"], weights["model.layers.4.mlp.up_proj.weight"]
    )


def test_its_folder_is_a_model(tmp_path: Path):
    made = objective(train_embedding=True)
    write_drafter("draft_model", tmp_path / "small", made.config, made.tensors())
    values = json.loads((tmp_path / "small" / "config.json").read_text())
    config = ModelConfig.from_hf(values)
    assert replace(config, eos_token_ids=()) == replace(made.config, eos_token_ids=())
    assert values["architectures"] == ["LlamaForCausalLM"]
    model = Decoder(config, load_file(tmp_path / "small" / "model.safetensors").items())
    text = random_tokens(9, 6)
    with torch.no_grad():
        states = made.network(torch.tensor([text]))[0]
    torch.testing.assert_close(run(model, text).hidden, states, atol=1e-5, rtol=1e-5)


def test_what_cannot_be():
    with pytest.raises(OptionError, match="train_embedding"):
        objective({"hidden_size": "24", "num_layers": "1"})
    assert objective({"hidden_size": "24", "num_layers": "1"}, train_embedding=True).tensors()
    with pytest.raises(OptionError, match="vocab_size"):
        objective({"vocab_size": "50"})
    with pytest.raises(OptionError, match="depth_decay"):
        DraftModelTraining(depth_decay=0.5)
    with pytest.raises(OptionError, match="depths"):
        DraftModelTraining(depths=0)
