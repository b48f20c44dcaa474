"""The harness finds the well-known mistakes, and says how large each bias is.

The sizes are printed: total variation between the output's first tokens and the target's.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from forespeak.spec.builders import TreeShape, build_chain, build_sampled_tree
from forespeak.spec.tree import CandidateTree, cut
from forespeak.spec.uniforms import Uniforms
from forespeak.spec.verify import RULES
from forespeak.types import Verdict
from tests.spec.enumeration import (
    ROOT,
    RandomTables,
    RandomTarget,
    TableDrafter,
    distance,
    output_law,
)
from tests.spec.exactness_cases import coin

pytestmark = pytest.mark.slow

Report = Callable[[str, list[float]], None]
SIBLINGS = TreeShape(((0,), (1,), (2,)))
SEEDS = range(10)


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Iterator[Report]:
    """Writes one line past pytest's capture, so that a plain run shows it."""

    def write(what: str, biases: list[float]) -> None:
        mean = sum(biases) / len(biases)
        with capsys.disabled():
            sys.stdout.write(f"\n  bias of {what}: mean {mean:.4f}, largest {max(biases):.4f}")

    yield write


def _three_siblings(drafter: TableDrafter, draws: Uniforms) -> CandidateTree:
    return build_sampled_tree(
        [ROOT], drafter.propose(), drafter.expand, [0], shape=SIBLINGS, draws=[draws]
    )[0]


def _pair(seed: int, vocab_size: int = 6) -> tuple[RandomTarget, TableDrafter]:
    target = RandomTarget(vocab_size, 2 * seed)
    return target, TableDrafter(RandomTables(vocab_size, 2 * seed + 1))


def _check(right: list[float], wrong: list[float]) -> None:
    assert max(right) < 1e-12
    assert max(wrong) > 1e-3
    assert sum(wrong) / len(wrong) > 1e-3


def test_q_not_updated_for_siblings(report: Report) -> None:
    """Siblings drawn without replacement, verified as if all had been drawn from the first law."""
    right, wrong = [], []
    for seed in SEEDS:
        target, drafter = _pair(seed)

        def stale(draws: Uniforms, drafter: TableDrafter = drafter) -> CandidateTree:
            tree = _three_siblings(drafter, draws)
            assert tree.q is not None
            return CandidateTree(tree.tokens, tree.parents, tree.q[1].expand_as(tree.q))

        def fresh(draws: Uniforms, drafter: TableDrafter = drafter) -> CandidateTree:
            return _three_siblings(drafter, draws)

        right.append(distance(output_law(target, fresh, RULES["siblings"], 2), target.joint(2)))
        wrong.append(distance(output_law(target, stale, RULES["siblings"], 2), target.joint(2)))
    report("q not updated for siblings", wrong)
    _check(right, wrong)


def _restarting(tree: CandidateTree, p: Tensor, uniforms: Uniforms) -> Verdict:
    """The siblings rule with its mistake: each child meets p, not what rejections left of it."""
    assert tree.q is not None
    path, law = [0], p[0]
    children = tree.children()
    while children[path[-1]]:
        for child in children[path[-1]]:
            token = tree.tokens[child]
            if uniforms.accept(float(p[path[-1], token] / tree.q[child, token])):
                path.append(child)
                law = p[child]
                break
            law = (p[path[-1]] - tree.q[child]).clamp_min(0)
        else:
            break
    return Verdict(tuple(path), uniforms.choose(law))


RESTARTING = dataclasses.replace(RULES["siblings"], verify=_restarting)


def test_residual_restarted_for_each_sibling(report: Report) -> None:
    wrong, right = [], []
    for seed in SEEDS:
        target, drafter = _pair(seed)

        def build(draws: Uniforms, drafter: TableDrafter = drafter) -> CandidateTree:
            return _three_siblings(drafter, draws)

        right.append(distance(output_law(target, build, RULES["siblings"], 2), target.joint(2)))
        wrong.append(distance(output_law(target, build, RESTARTING, 2), target.joint(2)))
    report("the residual restarted for each sibling", wrong)
    _check(right, wrong)


def _chain(drafter: TableDrafter, draws: Uniforms, length: int) -> CandidateTree:
    return build_chain(
        [ROOT], drafter.propose(), drafter.expand, [0], lengths=[length], draws=[draws]
    )[0]


@pytest.mark.parametrize("rule", ["rejection", "block", "siblings"])
def test_pruning_by_the_own_draw(report: Report, rule: str) -> None:
    """A token is dropped because its own draft probability came out low (law 3 broken)."""
    right, wrong = [], []
    for seed in SEEDS:
        target, drafter = _pair(seed)

        def pruned(draws: Uniforms, drafter: TableDrafter = drafter) -> CandidateTree:
            tree = _chain(drafter, draws, 2)
            assert tree.q is not None
            drawn = tree.q[range(3), list(tree.tokens)].tolist()
            return cut(tree, [True, *(mass >= 0.25 for mass in drawn[1:])])

        def lawful(draws: Uniforms, drafter: TableDrafter = drafter) -> CandidateTree:
            tree = _chain(drafter, draws, 2)
            assert tree.q is not None
            return cut(tree, [True, *(best >= 0.4 for best in tree.q[1:].amax(-1).tolist())])

        right.append(distance(output_law(target, lawful, RULES[rule], 3), target.joint(3)))
        wrong.append(distance(output_law(target, pruned, RULES[rule], 3), target.joint(3)))
    report(f"pruning by the own draw ({rule})", wrong)
    _check(right, wrong)


def test_keeping_the_more_confident_of_two_draws(report: Report) -> None:
    """Two tokens are drawn, the one the draft likes better is verified as if it were a draw."""
    wrong = []
    for seed in SEEDS:
        target, drafter = _pair(seed)

        def build(draws: Uniforms, drafter: TableDrafter = drafter) -> CandidateTree:
            tree = build_sampled_tree(
                [ROOT], drafter.propose(), drafter.expand, [0],
                shape=TreeShape(((0,), (1,))), draws=[draws],
            )[0]  # fmt: skip
            assert tree.q is not None
            first, second = tree.q[1, tree.tokens[1]], tree.q[1, tree.tokens[2]]
            better = tree.tokens[1] if first >= second else tree.tokens[2]
            return CandidateTree((ROOT, better), (-1, 0), tree.q[:2])

        wrong.append(distance(output_law(target, build, RULES["siblings"], 2), target.joint(2)))
    report("keeping the more confident of two draws", wrong)
    _check([0.0], wrong)


def _admitted(tree: CandidateTree, seed: int, *, stop_early: bool) -> CandidateTree:
    """DSpark's prefix scheduler for one request; its confidences know the tokens before a slot.

    Speed falls in a large step and then slowly, as that of a real engine does.
    """
    speed = [1.0, 0.5, 0.47, 0.45]
    survival = expected = 1.0
    best, length = speed[0], 0
    for slot in range(1, len(tree)):
        confidence = coin(seed, tree.tokens[:slot])
        survival *= 0.6 + 0.4 * confidence if slot == 1 else confidence
        expected += survival
        if expected * speed[slot] > best:
            best, length = expected * speed[slot], slot
        elif stop_early:
            break
    return cut(tree, [node <= length for node in range(len(tree))])


def test_full_argmax_over_current_confidences(report: Report) -> None:
    """The length with the best throughput of all looks at confidences that know later draws."""
    right, wrong = [], []
    for seed in SEEDS:
        target, drafter = _pair(seed)

        def early(draws: Uniforms, drafter: TableDrafter = drafter, s: int = seed) -> CandidateTree:
            return _admitted(_chain(drafter, draws, 3), s, stop_early=True)

        def full(draws: Uniforms, drafter: TableDrafter = drafter, s: int = seed) -> CandidateTree:
            return _admitted(_chain(drafter, draws, 3), s, stop_early=False)

        right.append(distance(output_law(target, early, RULES["rejection"], 4), target.joint(4)))
        wrong.append(distance(output_law(target, full, RULES["rejection"], 4), target.joint(4)))
    report("the full argmax over current confidences", wrong)
    _check(right, wrong)


def test_counter_example_of_the_scheduler(report: Report) -> None:
    """The paper's own numbers: P(A) is 0.70 with the early stop and 0.85 without."""
    p, q, speed = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]), (1.0, 0.5, 0.45)
    target = RandomTarget(2, 0)
    target._laws[()] = p.double()

    def build(draws: Uniforms, stop_early: bool) -> CandidateTree:
        first = draws.choose(q)
        confidences = (0.8, (0.9, 0.0)[first])
        gains = [speed[0], 1.8 * speed[1], (1.8 + 0.8 * confidences[1]) * speed[2]]
        length = 0 if stop_early else max(range(3), key=lambda at: gains[at])
        laws = torch.stack([torch.zeros(2), q, q]).double()
        tree = CandidateTree((ROOT, first, 0), (-1, 0, 1), laws)
        return cut(tree, [node <= length for node in range(3)])

    early = output_law(target, lambda draws: build(draws, True), RULES["rejection"], 1)
    full = output_law(target, lambda draws: build(draws, False), RULES["rejection"], 1)
    report("the scheduler's counter-example", [float(abs(full[0] - early[0]))])
    assert early[0] == pytest.approx(0.70, abs=1e-7)
    assert full[0] == pytest.approx(0.85, abs=1e-7)
