"""The siblings rules against stored exact laws (``verification``), and the stored wrong ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.spec.builders import (
    TreeShape,
    build_sampled_tree,
    build_static_tree,
)
from forespeak.spec.tree import CandidateTree
from forespeak.spec.verify import RULES, Rule
from tests.spec.enumeration import (
    ROOT,
    TableDrafter,
    explore,
    explore_rule,
)
from tests.spec.golden_data import Case, cases, load, rows
from tests.spec.stored_laws import OneLaw, repeated
from tests.spec.test_wrong_variants import RESTARTING

pytestmark = pytest.mark.golden
EXACT = 1e-9


class Refusing:
    """Rejects everything and remembers with what probability it should have accepted."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.law: Tensor | None = None

    def accept(self, probability: float) -> bool:
        self.asked.append(min(max(probability, 0.0), 1.0))
        return False

    def choose(self, law: Tensor) -> int:
        self.law = law / law.sum()
        return -1


def _siblings_tree(case: Case, kind: str, candidates: list[int]) -> CandidateTree:
    q = case.tensors["q"]
    laws = [torch.zeros_like(q)]
    left = q
    for token in candidates:
        laws.append(left / left.sum())
        if kind == "without_replacement":
            left = left.clone()
            left[token] = 0
    drawn = kind in ("without_replacement", "with_replacement")
    parents = (-1, *(0 for _ in candidates))
    return CandidateTree((ROOT, *candidates), parents, torch.stack(laws) if drawn else None)


@pytest.mark.parametrize("folder", cases("verification", having="without_replacement.candidates"))
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("without_replacement", "siblings"),
        ("with_replacement", "siblings"),
        ("pointmass", "point_siblings"),
    ],
)
def test_siblings_candidate_by_candidate(folder: Path | None, kind: str, rule: str) -> None:
    """Acceptance of each sibling given that it is tried, and what is left after all."""
    case = load(folder)
    p = case.tensors["p"]
    stored = zip(
        rows(case.tensors[f"{kind}.candidates"]),
        case.tensors[f"{kind}.draw_prob"].tolist(),
        case.tensors[f"{kind}.accept_prob"].tolist(),
        case.tensors[f"{kind}.residual"],
        strict=True,
    )
    for candidates, drawn, accept, residual in stored:
        if drawn == 0:
            continue
        source = Refusing()
        RULES[rule].verify(
            _siblings_tree(case, kind, candidates), repeated(p, 1 + len(candidates)), source
        )
        for mine, official in zip(source.asked, accept, strict=False):
            if official != official:  # never tried: an earlier one is accepted for certain
                break
            assert mine == pytest.approx(official, abs=EXACT)
        if float(residual.sum()) > 0:  # zeros: cannot be reached
            assert source.law is not None
            torch.testing.assert_close(source.law, residual, atol=EXACT, rtol=0)


def _sibling_builds(case: Case, kind: str) -> Iterator[tuple[float, CandidateTree]]:
    """Every sibling set a round may draw, with its probability."""
    q, k = case.tensors["q"], case.facts["config"]["k"]
    drafter = TableDrafter(OneLaw(q))
    shape = TreeShape(tuple((rank,) for rank in range(k)))
    if kind == "without_replacement":
        for weight, tree, _ in explore(
            lambda draws: build_sampled_tree(
                [ROOT], drafter.propose(), None, [0], shape=shape, draws=[draws]
            )[0]
        ):
            yield weight, tree
    elif kind == "with_replacement":
        for drawn in itertools.product(range(q.shape[0]), repeat=k):
            if (weight := float(q[list(drawn)].prod())) > 0:
                yield weight, _siblings_tree(case, kind, list(drawn))
    else:
        yield 1.0, build_static_tree([ROOT], drafter.propose(), None, [0], shape=shape)[0]


def _sibling_law(case: Case, kind: str, rule: Rule) -> tuple[Tensor, float]:
    """Law of the first token, and the probability that a sibling is accepted."""
    p = case.tensors["p"]
    output, accepted = torch.zeros_like(p), 0.0
    for drawn, tree in _sibling_builds(case, kind):
        for decided, nodes, bonus in explore_rule(rule, tree, repeated(p, len(tree))):
            weight = drawn * decided
            if len(nodes) > 1:
                accepted += weight
                output[tree.tokens[nodes[1]]] += weight
            else:
                output += weight * torch.from_numpy(bonus)
    return output, accepted


@pytest.mark.parametrize("folder", cases("verification", having="without_replacement.candidates"))
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("without_replacement", "siblings"),
        ("with_replacement", "siblings"),
        ("pointmass", "point_siblings"),
        ("match", "match"),
    ],
)
def test_siblings_law(folder: Path | None, kind: str, rule: str) -> None:
    case = load(folder)
    output, accepted = _sibling_law(case, kind, RULES[rule])
    torch.testing.assert_close(output, case.tensors[f"{kind}.output_law"], atol=EXACT, rtol=0)
    torch.testing.assert_close(output, case.tensors["p"], atol=1e-12, rtol=0)
    assert accepted == pytest.approx(case.facts["results"][kind]["accept_total"], abs=EXACT)


@pytest.mark.parametrize("folder", cases("verification", having="without_replacement.candidates"))
def test_siblings_draws(folder: Path | None) -> None:
    """The sampled tree draws every order of siblings with the stored probability."""
    case = load(folder)
    mine = {
        tree.tokens[1:]: weight for weight, tree in _sibling_builds(case, "without_replacement")
    }
    stored = dict(
        zip(
            map(tuple, rows(case.tensors["without_replacement.candidates"])),
            case.tensors["without_replacement.draw_prob"].tolist(),
            strict=True,
        )
    )
    assert mine == pytest.approx({k: w for k, w in stored.items() if w > 0}, abs=EXACT)


@pytest.mark.parametrize("folder", cases("verification", having="wrong_q_not_updated.output_law"))
def test_laws_of_wrong_rules(folder: Path | None) -> None:
    """The wrong variants of this suite are the stored ones: the same wrong laws come out."""
    case = load(folder)
    restart, _ = _sibling_law(case, "without_replacement", RESTARTING)
    torch.testing.assert_close(
        restart, case.tensors["wrong_residual_restart.output_law"], atol=EXACT, rtol=0
    )
    q = case.tensors["q"]
    output = torch.zeros_like(q)
    for drawn, tree in _sibling_builds(case, "without_replacement"):
        stale = CandidateTree(tree.tokens, tree.parents, q.expand(len(tree), -1))
        p = repeated(case.tensors["p"], len(tree))
        for decided, nodes, bonus in explore_rule(RULES["siblings"], stale, p):
            if len(nodes) > 1:
                output[tree.tokens[nodes[1]]] += drawn * decided
            else:
                output += drawn * decided * torch.from_numpy(bonus)
    stored = case.tensors["wrong_q_not_updated.output_law"]
    torch.testing.assert_close(output, stored, atol=EXACT, rtol=0)
