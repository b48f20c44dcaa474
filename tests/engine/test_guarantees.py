"""The tables of docs/exactness.md are the code's, and speak of every control."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from forespeak.engine.guarantees import CONTROLS, cell, control_table, rule_table
from forespeak.sampling import SamplingParams
from forespeak.types import SpeculationConfig

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"


@pytest.mark.parametrize(("mark", "table"), [("CONTROLS", control_table), ("RULES", rule_table)])
def test_page_holds_the_table(mark, table):
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("\n", text.index(f"<!-- {mark}:")) + 1
    held = text[start : text.index(f"<!-- END {mark} -->")]
    assert held == table(), "run `make docs`"


def test_every_control_is_in_the_table():
    named = {name.split(" ")[0] for name in CONTROLS} - {"greedy"}
    assert named == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", [name for name in CONTROLS if "greedy" not in name])
def test_each_sample_sets_its_control(name):
    assert getattr(CONTROLS[name], name) != getattr(SamplingParams(), name)


def test_lossy_and_impossible_rules_are_told_apart():
    draft = {"method": "draft_model", "drafter": "truncate:1"}
    assert cell(SpeculationConfig(**draft), 1.0) == "exact"
    assert cell(SpeculationConfig(**draft, rule="typical"), 1.0) == "lossy"
    assert cell(SpeculationConfig(**draft, rule="rejection"), 1.0) == "refused"
    drawn = SpeculationConfig(**draft, rule="rejection", draft_sampling="probabilistic")
    assert cell(drawn, 1.0) == "exact"
