"""Exclusion of evaluation prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from forespeak.bench.prompts import read_prompts
from forespeak.train.overlap import Exclusion, words_of

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


@pytest.mark.parametrize(
    ("prompt", "overlaps"),
    [
        ("What is 2 + 2?", True),
        ("  what IS 2 2", True),
        ("ｗｈａｔ is 2, 2", True),  # full width
        ("what is 2 + 3?", False),
        ("what is 2 2 then", False),  # shorter than a run: only whole turns count
        (f"Please: {LONG}", True),
        ("x " + " ".join(LONG.split()[:13]) + " y", True),
        ("x " + " ".join(LONG.split()[2:]) + ", y", True),
        (" ".join(LONG.split()[:12]), False),
        ("x " + " ".join(LONG.split()[:12]) + " y", False),
        ("", False),
        ("...", False),
    ],
)
def test_overlap(prompt: str, overlaps: bool):
    exclusion = Exclusion(["what is 2+2", LONG, "?!"])
    assert exclusion.overlaps([prompt]) is overlaps
    assert exclusion.overlaps(["unrelated", prompt]) is overlaps
    assert not Exclusion().overlaps([prompt])


def test_words():
    assert words_of("Straße, ÉCOLE_1; don't") == ("strasse", "école_1", "don", "t")


@pytest.mark.parametrize("name", ["spec_bench_dev", "humaneval"])
def test_every_evaluation_prompt_is_kept_out(shared_dir: Path, name: str):
    prompts = read_prompts(shared_dir / "data" / "eval" / f"{name}.jsonl")
    exclusion = Exclusion(turn for prompt in prompts for turn in prompt.turns)
    assert all(exclusion.overlaps([turn]) for prompt in prompts for turn in prompt.turns)
    longest = max((turn for p in prompts for turn in p.turns), key=len)
    assert exclusion.overlaps(["Dear model! " + longest[len(longest) // 2 :]])
