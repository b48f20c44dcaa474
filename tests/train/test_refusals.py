"""What a run must not go on with, and how it ends where the system refuses."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from forespeak.drafters.inspecting import inspect_drafter
from forespeak.errors import CheckpointError, DataError, OptionError, TrainingError
from forespeak.train.atomic import full_disk_said, only_writer
from forespeak.train.checkpoints import list_checkpoints
from forespeak.train.request import Request, Watchers
from forespeak.train.session import run_request
from tests.train.tiny_run import request, tiny_recipe, write_target

pytestmark = pytest.mark.slow


@pytest.fixture
def asked(tmp_path: Path) -> Request:
    """A run of six steps that lost its last checkpoint."""
    made = request(tmp_path, tiny_recipe("medusa"), out=tmp_path / "out")
    run_request(made)
    shutil.rmtree(list_checkpoints(made.out)[-1])
    return replace(made, resume=True)


def test_a_target_that_was_changed_in_its_place(asked: Request, tmp_path: Path):
    shutil.copytree(asked.target, tmp_path / "moved")
    run_request(replace(asked, target=str(tmp_path / "moved")))  # the same under another name
    shutil.rmtree(list_checkpoints(asked.out)[-1])
    shutil.rmtree(asked.target)
    write_target(Path(asked.target), seed=5)
    with pytest.raises(TrainingError, match="for a target with other weights than"):
        run_request(asked)


def test_another_method_is_named(asked: Request):
    with pytest.raises(TrainingError, match="another method, medusa"):
        run_request(replace(asked, recipe=tiny_recipe("eagle")))


def test_a_drafter_without_checkpoints_is_not_written_over(asked: Request):
    shutil.rmtree(asked.out / "checkpoints")
    before = {path.name: path.read_bytes() for path in asked.out.glob("*") if path.is_file()}
    with pytest.raises(OptionError, match="holds a model and no checkpoint of a run"):
        run_request(asked)
    assert before == {p.name: p.read_bytes() for p in asked.out.glob("*") if p.is_file()}


def test_checkpoints_of_other_contents(asked: Request):
    file = list_checkpoints(asked.out)[-1] / "state.pt"
    state = torch.load(file, weights_only=True)
    network = {name: torch.zeros(3) for name in state["network"]}
    for other in (
        [1], {"network": state["network"]}, {"network": network, "optimizer": state["optimizer"]},
        {"network": state["network"], "optimizer": {}},
    ):  # fmt: skip
        torch.save(other, file)
        with pytest.raises(CheckpointError, match="no whole checkpoint .* delete that folder"):
            run_request(asked)


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_progress_that_cannot_be_read(asked: Request, text: str):
    (list_checkpoints(asked.out)[-1] / "progress.json").write_text(text)
    with pytest.raises(CheckpointError, match="no whole checkpoint .* delete that folder"):
        run_request(asked)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        OSError(errno.EROFS, "Read-only file system"),
        RuntimeError("basic_ios::clear: iostream error"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_every_word_for_a_full_disk_is_a_sentence(tmp_path: Path, error: Exception):
    with pytest.raises(TrainingError, match="cannot be written .* go on with --resume"):
        with full_disk_said(tmp_path):
            raise error
    with pytest.raises(RuntimeError, match="another"), full_disk_said(tmp_path):
        raise RuntimeError("another")


def test_a_file_system_that_may_be_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("forespeak.train.atomic.Path.mkdir", refuse)
    with pytest.raises(TrainingError, match=r"cannot be made \(Read-only file system\)"):
        with only_writer(tmp_path / "new"):
            pass


def test_a_plot_that_does_not_fit_costs_no_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(out: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("forespeak.train.session.plot_log", full)
    notes: list[str] = []
    made = request(tmp_path, tiny_recipe("medusa"), out=tmp_path / "out")
    (tmp_path / "out").mkdir()
    done = run_request(made, Watchers(note=notes.append))
    assert done.files and done.picture is None
    assert any("could not be drawn (No space left on device)" in note for note in notes)


def test_parts_of_a_killed_export_are_cleared_away(asked: Request):
    (asked.out / ".part-abc").mkdir()
    (asked.out / ".part-abc" / "model.safetensors").touch()
    run_request(asked)
    assert not list(asked.out.glob(".part*"))
    assert json.loads((asked.out / "provenance.json").read_text())["progress"]["step"] == 6


def test_a_prompt_file_is_no_folder_of_dialogues(asked: Request, tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "turns": ["b"]}\n')
    with pytest.raises(DataError, match="is a file, and dialogues lie in a folder"):
        run_request(replace(asked, data=[tmp_path / "prompts.jsonl"]))


def test_a_drafter_of_ours_says_its_target(asked: Request):
    assert inspect_drafter(str(asked.out)).target == asked.target
    (asked.out / "provenance.json").write_text("{")
    assert inspect_drafter(str(asked.out)).target is None
