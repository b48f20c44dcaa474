"""Stored runs of official drafters: the target they ran with, the drafter, and texts to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.engine.llm import LLM
from forespeak.engine.target import Target, load_target
from forespeak.sampling import SamplingParams
from forespeak.types import Observation
from tests.spec.golden_data import GOLDEN, Case, cases, load
from tests.tiny import run

__all__ = [
    "GOLDEN",
    "Case",
    "Written",
    "cases",
    "drafter_folder",
    "load",
    "observe",
    "target_of",
    "write",
]

_ROOT = GOLDEN.parent


def target_of(case: Case, dtype: str = "float32") -> Target:
    """The target that a case was run with."""
    return load_target(str(_ROOT / case.facts["target"]), dtype=dtype, device="cpu")


def drafter_folder(case: Case) -> Path:
    """The drafter's folder, in the case's own or another's."""
    named = str(case.facts["drafter"]).split(" ")[0].rstrip("/")
    own = GOLDEN / case.name / named
    return own if own.is_dir() else _ROOT / named


def observe(drafter: Drafter, parts: TargetParts, tokens: Sequence[int], row: int = 0) -> None:
    """Shows a drafter verified tokens with the target's true features, as prefill does."""
    output = run(parts.model, tokens, taps=drafter.info.taps)
    drafter.observe([Observation(row, tuple(tokens), output.hidden, output.taps)])


@dataclass(frozen=True)
class Written:
    """A greedy text: its tokens, and the tokens of each round (bonus included)."""

    tokens: list[int]
    rounds: list[int]


def write(llm: LLM, prompt_ids: Sequence[int], num_tokens: int) -> Written:
    """A greedy text of a length, whatever end-of-sequence ids it holds."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    completion = llm.generate(list(prompt_ids), params)
    return Written(list(completion.token_ids), completion.stats.round_lengths)
