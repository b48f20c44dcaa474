"""The loop: batches to losses to steps, until the run, the time or the user says that it is over.

Progress is one integer. Which texts a step sees, which anchors and noise are drawn and what the
learning rate is follow from it, so that a run that was stopped or killed goes on to the same
numbers, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from forespeak.errors import TrainingError
from forespeak.train.batches import Collator, Group, Order, drawing
from forespeak.train.checkpoints import (
    Identity,
    Progress,
    damage_said,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from forespeak.train.devices import Devices, OneProcess
from forespeak.train.objective import Batch, Loss, Objective
from forespeak.train.optimizer import Optimizer, rate_at
from forespeak.train.recipe import Recipe
from forespeak.train.step_log import StepLog, read_log
from forespeak.train.sums import Sums

Ending = Literal["complete", "time", "signal"]

_RECENT = 8  # steps; the first ones of a process take longer than all others
_HELD_OUT_STEP = 2**40  # far above any step: the randomness of held-out batches is their own


@dataclass(frozen=True)
class StepReport:
    """What a step gave.

    Attributes:
        step: counted from 1, of ``num_steps``.
        loss: mean over the rows of all its micro-batches; ``parts`` of it likewise.
        acceptance_length: tokens a round would yield on its texts, bonus included.
        gradient_norm: before clipping.
        rate: share of the peak learning rate.
        tokens: predicted in the run so far.
        seconds: of training so far.
        skipped: its loss or gradient was not finite, so nothing moved.
    """

    step: int
    num_steps: int
    epoch: int
    loss: float
    parts: Mapping[str, float]
    acceptance_length: float
    gradient_norm: float
    rate: float
    tokens: float
    seconds: float
    skipped: bool


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        ending: ``complete``, ``time`` (the limit ran out) or ``signal`` (the user stopped it).
        progress: how far it is.
        num_steps: of the whole run.
        last: the last step of this process, None when there was nothing left to do.
        held_out: loss and acceptance length on texts that are not trained on, where there are any.
    """

    ending: Ending
    progress: Progress
    num_steps: int
    last: StepReport | None
    held_out: Mapping[str, float] | None


@dataclass(frozen=True)
class Job:
    """A run, ready to start.

    Attributes:
        recipe: what to do.
        objective: the method.
        order: which texts a step sees.
        collator: makes batches of them.
        held_out: micro-batches that measure progress; may be empty.
        out: the run's folder.
        identity: what it must still be when it is taken up again.
        provenance: kept with every checkpoint.
        device: where it trains.
        devices: the processes.
    """

    recipe: Recipe
    objective: Objective
    order: Order
    collator: Collator
    held_out: Sequence[Group]
    out: Path
    identity: Identity
    device: torch.device
    provenance: Mapping[str, Any] = field(default_factory=dict)
    devices: Devices = OneProcess()

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        schedule = self.recipe.schedule
        return schedule.steps or self.order.num_steps(schedule.epochs)


@dataclass
class Stop:
    """A wish to end, which is granted after the step."""

    wanted: bool = False


def train(
    job: Job,
    *,
    deadline: float | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    stop: Stop | None = None,
) -> Outcome:
    """Run, from the newest checkpoint on where there is one.

    Args:
        job: the run.
        deadline: ``time.monotonic()`` at which it must be over.
        on_step: told after every step.
        stop: asked after every step.

    Raises:
        TrainingError: too many steps in a row were not finite, or the run was another one.
        CheckpointError: a checkpoint is damaged.
        OSError: the disk is full; what was saved before stays good.
    """
    return _Run(job, deadline, on_step, stop or Stop()).run()


@contextmanager
def stopping_signals() -> Iterator[Stop]:
    """SIGINT and SIGTERM ask for an end after the step; a second one is an interruption."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.wanted:
            raise KeyboardInterrupt
        stop.wanted = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def held_out_batches(job: Job) -> Iterator[tuple[Batch, torch.Generator]]:
    """The texts that measure progress, with the randomness that is always theirs."""
    for number, group in enumerate(job.held_out):
        yield job.collator.batch(group), drawing(job.recipe.seed, _HELD_OUT_STEP, number)


class _Run:
    """A run under way."""

    def __init__(
        self,
        job: Job,
        deadline: float | None,
        on_step: Callable[[StepReport], None] | None,
        stop: Stop,
    ) -> None:
        self._job, self._deadline, self._on_step, self._stop = job, deadline, on_step, stop
        self._main = job.devices.rank == 0
        self._progress, self._optimizer = self._taken_up()
        self._log = StepLog(job.out, self._progress.step) if self._main else None
        self._started = time.monotonic()
        self._before = self._progress.seconds
        self._time_share = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of the latest steps

    def run(self) -> Outcome:
        try:
            return self._run()
        finally:
            if self._log is not None:
                self._log.close()

    def _run(self) -> Outcome:
        last: StepReport | None = None
        ending: Ending = "complete"
        held_out: Mapping[str, float] | None = None
        while self._progress.step < self._job.num_steps:
            if (early := self._early_end()) is not None:
                ending = early
                break
            last = self._step()
            done = self._progress.step
            if done % self._job.recipe.save.every == 0 and done < self._job.num_steps:
                self._save()
                held_out = self._measure()
        self._save()
        held_out = self._measure() if last is not None else self._measured_before()
        self._job.devices.unwrap(self._job.objective)
        return Outcome(ending, self._progress, self._job.num_steps, last, held_out)

    def _taken_up(self) -> tuple[Progress, Optimizer]:
        job, network = self._job, self._job.objective.network
        found = load_checkpoint(job.out, job.recipe, job.identity, job.device)
        progress, state = found or (Progress(), None)
        newest = [job.out, *list_checkpoints(job.out)][-1]
        job.devices.wait()
        with damage_said(newest):
            if state is not None:
                network.load_state_dict(state["network"])
        job.devices.wrap(job.objective)
        optimizer = Optimizer(network, job.recipe.optimizer, job.objective.rates)
        with damage_said(newest):
            if state is not None:
                optimizer.load(state["optimizer"], job.devices.shards)
        return progress, optimizer

    def _early_end(self) -> Ending | None:
        """Whether to end before the next step; all processes must agree."""
        late = self._deadline is not None and (
            time.monotonic() + max(self._recent, default=0.0) > self._deadline
        )
        if self._job.devices.count > 1:
            asked, passed = self._job.devices.add_numbers([self._stop.wanted, late])
            return "signal" if asked else "time" if passed else None
        return "signal" if self._stop.wanted else "time" if late else None

    def _step(self) -> StepReport:
        job, step, begun = self._job, self._progress.step, time.monotonic()
        self._time_share = self._share_of_time()
        job.objective.progress = self._share_done(step)
        losses = self._add_up(job.order.step(step))
        total, weight, reach, *parts = job.devices.add_numbers(losses.sums)
        job.devices.add_gradients(self._optimizer.parameters)
        self._scale_gradients(1 / weight if weight else 0.0)
        norm = self._optimizer.clip()
        rate = rate_at(self._share_done(step + 1), job.recipe.schedule)
        good = weight > 0 and math.isfinite(total) and math.isfinite(norm)
        if good:
            self._optimizer.step(rate)
        self._optimizer.clear()
        self._recent.append(time.monotonic() - begun)
        before = self._progress
        self._progress = Progress(
            step=step + 1,
            seconds=self._before + time.monotonic() - self._started,
            tokens=before.tokens + weight,
            skipped=before.skipped + (not good),
            skipped_in_a_row=0 if good else before.skipped_in_a_row + 1,
        )
        mean = 1 / weight if weight else math.nan
        report = StepReport(
            step=step + 1, num_steps=job.num_steps, epoch=job.order.epoch_of(step),
            loss=total * mean,
            parts={n: part * mean for n, part in zip(losses.names, parts, strict=True)},
            acceptance_length=reach * mean, gradient_norm=norm, rate=rate,
            tokens=self._progress.tokens, seconds=self._progress.seconds, skipped=not good,
        )  # fmt: skip
        self._tell(report)
        return report

    def _add_up(self, groups: Sequence[Group]) -> Sums:
        """Run this process's micro-batches; gradients are of the sum of loss * weight."""
        job, sums = self._job, Sums()
        job.objective.network.train()
        for number in range(job.devices.rank, len(groups), job.devices.count):
            generator = drawing(job.recipe.seed, self._progress.step, number)
            loss = self._loss(job.collator.batch(groups[number]), generator)
            if loss.weight > 0 or job.devices.together:
                (loss.total * loss.weight).backward()  # type: ignore[no-untyped-call]
            sums.add(loss)
        if job.devices.together and 0 < len(groups) % job.devices.count <= job.devices.rank:
            spare = self._loss(job.collator.batch(groups[0]), drawing(job.recipe.seed, 0, 0))
            (spare.total * 0).backward()  # type: ignore[no-untyped-call]
            sums.add(replace(spare, total=torch.zeros(()), weight=0.0))
        return sums if sums.names else self._no_sums(groups)

    def _no_sums(self, groups: Sequence[Group]) -> Sums:
        """Of a process that has no micro-batch in this step: the names of the others' parts."""
        sums = Sums()
        with torch.no_grad():
            batch = self._job.collator.batch(groups[0])
            generator = drawing(self._job.recipe.seed, self._progress.step, 0)
            loss = self._job.objective.loss(batch, generator)
        sums.add(replace(loss, total=torch.zeros(()), weight=0.0))
        return sums

    def _loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        job = self._job
        low = job.recipe.compute.dtype == "bfloat16"
        with torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=low):
            return job.devices.loss(job.objective, batch, generator)

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self._optimizer.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _share_done(self, step: int) -> float:
        return min(max(step / self._job.num_steps, self._time_share), 1.0)

    def _share_of_time(self) -> float:
        """Of the time limit, where the schedule follows it: by the first process's clock."""
        if self._job.recipe.schedule.follows != "time" or self._deadline is None:
            return 0.0
        now = self._before + time.monotonic() - self._started
        share = now / (self._before + self._deadline - self._started)
        if self._job.devices.count == 1:
            return share
        return self._job.devices.add_numbers([share if self._main else 0.0])[0]

    def _tell(self, report: StepReport) -> None:
        if self._log is not None:
            self._log.write({"kind": "step"} | vars(report))
        if self._on_step is not None and self._main:
            self._on_step(report)
        limit = self._job.recipe.optimizer.max_skipped
        if self._progress.skipped_in_a_row >= limit:
            raise TrainingError(
                f"{limit} steps in a row had a loss or gradient that is not finite, up to step "
                f"{report.step}; nothing was changed by them. Lower optimizer.learning_rate, or "
                'set compute.dtype to "float32", and start again in another folder.'
            )

    def _save(self) -> None:
        job = self._job
        if self._progress.step and (self._main or job.devices.together):
            network, optimizer = job.objective.network, self._optimizer
            state = job.devices.whole(
                {"network": network.state_dict(), "optimizer": optimizer.state()}
            )
            if self._main:
                save_checkpoint(
                    job.out, self._progress, state, job.recipe, job.identity, job.provenance
                )
        job.devices.wait()

    def _measured_before(self) -> Mapping[str, float] | None:
        """What the log has of the step that the run stands at."""
        for record in reversed(read_log(self._job.out)):
            if record["kind"] == "held_out" and record["step"] == self._progress.step:
                return {name: record[name] for name in ("loss", "acceptance_length")}
        return None

    def _measure(self) -> Mapping[str, float] | None:
        """Loss and acceptance length on the texts held out."""
        if not self._job.held_out or not (self._main or self._job.devices.together):
            return None
        sums = Sums()
        self._job.objective.network.eval()
        with torch.no_grad():
            for batch, generator in held_out_batches(self._job):
                sums.add(self._loss(batch, generator))
        total, weight, reach, *_ = sums.sums
        if not weight:
            return None
        found = {"loss": total / weight, "acceptance_length": reach / weight}
        if self._log is not None:
            self._log.write({"kind": "held_out", "step": self._progress.step} | found)
        return found
