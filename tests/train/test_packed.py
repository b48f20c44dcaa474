"""The form for a repository: smaller, without other people's prompts, and back again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from forespeak.errors import DataError
from forespeak.train.dialogues import DIALOGUES, SELF_WRITTEN, read_dialogues, write_manifest
from forespeak.train.journal import to_line
from forespeak.train.packed import pack, packed_dialogues, read_packed_manifest, unpack
from forespeak.train.prompt_sets import PromptSet
from tests.train.talking import dialogue, manifest, prompt_set

SECRET = "bad cafe"
FILE = prompt_set([SECRET, "b"], ["c", "d"], name="p.jsonl")
OWN = {"name": SELF_WRITTEN, "sha256": ""}
DIALOGUES_MADE = [
    dialogue((SECRET, "ab"), ("b", "cd"), id="q0"),
    dialogue(("c", "e" * 20), id="q1", end=False),
    dialogue(("fade", "dead"), id="7", source=SELF_WRITTEN),
]


def folder_of(path: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "prompts": (FILE.origin, OWN),
        "complete": True,
        "counts": {"whole": 3},
    } | changes
    write_manifest(path, manifest(**values))
    lines = b"".join(to_line(one.record()) for one in DIALOGUES_MADE)
    (path / DIALOGUES).write_bytes(lines)
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_there_and_back_are_the_same_bytes(tmp_path: Path):
    folder, file = folder_of(tmp_path / "a"), tmp_path / "a.jsonl.gz"
    assert pack(folder, file) == file.stat().st_size
    first = file.read_bytes()
    pack(folder, file)
    assert file.read_bytes() == first
    assert unpack(file, tmp_path / "b", [FILE]) == 3
    assert content(tmp_path / "b") == content(folder)
    assert list(read_dialogues(tmp_path / "b")) == DIALOGUES_MADE


def test_prompts_of_files_stay_out_and_those_of_the_target_stay_in(tmp_path: Path):
    file = tmp_path / "a.jsonl.gz"
    pack(folder_of(tmp_path / "a"), file)
    text = gzip.decompress(file.read_bytes()).decode()
    assert SECRET not in text and '"fade"' in text
    assert [one.answers for one in packed_dialogues(file)] == [
        one.answers for one in DIALOGUES_MADE
    ]
    assert read_packed_manifest(file).counts == {"whole": 3}


def test_an_incomplete_run_is_not_packed(tmp_path: Path):
    with pytest.raises(DataError, match="is not complete"):
        pack(folder_of(tmp_path / "a", complete=False), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_other_prompt_files_are_refused(tmp_path: Path):
    file = tmp_path / "a.jsonl.gz"
    pack(folder_of(tmp_path / "a"), file)
    changed = PromptSet(FILE.name, "f" * 64, FILE.prompts)
    shorter = PromptSet(FILE.name, FILE.sha256, FILE.prompts[:1])
    extra = prompt_set(["a"], name="other.jsonl")
    for sets, message in (
        ([], "answers to the prompts of p.jsonl, which was not given"),
        ([changed], "p.jsonl is another file than the one that was answered"),
        ([shorter], "line 3 answers 'q1' of p.jsonl, which has no such prompt"),
        ([FILE, extra], "no answers to other.jsonl"),
    ):
        with pytest.raises(DataError, match=message):
            unpack(file, tmp_path / "b", sets)
        assert not (tmp_path / "b").exists()


def test_damaged_files_are_refused(tmp_path: Path):
    file = tmp_path / "a.jsonl.gz"
    pack(folder_of(tmp_path / "a"), file)
    whole = file.read_bytes()
    bad = tmp_path / "bad"
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    for data in (b"", whole[:40], whole[:-9], b"text", bytes(flipped)):
        bad.write_bytes(data)
        with pytest.raises(DataError):
            unpack(bad, tmp_path / "b", [FILE])
    for lines, message in (
        ([{"kind": "other"}], "holds no dialogues"),
        ([], "holds no dialogues"),
        ([{"kind": "forespeak dialogues", "manifest": 3}], "is no manifest"),
    ):
        bad.write_bytes(gzip.compress(b"".join(json.dumps(one).encode() + b"\n" for one in lines)))
        with pytest.raises(DataError, match=message):
            unpack(bad, tmp_path / "b", [FILE])
    text = gzip.decompress(whole)
    bad.write_bytes(gzip.compress(text.replace(b'"answers":[[', b'"answers":[[-', 1)))
    with pytest.raises(DataError, match="bad, line 2 has an answer 1 that is no list of token ids"):
        unpack(bad, tmp_path / "b", [FILE])
    assert not (tmp_path / "b").exists()
    with pytest.raises(DataError, match="cannot be read"):
        unpack(tmp_path / "missing", tmp_path / "b", [])


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path):
    file = tmp_path / "a.jsonl.gz"
    pack(folder_of(tmp_path / "a"), file)
    before = content(tmp_path / "a")
    with pytest.raises(DataError, match="is there already"):
        unpack(file, tmp_path / "a", [FILE])
    assert content(tmp_path / "a") == before
