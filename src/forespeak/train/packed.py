"""The packed form of a folder of dialogues, small enough for a repository: one gzip file.

    line 1    the manifest
    others    a dialogue without its turns: answers as token ids, the prompt by its id

Turns stay out because prompt files have licences and homes of their own; ``unpack`` joins the
answers with them again and checks that they are the same files. Prompts that the target wrote
itself have no other home, so their text stays in. Packing the same folder gives the same bytes.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forespeak.errors import DataError
from forespeak.train.dialogues import (
    DIALOGUES,
    SELF_WRITTEN,
    Dialogue,
    Manifest,
    dialogue_from,
    manifest_from,
    read_dialogues,
    read_manifest,
    write_manifest,
)
from forespeak.train.journal import Line, parse_line, to_line, write_lines
from forespeak.train.prompt_sets import PromptSet

_KIND = "forespeak dialogues"


def pack(folder: Path, file: Path) -> int:
    """Write a folder's dialogues as one file; returns its size in bytes.

    Raises:
        DataError: the folder is damaged or its run is not complete, or the file cannot be written.
    """
    manifest = read_manifest(folder)
    if not manifest.complete:
        raise DataError(
            f"The run that makes {folder} is not complete; run its `forespeak data generate` again "
            "to its end, then pack."
        )
    header = {"kind": _KIND, "manifest": asdict(manifest)}
    lines = [to_line(header), *(to_line(_packed(one)) for one in read_dialogues(folder))]
    write_lines(file, iter([gzip.compress(b"".join(lines), compresslevel=9, mtime=0)]))
    return file.stat().st_size


def unpack(file: Path, folder: Path, sets: Sequence[PromptSet]) -> int:
    """Write a packed file as a folder again; returns the number of dialogues.

    Args:
        sets: the prompt sets that were answered, self-written ones excepted.

    Raises:
        DataError: the file is damaged, a prompt set is missing or another one, or the folder is
            there already or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is there already; name a new or empty folder.")
    manifest, lines = _read(file)
    turns = _turns(manifest, sets, file)
    dialogues = [_joined(line, turns) for line in lines]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}); name another.") from None
    write_lines(folder / DIALOGUES, (to_line(one.record()) for one in dialogues))
    write_manifest(folder, manifest)  # last: a folder without it is no data
    return len(dialogues)


def read_packed_manifest(file: Path) -> Manifest:
    """The manifest of a packed file.

    Raises:
        DataError: it is damaged or something else.
    """
    return _read(file)[0]


def packed_dialogues(file: Path) -> Iterator[Dialogue]:
    """Dialogues of a packed file; prompts that are elsewhere have their id as text.

    Raises:
        DataError: it is damaged or something else.
    """
    for line in _read(file)[1]:
        record = line.record
        answers = record.get("answers")
        number = len(answers) if isinstance(answers, list) else 0
        yield dialogue_from(Line(line.place, {"turns": [str(record.get("id"))] * number} | record))


def _packed(dialogue: Dialogue) -> dict[str, Any]:
    record = dialogue.record()
    if dialogue.source != SELF_WRITTEN:
        del record["turns"]
    return record


def _joined(line: Line, turns: Mapping[tuple[str, str], tuple[str, ...]]) -> Dialogue:
    record = dict(line.record)
    source, name = record.get("source"), record.get("id")
    if source != SELF_WRITTEN:
        answers = record.get("answers")
        key = (str(source), str(name))
        if key not in turns or not isinstance(answers, list):
            raise DataError(
                f"{line.place} answers {name!r} of {source}, which has no such prompt; take the "
                "file from its source again."
            )
        record["turns"] = list(turns[key][: len(answers)])
    return dialogue_from(Line(line.place, record))


def _turns(
    manifest: Manifest, sets: Sequence[PromptSet], file: Path
) -> dict[tuple[str, str], tuple[str, ...]]:
    given = {one.name: one for one in sets}
    turns: dict[tuple[str, str], tuple[str, ...]] = {}
    for origin in manifest.prompts:
        name = origin["name"]
        if name == SELF_WRITTEN:
            continue
        if name not in given:
            raise DataError(
                f"{file} holds answers to the prompts of {name}, which was not given; name that "
                "file with --prompts."
            )
        one = given.pop(name)
        if one.sha256 != origin["sha256"]:
            raise DataError(
                f"{name} is another file than the one that was answered (sha256 {one.sha256[:12]}, "
                f"answered {origin['sha256'][:12]}); give the same version of it."
            )
        turns |= {(name, prompt.id): prompt.turns for prompt in one.prompts}
    if given:
        raise DataError(
            f"{file} holds no answers to {', '.join(given)}; allowed: the prompt files that it "
            "names. Leave the others out."
        )
    return turns


def _read(file: Path) -> tuple[Manifest, list[Line]]:
    try:
        data = gzip.decompress(file.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise DataError(f"{file} is cut or no gzip file; take it from its source again.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); check the path.") from None
    lines = [
        parse_line(line, f"{file}, line {number}")
        for number, line in enumerate(data.splitlines(keepends=True), start=1)
    ]
    header = lines[0].record if lines else {}
    if header.get("kind") != _KIND:
        raise DataError(f"{file} holds no dialogues; name a file that `forespeak data pack` wrote.")
    return manifest_from(header.get("manifest"), str(file)), lines[1:]
