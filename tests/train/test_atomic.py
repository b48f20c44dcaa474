"""One writer to a folder at a time, and no trace of it afterwards."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from forespeak.errors import TrainingError
from forespeak.train import atomic
from forespeak.train.atomic import only_writer
from forespeak.train.request import Watchers
from forespeak.train.session import cache_features, run_request
from tests.train.tiny_run import request, tiny_recipe


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path: Path):
    folder = tmp_path / "new" / "run"
    with only_writer(folder), pytest.raises(TrainingError, match="another process"):
        with only_writer(folder):
            pytest.fail("two writers")
    with only_writer(folder), only_writer(tmp_path / "other"):
        assert list(folder.iterdir()) == []
    assert not folder.exists()


def test_an_error_lets_go_of_the_folder(tmp_path: Path):
    with pytest.raises(ValueError, match="mine"), only_writer(tmp_path):
        raise ValueError("mine")
    with only_writer(tmp_path):
        pass


def test_a_folder_below_a_file(tmp_path: Path):
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(TrainingError, match="cannot be made"), only_writer(tmp_path / name):
            pytest.fail("no such folder can be")


def test_a_file_system_without_locks_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(atomic, "_fcntl", SimpleNamespace(flock=no_locks, LOCK_EX=2, LOCK_NB=4))
    with only_writer(tmp_path), only_writer(tmp_path):
        pass


def test_training_and_features_keep_out_of_a_folder_that_is_written(tmp_path: Path):
    asked = request(tmp_path, tiny_recipe("eagle", schedule={"steps": 1}), out=tmp_path / "out")
    with only_writer(asked.out), pytest.raises(TrainingError, match="out is being written"):
        run_request(asked)
    assert not asked.out.exists()
    cache = tmp_path / "features"
    recipes = {"eagle": asked.recipe}
    with only_writer(cache), pytest.raises(TrainingError, match="features is being written"):
        cache_features(recipes, asked, cache, Watchers())
    assert cache_features(recipes, asked, cache, Watchers())
    with only_writer(cache):  # nothing is left to write
        assert cache_features(recipes, asked, cache, Watchers())
    assert run_request(replace(asked, features=cache)).files
