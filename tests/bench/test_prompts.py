"""Prompt files, good and bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forespeak.bench.prompts import Prompt, read_prompts, read_text
from forespeak.errors import PromptError


def write(folder: Path, *records: object) -> Path:
    path = folder / "prompts.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_reads_turns_ids_and_tasks(tmp_path: Path):
    path = write(tmp_path, {"id": 7, "task": "qa", "turns": ["a", "b"]}, "", {"turns": ["ü"]})
    assert read_prompts(path) == [
        Prompt("7", "qa", ("a", "b")),
        Prompt("line 3", "", ("ü",)),
    ]


def test_names_of_spec_bench_are_read(tmp_path: Path):
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["a"]}\n')
    (prompt,) = read_prompts(path)
    assert (prompt.id, prompt.task) == ("81", "writing")


def test_line_separators_inside_a_string_do_not_end_the_line(tmp_path: Path):
    path = write(tmp_path, {"turns": ["one\u2028two\x85three"]})
    assert read_prompts(path)[0].turns == ("one\u2028two\x85three",)


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"turns": ["a"]}\r\n{"turns": ["b"]}\r\n')
    assert [prompt.turns for prompt in read_prompts(path)] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("limit", "stride", "expected"),
    [(None, 1, "0123456789"), (3, 1, "012"), (None, 4, "048"), (2, 4, "04"), (99, 99, "0")],
)
def test_limit_and_stride(tmp_path: Path, limit: int | None, stride: int, expected: str):
    path = write(tmp_path, *({"turns": [str(n)]} for n in range(10)))
    chosen = read_prompts(path, limit=limit, stride=stride)
    assert "".join(prompt.turns[0] for prompt in chosen) == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"turns": ["a"]}', '{"turns": ["b"'], "line 2 is not JSON"),
        (["[" * 100_000], "line 1"),
        (["[1]"], "line 1 is not a JSON object"),
        (['{"turn": "a"}'], "line 1 has no list of turns"),
        (['{"turns": "a"}'], "line 1 has no list of turns"),
        (['{"turns": []}'], "line 1 has no list of turns"),
        (['{"turns": ["a", " \\n"]}'], "line 1 has an empty turn"),
        (['{"turns": [3]}'], "line 1 has an empty turn"),
        ([], "holds no prompt"),
        (["", "  "], "holds no prompt"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, lines: list[str], message: str):
    with pytest.raises(PromptError, match=message) as caught:
        read_prompts(write(tmp_path, *lines))
    assert "\n" not in str(caught.value)


def test_broken_utf8_names_the_place(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"turns": ["a"]}\n{"turns": ["\xff"]}\n')
    with pytest.raises(PromptError, match="byte 29, in line 2"):
        read_prompts(path)


def test_missing_file_and_folder(tmp_path: Path):
    with pytest.raises(PromptError, match="does not exist"):
        read_text(tmp_path / "nothing")
    with pytest.raises(PromptError, match="cannot be read"):
        read_text(tmp_path)
