"""CandidateTree: what follows from ``parents``, against the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forespeak.spec.tree import CandidateTree, chain, cut
from forespeak.spec.verify import follow, greedy


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12, vocab_size: int = 5) -> CandidateTree:
    """Any tree; siblings may share a token."""
    size = draw(st.integers(1, max_nodes))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    tokens = [draw(st.integers(0, vocab_size - 1)) for _ in range(size)]
    return CandidateTree(tuple(tokens), tuple(parents))


def _ancestors(tree: CandidateTree, node: int) -> list[int]:
    """The node and all above it, the root last."""
    found = [node]
    while found[-1] != 0:
        found.append(tree.parents[found[-1]])
    return found


@given(trees())
def test_layout_follows_from_parents(tree: CandidateTree) -> None:
    mask, depths = tree.mask(), tree.depths()
    assert mask.dtype == torch.bool and mask.shape == (len(tree), len(tree))
    for node in range(len(tree)):
        above = _ancestors(tree, node)
        assert set(mask[node].nonzero()[:, 0].tolist()) == set(above)
        assert depths[node] == len(above) - 1
        assert tree.path_to(node) == above[::-1]
    assert tree.positions(100) == [100 + depth for depth in depths]
    leaves = [node for node in range(len(tree)) if not tree.children()[node]]
    assert [path[-1] for path in tree.leaf_paths()] == leaves
    assert tree.num_drafted == len(tree) - 1
    causal = torch.ones(len(tree), len(tree)).tril().bool()
    assert tree.is_chain() == torch.equal(mask, causal)


@given(trees(), st.data())
def test_cut_keeps_what_hangs_from_the_root(tree: CandidateTree, data: st.DataObject) -> None:
    size = len(tree)
    keep = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    scores = tuple(-float(node) for node in range(size))
    small = cut(CandidateTree(tree.tokens, tree.parents, None, scores), keep)
    stays = [
        node
        for node in range(size)
        if all(keep[above] for above in _ancestors(tree, node) if above != 0)
    ]
    assert small.tokens == tuple(tree.tokens[node] for node in stays)
    assert small.scores == tuple(-float(node) for node in stays)
    for at, node in enumerate(stays):
        assert [stays[above] for above in _ancestors(small, at)] == _ancestors(tree, node)


def test_cut_takes_q_along() -> None:
    q = torch.arange(12.0).reshape(4, 3)
    small = cut(CandidateTree((0, 1, 2, 0), (-1, 0, 0, 2), q), [True, False, True, True])
    assert small.parents == (-1, 0, 1)
    assert small.q is not None and torch.equal(small.q, q[[0, 2, 3]])


@given(trees(), st.data())
def test_greedy_walk(tree: CandidateTree, data: st.DataObject) -> None:
    """Against the definition: at each node, go to the first child that holds the wanted token."""
    best = [data.draw(st.integers(0, 4)) for _ in tree.tokens]
    path = [0]
    while True:
        wanted = best[path[-1]]
        matching = [c for c in tree.children()[path[-1]] if tree.tokens[c] == wanted]
        if not matching:
            break
        path.append(matching[0])
    verdict = follow(tree, best)
    assert verdict.path == tuple(path)
    assert verdict.bonus == best[path[-1]]
    assert verdict.num_accepted == len(path) - 1
    logits = torch.zeros(len(tree), 5)
    logits[range(len(tree)), best] = 1.0
    assert greedy(tree, logits) == verdict


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert greedy(chain(0, []), torch.tensor([[0.0, 2.0, 2.0, 1.0]])).bonus == 1


def test_a_tree_checks_itself() -> None:
    with pytest.raises(AssertionError):
        CandidateTree((0, 1, 2), (-1, 2, 0))
    with pytest.raises(AssertionError):
        CandidateTree((0,), (0,))
    with pytest.raises(AssertionError, match="drawn"):
        CandidateTree((0, 1), (-1, 0), torch.zeros(2, 3), (0.0, -1.0))
