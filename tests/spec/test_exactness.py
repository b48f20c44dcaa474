"""Law 2: the output's law is the target's, for every lossless rule x builder x processor x cut.

By enumeration in float64 (``enumeration.py``). By default a share of the random laws; all of them
with FORESPEAK_EXHAUSTIVE=1, which is what ``scripts/exactness.sh`` does.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.spec.verify import RULES, Rule, fitting_rules
from tests.spec.enumeration import (
    RandomTables,
    RandomTarget,
    TableDrafter,
    largest_difference,
    output_law,
    output_laws,
)
from tests.spec.exactness_cases import CUTS, EXHAUSTIVE, MAKERS, PROCESSORS

pytestmark = pytest.mark.slow

NUM_SMALL, NUM_LARGE = (200, 20) if EXHAUSTIVE else (4, 2)  # pairs of random p and q
TOLERANCE = 1e-12


def lossless_rules(maker: str) -> list[Rule]:
    """Every lossless sampling rule that takes the maker's trees."""
    how = MAKERS[maker]
    fitting = (RULES[name] for name in fitting_rules(how.draft, how.shape))
    return [rule for rule in fitting if rule.lossless]


def _differences(
    maker: str, processor: str, cut: str, *, seed: int, vocab_size: int, nodes: int
) -> dict[str, float]:
    """Largest error of each rule's output law."""
    process = PROCESSORS[processor]
    target = RandomTarget(vocab_size, 2 * seed, process=process)
    drafter = TableDrafter(RandomTables(vocab_size, 2 * seed + 1))

    def build(draws: Uniforms) -> CandidateTree:
        tree = MAKERS[maker].make(drafter, process, draws, nodes - 1)
        assert 1 <= len(tree) <= nodes, tree
        return CUTS[cut](tree, seed)

    length = min(nodes, 5)
    laws = output_laws(target, build, lossless_rules(maker), length)
    return {name: largest_difference(law, target.joint(length)) for name, law in laws.items()}


def _check(maker: str, processor: str, seeds: range, *, vocab_size: int, nodes: int) -> None:
    """Every pair of laws with every rule; trees are whole and cut in turn."""
    cuts = [name for name in CUTS if maker == "tree sampled" or "siblings" not in name]
    for seed in seeds:
        cut = cuts[seed % len(cuts)]
        found = _differences(maker, processor, cut, seed=seed, vocab_size=vocab_size, nodes=nodes)
        assert len(found) >= 2
        assert max(found.values()) < TOLERANCE, (seed, cut, found)


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("maker", MAKERS)
def test_four_nodes_over_six_words(maker: str, processor: str) -> None:
    _check(maker, processor, range(NUM_SMALL), vocab_size=6, nodes=4)


@pytest.mark.parametrize("processor", PROCESSORS if EXHAUSTIVE else ["repetition"])
@pytest.mark.parametrize("maker", MAKERS)
def test_seven_nodes_over_three_words(maker: str, processor: str) -> None:
    _check(maker, processor, range(1000, 1000 + NUM_LARGE), vocab_size=3, nodes=7)


def _one_hot(logits: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
    best = torch.full_like(logits, float("-inf"))
    best[logits.argmax()] = 0.0
    return best


@pytest.mark.parametrize("maker", MAKERS)
def test_one_hot_target_gives_the_greedy_text(maker: str) -> None:
    """At temperature 0 every rule writes the greedy text, whatever was drafted."""
    target = RandomTarget(4, 7, process=_one_hot)
    drafter = TableDrafter(RandomTables(4, 7, scale=0.5))

    def build(draws: Uniforms) -> CandidateTree:
        return MAKERS[maker].make(drafter, PROCESSORS["identity"], draws, 3)

    walk = dataclasses.replace(RULES["greedy"], chooses_last=False)
    laws = output_laws(target, build, [*lossless_rules(maker), walk], 4)
    for name, law in laws.items():
        assert largest_difference(law, target.joint(4)) < TOLERANCE, name


def test_typical_acceptance_is_lossy_and_says_so() -> None:
    target = RandomTarget(6, 1)
    drafter = TableDrafter(RandomTables(6, 2))
    law = output_law(
        target,
        lambda draws: MAKERS["static tree"].make(drafter, PROCESSORS["identity"], draws, 3),
        RULES["typical"],
        3,
    )
    assert largest_difference(law, target.joint(3)) > 1e-3
    assert not RULES["typical"].lossless
