"""Losses and gradients of the official trainers, stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forespeak.train.objective import Batch
from forespeak.train.objectives.dflash import BlockObjective, BlockSettings, DFlashTraining
from forespeak.train.objectives.dspark import DSparkTraining
from forespeak.train.objectives.eagle import EagleTraining
from forespeak.train.objectives.eagle3 import Eagle3Training
from forespeak.train.objectives.medusa import MedusaTraining
from forespeak.train.rows import Guesses, find_guesses
from tests.drafters import golden
from tests.train.training import batch_of, golden_objective, gradients

pytestmark = pytest.mark.golden
_NEAR = 1e-4


def the(method: str) -> list:
    """The training case of a method."""
    found = golden.cases("training")
    return [
        p
        for p in found
        if p.values[0] is None or method in golden.load(p.values[0]).facts["method"]
    ]


def check_norms(stored: dict[str, float], names: dict[str, str], found: dict[str, Tensor]) -> None:
    """Every stored norm of a gradient, under its official name."""
    assert stored
    for name, norm in stored.items():
        assert float(found[names[name]].norm()) == pytest.approx(norm, abs=_NEAR, rel=_NEAR), name


@pytest.mark.parametrize("folder", the("eagle3"))
def test_eagle3_unrolled(folder):
    case = golden.load(folder)
    t = case.tensors
    settings = Eagle3Training(steps=7, official=True, official_rope=True)
    objective, view, _ = golden_objective(case, settings)
    # Stored are logits; the states that they come from solve head @ state = logits.
    logits = t["target_logits"].double()
    hidden = torch.linalg.lstsq(view.head.double(), logits.flatten(0, 1).T).solution.T
    taps = t["features"].unflatten(-1, (3, -1))
    batch = Batch(
        t["input_ids"], t["loss_mask"].bool(), t["attention_mask"].sum(1),
        hidden.view(2, 32, -1).float(), taps,
    )  # fmt: skip
    total, parts, found = gradients(objective, batch)
    for step, wanted in enumerate(t["step_losses"].tolist()):
        assert parts[f"step_{step + 1}"] == pytest.approx(wanted, abs=_NEAR)
    assert total == pytest.approx(float(t["total_loss"]), abs=_NEAR)
    names = {
        name: name.replace("midlayer.", "layers.0.") for name in case.facts["results"]["grad_norms"]
    }
    check_norms(case.facts["results"]["grad_norms"], names, found)
    for stored in ("fc.weight", "midlayer.self_attn.k_proj.weight", "norm.weight"):
        torch.testing.assert_close(
            found[names[stored]], t[f"grad.{stored}"], atol=_NEAR, rtol=_NEAR
        )


@pytest.mark.parametrize("folder", the("eagle1"))
def test_eagle(folder):
    case = golden.load(folder)
    t = case.tensors
    objective, _, _ = golden_objective(case, EagleTraining(official=True))
    batch = Batch(t["input_ids"], t["loss_mask"].bool(), t["attention_mask"].sum(1), t["features"])
    total, parts, found = gradients(objective, batch)
    results = case.facts["results"]
    assert parts["feature"] == pytest.approx(results["vloss"], abs=_NEAR)
    assert parts["law"] == pytest.approx(results["ploss"], abs=_NEAR)
    assert total == pytest.approx(results["loss"], abs=_NEAR)
    check_norms(results["grad_norms"], {name: name for name in results["grad_norms"]}, found)
    for stored in ("fc.weight", "layers.0.self_attn.k_proj.weight"):
        torch.testing.assert_close(found[stored], t[f"grad.{stored}"], atol=_NEAR, rtol=_NEAR)


@pytest.mark.parametrize("folder", the("medusa"))
def test_medusa(folder):
    case = golden.load(folder)
    t = case.tensors
    objective, _, _ = golden_objective(case, MedusaTraining(official=True))
    lengths = t["attention_mask"].sum(1)
    texts = [ids[:n].tolist() for ids, n in zip(t["input_ids"], lengths, strict=True)]
    wanted = [(row[:n] != -100).tolist() for row, n in zip(t["labels"], lengths, strict=True)]
    batch = batch_of(golden.target_of(case).parts.model, texts, wanted)
    total, parts, found = gradients(objective, batch)
    results = case.facts["results"]
    for head, stored in enumerate(results["per_head_ce"]):
        assert parts[f"ce_{head + 1}"] == pytest.approx(stored, abs=_NEAR)
    assert total == pytest.approx(results["coefficient_1_decay_0.8"], abs=_NEAR)
    names = {}
    for name in results["grad_norms"]:
        head, layer = name.split(".")[1:3]
        inner = "output.weight" if layer == "1" else f"blocks.0.{name.split('.')[-1]}"
        names[name] = f"heads.{head}.{inner}"
    check_norms(results["grad_norms"], names, found)
    for head in (0, 4):
        torch.testing.assert_close(
            found[f"heads.{head}.blocks.0.weight"], t[f"grad.{head}.0.linear.weight"],
            atol=_NEAR, rtol=_NEAR,
        )  # fmt: skip


@pytest.mark.parametrize("folder", golden.cases("dspark"))
def test_blocks(folder):
    """DSpark's sequential heads, and DeepSpec's DFlash."""
    case = golden.load(folder)
    t, stored = case.tensors, case.facts["training_loss"]
    weights = stored["weights"]
    mix = {"soft": 0.0, "hard": weights["ce"], "l1": weights["l1"]}
    decay = weights["loss_decay_gamma"]
    settings: BlockSettings = DFlashTraining(**mix, position_decay=decay)
    if case.facts["config"]["confidence_head"]:
        settings = DSparkTraining(**mix, position_decay=decay, confidence=weights["confidence"])
    objective, _, _ = golden_objective(case, settings)
    assert isinstance(objective, BlockObjective)
    counts, keep, mask = t["train.anchors"], t["train.block_keep"], t["train.eval_mask"]
    ids = t["train.input_ids"]
    taps = t["train.features"].unflatten(-1, (len(objective.taps), -1))
    lengths = torch.full((len(ids),), ids.shape[1])
    batch = Batch(ids, t["train.loss_mask"].bool(), lengths, t["train.last_hidden"], taps)
    texts, slots = (keep & mask.any(-1)).nonzero(as_tuple=True)
    start, depth = mask[texts, slots].nonzero(as_tuple=True)
    anchors = counts[texts, slots]
    guesses = Guesses(texts, anchors - 1, start, depth, ids.shape[1], mask.shape[-1])
    loss = objective.loss_of(batch, guesses)
    loss.total.backward()
    found = {n: p.grad for n, p in objective.network.named_parameters() if p.grad is not None}
    assert float(loss.total.detach()) == pytest.approx(stored["total"], abs=_NEAR)
    if stored["confidence"] is not None:
        assert loss.parts["confidence"] == pytest.approx(stored["confidence"], abs=_NEAR)
    assert loss.acceptance_length == pytest.approx(stored["tau_probabilistic"], abs=_NEAR)
    for place, rate in enumerate(stored["accept_rate_by_position"]):
        assert loss.parts[f"accept_{place + 1}"] == pytest.approx(rate, abs=_NEAR)
    check_norms(stored["grad_norms"], {name: name for name in stored["grad_norms"]}, found)
    for name in ("fc.weight", "layers.0.self_attn.k_proj.weight"):
        torch.testing.assert_close(found[name], t[f"train.grad.{name}"], atol=_NEAR, rtol=_NEAR)
    # The anchors that we would draw are those that the official sampler may draw.
    every = find_guesses(batch, objective.config.max_depth)
    drawn = set(zip(every.texts.tolist(), (every.places + 1).tolist(), strict=True))
    assert drawn >= set(zip(texts.tolist(), anchors.tolist(), strict=True))
