"""A small objective, texts for it, and runs of it: the loop without a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from forespeak.train.batches import Collator, Order, TextSet, select_texts
from forespeak.train.checkpoints import Identity
from forespeak.train.devices import Devices, OneProcess
from forespeak.train.dialogues import Sample
from forespeak.train.loop import Job, StepReport
from forespeak.train.objective import Batch, Loss, Objective
from forespeak.train.recipe import Recipe, recipe_from

VOCAB = 12
IDENTITY = Identity("tiny", "float32", "digest")


class Bigram(Objective):
    """Predicts the next token from this one and a little noise; the noise tells seeds apart."""

    needs_hidden = False

    def __init__(self, seed: int = 0, *, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.network = nn.Linear(VOCAB, VOCAB)
        with torch.no_grad():
            self.network.weight.normal_(generator=generator)
            self.network.bias.zero_()
        self.config = None
        self.noise = noise
        self.spoilt: set[int] = set()  # calls whose loss is not finite
        self.calls = 0

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        self.calls += 1
        inputs = F.one_hot(batch.tokens[:, :-1], VOCAB).float()
        noise = self.noise * torch.randn(inputs.shape, generator=generator)
        wanted = batch.supervised[:, 1:]
        logits = self.network(inputs + noise)[wanted].float()
        losses = F.cross_entropy(logits, batch.tokens[:, 1:][wanted], reduction="none")
        total = losses.sum() / max(1, len(losses))
        if self.calls in self.spoilt:
            total = total * torch.nan
        reach = float(1 + torch.exp(-losses.detach()).mean()) if len(losses) else 1.0
        parts = {"ce": float(total.detach())}
        return Loss(total, parts, reach, weight=float(wanted.sum()))


def samples(count: int = 23, seed: int = 0) -> list[Sample]:
    """Texts of a fixed bigram law, of different lengths, the last two thirds to predict."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(6, 20, (), generator=generator))
        text = [int(torch.randint(VOCAB, (), generator=generator))]
        while len(text) < length:
            text.append((3 * text[-1] + int(torch.randint(2, (), generator=generator))) % VOCAB)
        made.append(Sample(tuple(text), ((length // 3, length),)))
    return made


def recipe(**sections: Any) -> Recipe:
    table: dict[str, Any] = {
        "method": "medusa",
        "data": {"min_supervised": 1, "held_out": 0.1},
        "batch": {"tokens": 64, "micro_batches": 1},
        "optimizer": {"learning_rate": 0.1},
        "schedule": {"steps": 12},
        "save": {"every": 4},
    }
    for name, values in sections.items():
        table[name] = table.get(name, {}) | values if isinstance(values, dict) else values
    return recipe_from(table, "test")


def job(
    out: Path,
    made: Recipe | None = None,
    objective: Objective | None = None,
    devices: Devices | None = None,
    data: TextSet | None = None,
) -> Job:
    made = made or recipe()
    data = data or select_texts(samples(), made.data, made.seed)
    lengths = [len(text) for text in data.texts]
    held_out = Order(data.held_out, lengths, made.batch, 0).step(0) if data.held_out else ()
    return Job(
        recipe=made,
        objective=objective or Bigram(),
        order=Order(data.trained, lengths, made.batch, made.seed),
        collator=Collator(data, None, torch.device("cpu")),
        held_out=held_out,
        out=out,
        identity=IDENTITY,
        device=torch.device("cpu"),
        devices=devices or OneProcess(),
    )


class Steps:
    """Collects reports; ``stop_at`` asks for an end, ``kill_at`` dies there."""

    def __init__(self, *, kill_at: int | None = None) -> None:
        self.reports: list[StepReport] = []
        self._kill_at = kill_at

    def __call__(self, report: StepReport) -> None:
        self.reports.append(report)
        if report.step == self._kill_at:
            raise KilledHere

    @property
    def losses(self) -> dict[int, float]:
        return {report.step: report.loss for report in self.reports}


class KilledHere(BaseException):
    """Nothing handles it, as nothing handles SIGKILL."""


def weights(objective: Objective) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in objective.network.state_dict().values()]


def same(one: Objective, other: Objective) -> bool:
    pairs = zip(weights(one), weights(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
