"""Trees that follow the laws: EAGLE-2 and DDTree against slow, obvious forms of themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forespeak.spec.builders import (
    build_ddtree,
    build_dynamic_tree,
)
from forespeak.types import DenseLaws
from tests.spec.row_laws import Path, Rows, paths_of, score_of


def _eagle2(
    logits: Callable[[Path], Tensor], root: int, top_k: int, depth: int, budget: int
) -> list[Path]:
    """EAGLE-2 as its paper tells it, on lists: pool of (score, path) in order of creation."""
    pool: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(depth):
        made = []
        for score, path in frontier:
            law = logits((root, *path)).log_softmax(-1)
            for token in law.sort(descending=True, stable=True).indices.tolist()[:top_k]:
                made.append((score + float(law[token]), (*path, token)))
        pool += made
        frontier = sorted(made, key=lambda entry: -entry[0])[:top_k]
    kept = sorted(range(len(pool)), key=lambda at: (-pool[at][0], at))[:budget]
    return [pool[at][1] for at in sorted(kept)]


@pytest.mark.parametrize(
    ("top_k", "depth", "budget"), [(3, 3, 10), (2, 4, 7), (1, 4, 9), (4, 2, 3)]
)
def test_dynamic_tree_is_eagle2(top_k: int, depth: int, budget: int) -> None:
    for seed in range(10):
        rows = Rows([3, 4], 6, seed=seed)
        trees = build_dynamic_tree(
            rows.roots, rows.laws(), rows.expand, rows.rows,
            budgets=[budget, 2], max_depth=depth, top_k=top_k,
        )  # fmt: skip
        assert rows.calls == depth - 1
        for root, tree, nodes in zip(rows.roots, trees, (budget, 2), strict=True):
            assert paths_of(tree) == _eagle2(rows.logits, root, top_k, depth, nodes)
            assert tree.scores is not None
            for path, score in zip(paths_of(tree), tree.scores[1:], strict=True):
                assert score == pytest.approx(score_of(rows, root, path), abs=1e-5)


def test_dynamic_tree_ties_leave_no_orphan() -> None:
    """A child as probable as its parent (log-probability 0) must not stay without it."""
    logits = torch.full((1, 4, 6), float("-inf"))
    logits[0, 0, :2] = 0.0
    logits[0, 1:, 3] = 0.0
    (tree,) = build_dynamic_tree(
        [9], DenseLaws(logits), None, [0], budgets=[4], max_depth=4, top_k=3
    )
    assert paths_of(tree) == [(0,), (1,), (0, 3), (1, 3)]


def _most_probable(
    logits: Callable[[Path], Tensor], root: int, vocab_size: int, depth: int
) -> dict[Path, float]:
    weights = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(vocab_size), repeat=length):
            weights[path] = sum(
                float(logits((root, *path[:at])).double().log_softmax(-1)[token])
                for at, token in enumerate(path)
            )
    return weights


@pytest.mark.parametrize("budget", [1, 3, 7, 20, 84])
@pytest.mark.parametrize("form", ["compiled", "plain", "conditional"])
def test_ddtree_is_the_best_of_all_trees(form: str, budget: int) -> None:
    """Brute force over four words and three depths; the expected acceptance is the largest."""
    for seed in range(4):
        rows = Rows([3], 4, seed=seed)
        if form == "conditional":
            logits = rows.logits
            (tree,) = build_ddtree(
                [3], rows.laws(), rows.expand, [0], budgets=[budget], max_depth=3
            )
        else:
            table = torch.stack([rows.logits((3,) * at) for at in range(3)])

            def logits(path: Path, table: Tensor = table) -> Tensor:
                return table[len(path) - 1]

            (tree,) = build_ddtree(
                [3], DenseLaws(table[None]), None, [0], budgets=[budget],
                compiled=form == "compiled",
            )  # fmt: skip
        weights = _most_probable(logits, 3, 4, 3)
        best = sorted(weights, key=lambda path: -weights[path])[:budget]
        assert paths_of(tree) == best
        assert tree.scores is not None
        expected = [weights[path] for path in best]
        assert list(tree.scores[1:]) == pytest.approx(expected, abs=1e-5)


@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, 5),
    st.integers(2, 60),
    st.floats(0.1, 8.0),
    st.integers(0, 80),
)
def test_ddtree_forms_agree_and_small_trees_begin_large_ones(
    seed: int, depth: int, vocab_size: int, scale: float, budget: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, depth, vocab_size, generator=generator) * scale
    logits[1, :, : vocab_size // 2] = float("-inf")
    laws, budgets = DenseLaws(logits), [budget, budget // 2]
    fast = build_ddtree([1, 2], laws, None, [0, 1], budgets=budgets)
    plain = build_ddtree([1, 2], laws, None, [0, 1], budgets=budgets, compiled=False)
    levels = build_ddtree([1, 2], laws, None, [0, 1], budgets=budgets, process=lambda law, _: law)
    for at, (tree, nodes) in enumerate(zip(fast, budgets, strict=True)):
        assert len(tree) <= nodes + 1
        assert (tree.tokens, tree.parents) == (plain[at].tokens, plain[at].parents)
        assert (tree.tokens, tree.parents) == (levels[at].tokens, levels[at].parents)
        assert tree.scores is not None
        assert list(tree.scores) == sorted(tree.scores, reverse=True)
        smaller = nodes * 2 // 3
        begun = build_ddtree([1, 2], laws, None, [0, 1], budgets=[smaller, smaller])[at]
        assert begun.tokens == tree.tokens[: len(begun)]
        assert begun.parents == tree.parents[: len(begun)]


def test_ddtree_ties_go_by_rank_path() -> None:
    """Equal laws of four equal words: depth counts first, then the ranks in order."""
    laws = DenseLaws(torch.zeros(1, 3, 4))
    by_rank = [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    for compiled in (True, False):
        (tree,) = build_ddtree([9], laws, None, [0], budgets=[10], compiled=compiled)
        assert paths_of(tree) == by_rank
    (tree,) = build_ddtree([9], laws, None, [0], budgets=[10], process=lambda logits, paths: logits)
    assert paths_of(tree) == by_rank


def test_ddtree_flat_laws_read_one_law_far() -> None:
    """More siblings at the first depth than the first reading held."""
    logits = torch.randn(1, 3, 3000, generator=torch.Generator().manual_seed(5)) * 0.1
    (fast,) = build_ddtree([1], DenseLaws(logits), None, [0], budgets=[700])
    (plain,) = build_ddtree([1], DenseLaws(logits), None, [0], budgets=[700], compiled=False)
    assert fast.depths().count(1) > 256
    assert (fast.tokens, fast.parents) == (plain.tokens, plain.parents)


def test_ddtree_conditional_asks_once_a_level() -> None:
    rows = Rows([3, 4, 5], 8)
    trees = build_ddtree(
        rows.roots, rows.laws(), rows.expand, rows.rows, budgets=[20, 3, 0], max_depth=4
    )
    assert rows.calls <= 3
    assert [len(tree) for tree in trees] == [21, 4, 1]
