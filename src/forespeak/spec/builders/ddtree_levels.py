"""The N most probable prefixes when every parent has its own law, searched level by level.

A prefix that is not among the N best of those found so far cannot be among the N best of all, nor
can anything below it, because a child is never more probable than its parent. So each level expands
only the prefixes that are still in, all of them in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forespeak.spec.builders.source import DraftNode, LawSource
from forespeak.spec.builders.top import top_log_probs
from forespeak.spec.tree import CandidateTree


@dataclass(frozen=True)
class _Prefix:
    """A candidate: its log-probability, its ranks from the root down and where it stands."""

    weight: float
    ranks: tuple[int, ...]
    node: DraftNode

    @property
    def key(self) -> tuple[float, tuple[int, ...]]:
        """Best first; a parent always comes before its children."""
        return (-self.weight, self.ranks)


def search_levels(source: LawSource, budgets: Sequence[int], max_depth: int) -> list[CandidateTree]:
    """One tree a row; see :func:`build_ddtree`."""
    kept: list[list[_Prefix]] = [[] for _ in budgets]
    frontier = [
        _Prefix(0.0, (), root) for root in source.roots if budgets[root.slot] > 0 and max_depth > 0
    ]
    numbers = [0 for _ in budgets]
    for depth in range(1, max_depth + 1):
        if not frontier:
            break
        logits = source.logits([prefix.node for prefix in frontier])  # [F, V]
        grown = _grow(frontier, logits, source.token_ids, budgets, kept, depth)
        frontier = []
        for slot, found in enumerate(grown):
            best = sorted((*kept[slot], *found), key=lambda prefix: prefix.key)
            kept[slot] = best[: budgets[slot]]
            for at, prefix in enumerate(kept[slot]):
                if prefix.node.depth == depth:
                    numbers[slot] += 1
                    kept[slot][at] = _numbered(prefix, numbers[slot])
                    frontier.append(kept[slot][at])
    return [
        _to_tree(root.path[0], prefixes) for root, prefixes in zip(source.roots, kept, strict=True)
    ]


def _numbered(prefix: _Prefix, number: int) -> _Prefix:
    """Numbers are given when a node is expanded: the drafter never hears of the others."""
    node = prefix.node
    return _Prefix(
        prefix.weight, prefix.ranks, DraftNode(node.slot, number, node.parent, node.path)
    )


def _grow(
    frontier: Sequence[_Prefix],
    logits: Tensor,
    token_ids: Tensor | None,
    budgets: Sequence[int],
    kept: Sequence[Sequence[_Prefix]],
    depth: int,
) -> list[list[_Prefix]]:
    """Children of the frontier that may be among the N best of their row."""
    widest = max(budgets[prefix.node.slot] for prefix in frontier) - depth + 1
    indices, log_probs = top_log_probs(logits, max(widest, 1))  # [F, K] each
    ids = (indices if token_ids is None else token_ids[indices]).cpu().numpy()
    above = np.array([prefix.weight for prefix in frontier])
    weights = above[:, None] + log_probs.cpu().numpy().astype(np.float64)  # [F, K]
    slots = np.array([prefix.node.slot for prefix in frontier])
    grown: list[list[_Prefix]] = [[] for _ in budgets]
    for slot in np.unique(slots).tolist():
        mine = np.flatnonzero(slots == slot)
        floor = _floor(weights[mine], kept[slot], budgets[slot])
        for at in mine.tolist():
            parent = frontier[at]
            for rank in np.flatnonzero(weights[at] >= floor).tolist():
                node = parent.node.child(0, int(ids[at, rank]))
                weight = float(weights[at, rank])
                grown[slot].append(_Prefix(weight, (*parent.ranks, rank), node))
    return grown


def _floor(weights: NDArray[np.float64], kept: Sequence[_Prefix], budget: int) -> float:
    """A weight that the N best of a row all reach; above minus infinity."""
    known = np.concatenate([weights.ravel(), [prefix.weight for prefix in kept]])
    lowest = float(np.finfo(np.float64).min)
    if known.size <= budget:
        return lowest
    return max(lowest, float(np.partition(known, known.size - budget)[known.size - budget]))


def _to_tree(root: int, prefixes: Sequence[_Prefix]) -> CandidateTree:
    index = {(): 0} | {prefix.ranks: at for at, prefix in enumerate(prefixes, start=1)}
    return CandidateTree(
        (root, *(prefix.node.path[-1] for prefix in prefixes)),
        (-1, *(index[prefix.ranks[:-1]] for prefix in prefixes)),
        scores=(0.0, *(prefix.weight for prefix in prefixes)),
    )
