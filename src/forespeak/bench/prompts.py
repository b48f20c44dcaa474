"""Prompt files: one JSON object a line, ``{"id": ..., "task": ..., "turns": ["...", ...]}``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forespeak.errors import PromptError

# A text for the chat template's one user turn, or the messages of a dialogue.
Dialogue = str | Sequence[dict[str, str]]

_FORM = 'one JSON object a line, {"id": "...", "task": "...", "turns": ["first user turn", ...]}'


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file. ``turns`` are the user's, at least one, none empty."""

    id: str
    task: str
    turns: tuple[str, ...]


def read_text(path: Path) -> str:
    """The whole of a UTF-8 file; every way to fail is a sentence."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise PromptError(
            f"{path} does not exist; give the path of a file that can be read."
        ) from None
    except OSError as error:
        raise PromptError(
            f"{path} cannot be read ({error.strerror}); give the path of a file that can be read."
        ) from None
    return decode(data, str(path))


def decode(data: bytes, source: str) -> str:
    """UTF-8 bytes as text; broken ones are a sentence with the place."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PromptError(
            f"{source} is not UTF-8: byte {error.start}, in line {line}, belongs to no character; "
            "save the text as UTF-8."
        ) from None


def read_prompts(path: Path, *, limit: int | None = None, stride: int = 1) -> list[Prompt]:
    """Every ``stride``-th prompt of a file, from the first on, and of these the first ``limit``.

    The whole file is checked, whatever part of it is taken. Blank lines are passed over.
    """
    # Only the newline ends a line: the other separators may stand inside a JSON string.
    lines = read_text(path).split("\n")
    prompts = [
        _prompt(line, f"{path}, line {number}", f"line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"{path} holds no prompt; allowed: {_FORM}. Add at least one line.")
    return prompts[::stride][:limit]


def _prompt(line: str, place: str, default_id: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{place} is not JSON ({error.msg} at column {error.colno}); allowed: {_FORM}."
        ) from None
    except RecursionError:
        raise PromptError(f"{place} is nested too deeply; allowed: {_FORM}.") from None
    if not isinstance(record, dict):
        raise PromptError(f"{place} is not a JSON object; allowed: {_FORM}.")
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        raise PromptError(f"{place} has no list of turns; allowed: {_FORM}.")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise PromptError(f"{place} has an empty turn; every turn is a text with some content.")
    # The second names are Spec-Bench's and MT-Bench's, whose files are read as they are.
    name = record.get("id", record.get("question_id", default_id))
    task = record.get("task", record.get("category", ""))
    return Prompt(str(name), str(task), tuple(turns))
