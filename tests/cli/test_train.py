"""``train`` and ``features`` on a tiny target, and what they refuse."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forespeak.train.loop import Stop
from tests.cli.conftest import Command
from tests.train.tiny_run import write_data, write_target

pytestmark = pytest.mark.slow

SHORT = (
    "--set", "schedule.steps=4", "--set", "data.min_supervised=2", "--set", "data.max_length=64",
    "--set", "batch.tokens=256", "--set", "batch.micro_batches=1", "--threads", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    write_target(root / "target")
    write_data(root / "data")
    return root


def test_train_then_resume(forespeak: Command, root: Path, tmp_path: Path):
    out = str(tmp_path / "out")
    given = ("--target", str(root / "target"), "--data", str(root / "data"), "--out", out, *SHORT)
    made = forespeak("train", "medusa", *given, "--json")
    assert made.code == 0, made.err
    assert made.record["ending"] == "complete" and made.record["progress"]["step"] == 4
    assert "4/4 loss" in made.err and "tokens to predict" in made.err
    assert made.record["files"] and Path(made.record["files"][0]).is_file()
    found = forespeak("inspect", out, "--target", str(root / "target"), "--json")
    assert found.code == 0, found.err
    assert found.record["num_parameters"] == made.record["num_parameters"]
    refused = forespeak("train", "medusa", *given)
    assert refused.code == 2 and "--resume" in refused.err
    again = forespeak("train", "medusa", *given, "--resume")
    assert again.code == 0 and "4 of 4 steps" in again.err


def test_features_for_two_recipes(forespeak: Command, root: Path, tmp_path: Path):
    given = ("--target", str(root / "target"), "--data", str(root / "data"), *SHORT)
    kept = tmp_path / "features"
    made = forespeak(
        "features", "medusa", "eagle3", *given, "--set", "drafter.draft_vocab_size=none",
        "--out", str(kept), "--json",
    )  # fmt: skip
    assert made.code == 0, made.err
    assert made.record["complete"] and made.record["problems"] == [] and made.record["bytes"] > 0
    assert len(json.loads((kept / "manifest.json").read_text())["taps"]) == 3
    done = forespeak("train", "medusa", *given, "--features", str(kept), "--out",
                     str(tmp_path / "out"))  # fmt: skip
    assert done.code == 0, done.err
    assert "Features of" not in done.err


def test_a_limit_before_the_first_step_is_no_success(
    forespeak: Command, root: Path, tmp_path: Path
):
    given = ("--target", str(root / "target"), "--data", str(root / "data"), *SHORT)
    cached = ("--set", "data.features=cache", "--time-limit", "1e-8")
    done = forespeak("train", "medusa", *given, *cached, "--out", str(tmp_path / "out"))
    assert done.code == 1
    assert "the time limit ran out before the first step, so there is no drafter" in done.err
    more = forespeak(
        "train", "medusa", *given, "--set", "data.features=cache", "--resume", "--out",
        str(tmp_path / "out"),
    )  # fmt: skip
    assert more.code == 0, more.err
    assert f"{tmp_path / 'out' / 'features'} keeps 0.00 GB of features for --resume" in more.err


def test_a_stopped_run_is_an_interruption(
    forespeak: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    @contextmanager
    def stopped() -> Iterator[Stop]:
        yield Stop(wanted=True)

    monkeypatch.setattr("forespeak.train.loop.stopping_signals", stopped)
    given = ("--target", str(root / "target"), "--data", str(root / "data"), *SHORT)
    done = forespeak("train", "medusa", *given, "--out", str(tmp_path / "out"))
    assert done.code == 130 and "go on with --resume" in done.err


def test_show(forespeak: Command):
    shown = forespeak("train", "smollm2/eagle3", "--show", "--set", "seed=7")
    assert shown.code == 0
    table = tomllib.loads(shown.out)
    assert table["method"] == "eagle3" and table["seed"] == 7 and table["optimizer"]["betas"]
    assert forespeak("train", "medusa", "--show", "--json").record["method"] == "medusa"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "medusae"), "Did you mean 'medusa'"),
        (("train", "medusa"), "--data was not given"),
        (("train", "medusa", "--data", "x"), "--out was not given"),
        (("train", "medusa", "--set", "seed"), "KEY=VALUE"),
        (("train", "medusa", "--set", "optimizer.lr=1"), "mean 'optimizer.learning_rate'?"),
        (("train", "medusa", "--data", "x", "--out", "y", "--time-limit", "0"), "above 0"),
        (("train", "medusa", "--data", "x", "--out", "y", "--set", "objective.a=1"), "objective.a"),
        (("features", "medusa", "--out", "y"), "--data was not given"),
    ],
)
def test_refused_before_anything_is_loaded(forespeak: Command, arguments, said):
    outcome = forespeak(*arguments)
    assert outcome.code == 2 and said in outcome.err


def test_a_full_disk_is_a_sentence(
    forespeak: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*arguments: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr("forespeak.train.checkpoints.torch.save", full)
    outcome = forespeak(
        "train", "medusa", "--target", str(root / "target"), "--data", str(root / "data"),
        "--out", str(tmp_path / "out"), *SHORT,
    )  # fmt: skip
    assert outcome.code == 2 and "Free some space and go on with --resume" in outcome.err
    assert list((tmp_path / "out" / "checkpoints").iterdir()) == []
