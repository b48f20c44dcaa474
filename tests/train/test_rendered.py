"""Samples that were rendered once are the samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from forespeak.errors import DataError
from forespeak.train import rendered
from forespeak.train.dialogues import DIALOGUES, read_samples
from forespeak.train.rendered import RENDERED, read_rendered
from tests.train.talking import TOKENIZER
from tests.train.tiny_run import write_data


def refuse(*_: object) -> None:
    raise AssertionError("rendered again")


def test_the_same_samples_without_rendering_again(tmp_path: Path, monkeypatch):
    write_data(tmp_path)
    expected = read_samples(tmp_path, TOKENIZER)
    assert read_rendered(tmp_path, TOKENIZER) == expected
    monkeypatch.setattr(rendered, "read_samples", refuse)
    again = read_rendered(tmp_path, TOKENIZER)
    assert again == expected and again.samples[0] == expected.samples[0]
    assert len({len(sample.spans) for sample in again.samples}) >= 1


def test_other_dialogues_are_rendered(tmp_path: Path):
    write_data(tmp_path)
    whole = read_rendered(tmp_path, TOKENIZER)
    lines = (tmp_path / DIALOGUES).read_bytes().splitlines(keepends=True)
    (tmp_path / DIALOGUES).write_bytes(b"".join(lines[:-1]))
    fewer = read_rendered(tmp_path, TOKENIZER)
    assert fewer == read_samples(tmp_path, TOKENIZER) and len(fewer.samples) < len(whole.samples)
    (tmp_path / DIALOGUES).write_bytes(lines[0] + lines[1][:-9] + b"\n")
    with pytest.raises(DataError, match="line 2"):
        read_rendered(tmp_path, TOKENIZER)


@pytest.mark.parametrize("cut", [0, 7, 60, -3])
def test_a_damaged_file_is_made_again(tmp_path: Path, cut: int):
    write_data(tmp_path)
    expected = read_rendered(tmp_path, TOKENIZER)
    whole = (tmp_path / RENDERED).read_bytes()
    (tmp_path / RENDERED).write_bytes(whole[:cut])
    assert read_rendered(tmp_path, TOKENIZER) == expected
    assert len((tmp_path / RENDERED).read_bytes()) == len(whole)


@pytest.mark.parametrize("name", ["tokens", "lengths", "spans", "span_counts"])
def test_a_file_with_fewer_numbers_is_made_again(tmp_path: Path, name: str):
    write_data(tmp_path)
    expected = read_rendered(tmp_path, TOKENIZER)
    path = tmp_path / RENDERED
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(tensors | {name: tensors[name][:-2].clone()}, path, metadata)
    assert read_rendered(tmp_path, TOKENIZER) == expected


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch):
    write_data(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rendered, "write_whole", full)
    assert read_rendered(tmp_path, TOKENIZER) == read_samples(tmp_path, TOKENIZER)
    assert not (tmp_path / RENDERED).exists()


def test_no_dialogues_at_all(tmp_path: Path):
    write_data(tmp_path)
    (tmp_path / DIALOGUES).unlink()
    with pytest.raises(DataError):
        read_rendered(tmp_path, TOKENIZER)
