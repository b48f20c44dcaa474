"""Prompt files and data sets of the Hub, the latter with a stand-in for what loads them."""

from __future__ import annotations

import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from forespeak.errors import DataError, OptionError, PromptError
from forespeak.train.prompt_sets import hub_rows, load_dataset_prompts, read_prompt_sets

LINE = '{"id": "x", "turns": ["a", "b"]}\n'


def test_files(tmp_path: Path):
    (tmp_path / "p.jsonl").write_text(LINE)
    [found] = read_prompt_sets([tmp_path / "p.jsonl"])
    assert found.name == "p.jsonl"
    assert found.sha256 == hashlib.sha256(LINE.encode()).hexdigest()
    assert [(prompt.id, prompt.turns) for prompt in found.prompts] == [("x", ("a", "b"))]


def test_refused_files(tmp_path: Path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.jsonl").write_text(LINE)
    with pytest.raises(OptionError, match="Two prompt files are named p.jsonl"):
        read_prompt_sets([tmp_path / "one" / "p.jsonl", tmp_path / "two" / "p.jsonl"])
    for text, kind, message in (
        (LINE * 2, DataError, "has the id 'x' twice"),
        ('{"id": "", "turns": ["a"]}', DataError, "an empty id"),
        (LINE + "{", PromptError, "line 2 is not JSON"),
        ('{"id": "x", "turns": [""]}', PromptError, "an empty turn"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(kind, match=message):
            read_prompt_sets([tmp_path / "bad.jsonl"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"turns": ["a", "b"], "prompt": "c"}, ("a", "b")),
        ({"messages": [user("a"), {"role": "assistant", "content": "x"}, user("b")]}, ("a", "b")),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]},
            ("a",),
        ),
        ({"prompt": "a", "other": 3}, ("a",)),
        ({"instruction": "a"}, ("a",)),
        ({"question": "a", "answer": "x"}, ("a",)),
    ],
)
def test_rows_of_a_data_set(row: dict[str, Any], turns: tuple[str, ...]):
    asked: list[tuple[str, str]] = []

    def load(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        return [{}, row, {"messages": [{"role": "assistant", "content": "x"}]}]

    found = load_dataset_prompts("org/set", "test", load=load)
    assert asked == [("org/set", "test")]
    assert found.name == "org/set:test"
    assert [(prompt.id, prompt.turns) for prompt in found.prompts] == [("1", turns)]
    again = load_dataset_prompts("org/set", "test", load=load)
    assert again == found
    other = load_dataset_prompts("org/set", "test", load=lambda *_: [{"prompt": "z"}])
    assert other.sha256 != found.sha256


def test_a_data_set_without_prompts():
    with pytest.raises(DataError, match="has the columns image, label; allowed: one of turns"):
        load_dataset_prompts("org/set", "train", load=lambda *_: [{"image": 1, "label": 2}])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OptionError, match=r"pip install forespeak\[data\]"):
        hub_rows("org/set", "train")


def test_with_the_package(monkeypatch: pytest.MonkeyPatch):
    fake = types.ModuleType("datasets")

    def load_dataset(name: str, *, split: str) -> Any:
        if name == "missing":
            raise RuntimeError("no such thing\nand a long story")
        return [{"prompt": f"{name} {split}"}]

    fake.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(hub_rows("org/set", "s")) == [{"prompt": "org/set s"}]
    with pytest.raises(DataError, match=r"cannot be loaded \(no such thing\)"):
        hub_rows("missing", "s")
