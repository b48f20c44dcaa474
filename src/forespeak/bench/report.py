"""A comparison as a table for people and as a record for other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from forespeak.bench.compare import Row

PLAIN_BUILDER = "none"
_WIDTH_OF_ALL = 130  # columns of a terminal

# In the table only; the record's keys are fixed.
_TABLE_ONLY = ("speedup_quartiles",)


def record(row: Row) -> dict[str, Any]:
    """A row with the keys that other tools read."""
    fields = asdict(row)
    for name in _TABLE_ONLY:
        del fields[name]
    fields["first_differences"] = list(fields["first_differences"])
    return fields


def table(rows: Sequence[Row], *, title: str, width: int) -> Table:
    """One line a method: speed, what a round yields, where its time goes, whether it is exact.

    Fewer columns where ``width`` has no room for all.
    """
    columns = _COLUMNS if width >= _WIDTH_OF_ALL else [c for c in _COLUMNS if c.essential]
    drawn = Table(
        title=Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        drawn.add_column(column.heading, justify=column.justify, no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(column.cell(row)) for column in columns))
    return drawn


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table's headings mean, and where answers left plain decoding's."""
    lines = [
        "speed-up: median over prompts of tokens/s against plain decoding of the same prompt. "
        "acceptance length: tokens a round yields, bonus included; "
        "acceptance rate: accepted over proposed, bonus not included. "
        "exact match: share of texts that are plain decoding's, token for token; none where texts "
        "are drawn. "
        "outside forwards: share of a round in neither drafter nor target: trees, decisions, "
        "commits."
    ]
    for row in rows:
        for difference in row.first_differences:
            lines.append(
                f"{row.method} leaves plain decoding in prompt {difference.prompt} at token "
                f"{difference.position}; the target's two best logits are "
                f"{difference.gap:.2g} apart there."
            )
    return lines


def number(value: float | None, digits: int) -> str:
    """A number with so many digits behind the point, a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def _drafter(row: Row) -> str:
    """A folder's last name; the whole of it stands in the record."""
    return (row.drafter or "-").rstrip("/").rpartition("/")[2]


def _speedup(row: Row) -> str:
    if row.speedup_quartiles is None or row.builder == PLAIN_BUILDER:
        return number(row.speedup, 2)
    low, high = row.speedup_quartiles
    return f"{number(row.speedup, 2)} ({low:.2f}-{high:.2f})"


def _milliseconds(row: Row) -> str:
    return "+".join(number(part, 1) for part in (row.draft_ms, row.verify_ms, row.other_ms))


def _outside(row: Row) -> str:
    parts = (row.draft_ms, row.verify_ms, row.other_ms)
    if any(part is None for part in parts):
        return "-"
    return f"{100 * (row.other_ms or 0.0) / sum(part or 0.0 for part in parts):.0f} %"


@dataclass(frozen=True)
class _Column:
    heading: str
    cell: Callable[[Row], str]
    essential: bool = True
    justify: Literal["left", "right"] = "right"


_COLUMNS = (
    _Column("method", lambda row: row.method, justify="left"),
    _Column("builder", lambda row: row.builder, essential=False, justify="left"),
    _Column("drafter", _drafter, essential=False, justify="left"),
    _Column("tokens/s", lambda row: number(row.tokens_per_second, 1)),
    _Column("speed-up\n(p25-p75)", _speedup),
    _Column("acceptance\nlength", lambda row: number(row.acceptance_length, 2)),
    _Column("acceptance\nrate", lambda row: number(row.acceptance_rate, 2)),
    _Column("ms a round:\ndraft+verify+other", _milliseconds, essential=False),
    _Column("outside\nforwards", _outside, essential=False),
    _Column("exact\nmatch", lambda row: number(row.exact_match, 3)),
)
