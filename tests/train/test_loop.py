"""The loop: exact resume after anything, refusals, accumulation, schedule, order."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from forespeak.errors import CheckpointError, OptionError, TrainingError
from forespeak.train import checkpoints, step_log
from forespeak.train.atomic import PART
from forespeak.train.batches import Order, drawing, select_texts
from forespeak.train.checkpoints import list_checkpoints
from forespeak.train.dialogues import Sample
from forespeak.train.loop import Stop, stopping_signals, train
from forespeak.train.optimizer import Optimizer, rate_at
from forespeak.train.recipe import BatchSettings, DataSettings, OptimizerSettings, ScheduleSettings
from tests.train.stubs import Bigram, KilledHere, Steps, job, recipe, same, samples, weights

pytestmark = pytest.mark.slow


def test_the_loss_falls(tmp_path: Path):
    steps = Steps()
    outcome = train(job(tmp_path, recipe(schedule={"steps": 40})), on_step=steps)
    first, last = steps.reports[0], steps.reports[-1]
    assert outcome.ending == "complete" and outcome.progress.step == 40
    assert last.loss < 0.6 * first.loss
    assert last.acceptance_length > first.acceptance_length > 1
    assert last.parts["ce"] == pytest.approx(last.loss)
    assert outcome.held_out is not None and outcome.held_out["loss"] < first.loss


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kill_at", [1, 3, 4, 5, 8, 11, 12])
def test_resume_after_a_kill_at_any_step(tmp_path: Path, kill_at, optimizer):
    made = recipe(optimizer={"name": optimizer}, batch={"micro_batches": 2})
    whole, steps = Bigram(), Steps()
    train(job(tmp_path / "whole", made, whole), on_step=steps)
    first, again = Steps(kill_at=kill_at), Steps()
    with pytest.raises(KilledHere):
        train(job(tmp_path / "cut", made, Bigram()), on_step=first)
    # Whatever it begins with, the checkpoint decides; the first is written after step 4.
    resumed = Bigram(seed=5 if kill_at > 4 else 0)
    train(job(tmp_path / "cut", made, resumed), on_step=again)
    assert same(whole, resumed)
    assert first.losses | again.losses == steps.losses
    assert min(again.losses) == 4 * ((kill_at - 1) // 4) + 1
    logged = [r["loss"] for r in step_log.read_log(tmp_path / "cut") if r["kind"] == "step"]
    assert logged == list(steps.losses.values())


def test_killed_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch):
    whole = Bigram()
    train(job(tmp_path / "whole", objective=whole))
    real, calls = torch.save, []

    def save(value, path):
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise KilledHere
        real(value, path)

    monkeypatch.setattr(checkpoints.torch, "save", save)  # type: ignore[attr-defined]
    # A killed process clears nothing away.
    monkeypatch.setattr("forespeak.train.atomic.shutil.rmtree", lambda *a, **k: None)
    with pytest.raises(KilledHere):
        train(job(tmp_path / "cut"))
    monkeypatch.undo()
    left = [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()]
    assert sorted(left) == [f"{PART}step-0000008", "step-0000004"]
    resumed = Bigram()
    train(job(tmp_path / "cut", objective=resumed))
    assert same(whole, resumed)
    assert [p.name for p in list_checkpoints(tmp_path / "cut")] == ["step-0000008", "step-0000012"]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch):
    real, calls = torch.save, []

    def save(value, path):
        calls.append(path)
        if len(calls) > 1:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(value, path)

    monkeypatch.setattr(checkpoints.torch, "save", save)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="No space"):
        train(job(tmp_path))
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000004"]
    whole, resumed = Bigram(), Bigram()
    train(job(tmp_path / "whole", objective=whole))
    train(job(tmp_path, objective=resumed))
    assert same(whole, resumed)


def test_a_finished_run_is_left_alone(tmp_path: Path):
    train(job(tmp_path))
    before = (tmp_path / "log.jsonl").read_text()
    objective = Bigram(seed=3)
    outcome = train(job(tmp_path, objective=objective))
    assert outcome.last is None and outcome.progress.step == 12 and objective.calls == 0
    assert (tmp_path / "log.jsonl").read_text() == before


def test_stops_for_the_user_and_goes_on(tmp_path: Path):
    whole, stop = Bigram(), Stop()
    train(job(tmp_path / "whole", objective=whole))

    def ask(report):
        stop.wanted = report.step == 6

    outcome = train(job(tmp_path / "cut"), on_step=ask, stop=stop)
    assert outcome.ending == "signal" and outcome.progress.step == 6
    assert list_checkpoints(tmp_path / "cut")[-1].name == "step-0000006"
    resumed = Bigram()
    assert train(job(tmp_path / "cut", objective=resumed)).ending == "complete"
    assert same(whole, resumed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_ask_for_an_end(tmp_path: Path, number):
    before = signal.getsignal(number)
    with stopping_signals() as stop:
        outcome = train(job(tmp_path), stop=stop, on_step=lambda r: os.kill(os.getpid(), number))
        assert outcome.ending == "signal" and outcome.progress.step == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(1)
    assert signal.getsignal(number) == before


def test_the_time_runs_out(tmp_path: Path):
    deadline = time.monotonic() + 0.4
    made = recipe(schedule={"steps": 10**6})
    outcome = train(job(tmp_path, made), deadline=deadline, on_step=lambda r: time.sleep(0.05))
    assert outcome.ending == "time" and 1 <= outcome.progress.step <= 9
    assert len(list_checkpoints(tmp_path)) >= 1


def test_the_rate_may_follow_the_time(tmp_path: Path):
    steps = Steps()
    made = recipe(schedule={"steps": 10**6, "follows": "time", "warmup": 0.0})

    def slow(report):
        steps(report)
        time.sleep(0.03)

    train(job(tmp_path, made), deadline=time.monotonic() + 0.5, on_step=slow)
    rates = [report.rate for report in steps.reports]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.2 < rates[0]


def test_what_is_not_finite_is_skipped_and_counted(tmp_path: Path):
    objective, steps = Bigram(), Steps()
    objective.spoilt = {3, 6}
    outcome = train(job(tmp_path, recipe(data={"held_out": 0.0}), objective), on_step=steps)
    assert [r.step for r in steps.reports if r.skipped] == [3, 6]
    assert outcome.progress.skipped == 2 and outcome.progress.skipped_in_a_row == 0
    assert all(bool(tensor.isfinite().all()) for tensor in weights(objective))
    logged = {r["step"]: r for r in step_log.read_log(tmp_path)}
    assert logged[3]["loss"] is None and logged[3]["skipped"] is True


def test_too_many_in_a_row_end_the_run(tmp_path: Path):
    objective = Bigram()
    objective.spoilt = set(range(6, 100))
    with pytest.raises(TrainingError, match="5 steps in a row"):
        train(job(tmp_path, recipe(data={"held_out": 0.0}), objective))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-0000004", "step-0000008"]
    # The count goes on after a resume, too.
    objective = Bigram()
    objective.spoilt = {1, 2}
    with pytest.raises(TrainingError, match="up to step 10"):
        train(job(tmp_path, recipe(data={"held_out": 0.0}), objective))


def test_micro_batches_are_one_big_batch(tmp_path: Path):
    big, small = Bigram(noise=0.0), Bigram(noise=0.0)
    data = select_texts(samples(16), DataSettings(min_supervised=1, held_out=0.0), 0)

    class Everything(Order):
        def step(self, step):
            return (tuple(data.trained),)

    class InParts(Order):
        def step(self, step):
            return (data.trained[:3], data.trained[3:4], data.trained[4:])

    reports = []
    for objective, kind in ((big, Everything), (small, InParts)):
        exact = recipe(compute={"dtype": "float32"})
        made = job(tmp_path / kind.__name__, exact, objective, data=data)
        order = kind(data.trained, [len(t) for t in data.texts], BatchSettings(), 0)
        steps = Steps()
        train(replace(made, order=order), on_step=steps)
        reports.append(steps.reports)
    for one, other in zip(*reports, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)
        assert one.acceptance_length == pytest.approx(other.acceptance_length, rel=1e-5)
    for a, b in zip(weights(big), weights(small), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def refused(out: Path, match: str, **changes) -> None:
    with pytest.raises(TrainingError, match=match):
        train(replace(job(out), **changes))


def test_another_run_is_not_taken_up(tmp_path: Path):
    made = job(tmp_path)
    train(made)
    faster = recipe(optimizer={"learning_rate": 0.2})
    refused(tmp_path, "another optimizer.learning_rate", recipe=faster)
    refused(tmp_path, "another seed", recipe=recipe(seed=1))
    refused(
        tmp_path,
        "other dialogues than those of --data",
        identity=replace(made.identity, data="other"),
    )
    refused(tmp_path, "another target", identity=replace(made.identity, target="other"))
    train(replace(job(tmp_path), recipe=recipe(save={"every": 3, "keep": 1})))


def test_a_damaged_checkpoint_is_said(tmp_path: Path):
    train(job(tmp_path))
    last = list_checkpoints(tmp_path)[-1]
    (last / "state.pt").write_bytes((last / "state.pt").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="delete that folder"):
        train(job(tmp_path))
    whole = (last / "progress.json").read_text()
    damaged: list[object] = [
        {"step": "six"}, {"steps": 6}, [], None, {"step": 1.5}, {"seconds": [1]},
    ]  # fmt: skip
    for broken in damaged:
        (last / "progress.json").write_text(json.dumps(json.loads(whole) | {"progress": broken}))
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            train(job(tmp_path))
    (last / "progress.json").write_text(json.dumps({"format": "x"}))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        train(job(tmp_path))


@pytest.mark.parametrize(
    ("shape", "share", "expected"),
    [
        ("cosine", 0.05, 0.5),
        ("cosine", 0.1, 1.0),
        ("cosine", 0.55, 0.1 + 0.9 * 0.5),
        ("cosine", 1.0, 0.1),
        ("linear", 0.325, 0.1 + 0.9 * 0.75),
        ("linear", 1.0, 0.1),
        ("constant", 0.9, 1.0),
        ("constant", 0.01, 0.1),
    ],
)
def test_schedule(shape, share, expected):
    settings = ScheduleSettings(warmup=0.1, shape=shape, final=0.1)
    assert rate_at(share, settings) == pytest.approx(expected)


def test_adamw_is_the_formula():
    network = nn.Linear(3, 2)
    start = network.weight.detach().clone()
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.01, betas=(0.9, 0.99))
    optimizer = Optimizer(network, settings)
    gradient = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]])
    network.weight.grad, network.bias.grad = gradient.clone(), torch.zeros(2)
    norm = optimizer.clip()
    assert norm == pytest.approx(math.sqrt(float((gradient**2).sum())))
    clipped = gradient * 0.5 / norm
    torch.testing.assert_close(network.weight.grad, clipped)
    optimizer.step(0.5)
    moved = start * (1 - 0.05 * 0.01) - 0.05 * clipped / (clipped.abs() + 1e-8)
    torch.testing.assert_close(network.weight.detach(), moved)


def test_muon_moves_matrices_alone():
    network = nn.ModuleDict({"embed": nn.Embedding(5, 4), "layer": nn.Linear(4, 4)})
    optimizer = Optimizer(network, OptimizerSettings(name="muon"))
    kinds = [type(part).__name__ for part, _ in optimizer._parts]
    sizes = [
        [p.ndim for g in part.param_groups for p in g["params"]] for part, _ in optimizer._parts
    ]
    assert kinds == ["AdamW", "Muon"] and sizes == [[2, 1], [2]]


def test_order_is_every_text_once_an_epoch():
    lengths = [len(sample.token_ids) for sample in samples(50)]
    order = Order(range(50), lengths, BatchSettings(tokens=64), seed=3)
    epochs = []
    for epoch in range(3):
        first = order.num_steps(epoch) if epoch else 0
        groups = [g for step in range(first, order.num_steps(epoch + 1)) for g in order.step(step)]
        assert Counter(n for g in groups for n in g) == Counter(range(50))
        assert all(len(g) * max(lengths[n] for n in g) <= 64 for g in groups)
        assert {order.epoch_of(s) for s in range(first, order.num_steps(epoch + 1))} == {epoch}
        epochs.append(groups)
    assert epochs[0] != epochs[1] != epochs[2]
    again = Order(range(50), lengths, BatchSettings(tokens=64), seed=3)
    assert again.step(order.num_steps(2)) == order.step(order.num_steps(2))
    assert Order(range(50), lengths, BatchSettings(tokens=64), seed=4).step(0) != order.step(0)


def test_draws_are_their_own():
    places = [(step, number) for step in range(20) for number in range(4)]
    draws = {place: float(torch.rand((), generator=drawing(0, *place))) for place in places}
    assert len(set(draws.values())) == 80
    assert float(torch.rand((), generator=drawing(0, 7, 2))) == draws[7, 2]


def test_texts_are_cut_and_left_out():
    given = [Sample(tuple(range(10)), ((2, 4), (6, 10))), Sample(tuple(range(5)), ((4, 5),))]
    data = select_texts(given, DataSettings(max_length=7, min_supervised=2, held_out=0.0), 0)
    assert data.texts == (tuple(range(7)), tuple(range(5)))
    assert data.spans == (((2, 4), (6, 7)), ((4, 5),))
    assert data.trained == (0,) and data.too_short == 1
    with pytest.raises(OptionError, match="min_supervised"):
        select_texts(given, DataSettings(max_length=3, min_supervised=2), 0)


def test_a_batch_is_its_texts(tmp_path: Path):
    made = job(tmp_path)
    batch = made.collator.batch((4, 0))
    for row, number in enumerate((4, 0)):
        sample = samples()[number]
        n = int(batch.lengths[row])
        assert batch.tokens[row, :n].tolist() == list(sample.token_ids)
        assert not batch.tokens[row, n:].any() and not batch.supervised[row, n:].any()
        begin, end = sample.spans[0]
        assert batch.supervised[row].nonzero()[:, 0].tolist() == list(range(begin, end))


def test_plot(tmp_path: Path):
    train(job(tmp_path))
    picture = step_log.plot_log(tmp_path)
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")
    assert step_log.plot_log(tmp_path / "nothing") is None
