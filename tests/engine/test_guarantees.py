"""The tables of docs/exactness.md are the code's, and speak of every control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from forespeak.engine.guarantees import CONTROLS, cell, control_table, rule_table
from forespeak.sampling import SamplingParams
from forespeak.types import SpeculationConfig

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"


@pytest.mark.parametrize(("mark", "table"), [("CONTROLS", control_table), ("RULES", rule_table)])
def test_page_holds_the_table(mark: str, table: Callable[[], str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("\n", text.index(f"<!-- {mark}:")) + 1
    held = text[start : text.index(f"<!-- END {mark} -->")]
    assert held == table(), "run `make docs`"


def test_every_control_is_in_the_table() -> None:
    named = {name.split(" ")[0] for name in CONTROLS} - {"greedy"}
    assert named == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", [name for name in CONTROLS if "greedy" not in name])
def test_each_sample_sets_its_control(name: str) -> None:
    assert getattr(CONTROLS[name], name) != getattr(SamplingParams(), name)


def test_lossy_and_impossible_rules_are_told_apart() -> None:
    def config(rule: str | None, sampling: str | None = None) -> SpeculationConfig:
        return SpeculationConfig(
            method="draft_model", drafter="truncate:1", rule=rule, draft_sampling=sampling
        )

    assert cell(config(None), 1.0) == "exact"
    assert cell(config("typical"), 1.0) == "lossy"
    assert cell(config("rejection"), 1.0) == "refused"
    assert cell(config("rejection", "probabilistic"), 1.0) == "exact"
