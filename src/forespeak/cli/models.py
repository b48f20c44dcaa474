"""``forespeak models``: which models are here, how to get one, where they live."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from forespeak.cli import consoles
from forespeak.cli.groups import takes_groups
from forespeak.cli.options import DEFAULT_TARGET, OutputOptions


def models() -> typer.Typer:
    """The group of commands about models."""
    group = typer.Typer(
        help="List, fetch and find models.", no_args_is_help=False, rich_markup_mode="rich"
    )
    group.command("list")(takes_groups(list_models))
    group.command("fetch")(takes_groups(fetch))
    group.command("where")(takes_groups(where))
    return group


def list_models(*, output: OutputOptions) -> None:
    """List the models that have been fetched."""
    from forespeak.models import sources

    found = sources.list_models()
    if output.json:
        records = [
            {"name": model.name, "path": str(model.path), "num_bytes": model.num_bytes}
            for model in found
        ]
        consoles.write_json({"models": records})
        return
    if not found:
        consoles.say(
            f"No model is here yet; `forespeak models fetch {DEFAULT_TARGET}` gets the embedded "
            "one, `forespeak models fetch ORG/NAME` one of the Hub's."
        )
        return
    table = Table(pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("path", overflow="fold")
    for model in found:
        table.add_row(Text(model.name), f"{model.num_bytes / 1e6:.0f}", Text(str(model.path)))
    consoles.out().print(table)


def fetch(
    name: Annotated[
        str, typer.Argument(help=f"{DEFAULT_TARGET} or a Hub id ORG/NAME.")
    ] = DEFAULT_TARGET,
    *,
    output: OutputOptions,
) -> None:
    """Get a model, once; later calls find it there."""
    from forespeak.models import sources

    with consoles.waiting(f"Fetching {name}"):
        source = sources.resolve(name)
    if output.json:
        consoles.write_json({"name": source.name, "path": str(source.path)})
    else:
        consoles.say(f"{source.name} is at {source.path}")


def where(*, output: OutputOptions) -> None:
    """Print the folder in which fetched models live (FORESPEAK_HOME)."""
    from forespeak.models import sources

    home = sources.models_home()
    if output.json:
        consoles.write_json({"path": str(home)})
    else:
        consoles.write(f"{home}\n")
