"""Builders and rules give the same trees and verdicts wherever the tensors are."""

from __future__ import annotations

import pytest
import torch

from forespeak.spec.builders import (
    TreeShape,
    build_chain,
    build_ddtree,
    build_dynamic_tree,
    build_sampled_tree,
    build_static_tree,
)
from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import RecordedUniforms, Uniforms
from forespeak.spec.verify import RULES, Draft, fitting_rules
from forespeak.types import DenseLaws

SHAPE = TreeShape(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
VOCAB_SIZE = 300


def _draws() -> list[Uniforms]:
    generator = torch.Generator().manual_seed(7)
    return [RecordedUniforms(torch.rand(20, generator=generator).tolist()) for _ in range(2)]


def _trees(device: torch.device, mapped: bool) -> dict[str, list[CandidateTree]]:
    """Trees of every builder from the same laws on one device."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, 3, 200, generator=generator) * 3).to(device)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:200].to(device) if mapped else None
    laws, roots, rows = DenseLaws(logits, ids), [1, 2], [0, 1]
    size = VOCAB_SIZE if mapped else None
    return {
        "chain": build_chain(roots, laws, None, rows, lengths=[3, 2]),
        "chain sampled": build_chain(
            roots, laws, None, rows, lengths=[3, 2], draws=_draws(), vocab_size=size
        ),
        "static": build_static_tree(roots, laws, None, rows, shape=SHAPE),
        "sampled": build_sampled_tree(
            roots, laws, None, rows, shape=SHAPE, draws=_draws(), vocab_size=size
        ),
        "dynamic": build_dynamic_tree(
            roots, laws, None, rows, budgets=[9, 4], max_depth=3, top_k=3
        ),
        "ddtree": build_ddtree(roots, laws, None, rows, budgets=[40, 5]),
        "ddtree levels": build_ddtree(
            roots, laws, None, rows, budgets=[40, 5], vocab_size=size, process=lambda law, _: law
        ),
    }


@pytest.mark.parametrize("mapped", [False, True])
def test_builders_on_every_device(device: torch.device, mapped: bool) -> None:
    here, there = _trees(torch.device("cpu"), mapped), _trees(device, mapped)
    for name, trees in here.items():
        for one, other in zip(trees, there[name], strict=True):
            assert (one.tokens, one.parents) == (other.tokens, other.parents), name
            if one.q is not None:
                assert other.q is not None and other.q.device.type == device.type
                torch.testing.assert_close(one.q, other.q.cpu())


def test_rules_on_every_device(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, (tree, _) in _trees(device, mapped=False).items():
        draft: Draft = "point" if tree.q is None else "sampled"
        logits = torch.randn(len(tree), 200, generator=generator, dtype=torch.float64) * 2
        logits[list(tree.parents[1:]), list(tree.tokens[1:])] += 6  # so that some are accepted
        p = logits.softmax(-1)
        on_cpu = CandidateTree(tree.tokens, tree.parents, None if tree.q is None else tree.q.cpu())
        for rule in (*fitting_rules(draft, "chain" if tree.is_chain() else "tree"), "greedy"):
            uniforms = torch.rand(20, generator=generator).tolist()
            verdicts = [
                RULES[rule].verify(one, law, RecordedUniforms(uniforms))
                for one, law in ((on_cpu, p), (tree, p.to(device)))
            ]
            assert verdicts[0] == verdicts[1], (name, rule)
