"""``forespeak methods``: what there is to choose from, computed from the method table."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from forespeak.cli import consoles
from forespeak.cli.options import OutputOptions
from forespeak.drafters.table import BUILDER_SETTINGS, METHODS, MethodEntry


def methods(*, output: OutputOptions) -> None:
    """List the methods: what each needs, which builders it takes, its defaults, exact or not."""
    if output.json:
        consoles.write_json({"methods": [record(entry) for entry in METHODS.values()]})
        return
    consoles.out().print(drawn())
    consoles.say(
        "Join methods with + for a cascade: the first that has a proposal drafts. Each may be "
        "NAME:SIZE, NAME:BUILDER or NAME:BUILDER:SIZE, such as ngram+eagle3:2. "
        "Exact: the text is plain decoding's, token for token.",
        style="dim",
    )


def record(entry: MethodEntry) -> dict[str, Any]:
    """The keys that other tools read."""
    return {
        "name": entry.name,
        "available": entry.available,
        "summary": entry.summary,
        "paper": entry.paper,
        "needs": entry.needs,
        "builders": list(entry.builders),
        "defaults": dict(entry.defaults),
        "defaults_on_cpu": dict(entry.on_cpu),
        "exact": entry.exact,
    }


def drawn() -> Table:
    """The table for people."""
    table = Table(show_lines=True, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in ("what it does", "needs", "builders", "defaults", "exact"):
        table.add_column(heading, overflow="fold")
    for entry in METHODS.values():
        style = "" if entry.available else "dim"
        name = entry.name if entry.available else f"{entry.name}\n(planned)"
        cells = (
            name,
            entry.summary,
            entry.needs,
            "\n".join(entry.builders) or "none",
            _defaults(entry),
            "yes" if entry.exact else "no",
        )
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _defaults(entry: MethodEntry) -> str:
    """Values, and which sizes the drafter decides."""
    lines = [f"{key} {value}" for key, value in entry.defaults.items()]
    if entry.builders:
        sizes = BUILDER_SETTINGS[entry.builders[0]]
        depths = [name for name in ("num_speculative_tokens", "tree_depth") if name in sizes]
        lines += [f"{name}: as the drafter has" for name in depths if name not in entry.defaults]
    if entry.on_cpu:
        shown = ", ".join(f"{key} {value}" for key, value in entry.on_cpu.items())
        lines.append(f"on a CPU: {shown}")
    return "\n".join(lines) or "none"


def markdown() -> str:
    """The table of README.md."""
    lines = [
        "| method | what it does | needs | builders | exact |",
        "| --- | --- | --- | --- | :-: |",
    ]
    for entry in METHODS.values():
        if not entry.available:
            continue
        cells = (
            f"`{entry.name}`",
            entry.summary,
            entry.needs,
            ", ".join(entry.builders) or "none",
            "yes" if entry.exact else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
