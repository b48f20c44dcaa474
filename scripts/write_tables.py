"""Write the tables that come from code into README.md and docs/exactness.md (``make docs``)."""

from __future__ import annotations

from pathlib import Path

from forespeak.cli.methods import markdown
from forespeak.engine.guarantees import control_table, rule_table

ROOT = Path(__file__).parents[1]


def put(path: Path, mark: str, table: str) -> None:
    """Replace what stands between ``<!-- MARK:`` and ``<!-- END MARK -->``."""
    text = path.read_text(encoding="utf-8")
    start = text.index("\n", text.index(f"<!-- {mark}:")) + 1
    end = text.index(f"<!-- END {mark} -->")
    path.write_text(text[:start] + table + text[end:], encoding="utf-8")


def main() -> None:
    put(ROOT / "README.md", "METHODS", markdown())
    put(ROOT / "docs" / "exactness.md", "CONTROLS", control_table())
    put(ROOT / "docs" / "exactness.md", "RULES", rule_table())


if __name__ == "__main__":
    main()
