"""Prompt sets: prompt files, data sets of the Hub, and prompts that the target wrote itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forespeak.bench.prompts import Prompt, read_prompts
from forespeak.errors import DataError, OptionError

Rows = Iterable[Mapping[str, Any]]

_TURN_LISTS = ("turns", "user_turns")
_DIALOGUES = ("messages", "conversations", "conversation")
_TEXTS = ("prompt", "instruction", "question", "text")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one origin.

    Attributes:
        name: of the file without its folder, or of the data set.
        sha256: of the content, so that answers can be joined with it again.
        prompts: ids are unique.
    """

    name: str
    sha256: str
    prompts: Sequence[Prompt]

    @property
    def origin(self) -> dict[str, str]:
        """For a manifest."""
        return {"name": self.name, "sha256": self.sha256}


def read_prompt_set(path: Path) -> PromptSet:
    """A prompt file.

    Raises:
        PromptError: it cannot be read, or a line is broken.
        DataError: an id is there twice.
    """
    prompts = read_prompts(path)
    _refuse_twins(prompts, str(path))
    return PromptSet(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), prompts)


def read_prompt_sets(paths: Sequence[Path]) -> list[PromptSet]:
    """Prompt files, each under a name of its own.

    Raises:
        PromptError, DataError: see :func:`read_prompt_set`.
        OptionError: two files have one name.
    """
    sets = [read_prompt_set(path) for path in paths]
    names = [one.name for one in sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(
            f"Two prompt files are named {twice}, and dialogues name their file; rename one."
        )
    return sets


def hub_rows(name: str, split: str) -> Rows:
    """The rows of a data set of the Hub.

    Raises:
        OptionError: the package ``datasets`` is not here.
        DataError: the data set cannot be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise OptionError(
            f"--dataset {name} needs the package datasets, which is not installed; install it with "
            "`pip install forespeak[data]`, or give prompt files with --prompts."
        ) from None
    try:
        rows: Rows = load_dataset(name, split=split)
    except Exception as error:  # noqa: BLE001  # the library raises whatever lies below it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"Data set {name} (split {split}) cannot be loaded ({reason}); check its name, its "
            "split and the network."
        ) from None
    return rows


def load_dataset_prompts(
    name: str, split: str, *, load: Callable[[str, str], Rows] = hub_rows
) -> PromptSet:
    """The user turns of a data set.

    A row's prompt is the first of these columns that it has: a list ``turns`` of user turns; a
    dialogue in ``messages`` or ``conversations``; a text in ``prompt``, ``instruction``,
    ``question`` or ``text``. Rows without a user turn are passed over.

    Args:
        load: gives the rows of (name, split).

    Raises:
        OptionError, DataError: see :func:`hub_rows`; or no row has such a column.
    """
    prompts = []
    columns: set[str] = set()
    for number, row in enumerate(load(name, split)):
        columns |= set(row)
        turns = _user_turns(row)
        if turns:
            prompts.append(Prompt(str(number), "", tuple(turns)))
    if not prompts:
        allowed = ", ".join((*_TURN_LISTS, *_DIALOGUES, *_TEXTS))
        raise DataError(
            f"Data set {name} has the columns {', '.join(sorted(columns)) or 'none'}; allowed: one "
            f"of {allowed} with user turns in it. Save its prompts as a prompt file instead."
        )
    listed = json.dumps([prompt.turns for prompt in prompts], ensure_ascii=False)
    digest = hashlib.sha256(listed.encode("utf-8", "surrogatepass")).hexdigest()
    return PromptSet(f"{name}:{split}", digest, prompts)


def _user_turns(row: Mapping[str, Any]) -> list[str]:
    for column in _TURN_LISTS:
        if isinstance(row.get(column), list):
            return [turn for turn in row[column] if isinstance(turn, str) and turn.strip()]
    for column in _DIALOGUES:
        if isinstance(row.get(column), list):
            return [turn for message in row[column] for turn in _user_text(message)]
    for column in _TEXTS:
        if isinstance(row.get(column), str) and row[column].strip():
            return [row[column]]
    return []


def _user_text(message: object) -> list[str]:
    """A message's text when a user wrote it: OpenAI's form, or ShareGPT's."""
    if not isinstance(message, Mapping):
        return []
    role = message.get("role", message.get("from"))
    text = message.get("content", message.get("value"))
    wrote = role in ("user", "human") and isinstance(text, str) and text.strip()
    return [str(text)] if wrote else []


def _refuse_twins(prompts: Sequence[Prompt], place: str) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if not prompt.id:
            raise DataError(f"{place} has a prompt with an empty id; give each prompt its own.")
        if prompt.id in seen:
            raise DataError(
                f"{place} has the id {prompt.id!r} twice, and answers are kept by id; give each "
                "prompt its own."
            )
        seen.add(prompt.id)
