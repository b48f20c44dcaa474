"""Journal: a file of JSON lines that only grows, each line there whole or not at all.

A process that is killed leaves at most one half-written line, the last; whoever opens the journal
to go on drops it. Nobody else may: a reader that passed over half a line would pass over damage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forespeak.errors import DataError
from forespeak.train.atomic import take_lock, write_whole


@dataclass(frozen=True)
class Line:
    """One line: where it stands, for messages, and what it says."""

    place: str
    record: dict[str, Any]


def read_lines(path: Path) -> Iterator[Line]:
    """Every line of a journal that nobody writes.

    Raises:
        DataError: the file cannot be read, or a line is broken or half-written.
    """
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield parse_line(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); name the folder that `forespeak data "
            "generate` wrote."
        ) from None


def parse_line(line: bytes, place: str) -> Line:
    """One line, its newline included.

    Raises:
        DataError: it is half-written, or no JSON object.
    """
    if not line.endswith(b"\n"):
        raise DataError(
            f"{place} is half-written, as a killed process leaves it; run the command that wrote "
            "it again, which drops that line and goes on."
        )
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: no UTF-8, too
        record = None
    if not isinstance(record, dict):
        raise DataError(
            f"{place} is broken: a JSON object was expected and it begins with {line[:40]!r}; "
            "take the file from its source again, or take the line out."
        )
    return Line(place, record)


def to_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def write_lines(path: Path, lines: Iterator[bytes]) -> None:
    """Replace a file by these lines, whole; whatever happens meanwhile the old one stays.

    Raises:
        DataError: it cannot be written.
    """

    def fill(part: Path) -> None:
        with part.open("wb") as stream:
            stream.writelines(lines)

    try:
        write_whole(path, fill)
    except OSError as error:
        raise _unwritable(path, error) from None


class Journal:
    """A journal open for going on.

    Args:
        path: the file; made when it is not there. A half-written last line is dropped.

    Raises:
        DataError: it cannot be written, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from None
        self._lock()
        try:
            self._size = _whole_lines(path)
            os.truncate(path, self._size)
        except OSError as error:
            raise _unwritable(path, error) from None

    def _lock(self) -> None:
        if not take_lock(self._stream.fileno()):
            self._stream.close()
            raise DataError(
                f"{self.path} is being written by another process; allowed: one at a time. Wait "
                "for it, or name another folder."
            )

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line; when this returns, a killed process no longer loses it.

        Raises:
            DataError: the disk is full, or refuses; the file then ends with the line before.
        """
        line = to_line(record)
        written = 0
        try:
            while written < len(line):
                written += self._stream.write(line[written:]) or 0
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, self._size)
            raise _unwritable(self.path, error) from None
        self._size += len(line)

    def lines(self) -> Iterator[Line]:
        """What is in it."""
        return read_lines(self.path)

    def keep(self, order: Sequence[int]) -> None:
        """Close the journal with these of its lines, by number from 0, in this order.

        Raises:
            DataError: there is no room for the new file; the old one stays.
        """
        starts = [0]
        with self.path.open("rb") as stream:
            for line in stream:
                starts.append(starts[-1] + len(line))
            if list(order) != list(range(len(starts) - 1)):
                write_lines(self.path, (_part(stream, starts, number) for number in order))
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            os.fsync(self._stream.fileno())
        self._stream.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stream.closed:
            self.close()


def _part(stream: Any, starts: Sequence[int], number: int) -> bytes:
    stream.seek(starts[number])
    part: bytes = stream.read(starts[number + 1] - starts[number])
    return part


def _whole_lines(path: Path) -> int:
    """Bytes up to the last newline."""
    with path.open("rb") as stream:
        at = stream.seek(0, os.SEEK_END)
        while at > 0:
            block = min(at, 1 << 16)
            stream.seek(at - block)
            found = stream.read(block).rfind(b"\n")
            if found >= 0:
                return at - block + found + 1
            at -= block
    return 0


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be written ({error.strerror}); what was written before is whole. Free some "
        "space or name another folder, and run the command again: it goes on where it stopped."
    )
