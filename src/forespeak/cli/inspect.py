"""``forespeak inspect``: what a drafter's checkpoint is, and what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from forespeak.cli import consoles
from forespeak.cli.options import OutputOptions

if TYPE_CHECKING:
    from forespeak.drafters.inspecting import Inspection

_UNUSABLE = 2


def inspect(
    path: Annotated[str, Argument(help="Folder or Hub id of a drafter.")],
    *,
    target: Annotated[
        str | None,
        Option(help="Check it against this model: name, folder, GGUF file or Hub id."),
    ] = None,
    output: OutputOptions,
) -> None:
    """Say what a drafter is, for which target, in which convention, and what is wrong with it.

    Exit code 2 when something is.
    """
    with consoles.waiting(f"Reading {path}"):
        from forespeak.drafters.inspecting import inspect_drafter

        found = inspect_drafter(path, target)
    if output.json:
        consoles.write_json(asdict(found))
    else:
        consoles.out().print(drawn(found, target))
    for problem in found.problems:
        consoles.say(f"forespeak: {problem}")
    if found.problems:
        raise typer.Exit(_UNUSABLE)


def drawn(found: Inspection, checked: str | None) -> Table:
    """The table for people; ``checked`` is the target that it was held against."""
    table = Table(show_header=False, pad_edge=False, box=None)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    rows = {
        "method": found.method,
        "layout": found.dialect,
        "path": found.path,
        "made for": found.target or "(its config does not say)",
        "weights": f"{found.num_parameters / 1e6:.1f} million, {found.stored_bytes / 1e6:.1f} MB "
        f"in {', '.join(found.dtypes)}",
        **found.facts,
        "memory per token of context": f"{found.context_bytes} bytes",
    }
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    if checked is not None:
        table.add_row(Text(f"fits {checked}"), Text("no" if found.problems else "yes"))
    for note in found.notes:
        table.add_row(Text("note"), Text(note))
    return table
