"""Write the tables that come from code and records into README.md and docs (``make docs``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forespeak.cli.methods import markdown
from forespeak.engine.guarantees import control_table, rule_table

ROOT = Path(__file__).parents[1]


def put(path: Path, mark: str, table: str) -> None:
    """Replace what stands between ``<!-- MARK:`` and ``<!-- END MARK -->``."""
    text = path.read_text(encoding="utf-8")
    start = text.index("\n", text.index(f"<!-- {mark}:")) + 1
    end = text.index(f"<!-- END {mark} -->")
    path.write_text(text[:start] + table + text[end:], encoding="utf-8")


def shipped_table(record: dict[str, Any]) -> str:
    """Markdown of what ``forespeak compare --record`` wrote, the fastest method first."""
    rows = sorted(record["rows"], key=lambda row: -(row["speedup"] or 0.0))
    lines = [
        "| method | drafts by | speed-up | quartiles | tokens/s | acceptance length "
        "| acceptance rate | same text |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    settings = record.get("settings", {})
    return "\n".join([*lines, *(_shipped_line(row, settings) for row in rows)]) + "\n"


def _drafts_by(row: dict[str, Any], settings: dict[str, dict[str, Any]]) -> str:
    """Its builder and size; of a cascade the builders alone, whose sizes its name may say."""
    own = settings.get(row["method"], {})
    size = own.get("num_speculative_tokens" if row["builder"] == "chain" else "node_budget")
    return row["builder"].replace("_", " ") + (f" of {size}" if size else "")


def _shipped_line(row: dict[str, Any], settings: dict[str, dict[str, Any]]) -> str:
    low, high = row["speedup_quartiles"] or (1.0, 1.0)
    rate = row["acceptance_rate"]
    return (
        f"| `{row['method']}` | {_drafts_by(row, settings)} | {row['speedup'] or 1.0:.2f} "
        f"| {low:.2f} to {high:.2f} | {row['tokens_per_second'] or 0:.0f} "
        f"| {row['acceptance_length']:.2f} | {'' if rate is None else f'{rate:.2f}'} "
        f"| {row['exact_match']:.0%} |"
    )


def main() -> None:
    put(ROOT / "README.md", "METHODS", markdown())
    record = ROOT / "docs" / "smollm2-135m.json"
    if record.is_file():
        put(ROOT / "README.md", "SHIPPED", shipped_table(json.loads(record.read_text("utf-8"))))
    put(ROOT / "docs" / "exactness.md", "CONTROLS", control_table())
    put(ROOT / "docs" / "exactness.md", "RULES", rule_table())


if __name__ == "__main__":
    main()
