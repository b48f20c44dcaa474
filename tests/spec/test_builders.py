"""Builders against slow, obvious forms of themselves, and what every tree must keep to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forespeak.errors import DrafterError, OptionError
from forespeak.spec.builders import (
    DraftPath,
    TreeShape,
    build_chain,
    build_sampled_tree,
    build_static_tree,
    fit_shape,
)
from forespeak.spec.uniforms import SeededUniforms
from forespeak.types import DenseLaws, PointLaws
from tests.spec.row_laws import Path, Rows, paths_of, score_of

# --- chain ----------------------------------------------------------------------------------------


def test_chain_takes_the_best_token_after_each_path() -> None:
    rows = Rows([3, 4, 5], 7)
    trees = build_chain(rows.roots, rows.laws(), rows.expand, rows.rows, lengths=[4, 0, 2])
    assert rows.calls == 3  # one call a level for all rows that go on
    for root, tree, length in zip(rows.roots, trees, (4, 0, 2), strict=True):
        path: Path = (root,)
        for _ in range(length):
            path = (*path, int(rows.logits(path).argmax()))
        assert tree.tokens == path and tree.is_chain() and tree.q is None


def test_chain_of_all_depths_at_once_and_reduced_vocabulary() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([4, 9, 11, 2, 30])
    trees = build_chain([1, 2], DenseLaws(logits, ids), None, [0, 1], lengths=[2, 9])
    assert [tree.tokens[1:] for tree in trees] == [
        tuple(ids[logits[0].argmax(-1)].tolist()[:2]),
        tuple(ids[logits[1].argmax(-1)].tolist()),
    ]


def test_chain_of_point_laws() -> None:
    laws = PointLaws(((7, 8, 9), (), (5,)))
    trees = build_chain([1, 2, 3], laws, None, [0, 1, 2], lengths=[2, 2, 2])
    assert [tree.tokens for tree in trees] == [(1, 7, 8), (2,), (3, 5)]
    for option in ({"min_confidence": 0.5}, {"process": lambda logits, paths: logits}):
        with pytest.raises(OptionError, match="single tokens"):
            build_chain([1, 2, 3], laws, None, [0, 1, 2], lengths=[2, 2, 2], **option)


def _seeded(count: int) -> list[SeededUniforms]:
    return [SeededUniforms(torch.Generator().manual_seed(seed)) for seed in range(count)]


def test_sampled_chain_keeps_the_laws_it_drew_from() -> None:
    rows = Rows([3, 4], 7)
    trees = build_chain(
        rows.roots, rows.laws(), rows.expand, rows.rows, lengths=[3, 2], draws=_seeded(2)
    )
    for tree, length in zip(trees, (3, 2), strict=True):
        assert tree.q is not None and tree.q.dtype == torch.float32 and len(tree) == length + 1
        for node in range(1, len(tree)):
            law = rows.logits(tuple(tree.tokens[:node])).softmax(-1)
            assert torch.equal(tree.q[node], law)
            assert law[tree.tokens[node]] > 0


def test_sampled_chain_in_a_reduced_vocabulary_has_no_mass_outside() -> None:
    laws = DenseLaws(torch.zeros(1, 4, 3), torch.tensor([5, 1, 8]))
    (tree,) = build_chain([0], laws, None, [0], lengths=[4], draws=_seeded(1), vocab_size=10)
    assert tree.q is not None and tree.q.shape == (5, 10)
    assert set(tree.q[1:].nonzero()[:, 1].tolist()) == {1, 5, 8}
    assert set(tree.tokens[1:]) <= {1, 5, 8}


def test_rows_do_not_see_each_other() -> None:
    """A batch gives what each row gives alone (law 8)."""
    together = Rows([3, 4, 5], 7)
    trees = build_chain(
        together.roots, together.laws(), together.expand, together.rows,
        lengths=[3, 1, 3], draws=_seeded(3),
    )  # fmt: skip
    for at in range(3):
        alone = Rows([together.roots[at]], 7)
        (tree,) = build_chain(
            alone.roots, alone.laws(), alone.expand, alone.rows,
            lengths=[(3, 1, 3)[at]], draws=[_seeded(3)[at]],
        )  # fmt: skip
        assert tree.tokens == trees[at].tokens


@pytest.mark.parametrize("drawn", [False, True])
def test_unsure_chain_ends_before_the_token(drawn: bool) -> None:
    """The law that is looked at is the token's own, which knows only its ancestors."""
    for seed in range(20):
        rows = Rows([3], 5, seed=seed)
        draws = _seeded(1) if drawn else None
        (tree,) = build_chain(
            [3], rows.laws(), rows.expand, [0], lengths=[4], draws=draws, min_confidence=0.5
        )
        confident = [
            float(rows.logits(tree.tokens[:end]).softmax(-1).max()) >= 0.5
            for end in range(1, len(tree) + 1)
        ]
        assert all(confident[:-1])
        assert len(tree) == 5 or not confident[-1]


def test_draft_processors_see_row_and_path() -> None:
    seen: list[DraftPath] = []

    def process(logits: Tensor, paths: Sequence[DraftPath]) -> Tensor:
        seen.extend(paths)
        logits = logits.clone()
        for law, path in zip(logits, paths, strict=True):
            law[list(path.tokens)] = float("-inf")
        return logits

    rows = Rows([3, 4], 7)
    trees = build_chain(
        rows.roots, rows.laws(), rows.expand, rows.rows, lengths=[5, 5], process=process
    )
    assert all(len(set(tree.tokens)) == 6 for tree in trees)
    assert DraftPath(10, trees[1].tokens[:3]) in seen


# --- fixed shapes ---------------------------------------------------------------------------------

SHAPE = TreeShape(((1,), (0,), (0, 2), (0, 0), (1, 0), (0, 0, 0), (2,)))


def test_static_tree_takes_ranks() -> None:
    rows = Rows([3, 4], 6)
    trees = build_static_tree(rows.roots, rows.laws(), rows.expand, rows.rows, shape=SHAPE)
    assert rows.calls == SHAPE.depth - 1
    for root, tree in zip(rows.roots, trees, strict=True):
        assert len(tree) == len(SHAPE.paths) + 1 and tree.scores is not None
        for node, ranks in enumerate(SHAPE.paths, start=1):
            path: Path = (root,)
            for rank in ranks:
                path = (*path, rows.logits(path).sort(descending=True).indices.tolist()[rank])
            assert paths_of(tree)[node - 1] == path[1:]
            assert tree.scores[node] == pytest.approx(score_of(rows, root, path[1:]), abs=1e-5)


def test_static_tree_without_steps_reads_each_depth_once() -> None:
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(3))
    trees = build_static_tree([1, 2], DenseLaws(logits), None, [0, 1], shape=SHAPE)
    order = logits.sort(dim=-1, descending=True).indices
    for at, tree in enumerate(trees):
        expected = [int(order[at, len(ranks) - 1, ranks[-1]]) for ranks in SHAPE.paths]
        assert list(tree.tokens[1:]) == expected


def test_static_tree_leaves_out_impossible_tokens() -> None:
    logits = torch.tensor([[[0.0, 1.0, float("-inf"), float("-inf")]] * 3])
    (tree,) = build_static_tree([9], DenseLaws(logits), None, [0], shape=SHAPE)
    assert paths_of(tree) == [(1,), (0,), (1, 1), (0, 1), (1, 1, 1)]


def test_shapes_are_checked() -> None:
    for paths, words in [
        (((0, 0),), "lacks its parent"),
        (((0,), (0,)), "given twice"),
        (((),), "one or more ranks"),
        (((-1,),), "one or more ranks"),
    ]:
        with pytest.raises(OptionError, match=words):
            TreeShape(paths)
    with pytest.raises(OptionError, match="3 deep and the drafter gives 2"):
        build_static_tree([0], DenseLaws(torch.zeros(1, 2, 9)), None, [0], shape=SHAPE)
    with pytest.raises(OptionError, match="skips a sibling"):
        build_sampled_tree(
            [0], DenseLaws(torch.zeros(1, 3, 9)), None, [0], shape=SHAPE, draws=_seeded(1)
        )


def test_sampled_tree_draws_siblings_without_replacement() -> None:
    shape = TreeShape(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0)))
    rows = Rows([3, 4], 6)
    trees = build_sampled_tree(
        rows.roots, rows.laws(), rows.expand, rows.rows, shape=shape, draws=_seeded(2)
    )
    for tree in trees:
        assert tree.q is not None and tree.scores is None and len(tree) == 7
        for node in range(1, 7):
            parent = tree.parents[node]
            path = tuple(tree.tokens[at] for at in tree.path_to(parent))
            law = rows.logits(path).softmax(-1)
            siblings = [at for at in range(1, node) if tree.parents[at] == parent]
            law[[tree.tokens[at] for at in siblings]] = 0
            torch.testing.assert_close(tree.q[node], law / law.sum())
            assert tree.q[node, tree.tokens[node]] > 0


def test_sampled_tree_stops_where_a_law_runs_out() -> None:
    logits = torch.full((1, 2, 4), float("-inf"))
    logits[0, 0, 2], logits[0, 1, :2] = 0.0, 0.0
    shape = TreeShape(((0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0)))
    (tree,) = build_sampled_tree([9], DenseLaws(logits), None, [0], shape=shape, draws=_seeded(1))
    assert [path[:1] for path in paths_of(tree)] == [(2,)] * 3 and len(tree) == 4


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 0.7]), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 8),
)
def test_fitted_shape_is_the_best(accuracies: list[list[float]], budget: int) -> None:
    values = {}
    for depth in range(1, len(accuracies) + 1):
        for path in itertools.product(*(range(len(level)) for level in accuracies[:depth])):
            value = 1.0
            for level, rank in zip(accuracies, path, strict=False):
                value *= level[rank]
            if value > 0:
                values[path] = value
    shape = fit_shape(accuracies, budget)
    best = sorted(values.values(), reverse=True)[:budget]
    assert sorted((values[path] for path in shape.paths), reverse=True) == pytest.approx(best)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("drawn", [False, True])
def test_laws_that_are_no_numbers_are_refused(value: float, drawn: bool) -> None:
    """They would draw the last token and accept it, or sort children before their parents."""
    logits = torch.randn(1, 3, 9, generator=torch.Generator().manual_seed(1))
    logits[0, 1, 4] = value
    draws = [SeededUniforms(torch.Generator().manual_seed(1))] if drawn else None
    with pytest.raises(DrafterError, match="no numbers"):
        build_chain([1], DenseLaws(logits), None, [0], lengths=[3], draws=draws)
    logits[0, 1, 4] = float("-inf")  # an impossible token is none of these
    build_chain([1], DenseLaws(logits), None, [0], lengths=[3], draws=draws)
