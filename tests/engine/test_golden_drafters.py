"""Law 1 with fitted drafters: those of the reference data, whose drafts are accepted now and then.

Each goes through every builder that its method takes, in float32 and int8.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forespeak.drafters.table import METHODS
from forespeak.engine.llm import LLM
from forespeak.engine.reference import decode_greedy
from forespeak.engine.target import Target
from forespeak.formats.drafters import read_drafter
from forespeak.sampling import SamplingParams
from tests.drafters.golden import Case, cases, drafter_folder, load, target_of
from tests.engine.scripted import check_counts

pytestmark = [pytest.mark.golden, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SIZES = {"node_budget": 12, "tree_depth": 3, "tree_top_k": 3}
LENGTH = 32
FOLDERS = cases("medusa", "eagle1", "eagle2", "eagle3", "dflash", "dspark")


def methods_of(folder: Path) -> list[str]:
    """The methods that draft with a checkpoint."""
    family = read_drafter(folder).method
    return [family, *(name for name, entry in METHODS.items() if family in entry.reads)]


@cache
def opened(folder: Path, dtype: str) -> tuple[Case, Target, list[int], list[int]]:
    """Case, target, a stored prompt and plain decoding's text of it."""
    case = load(folder)
    target = target_of(case, dtype)
    prompt = case.tensors["gen0.prompt_ids"].flatten().tolist()
    return case, target, prompt, decode_greedy(target.model, prompt, LENGTH)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_builder_writes_plain_decodings_text(folder: Path | None, dtype: str) -> None:
    assert folder is not None
    case, target, prompt, plain = opened(folder, dtype)
    drafter = drafter_folder(case)
    num_accepted = 0
    for method in methods_of(drafter):
        for builder in METHODS[method].builders:
            names = ("node_budget", "tree_depth") if builder == "ddtree" else tuple(SIZES)
            options: dict[str, Any] = {"method": method, "drafter": str(drafter)}
            if len(METHODS[method].builders) > 1:
                options["builder"] = builder
            if builder != "chain":
                options |= {name: SIZES[name] for name in names}
            llm = LLM(target, **options)
            done = llm.generate(prompt, SamplingParams(max_new_tokens=LENGTH, ignore_eos=True))
            assert list(done.token_ids) == plain, (method, builder)
            check_counts(done)
            num_accepted += done.stats.num_accepted
    assert num_accepted > 0, "drafters that were fitted are right now and then"
