"""Training forward equals inference forward: every law that the loss sees is the drafter's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.drafters.loader import load_drafter, named
from forespeak.drafters.starting import fresh_config, spread_vocabulary
from forespeak.drafters.table import METHODS
from forespeak.formats.drafters import FAMILIES
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import Decoder
from forespeak.train.objective import Batch, Objective, Start, make_objective, settings_class
from forespeak.train.objectives import dspark
from forespeak.train.rows import Guesses
from forespeak.types import DenseLaws, Frontier, SpeculationConfig
from tests.drafters.golden import observe
from tests.tiny import random_tokens, tiny_config, tiny_decoder
from tests.train.training import batch_of, seeded, tiny_view

SIZE = 83


@dataclass(frozen=True)
class Plan:
    """A drafter and how it is trained."""

    method: str
    changes: dict[str, str]
    settings: dict[str, Any]
    target: ModelConfig


def plan(method: str, changes: str = "", family: str = "llama", layers: int = 5, **settings) -> Any:
    pairs = dict(part.split("=") for part in changes.split())
    if pairs.get("draft_vocab_size"):
        settings["reduced"] = True
    made = Plan(method, pairs, settings, tiny_config(family, num_layers=layers))
    return pytest.param(
        made, id="-".join(filter(None, [method, changes.replace(" ", ","), family]))
    )


PLANS = [
    plan("medusa"),
    plan("medusa", "output=own num_blocks=2 draft_vocab_size=30"),
    plan("mtp_parallel"),
    plan("mtp_parallel", family="mistral"),
    plan("mtp", steps=4),
    plan("mtp", "num_modules=2 recursion_state=raw draft_vocab_size=40", steps=5),
    plan("mtp", "num_modules=3 zero_first_embedding=true", "qwen2", steps=7),
    plan("mtp", family="mistral", steps=3),
    plan("eagle", steps=3),
    plan("eagle", "draft_vocab_size=30 layers.num_layers=2", "qwen3"),
    plan("eagle3", "draft_vocab_size=30", steps=4, layers=8),
    plan("eagle3", "norm_before_residual=true norm_before_fc=true norm_output=true own_head=false"),
    plan("eagle3", "fc_norm=true layers.num_layers=2 target_layer_ids=-1,0,2"),
    plan("dflash"),
    plan("dflash", "sample_from_anchor=true block_size=4 draft_vocab_size=30"),
    plan("dspark"),
    plan("dspark", "markov_head_type=gated draft_vocab_size=30 target_layer_ids=-1,1"),
    plan("dspark", "markov_head_type=rnn confidence_with_markov=false"),
    plan("dspark", "markov_head_type=rnn sample_from_anchor=false"),
]  # fmt: skip


def begun(p: Plan, seed: int = 0) -> tuple[Objective, dict[str, Tensor]]:
    """An objective with random weights that are large enough to matter."""
    config = fresh_config(p.method, p.target, p.changes)
    tensors: dict[str, Tensor] = named(METHODS[p.method].starts)(config, seeded(seed))
    generator = seeded(seed + 1)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensors[name] = tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        elif tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator)
            tensors[name] = drawn / tensor.shape[1] ** 0.5
    if config.draft_vocab_size is not None:
        tensors["d2t"] = spread_vocabulary(SIZE, config.draft_vocab_size)
    settings = {name: value for name, value in p.settings.items() if name != "reduced"}
    made = settings_class(p.method)(**settings)
    view = tiny_view(p.target)
    return make_objective(p.method, config, view, made, Start(seeded(), tensors)), tensors


def texts_for(model: Decoder, objective: Objective) -> Batch:
    """Two texts of different lengths: a prompt, an answer, words of a user, an answer."""
    first, second = random_tokens(24, 1), random_tokens(17, 2)
    spoken = [False] * 5 + [True] * 9 + [False] * 3 + [True] * 7
    return batch_of(model, [first, second], [spoken, [False] * 2 + [True] * 15], objective.taps)


class Seen:
    """Laws [Vd] of guesses by (text, start, depth), as the loss saw them."""

    def __init__(self, objective: Any) -> None:
        self.laws: dict[tuple[int, int, int], Tensor] = {}
        self._score = objective._score
        self.head, self.vocabulary = self._score.head, self._score.vocabulary
        objective._score = self

    def __call__(self, products, guesses: Guesses, weights, batch, mix, *, at=None, **more):
        logits = torch.stack([x.detach() @ w.detach().T for x, w in products]).sum(0)
        which = range(len(guesses.start)) if at is None else at.tolist()
        for law, guess in zip(logits, which, strict=True):
            start = int(guesses.start[guess])
            place = int(guesses.texts[start]), int(guesses.places[start])
            self.laws[*place, int(guesses.depth[guess])] = law
        return self._score(products, guesses, weights, batch, mix, at=at, **more)


def drafted(
    drafter: Drafter, parts: TargetParts, text: Sequence[int], start: int, depths: int
) -> tuple[Tensor, Tensor | None]:
    """Laws [D, Vd] and confidences [D] below the true tokens after a start."""
    drafter.admit(0)
    observe(drafter, parts, text[: start + 1])
    laws = drafter.propose([0], [text[start + 1]], depths)
    assert isinstance(laws, DenseLaws)
    logits, chances = (
        [laws.logits[0]],
        [laws.confidences[0] if laws.confidences is not None else None],
    )
    if drafter.info.expansion != "none":
        for depth in range(1, depths):
            laws = drafter.expand([Frontier(0, (depth,), (text[start + 1 + depth],), (depth - 1,))])
            logits.append(laws.logits[0])
            chances.append(laws.confidences[0] if laws.confidences is not None else None)
    drafter.release(0)
    known = [chance for chance in chances if chance is not None]
    return torch.cat(logits)[:depths], torch.cat(known)[:depths] if known else None


@pytest.mark.parametrize("p", PLANS)
def test_laws_in_training_are_laws_in_drafting(
    p: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_decoder(p.target)
    objective, _ = begun(p)
    estimates: list[Tensor] = []

    def noted(logits: Tensor, chances: Tensor) -> Tensor:
        estimates.append(torch.sigmoid(logits.detach()))
        return torch.zeros_like(logits)

    monkeypatch.setattr(dspark, "chance_loss", noted)
    batch, seen = texts_for(model, objective), Seen(objective)
    objective.loss(batch, seeded())
    import_module(FAMILIES[p.method]).write(
        tmp_path / "drafter", objective.config, objective.tensors()
    )
    parts = TargetParts(model)
    config = SpeculationConfig(method=p.method, drafter=str(tmp_path / "drafter"))
    drafter = load_drafter(config, parts)
    places = sorted({(text, start) for text, start, _ in seen.laws})
    assert (0, 4) in places and (1, 1) in places  # where the first answers begin
    order = {guess: at for at, guess in enumerate(seen.laws)}
    deepest = 0
    for text, start in [places[0], places[5], places[-6], places[-1]]:
        depths = len([guess for guess in seen.laws if guess[:2] == (text, start)])
        deepest = max(deepest, depths)
        length = int(batch.lengths[text])
        laws, chances = drafted(drafter, parts, batch.tokens[text, :length].tolist(), start, depths)
        for depth in range(depths):
            torch.testing.assert_close(
                seen.laws[text, start, depth], laws[depth], atol=1e-4, rtol=1e-4
            )
            if chances is not None:
                mine = estimates[0][order[text, start, depth]]
                torch.testing.assert_close(mine, chances[depth], atol=1e-4, rtol=1e-4)
    assert deepest > 1 or p.settings.get("steps", 1) == 1


@pytest.mark.parametrize("p", PLANS)
def test_every_parameter_learns(p: Plan):
    objective, _ = begun(p)
    batch = texts_for(tiny_decoder(p.target), objective)
    loss = objective.loss(batch, seeded())
    loss.total.backward()
    assert torch.isfinite(loss.total) and 1 <= loss.acceptance_length <= 12 and loss.weight > 0
    for name, parameter in objective.network.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), name


@pytest.mark.parametrize("p", PLANS)
def test_bfloat16_products_give_nearly_the_same(p: Plan):
    objective, _ = begun(p)
    batch = texts_for(tiny_decoder(p.target), objective)
    exact = objective.loss(batch, seeded())
    with torch.autocast("cpu", torch.bfloat16):
        near = objective.loss(batch, seeded())
    near.total.backward()
    assert float(near.total.detach()) == pytest.approx(float(exact.total.detach()), rel=0.05)
    assert all(p.grad is not None for p in objective.network.parameters())
