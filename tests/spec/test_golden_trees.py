"""Trees and masks of the official implementations, as far as no network is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.spec.builders import (
    TreeShape,
    build_chain,
    build_ddtree,
    build_dynamic_tree,
    build_static_tree,
)
from forespeak.spec.tree import CandidateTree
from forespeak.types import DenseLaws, Frontier
from tests.spec.golden_data import Case, cases, load, rows, static_shape

pytestmark = pytest.mark.golden


def _check_layout(tree: CandidateTree, case: Case, key: str) -> None:
    """Mask, positions and leaf paths as stored; the order of leaf rows is the release's own."""
    assert torch.equal(tree.mask(), case.tensors[f"{key}.attn_mask"])
    assert tree.positions(0) == case.tensors[f"{key}.position_ids"].tolist()
    assert sorted(tree.leaf_paths()) == sorted(rows(case.tensors[f"{key}.retrieve_indices"]))


# --- trees from stored logits -------------------------------------------------------------------


@pytest.mark.parametrize("folder", cases("ddtree"))
@pytest.mark.parametrize("compiled", [True, False])
def test_ddtree_builder(folder: Path | None, compiled: bool) -> None:
    case = load(folder)
    logits = case.tensors["tree.draft_logits"]
    budgets = case.facts["config"]["tree_budgets"]
    assert budgets
    for budget in budgets:
        (tree,) = build_ddtree(
            [5], DenseLaws(logits[None]), None, [0], budgets=[budget], compiled=compiled
        )
        key = f"tree.b{budget}"
        assert list(tree.tokens[1:]) == case.tensors[f"{key}.tokens"].tolist()
        assert list(tree.parents) == case.tensors[f"{key}.parents"].tolist()
        assert tree.depths()[1:] == case.tensors[f"{key}.depths"].tolist()
        assert torch.equal(tree.mask(), case.tensors[f"{key}.visibility"])
        assert tree.scores is not None
        weights = case.tensors[f"{key}.log_weights"].tolist()
        assert list(tree.scores[1:]) == pytest.approx(weights, abs=1e-5)


@pytest.mark.parametrize("folder", cases("ddtree"))
def test_ddtree_conditional_form(folder: Path | None) -> None:
    """On laws that do not depend on the parent the level search finds the same trees."""
    case = load(folder)
    logits = case.tensors["tree.draft_logits"]
    depths = {0: 0}

    def expand(frontiers: Sequence[Frontier]) -> DenseLaws:
        found = []
        for frontier in frontiers:
            for number, parent in zip(frontier.nodes, frontier.parents, strict=True):
                depths[number] = depths[parent] + 1
                found.append(logits[depths[number]])
        return DenseLaws(torch.stack(found)[:, None])

    for budget in case.facts["config"]["tree_budgets"]:
        laws = DenseLaws(logits[None, :1])
        (tree,) = build_ddtree([5], laws, expand, [0], budgets=[budget], max_depth=logits.shape[0])
        assert list(tree.tokens[1:]) == case.tensors[f"tree.b{budget}.tokens"].tolist()
        assert list(tree.parents) == case.tensors[f"tree.b{budget}.parents"].tolist()


@pytest.mark.parametrize("folder", cases("medusa"))
def test_medusa_tree(folder: Path | None) -> None:
    """Static tree over the heads' logits at the last position, root from the target's own."""
    case = load(folder)
    root = int(case.tensors["heads.base_logits"][0, -1].argmax())
    laws = DenseLaws(case.tensors["heads.medusa_logits"][None, :, -1])  # [1, heads, V]
    shape = TreeShape(tuple(tuple(path) for path in case.facts["config"]["choices"]))
    assert shape == static_shape(case)
    (tree,) = build_static_tree([root], laws, None, [0], shape=shape)
    assert list(tree.tokens) == case.tensors["tree.tokens"].tolist()
    _check_layout(tree, case, "tree")
    leaves = case.tensors["tree.retrieve_indices"]
    paths = torch.tensor(tree.tokens)[leaves.clamp_min(0)].masked_fill(leaves < 0, 0)
    assert torch.equal(paths, case.tensors["tree.cart_candidates"])


@pytest.mark.parametrize("folder", cases("eagle1"))
def test_eagle1_tree(folder: Path | None) -> None:
    """Static tree; laws of expanded nodes are stored in the order in which they are asked for."""
    case = load(folder)
    ids, values = case.tensors["tree.pool_top10_ids"], case.tensors["tree.pool_top10_logits"]
    vocab_size = case.facts["config"]["vocab_size"]
    logits = torch.full((ids.shape[0], vocab_size), -100.0).scatter_(1, ids, values)
    used = 1

    def expand(frontiers: Sequence[Frontier]) -> DenseLaws:
        nonlocal used
        count = sum(len(frontier.nodes) for frontier in frontiers)
        used += count
        return DenseLaws(logits[used - count : used, None])

    root = int(case.tensors["tree.tokens"][0])
    (tree,) = build_static_tree(
        [root], DenseLaws(logits[None, :1]), expand, [0], shape=static_shape(case)
    )
    assert used == ids.shape[0]
    assert list(tree.tokens) == case.tensors["tree.tokens"].tolist()
    _check_layout(tree, case, "tree")


@pytest.mark.parametrize("folder", cases("eagle2", "eagle3"))
def test_dynamic_tree_layout(folder: Path | None) -> None:
    """Stored trees: layout from parents, scores that never grow along a path."""
    case = load(folder)
    keys = case.keys("tree", "parents")
    assert keys
    for key in keys:
        stored = [case.tensors[f"{key}.{part}"].tolist() for part in ("tokens", "parents")]
        scores = tuple(case.tensors[f"{key}.scores"].tolist())
        tree = CandidateTree(tuple(stored[0]), tuple(stored[1]), scores=scores)
        _check_layout(tree, case, key)
        assert all(scores[node] <= scores[tree.parents[node]] for node in range(1, len(tree)))


class _LawsOfATree:
    """Draft laws that would give a stored tree its scores.

    What is left of each law is spread over so many words beside the real ones that none of them can
    be among the best.
    """

    beside = 500_000

    def __init__(self, tree: CandidateTree, vocab_size: int) -> None:
        assert tree.scores is not None
        self._tree, self._scores, self._vocab_size = tree, tree.scores, vocab_size
        self._nodes: dict[int, int | None] = {0: 0}  # the builder's number -> node of the tree

    def propose(self) -> DenseLaws:
        return DenseLaws(self._law(0)[None, None])

    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        laws = []
        for frontier in frontiers:
            for number, token, parent in zip(
                frontier.nodes, frontier.tokens, frontier.parents, strict=True
            ):
                above = self._nodes[parent]
                children = [] if above is None else self._tree.children()[above]
                same = [child for child in children if self._tree.tokens[child] == token]
                self._nodes[number] = same[0] if same else None
                laws.append(self._law(self._nodes[number]))
        return DenseLaws(torch.stack(laws)[:, None])

    def _law(self, node: int | None) -> Tensor:
        children = [] if node is None else self._tree.children()[node]
        masses = torch.tensor(
            [self._scores[child] - self._scores[node or 0] for child in children]
        ).exp()
        left = (1 - masses.sum()).clamp_min(1e-12)
        logits = torch.full((self._vocab_size + self.beside,), float("-inf"))
        logits[self._vocab_size :] = (left / self.beside).log()
        logits[[self._tree.tokens[child] for child in children]] = masses.log()
        return logits


@pytest.mark.parametrize("folder", cases("eagle2", "eagle3"))
def test_dynamic_tree_from_its_scores(folder: Path | None) -> None:
    """The builder finds the stored tree again, node for node, from laws with the stored scores."""
    case = load(folder)
    settings = {f"tree{entry['tree']}": entry for entry in case.facts["trees"]}
    for key in case.keys("tree", "parents"):
        tokens, parents, scores = (
            case.tensors[f"{key}.{part}"].tolist() for part in ("tokens", "parents", "scores")
        )
        stored = CandidateTree(tuple(tokens), tuple(parents), scores=tuple(scores))
        laws, sizes = _LawsOfATree(stored, 512), settings[key]
        (tree,) = build_dynamic_tree(
            [tokens[0]], laws.propose(), laws.expand, [0],
            budgets=[sizes["total_token"] - 1], max_depth=sizes["depth"] + 1, top_k=sizes["top_k"],
        )  # fmt: skip
        assert (tree.tokens, tree.parents) == (stored.tokens, stored.parents)
        assert tree.scores is not None
        assert list(tree.scores) == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("folder", cases("eagle2", "eagle3"))
def test_dynamic_tree_of_width_one(folder: Path | None) -> None:
    """With top_k 1 the tree is the argmax chain, whose logits are stored step by step."""
    case = load(folder)
    target_ids, logits = case.tensors["chain.draft_ids"], case.tensors["chain.logits"]
    token_ids = torch.zeros(logits.shape[1], dtype=torch.int64)
    token_ids[logits.argmax(-1)] = target_ids  # as much of the vocabulary map as is needed
    step = 0

    def expand(frontiers: Sequence[Frontier]) -> DenseLaws:
        nonlocal step
        step += 1
        return DenseLaws(logits[None, step : step + 1], token_ids)

    laws = DenseLaws(logits[None, :1], token_ids)
    root = int(case.tensors["chain.input_ids"][0, -1])
    length = target_ids.shape[0]
    (dynamic,) = build_dynamic_tree(
        [root], laws, expand, [0], budgets=[length], max_depth=length, top_k=1
    )
    assert list(dynamic.tokens[1:]) == target_ids.tolist()
    assert dynamic.is_chain() and dynamic.scores is not None
    step = 0
    (greedy_chain,) = build_chain([root], laws, expand, [0], lengths=[length])
    assert greedy_chain.tokens == dynamic.tokens
    widths = {entry["tree"]: entry for entry in case.facts["trees"]}
    for key in case.keys("tree", "scores"):
        same = torch.equal(case.tensors[f"{key}.input_ids"], case.tensors["chain.input_ids"])
        if same and widths[int(key.removeprefix("tree"))]["top_k"] == 1:
            scores = case.tensors[f"{key}.scores"].tolist()
            shared = min(len(scores), len(dynamic))
            assert list(dynamic.scores[:shared]) == pytest.approx(scores[:shared], abs=1e-4)


@pytest.mark.parametrize("folder", cases("dspark", having="block.greedy_corrected_logits"))
def test_dspark_chain(folder: Path | None) -> None:
    case = load(folder)
    laws = DenseLaws(case.tensors["block.greedy_corrected_logits"])
    drafts = case.tensors["block.greedy_ids"][0].tolist()
    root = int(case.tensors["block.input_ids"][0, 0])
    (tree,) = build_chain([root], laws, None, [0], lengths=[len(drafts)])
    assert list(tree.tokens) == [root, *drafts]
