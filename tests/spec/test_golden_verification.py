"""Rules against the stored exact laws and recorded draws (``verification``).

The logit filters of the ``warp`` entries are computed here in plain code; that the package's own
processors give the same laws is tested with the processors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.spec.builders import (
    TreeShape,
    build_chain,
    build_sampled_tree,
    build_static_tree,
)
from forespeak.spec.tree import CandidateTree, chain, cut
from forespeak.spec.uniforms import RecordedUniforms, Uniforms
from forespeak.spec.verify import RULES, Rule, rejection
from forespeak.types import Verdict
from tests.spec.enumeration import (
    ROOT,
    RandomTables,
    RandomTarget,
    TableDrafter,
    emissions,
    explore,
    output_law,
)
from tests.spec.golden_data import Case, cases, load, rows
from tests.spec.test_wrong_variants import RESTARTING

pytestmark = pytest.mark.golden
EXACT = 1e-9


class Stored(RandomTarget):
    """Laws from stored tables: ``<name>0`` [V], ``<name>1`` [V, V] by the first token, ..."""

    def __init__(self, case: Case, name: str) -> None:
        self._tables: list[Tensor] = []
        while case.has(f"{name}{len(self._tables)}"):
            self._tables.append(case.tensors[f"{name}{len(self._tables)}"])
        super().__init__(self._tables[0].shape[0], 0)

    @property
    def depth(self) -> int:
        return len(self._tables)

    def logits(self, path: tuple[int, ...]) -> Tensor:
        law = self._tables[len(path)]
        for token in path:
            law = law[token]
        return law.log()


class OneLaw(RandomTarget):
    """The same law after every path."""

    def __init__(self, law: Tensor) -> None:
        super().__init__(law.shape[0], 0)
        self._only = law

    def logits(self, path: tuple[int, ...]) -> Tensor:
        return self._only.log()


def _draw_chain(q: RandomTables, length: int, draws: Uniforms) -> CandidateTree:
    drafter = TableDrafter(q)
    return build_chain(
        [ROOT], drafter.propose(), drafter.expand, [0], lengths=[length], draws=[draws]
    )[0]


def _sequences(case: Case, name: str) -> dict[tuple[int, ...], float]:
    stored = rows(case.tensors[f"{name}.out_sequences"])
    weights = case.tensors[f"{name}.out_probs"].tolist()
    return {tuple(row): weight for row, weight in zip(stored, weights, strict=True) if weight > 0}


@pytest.mark.parametrize("folder", cases("verification", having="chain.p0"))
@pytest.mark.parametrize("rule", ["rejection", "siblings"])
def test_chain_law(folder: Path | None, rule: str) -> None:
    """Every sequence a round can emit, with its probability."""
    case = load(folder)
    p, q = Stored(case, "chain.p"), Stored(case, "chain.q")
    assert p.depth == q.depth + 1
    law = emissions(p, lambda draws: _draw_chain(q, q.depth, draws), RULES[rule])
    assert law == pytest.approx(_sequences(case, "chain"), abs=EXACT)
    accepted = [0.0] * (q.depth + 1)
    first = [0.0] * p.vocab_size
    for sequence, weight in law.items():
        accepted[len(sequence) - 1] += weight
        first[sequence[0]] += weight
    assert accepted == pytest.approx(case.tensors["chain.accepted_law"].tolist(), abs=EXACT)
    assert first == pytest.approx(case.tensors["chain.first_token_law"].tolist(), abs=EXACT)
    expected = case.facts["results"]["expected_tokens_per_round"]
    assert sum(length * mass for length, mass in enumerate(accepted, 1)) == pytest.approx(expected)


@pytest.mark.parametrize("folder", cases("verification", having="chain.p0"))
def test_block_verification_accepts_no_less(folder: Path | None) -> None:
    """The same tables under the block rule: the target's joint law, and at least as many tokens."""
    case = load(folder)
    p, q = Stored(case, "chain.p"), Stored(case, "chain.q")

    def build(draws: Uniforms) -> CandidateTree:
        return _draw_chain(q, q.depth, draws)

    law = output_law(p, build, RULES["block"], p.depth)
    assert abs(law - p.joint(p.depth)).max() < 1e-12
    mean = sum(len(s) * w for s, w in emissions(p, build, RULES["block"]).items())
    assert mean >= case.facts["results"]["expected_tokens_per_round"] - EXACT


class Watched:
    """A recorded source that also keeps the law of the last choice; any token answers it."""

    def __init__(self, uniforms: list[float]) -> None:
        self.recorded = RecordedUniforms(uniforms)
        self.law: Tensor | None = None

    def accept(self, probability: float) -> bool:
        return self.recorded.accept(probability)

    def choose(self, law: Tensor) -> int:
        self.law = law / law.sum()
        return int(law.argmax())


@pytest.mark.parametrize("folder", cases("verification", having="chain.p0"))
def test_chain_recorded_draws(folder: Path | None) -> None:
    """Recorded drafts and uniforms: the accepted count and the law of the next token."""
    case = load(folder)
    p, q = Stored(case, "chain.p"), Stored(case, "chain.q")
    scripts = zip(
        case.tensors["chain.script_drafts"].tolist(),
        case.tensors["chain.script_uniforms"].tolist(),
        case.tensors["chain.script_accepted"].tolist(),
        case.tensors["chain.script_next_law"],
        strict=True,
    )
    for drafts, uniforms, accepted, next_law in scripts:
        laws = [q.law(tuple(drafts[:depth])) for depth in range(len(drafts))]
        tree = chain(ROOT, drafts, torch.stack([torch.zeros_like(laws[0]), *laws]))
        p_rows = torch.stack([p.law(tuple(drafts[:depth])) for depth in range(len(drafts) + 1)])
        source = Watched(uniforms)
        verdict = rejection(tree, p_rows, source)
        assert verdict.num_accepted == accepted
        assert source.law is not None
        torch.testing.assert_close(source.law, next_law, atol=EXACT, rtol=0)


@pytest.mark.parametrize("folder", cases("verification", having="chain.residual0"))
def test_chain_residual(folder: Path | None) -> None:
    case = load(folder)
    p, q = Stored(case, "chain.p"), Stored(case, "chain.q")
    source = Watched([0.999999999999] * 2)
    token = int((q.law(()) - p.law(())).argmax())  # can be rejected
    rejection(chain(ROOT, [token], torch.stack([q.law(()), q.law(())])), _rows(p.law(())), source)
    assert source.law is not None
    torch.testing.assert_close(source.law, case.tensors["chain.residual0"], atol=EXACT, rtol=0)


def _rows(law: Tensor, count: int = 2) -> Tensor:
    return law.expand(count, -1)


def _filtered(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """temperature, top-k, top-p in that order; the token that crosses top_p stays."""
    values, order = (logits / temperature).sort(descending=True, stable=True)
    if top_k:
        values[top_k:] = float("-inf")
    law = values.softmax(-1)
    law[law.cumsum(-1) - law >= top_p] = 0
    return torch.zeros_like(law).scatter_(0, order, law / law.sum())


@pytest.mark.parametrize("folder", cases("verification", having="warp.logits"))
def test_filtered_laws(folder: Path | None) -> None:
    """Rejection between laws that were filtered alike: acceptance, residual, output."""
    case = load(folder)
    for number, warp in enumerate(case.facts["results"]["warps"]):
        stored = {
            part: case.tensors[f"warp{number}.{part}"]
            for part in ("p", "q", "residual", "accept", "output_law")
        }
        target_logits, draft_logits = case.tensors["warp.logits"]
        p, q = _filtered(target_logits, **warp), _filtered(draft_logits, **warp)
        torch.testing.assert_close(p, stored["p"], atol=EXACT, rtol=0)
        torch.testing.assert_close(q, stored["q"], atol=EXACT, rtol=0)
        target, drafter = OneLaw(p), OneLaw(q)
        law = emissions(target, partial(_draw_chain, drafter, 1), RULES["rejection"])
        accepted = sum(weight for sequence, weight in law.items() if len(sequence) == 2)
        assert accepted == pytest.approx(float(stored["accept"]), abs=EXACT)
        residual = torch.zeros_like(p)
        output = torch.zeros_like(p)
        for sequence, weight in law.items():
            output[sequence[0]] += weight
            if len(sequence) == 1:
                residual[sequence[0]] += weight / (1 - accepted)
        torch.testing.assert_close(output, stored["output_law"], atol=EXACT, rtol=0)
        torch.testing.assert_close(residual, stored["residual"], atol=EXACT, rtol=0)


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
            _siblings_tree(case, kind, candidates), _rows(p, 1 + len(candidates)), source
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

        def verify(source: Uniforms, tree: CandidateTree = tree) -> Verdict:
            return rule.verify(tree, _rows(p, len(tree)), source)

        for decided, verdict, final in explore(verify, defer=rule.chooses_last):
            weight = drawn * decided
            if verdict.num_accepted:
                accepted += weight
                output[tree.tokens[verdict.path[1]]] += weight
            elif final is None:
                output[verdict.bonus] += weight
            else:
                output += weight * torch.from_numpy(final)
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

        def verify(source: Uniforms, tree: CandidateTree = stale) -> Verdict:
            return RULES["siblings"].verify(tree, _rows(case.tensors["p"], len(tree)), source)

        for decided, verdict, final in explore(verify, defer=True):
            assert final is not None
            if verdict.num_accepted:
                output[tree.tokens[verdict.path[1]]] += drawn * decided
            else:
                output += drawn * decided * torch.from_numpy(final)
    stored = case.tensors["wrong_q_not_updated.output_law"]
    torch.testing.assert_close(output, stored, atol=EXACT, rtol=0)


@pytest.mark.parametrize("folder", cases("verification", having="tree.p0"))
@pytest.mark.parametrize("rule", ["match", "point_siblings"])
def test_tree_law(folder: Path | None, rule: str) -> None:
    """Two best children a node, two levels: every sequence a round can emit."""
    case = load(folder)
    p, q = Stored(case, "tree.p"), Stored(case, "tree.q")
    paths = [
        path for depth in range(1, q.depth + 1) for path in itertools.product((0, 1), repeat=depth)
    ]
    drafter = TableDrafter(q)

    def build(draws: Uniforms) -> CandidateTree:
        return build_static_tree(
            [ROOT], drafter.propose(), drafter.expand, [0], shape=TreeShape(tuple(paths))
        )[0]

    law = emissions(p, build, RULES[rule])
    assert law == pytest.approx(_sequences(case, "tree"), abs=EXACT)


@pytest.mark.parametrize("folder", cases("verification", having="schedule.p"))
@pytest.mark.parametrize("stop_early", [True, False])
def test_schedule(folder: Path | None, stop_early: bool) -> None:
    """Prefix admission: exact with the early stop, and wrong by the stored amount without."""
    case = load(folder)
    facts = case.facts["results"]["schedule"]
    q = case.tensors["schedule.q"]
    speed = case.tensors["schedule.steps_per_second"].tolist()

    def build(draws: Uniforms) -> CandidateTree:
        first = draws.choose(q)
        survival = facts["confidence_1"]
        gains = [speed[0], (1 + survival) * speed[1]]
        gains.append((1 + survival + survival * facts["confidence_2_by_token"][first]) * speed[2])
        assert gains[2] == pytest.approx(facts[f"theta2_if_token_{first}"])
        length = max(range(3), key=lambda at: gains[at])
        if stop_early:
            length = next((at for at in range(2) if gains[at + 1] <= gains[at]), 2)
        return cut(chain(ROOT, [first, 0], _rows(q, 3)), [node <= length for node in range(3)])

    target = OneLaw(case.tensors["schedule.p"])
    law = output_law(target, build, RULES["rejection"], 1)
    stored = case.tensors[f"schedule.{'early_stop' if stop_early else 'full_argmax'}_law"]
    torch.testing.assert_close(torch.from_numpy(law), stored, atol=EXACT, rtol=0)
