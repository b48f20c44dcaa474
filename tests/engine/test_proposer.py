"""Proposers and cascades of several rows: who proposes for whom, and how deep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from forespeak.drafters.base import Drafter
from forespeak.drafters.ngram import NgramDrafter
from forespeak.engine.proposer import Cascade, DraftRequest, Proposer
from forespeak.errors import OptionError
from forespeak.spec.uniforms import SeededUniforms
from forespeak.types import DenseLaws, DrafterInfo, Observation, SpeculationConfig
from tests.engine.scripted import SIZES, ScriptedDrafter

V = 13
KNOWN = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] * 2
BUILDERS = ["chain", "static_tree", "dynamic_tree", "ddtree"]


class Reader(Drafter):
    """Reads taps, keeps what it got and says one law for everything."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.info = DrafterInfo(method="reader", expansion="none", taps=taps)
        self.got: list[Observation] = []

    def admit(self, row: int) -> None: ...

    def release(self, row: int) -> None: ...

    def observe(self, observations: Sequence[Observation]) -> None:
        self.got += observations

    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> DenseLaws:
        return DenseLaws(torch.zeros(len(rows), 3, V))


def observation(tokens: Sequence[int], row: int, num_taps: int = 0) -> Observation:
    taps = torch.arange(num_taps).expand(len(tokens), num_taps)[..., None].float()
    return Observation(row, tuple(tokens), torch.zeros(len(tokens), 1), taps if num_taps else None)


def started(builder: str, rows: int, expansion: str = "forward") -> Proposer:
    drafter = ScriptedDrafter(KNOWN, 1.0, expansion=expansion, vocab_size=V)  # type: ignore[arg-type]
    proposer = Proposer(drafter, builder, SIZES, vocab_size=V)
    for row in range(rows):
        proposer.admit(row)
        proposer.observe([observation(KNOWN[: row + 1], row)])
    return proposer


@pytest.mark.parametrize("expansion", ["none", "forward"])
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("limits", [[3, 1, 4], [0, 2, 0], [0, 0, 0], [9, 9, 9]])
def test_no_path_is_longer_than_its_row_may_have(builder, expansion, limits):
    """Tokens beyond the limit would be run for nothing, past the end of the context even."""
    proposer = started(builder, 3, expansion)
    roots = [KNOWN[1], KNOWN[2], KNOWN[3]]
    trees = proposer.propose(DraftRequest([0, 1, 2], roots, limits))
    most = 5 if builder == "chain" else 4
    for row, (tree, limit) in enumerate(zip(trees, limits, strict=True)):
        assert tree.tokens[0] == roots[row]
        assert max(tree.depths()) == min(limit, most)
        path: list[int] = []
        node = 0
        while children := tree.children()[node]:
            node = next(c for c in children if tree.tokens[c] == KNOWN[row + 2 + len(path)])
            path.append(tree.tokens[node])
        assert path == KNOWN[row + 2 : row + 2 + min(limit, most)]


@pytest.mark.parametrize("builder", ["chain", "static_tree"])
def test_drawn_trees_keep_the_law_of_each_node(builder):
    proposer = started(builder, 2)
    draws = [SeededUniforms(torch.Generator().manual_seed(seed)) for seed in range(2)]
    trees = proposer.propose(DraftRequest([0, 1], [2, 3], [1, 4], draws))
    for tree, limit in zip(trees, (1, 4), strict=True):
        assert max(tree.depths()) == limit
        assert tree.q is not None and tree.q.shape == (len(tree), V)
        for node in range(1, len(tree)):
            assert float(tree.q[node, tree.tokens[node]]) > 0
            assert float(tree.q[node].sum()) == pytest.approx(1, abs=1e-5)


def test_a_cascade_asks_row_by_row():
    lookup = Proposer(NgramDrafter(lookup_min=2, lookup_max=3), "chain", SIZES, vocab_size=V)
    model = started("dynamic_tree", 0)
    cascade = Cascade([lookup, model])
    known = {0: [1, 2, 3, 4], 1: [1, 2, 3]}
    for row, tokens in known.items():
        cascade.admit(row)
        cascade.observe([observation(tokens, row)])
    first, second = cascade.propose(DraftRequest([1, 0], [4, 5], [3, 3]))
    assert not first.is_chain() and first.num_drafted > 3  # nothing to look up: the model
    assert not second.is_chain()
    lookup.release(0)
    lookup.admit(0)
    lookup.observe([observation([7, 8, 9, 7], 0)])
    first, second = cascade.propose(DraftRequest([1, 0], [4, 8], [3, 3]))
    assert not first.is_chain() and first.tokens[0] == 4
    assert second.tokens == (8, 9, 7, 8) and second.is_chain()


def test_each_member_of_a_cascade_gets_the_taps_it_reads():
    readers = [Reader((5, 2)), Reader(()), Reader((3,))]
    cascade = Cascade([Proposer(r, "chain", SIZES, vocab_size=V) for r in readers])
    assert cascade.taps == (2, 3, 5)
    cascade.observe([observation([1, 2], 0, num_taps=3)])  # columns 0, 1, 2 are taps 2, 3, 5
    first, none, last = (reader.got[0].taps for reader in readers)
    assert first is not None and first[:, :, 0].tolist() == [[2.0, 0.0]] * 2
    assert none is None
    assert last is not None and last[:, :, 0].tolist() == [[1.0]] * 2


def test_unknown_builders_are_refused():
    with pytest.raises(OptionError, match="chain, ddtree, dynamic_tree, static_tree"):
        Proposer(Reader(()), "trees", SpeculationConfig(), vocab_size=V)
