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
)
from tests.spec.exactness_cases import CUTS, EXHAUSTIVE, MAKERS, PROCESSORS

NUM_SMALL, NUM_LARGE = (200, 20) if EXHAUSTIVE else (2, 1)
TOLERANCE = 1e-12

PAIRS = [
    (maker, rule)
    for maker, how in MAKERS.items()
    for rule in fitting_rules(how.draft, how.shape)
    if RULES[rule].lossless
]


def _difference(
    maker: str, rule: Rule, processor: str, cut: str, *, seed: int, vocab_size: int, nodes: int
) -> float:
    process = PROCESSORS[processor]
    target = RandomTarget(vocab_size, 2 * seed, process=process)
    drafter = TableDrafter(RandomTables(vocab_size, 2 * seed + 1))

    def build(draws: Uniforms) -> CandidateTree:
        tree = MAKERS[maker].make(drafter, process, draws, nodes - 1)
        assert 1 <= len(tree) <= nodes, tree
        return CUTS[cut](tree, seed)

    length = min(nodes, 5)
    return largest_difference(output_law(target, build, rule, length), target.joint(length))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("maker", "rule"), PAIRS)
def test_four_nodes_over_six_words(maker: str, rule: str, processor: str, cut: str) -> None:
    seeds = range(NUM_SMALL if cut == "whole" else max(NUM_SMALL // 2, 1))
    worst = max(
        _difference(maker, RULES[rule], processor, cut, seed=seed, vocab_size=6, nodes=4)
        for seed in seeds
    )
    assert worst < TOLERANCE


@pytest.mark.parametrize("processor", PROCESSORS if EXHAUSTIVE else ["repetition"])
@pytest.mark.parametrize(("maker", "rule"), PAIRS)
def test_seven_nodes_over_three_words(maker: str, rule: str, processor: str) -> None:
    cut = list(CUTS)[len(processor) % 2]  # whole or by ancestors
    worst = max(
        _difference(maker, RULES[rule], processor, cut, seed=seed, vocab_size=3, nodes=7)
        for seed in range(1000, 1000 + NUM_LARGE)
    )
    assert worst < TOLERANCE


def _one_hot(logits: torch.Tensor, path: tuple[int, ...]) -> torch.Tensor:
    best = torch.full_like(logits, float("-inf"))
    best[logits.argmax()] = 0.0
    return best


@pytest.mark.parametrize(("maker", "rule"), [*PAIRS, *((maker, "greedy") for maker in MAKERS)])
def test_one_hot_target_gives_the_greedy_text(maker: str, rule: str) -> None:
    """At temperature 0 every rule writes the greedy text, whatever was drafted."""
    target = RandomTarget(4, 7, process=_one_hot)
    drafter = TableDrafter(RandomTables(4, 7, scale=0.5))

    def build(draws: Uniforms) -> CandidateTree:
        return MAKERS[maker].make(drafter, PROCESSORS["identity"], draws, 3)

    rules = {**RULES, "greedy": dataclasses.replace(RULES["greedy"], chooses_last=False)}
    law = output_law(target, build, rules[rule], 4)
    assert largest_difference(law, target.joint(4)) < TOLERANCE


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
