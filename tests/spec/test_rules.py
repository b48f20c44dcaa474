"""Which rule takes which tree, and rules beside the laws that ``test_exactness`` proves."""

from __future__ import annotations

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.spec.tree import CandidateTree, chain
from forespeak.spec.uniforms import RecordedUniforms, SeededUniforms
from forespeak.spec.verify import (
    RULES,
    Draft,
    Shape,
    block,
    fitting_rules,
    point_siblings,
    rejection,
    select_rule,
    siblings,
)


@pytest.mark.parametrize(
    ("draft", "shape", "best"),
    [
        ("sampled", "chain", "block"),
        ("sampled", "tree", "siblings"),
        ("point", "chain", "match"),
        ("point", "tree", "match"),
    ],
)
def test_the_default_is_lossless_and_greedy_at_temperature_zero(
    draft: Draft, shape: Shape, best: str
) -> None:
    assert select_rule(None, draft=draft, shape=shape, temperature=1.0).name == best
    assert RULES[best].lossless
    for name in (None, *fitting_rules(draft, shape), "greedy"):
        rule = select_rule(name, draft=draft, shape=shape, temperature=0.0)
        assert rule.name == "greedy"


def test_every_rule_is_reachable_by_name() -> None:
    reached = {
        name
        for draft in ("point", "sampled")
        for shape in ("chain", "tree")
        for name in fitting_rules(draft, shape)
    }
    assert reached | {"greedy"} == set(RULES)
    assert all(RULES[name].name == name for name in RULES)


@pytest.mark.parametrize(
    ("name", "draft", "shape", "words"),
    [
        ("rejection", "point", "chain", "allowed: match, point_siblings, typical"),
        ("block", "sampled", "tree", "allowed: siblings, match, typical"),
        ("point_siblings", "sampled", "chain", "allowed: block, rejection, siblings"),
        ("greedy", "sampled", "chain", "temperature 0.7 would not give the target's law"),
        ("blok", "sampled", "chain", "Did you mean 'block'?"),
    ],
)
def test_impossible_pairs_are_refused_in_words(
    name: str, draft: Draft, shape: Shape, words: str
) -> None:
    with pytest.raises(OptionError) as refusal:
        select_rule(name, draft=draft, shape=shape, temperature=0.7)
    assert words in str(refusal.value)


def test_typical_is_chosen_only_by_name() -> None:
    for draft in ("point", "sampled"):
        for shape in ("chain", "tree"):
            chosen = select_rule(None, draft=draft, shape=shape, temperature=1.0)
            assert chosen.lossless
    rule = select_rule("typical", draft="point", shape="tree", temperature=1.0)
    assert not rule.lossless


def test_rules_compute_in_the_dtype_of_p() -> None:
    """The law of the bonus has the dtype of p, whatever that of q is."""
    seen: list[torch.dtype] = []

    class Source(RecordedUniforms):
        def choose(self, law: torch.Tensor) -> int:
            seen.append(law.dtype)
            return super().choose(law)

    q = torch.tensor([[0.0, 0.0], [0.5, 0.5]])
    tree = chain(0, [1], q)
    for dtype in (torch.float32, torch.float64):
        p = torch.tensor([[0.9, 0.1], [0.5, 0.5]], dtype=dtype)
        for rule in (rejection, block, siblings):
            rule(tree, p, Source([0.99, 0.5]))
        assert seen == [dtype] * 3
        seen.clear()


def test_equal_laws_always_accept_even_where_rounding_rejects() -> None:
    """No residual mass: the fallback is p itself and no impossible token."""
    law = torch.tensor([0.0, 1.0, 0.0])
    tree = chain(0, [1], law.expand(2, -1))
    p = law.expand(2, -1)
    assert rejection(tree, p, RecordedUniforms([0.999, 0.5])).path == (0, 1)
    assert block(tree, p, RecordedUniforms([0.999, 0.5])).path == (0, 1)
    almost = torch.tensor([[0.0, 1 - 2e-7, 0.0], [1.0, 0.0, 0.0]])
    verdict = rejection(tree, almost, RecordedUniforms([1 - 1e-8, 0.999999]))
    assert (verdict.path, verdict.bonus) == ((0,), 1)
    point = point_siblings(chain(0, [1]), p, RecordedUniforms([0.999, 0.5]))
    assert point.path == (0, 1)


@pytest.mark.parametrize("rule", ["siblings", "point_siblings", "match", "rejection", "block"])
def test_root_alone_draws_from_p(rule: str) -> None:
    p = torch.tensor([[0.25, 0.75]])
    assert RULES[rule].verify(chain(0, []), p, RecordedUniforms([0.2])).bonus == 0
    assert RULES[rule].verify(chain(0, []), p, RecordedUniforms([0.3])).bonus == 1


def test_repeated_siblings() -> None:
    """Two children with one token: with replacement it is legal, and a point mass counts once."""
    q = torch.tensor([0.5, 0.5])
    tree = CandidateTree((0, 1, 1), (-1, 0, 0), q.expand(3, -1))
    p = torch.tensor([0.8, 0.2]).expand(3, -1)
    verdict = siblings(tree, p, RecordedUniforms([0.5, 0.0, 0.5]))
    assert (verdict.path, verdict.bonus) == ((0,), 0)
    verdict = point_siblings(CandidateTree((0, 1, 1), (-1, 0, 0)), p, RecordedUniforms([0.3, 0, 0]))
    assert (verdict.path, verdict.bonus) == ((0,), 0)


def test_float32_law_of_a_large_vocabulary() -> None:
    """Monte Carlo on top of the proofs: float32, 2,000 tokens, the first token's law."""
    generator = torch.Generator().manual_seed(0)
    p_law = (torch.randn(2000, generator=generator) * 3).softmax(-1)
    q_law = (torch.randn(2000, generator=generator) * 3).softmax(-1)
    p = p_law.expand(2, -1)
    for verify in (rejection, block, siblings):
        draws, checks = (SeededUniforms(torch.Generator().manual_seed(seed)) for seed in (1, 2))
        counts = torch.zeros(2000)
        for _ in range(1500):
            token = draws.choose(q_law)
            verdict = verify(chain(0, [token], q_law.expand(2, -1)), p, checks)
            counts[token if verdict.num_accepted else verdict.bonus] += 1
        best = p_law.topk(8).indices
        expected = p_law[best] * 1500
        chi_square = float(((counts[best] - expected) ** 2 / expected).sum())
        assert chi_square < 30, (verify, chi_square)  # 8 cells: p is about 2e-4
