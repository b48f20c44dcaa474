"""The command as a process: start time, exit codes, pipes; and the option groups."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from forespeak.cli import options
from forespeak.cli.app import execute
from forespeak.cli.groups import takes_groups
from tests.cli.conftest import Command

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "forespeak"]


def processor_seconds(arguments: list[str]) -> float:
    """What one run costs. Not the time on the clock, which another busy process would stretch."""
    before = os.times()
    subprocess.run(arguments, check=True, capture_output=True)
    after = os.times()
    return (
        after.children_user
        + after.children_system
        - (before.children_user + before.children_system)
    )


@pytest.mark.parametrize(
    "arguments",
    [[*COMMAND, "--help"], [*COMMAND, "methods"], [sys.executable, "-c", "import forespeak"]],
    ids=["help", "methods", "import"],
)
def test_starts_in_under_half_a_second(arguments: list[str]):
    assert min(processor_seconds(arguments) for _ in range(3)) < 0.5


@pytest.mark.parametrize("command", ["generate", "chat", "compare", "demo", "methods", "models"])
def test_every_command_has_help(forespeak: Command, command: str):
    done = forespeak(command, "--help")
    assert done.code == 0
    assert "Usage: forespeak" in done.out
    assert command in forespeak("--help").out


def test_no_command_is_help(forespeak: Command):
    assert "Usage: forespeak" in forespeak().out


def test_version(forespeak: Command):
    import forespeak as package

    assert forespeak("--version").out == f"forespeak {package.__version__}\n"


def test_no_colour_in_a_pipe():
    done = subprocess.run([*COMMAND, "methods"], capture_output=True, check=True)
    assert b"\x1b" not in done.stdout + done.stderr


def test_exit_code_of_the_process():
    done = subprocess.run([*COMMAND, "generate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "methods"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_encoding_without_the_characters_is_no_error():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "methods"], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr.count(b"Traceback")) == (0, 0)


def test_our_own_mistakes_are_tracebacks(monkeypatch: pytest.MonkeyPatch):
    from forespeak.cli import methods

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(methods, "drawn", broken)
    with pytest.raises(ZeroDivisionError):
        execute(["methods"])


GROUPS = [
    group
    for group in vars(options).values()
    if isinstance(group, type) and dataclasses.is_dataclass(group) and group.__name__ != "Prompt"
]


def test_no_option_is_declared_twice():
    names = [
        name
        for group in GROUPS
        if group.__module__ == "forespeak.cli.options"
        for name in inspect.get_annotations(group)  # its own, not those of the group it extends
    ]
    assert len(names) == len(set(names)) > 15


def test_groups_are_spread_and_filled():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Size:
        width: Annotated[int, typer.Option(min=1)] = 3
        tall: Annotated[bool, typer.Option("--tall")] = False

    seen: list[object] = []

    def draw(
        name: str, *, size: Size, loud: Annotated[bool, typer.Option("--loud")] = False
    ) -> None:
        seen.append((name, size, loud))

    draw.__annotations__["size"] = Size  # a local class has no name that a string could find
    app = typer.Typer()
    app.command()(takes_groups(draw))
    app(["box", "--width", "5", "--loud"], standalone_mode=False)
    app(["box", "--tall"], standalone_mode=False)
    assert seen == [("box", Size(width=5), True), ("box", Size(tall=True), False)]


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-"])
def test_closed_standard_streams_are_no_traceback(redirection: str) -> None:
    command = f"{sys.executable} -m forespeak generate - --target /no/such/model {redirection}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_sentence() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m forespeak methods --json > /dev/full"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
