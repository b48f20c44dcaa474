"""The two ways out: results go to stdout, everything said about them goes to stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

# A pipe has no width; wide enough that no table is cut.
_PIPE_WIDTH = 140


def console(stream: TextIO) -> Console:
    """A rich console that interprets nothing in a text and colours on a terminal only."""
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=width)


def out() -> Console:
    """For results."""
    return console(sys.stdout)


def err() -> Console:
    """For progress, notices and errors."""
    return console(sys.stderr)


def say(line: str, style: str = "") -> None:
    """One line on stderr, never broken into several."""
    err().print(Text(line, style=style), soft_wrap=True)


def write(text: str) -> None:
    """A model's text on stdout, as it is and at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(record: object) -> None:
    """The one JSON object that other programs read; the last line of stdout."""
    write(json.dumps(record, allow_nan=False) + "\n")


def open_missing_streams() -> None:
    """Put the null device where a caller has closed a standard stream (``<&-``, ``>&-``)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def survive_any_character() -> None:
    """Replace what the terminal's encoding lacks, so that no text of a model ends the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def silence_stdout() -> None:
    """After the reader of a pipe is gone: let the interpreter's last flush go nowhere."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr while something long runs; nothing where there is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with err().status(Text(what)):
        yield


@contextmanager
def progress(what: str, total: int) -> Iterator[Bar]:
    """A bar on stderr; nothing where there is no terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=err(), transient=True, disable=not sys.stderr.isatty()
    ) as drawn:
        yield Bar(drawn, drawn.add_task(what, total=total))


@contextmanager
def filling(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr whose length shows only as it goes; nothing where there is no terminal.

    Args:
        what: shown until the first call.

    Yields:
        A function of parts done, parts in all and a line about the last of them.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err(), transient=True, disable=not is_watched()) as drawn:
        task = drawn.add_task(what, total=None)
        yield lambda done, total, line: drawn.update(
            task, completed=done, total=total, description=line
        )


def is_watched() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()


class Bar:
    """A running bar."""

    def __init__(self, drawn: Progress, task: Any) -> None:
        self._drawn = drawn
        self._task = task

    def advance(self, what: str) -> None:
        """One step further, which was ``what``."""
        self._drawn.update(self._task, advance=1, description=what)
