"""Rules against the stored exact laws and recorded draws (``verification``).

The logit filters of the ``warp`` entries are computed here in plain code; that the package's own
processors give the same laws is tested with the processors.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.spec.builders import (
    TreeShape,
    build_chain,
    build_static_tree,
)
from forespeak.spec.tree import CandidateTree, chain, cut
from forespeak.spec.uniforms import RecordedUniforms, Uniforms
from forespeak.spec.verify import RULES, rejection
from tests.spec.enumeration import (
    ROOT,
    RandomTables,
    TableDrafter,
    emissions,
    output_law,
)
from tests.spec.golden_data import cases, load
from tests.spec.stored_laws import OneLaw, Stored, repeated, sequences

pytestmark = pytest.mark.golden
EXACT = 1e-9


def _draw_chain(q: RandomTables, length: int, draws: Uniforms) -> CandidateTree:
    drafter = TableDrafter(q)
    return build_chain(
        [ROOT], drafter.propose(), drafter.expand, [0], lengths=[length], draws=[draws]
    )[0]


@pytest.mark.parametrize("folder", cases("verification", having="chain.p0"))
@pytest.mark.parametrize("rule", ["rejection", "siblings"])
def test_chain_law(folder: Path | None, rule: str) -> None:
    """Every sequence a round can emit, with its probability."""
    case = load(folder)
    p, q = Stored(case, "chain.p"), Stored(case, "chain.q")
    assert p.depth == q.depth + 1
    law = emissions(p, lambda draws: _draw_chain(q, q.depth, draws), RULES[rule])
    assert law == pytest.approx(sequences(case, "chain"), abs=EXACT)
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
    rejection(
        chain(ROOT, [token], torch.stack([q.law(()), q.law(())])), repeated(p.law(())), source
    )
    assert source.law is not None
    torch.testing.assert_close(source.law, case.tensors["chain.residual0"], atol=EXACT, rtol=0)


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
    assert law == pytest.approx(sequences(case, "tree"), abs=EXACT)


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
        return cut(chain(ROOT, [first, 0], repeated(q, 3)), [node <= length for node in range(3)])

    target = OneLaw(case.tensors["schedule.p"])
    law = output_law(target, build, RULES["rejection"], 1)
    stored = case.tensors[f"schedule.{'early_stop' if stop_early else 'full_argmax'}_law"]
    torch.testing.assert_close(torch.from_numpy(law), stored, atol=EXACT, rtol=0)
