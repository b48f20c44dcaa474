"""The command ``forespeak``: its commands, and how each way to end becomes an exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

import forespeak
from forespeak.cli import consoles
from forespeak.cli.calibrate import calibrate
from forespeak.cli.chat import chat
from forespeak.cli.compare import compare
from forespeak.cli.data import data
from forespeak.cli.demo import demo
from forespeak.cli.generate import generate
from forespeak.cli.groups import takes_groups
from forespeak.cli.init import init
from forespeak.cli.inspect import inspect
from forespeak.cli.methods import methods
from forespeak.cli.models import models
from forespeak.cli.train import features, train
from forespeak.errors import ForespeakError

INPUT_FAULT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
READER_GONE = 1  # as rich and typer have it, which may notice first


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="forespeak",
        help="Speculative decoding: the same text as plain decoding, sooner.",
        no_args_is_help=False,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    for command in (
        generate, chat, compare, demo, methods, init, inspect, features, train, calibrate,
    ):  # fmt: skip
        app.command()(takes_groups(command))
    app.add_typer(data(), name="data")
    app.add_typer(models(), name="models")
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        consoles.write(f"forespeak {forespeak.__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Speculative decoding: the same text as plain decoding, sooner."""


def execute(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    What the input is to blame for is one sentence on stderr and 2; our own mistakes are tracebacks.
    """
    try:
        code = build()(
            args=list(arguments) or ["--help"], prog_name="forespeak", standalone_mode=False
        )
        sys.stdout.flush()
    except ForespeakError as error:
        consoles.say(f"forespeak: {error}")
        return INPUT_FAULT
    except typer.TyperException as error:
        consoles.say(f"forespeak: {error.format_message()} {_help_hint(arguments)}")
        return INPUT_FAULT
    except (KeyboardInterrupt, typer.Abort):
        consoles.say("")
        return INTERRUPTED
    except BrokenPipeError:
        consoles.silence_stdout()
        return READER_GONE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        consoles.silence_stdout()
        consoles.say(
            f"forespeak: The output cannot be written ({error.strerror}); free some space."
        )
        return INPUT_FAULT
    return code if isinstance(code, int) else 0


def _help_hint(arguments: Sequence[str]) -> str:
    names = (
        "generate",
        "chat",
        "compare",
        "demo",
        "methods",
        "init",
        "inspect",
        "data",
        "models",
        "features",
        "train",
        "calibrate",
    )
    command = next((argument for argument in arguments if argument in names), None)
    return f"See `forespeak {command} --help`." if command else "See `forespeak --help`."


def run() -> NoReturn:
    """Entry point of the installed command."""
    consoles.open_missing_streams()
    consoles.survive_any_character()
    sys.exit(execute(sys.argv[1:]))
