"""Objectives as a loop uses them: they learn, halves are wholes, what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forespeak.drafters.starting import fresh_config
from forespeak.errors import DrafterError, OptionError
from forespeak.train.objective import (
    TRAINABLE,
    Batch,
    Objective,
    Start,
    make_objective,
    settings_class,
)
from forespeak.train.objectives.dspark import DSparkObjective
from forespeak.train.objectives.eagle import EagleTraining
from forespeak.train.objectives.eagle3 import Eagle3Training
from forespeak.train.objectives.medusa import MedusaTraining
from forespeak.train.rows import find_guesses
from forespeak.train.sts import calibrate
from tests.tiny import random_weights, run, tiny_config, tiny_decoder
from tests.train.training import batch_of, seeded, tiny_view, view_of

pytestmark = pytest.mark.slow

DRAFTERS = ("medusa", "mtp_parallel", "mtp", "eagle", "eagle3", "dflash", "dspark")
CONFIG = tiny_config(num_layers=5)


def fresh(method: str, changes: dict[str, str] | None = None, **settings) -> Objective:
    config = fresh_config(method, CONFIG, changes or {})
    ids = None
    if config.draft_vocab_size is not None:
        ids = torch.arange(config.draft_vocab_size)
    made = settings_class(method)(**settings)
    return make_objective(method, config, tiny_view(CONFIG), made, Start(seeded(), token_ids=ids))


def answered(objective: Objective, count: int = 4) -> Batch:
    """Texts that the target wrote greedily, which a drafter can learn by heart."""
    model = tiny_decoder(CONFIG)
    texts = [[7 + row, 3, 5 * row] for row in range(count)]
    for text in texts:
        while len(text) < 20 + text[0] % 3:
            text.append(int(run(model, text).logits[-1].argmax()))
    spoken = [[False] * 3 + [True] * (len(text) - 3) for text in texts]
    return batch_of(model, texts, spoken, objective.taps)


@pytest.mark.parametrize("method", DRAFTERS)
def test_loss_falls(method: str):
    objective = fresh(method)
    batch = answered(objective)
    optimizer = torch.optim.AdamW(objective.network.parameters(), lr=3e-3)
    losses, lengths = [], []
    for step in range(30):
        loss = objective.loss(batch, seeded(step))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(float(loss.total.detach()))
        lengths.append(loss.acceptance_length)
    assert losses[-1] < 0.7 * losses[0]
    assert lengths[-1] > lengths[0]


@pytest.mark.parametrize("method", DRAFTERS)
def test_halves_make_the_whole(method: str):
    objective = fresh(method)
    batch = answered(objective)

    def part(rows: slice) -> Batch:
        assert batch.hidden is not None
        return Batch(
            batch.tokens[rows], batch.supervised[rows], batch.lengths[rows], batch.hidden[rows],
            None if batch.taps is None else batch.taps[rows],
        )  # fmt: skip

    whole = objective.loss(batch, seeded())
    halves = [objective.loss(part(rows), seeded()) for rows in (slice(0, 1), slice(1, 4))]
    total = sum(float(half.total.detach()) * half.weight for half in halves)
    weight = sum(half.weight for half in halves)
    assert weight == pytest.approx(whole.weight)
    assert total / weight == pytest.approx(float(whole.total.detach()), rel=1e-4)


@pytest.mark.parametrize("method", DRAFTERS)
def test_a_batch_without_answers_says_nothing(method: str):
    objective = fresh(method)
    batch = answered(objective)
    silent = replace(batch, supervised=torch.zeros_like(batch.supervised))
    loss = objective.loss(silent, seeded())
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and loss.weight == 0 and loss.acceptance_length == 1


@pytest.mark.parametrize("method", DRAFTERS)
def test_words_outside_the_draft_vocabulary_have_no_chance(method: str):
    objective = fresh(method, {"draft_vocab_size": "1"})
    batch = answered(objective)
    batch = replace(batch, tokens=torch.where(batch.supervised, 5, batch.tokens))
    loss = objective.loss(batch, seeded())
    assert loss.acceptance_length == 1 and objective.tensors()["d2t"].tolist() == [0]


def test_padding_changes_nothing():
    for method in DRAFTERS:
        objective = fresh(method)
        batch = answered(objective)
        assert batch.hidden is not None
        junk = torch.full((4, 5), 11)
        wide = Batch(
            torch.cat([batch.tokens, junk], 1),
            torch.cat([batch.supervised, junk < 0], 1),
            batch.lengths,
            torch.cat([batch.hidden, torch.randn(4, 5, CONFIG.hidden_size)], 1),
            None if batch.taps is None
            else torch.cat([batch.taps, torch.randn(4, 5, *batch.taps.shape[2:])], 1),
        )  # fmt: skip
        first, second = (float(objective.loss(b, seeded()).total.detach()) for b in (batch, wide))
        assert first == pytest.approx(second, rel=1e-4), method


@pytest.mark.parametrize("method", ["medusa", "mtp_parallel", "mtp", "eagle", "eagle3"])
def test_sampled_positions_are_few_and_drawn_by_the_generator(method: str):
    objective = fresh(method, max_positions=10)
    batch = answered(objective)
    losses = {seed: objective.loss(batch, seeded(seed)) for seed in (0, 1)}
    assert losses[0].weight == losses[1].weight == 10
    again = objective.loss(batch, seeded(0))
    assert torch.equal(again.total, losses[0].total)
    assert not torch.equal(losses[0].total, losses[1].total)


def test_all_runs_of_starts_are_drawn_at_some_time():
    batch = answered(fresh("medusa"))
    every = set(find_guesses(batch, 2).flat_starts.tolist())
    seen: set[int] = set()
    for seed in range(40):
        guesses = find_guesses(batch, 2, max_positions=12, generator=seeded(seed))
        seen |= set(guesses.flat_starts.tolist())
    assert seen == every


def test_anchors_are_drawn_for_each_text():
    objective = fresh("dflash", num_anchors=3)
    batch = answered(objective)
    loss = objective.loss(batch, seeded())
    most = sum(2.718281828 ** (-k / 4) for k in range(7))
    assert 0 < loss.weight <= 4 * 3 * most + 1e-3


def test_layers_start_from_the_target():
    weights = random_weights(CONFIG, 0)
    config = fresh_config("eagle3", CONFIG, {})
    start = Start(seeded())
    made = make_objective("eagle3", config, view_of(CONFIG, weights), Eagle3Training(), start)
    tensors = made.tensors()
    last = "model.layers.4."
    assert torch.equal(tensors["lm_head.weight"], weights["lm_head.weight"])
    assert torch.equal(tensors["layers.0.mlp.up_proj.weight"], weights[f"{last}mlp.up_proj.weight"])
    assert torch.equal(
        tensors["layers.0.self_attn.q_proj.weight"][:, 40:],
        weights[f"{last}self_attn.q_proj.weight"],
    )
    other = Eagle3Training(from_target=False)
    plain = make_objective("eagle3", config, view_of(CONFIG, weights), other, Start(seeded()))
    assert not torch.equal(plain.tensors()["norm.weight"], weights["model.norm.weight"])


def test_training_goes_on_from_given_tensors():
    first = fresh("eagle3", {"draft_vocab_size": "20"})
    tensors = first.tensors()
    second = make_objective(
        "eagle3", first.config, tiny_view(CONFIG), Eagle3Training(), Start(seeded(5), tensors)
    )
    for name, tensor in second.tensors().items():
        assert torch.equal(tensor, tensors[name]), name


def test_noise_comes_from_the_generator():
    for method, settings in (("eagle", EagleTraining), ("eagle3", Eagle3Training)):
        assert settings(noise=0.1).noise == 0.1
        objective = fresh(method, noise=0.1)
        batch = answered(objective)
        totals = [objective.loss(batch, seeded(seed)).total for seed in (0, 0, 1)]
        assert torch.equal(totals[0], totals[1]) and not torch.equal(totals[0], totals[2])


@pytest.mark.parametrize("greedy", [True, False])
def test_confidences_are_calibrated_on_held_out_texts(greedy: bool):
    objective = fresh("dspark", num_anchors=8)
    assert isinstance(objective, DSparkObjective)
    batch = answered(objective)
    logits, accepted = objective.observed(batch, seeded(), greedy=greedy)
    assert logits.shape == (len(accepted), 7) and len(accepted) == 4 * 8
    short = logits.isnan().sum(1)
    assert bool((accepted <= 7 - short).all()) and bool(logits[:, 0].isfinite().all())
    found = calibrate(logits, accepted)
    assert replace(objective.config, temperatures=found.temperatures).temperatures


@pytest.mark.parametrize(
    ("method", "settings", "what"),
    [
        ("medusa", {"soft": -1.0}, "soft"),
        ("medusa", {"soft": 0.0}, "above 0"),
        ("medusa", {"official": True, "l1": 1.0}, "l1"),
        ("medusa", {"max_positions": 0}, "max_positions"),
        ("medusa", {"depth_decay": 0.0}, "depth_decay"),
        ("mtp", {"steps": 0}, "steps"),
        ("mtp", {"attention": "odd"}, "odd"),
        ("eagle", {"noise_by_length": True}, "noise"),
        ("eagle", {"official": True, "steps": 2}, "official"),
        ("eagle3", {"steps": 17}, "steps"),
        ("eagle3", {"official": True, "max_positions": 5}, "max_positions"),
        ("dflash", {"num_anchors": 0}, "num_anchors"),
        ("dflash", {"max_positions": 5}, "max_positions"),
        ("dflash", {"position_decay": 0.0}, "position_decay"),
        ("dspark", {"confidence": -1.0}, "confidence"),
    ],
)
def test_settings_that_cannot_be(method: str, settings: dict, what: str):
    with pytest.raises(OptionError, match=what):
        settings_class(method)(**settings)


def test_drafters_that_cannot_be():
    view = tiny_view(CONFIG)

    def make(method: str, changes: dict[str, str], start: Start, **settings) -> Objective:
        config = fresh_config(method, CONFIG, changes)
        return make_objective(method, config, view, settings_class(method)(**settings), start)

    with pytest.raises(OptionError, match="no vocabulary"):
        make("eagle3", {"draft_vocab_size": "9"}, Start(seeded()))
    with pytest.raises(OptionError, match="rising"):
        make("eagle3", {"draft_vocab_size": "2"}, Start(seeded(), token_ids=torch.tensor([4, 4])))
    with pytest.raises(OptionError, match="DSpark"):
        make("dflash", {"markov_rank": "4"}, Start(seeded()))
    with pytest.raises(OptionError, match="no confidence head"):
        make("dspark", {"confidence_head": "false"}, Start(seeded()))
    with pytest.raises(DrafterError, match="layers"):
        deep = replace(CONFIG, num_layers=9)
        config = fresh_config("eagle3", deep, {})
        make_objective("eagle3", config, view, Eagle3Training(), Start(seeded()))
    with pytest.raises(OptionError, match="medusae"):
        settings_class("medusae")
    assert set(DRAFTERS) <= set(TRAINABLE)
    assert MedusaTraining().official is False
