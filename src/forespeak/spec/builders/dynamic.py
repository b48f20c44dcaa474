"""The dynamic tree of EAGLE-2 (arXiv 2406.16858): expand the most promising, then rerank all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forespeak.spec.builders.source import DraftNode, DraftProcess, Expand, LawSource
from forespeak.spec.tree import CandidateTree
from forespeak.types import Laws


@dataclass(frozen=True)
class _Candidate:
    """A prefix of the pool; ``node.number`` is its place in order of creation, from 1."""

    score: float
    node: DraftNode

    @property
    def key(self) -> tuple[float, int]:
        """Best first; ties to the shallower and then the earlier candidate.

        Levels are created one after the other, so order of creation is both.
        """
        return (-self.score, self.node.number)


def build_dynamic_tree(
    roots: Sequence[int],
    laws: Laws,
    expand: Expand | None,
    rows: Sequence[int],
    *,
    budgets: Sequence[int],
    max_depth: int,
    top_k: int,
    process: DraftProcess | None = None,
    vocab_size: int | None = None,
) -> list[CandidateTree]:
    """Trees of at most N draft nodes, in order of creation, with their scores.

    The score of a node is the draft's log-probability of its path at temperature 1. Each level
    expands the ``top_k`` best nodes of the level before into their ``top_k`` best children; of all
    nodes ever made the N best stay. A child never scores more than its parent and comes later, so
    no node stays without its parent.

    Args:
        roots, laws, expand, rows, process, vocab_size: see :class:`LawSource`.
        budgets: R node budgets, roots not counted (the release's ``total_token - 1``).
        max_depth: longest path, roots not counted (the release's ``depth + 1``).
        top_k: children of an expanded node and nodes expanded a level.
    """
    assert top_k >= 1 and len(budgets) == len(roots), (top_k, budgets, roots)
    source = LawSource(roots, laws, expand, rows, process=process, vocab_size=vocab_size)
    if source.max_depth is not None:
        max_depth = min(max_depth, source.max_depth)
    pools: list[list[_Candidate]] = [[] for _ in roots]
    frontier = [_Candidate(0.0, root) for root in source.roots if budgets[root.slot] > 0]
    for _ in range(max_depth):
        if not frontier:
            break
        frontier = _grow(source, frontier, pools, top_k)
    return [
        _rerank(root.path[0], pool, budget)
        for root, pool, budget in zip(source.roots, pools, budgets, strict=True)
    ]


def _grow(
    source: LawSource,
    frontier: Sequence[_Candidate],
    pools: list[list[_Candidate]],
    top_k: int,
) -> list[_Candidate]:
    """Adds the children of the frontier to the pools and returns the next frontier."""
    ids, log_probs = source.top([candidate.node for candidate in frontier], top_k)
    level: list[list[_Candidate]] = [[] for _ in pools]
    for parent, tokens, logs in zip(frontier, ids, log_probs, strict=True):
        pool = pools[parent.node.slot]
        for token, log_prob in zip(tokens, logs, strict=True):
            if log_prob == float("-inf"):  # a token that a processor forbids
                break
            child = _Candidate(parent.score + log_prob, parent.node.child(len(pool) + 1, token))
            pool.append(child)
            level[parent.node.slot].append(child)
    best = (sorted(made, key=lambda candidate: candidate.key)[:top_k] for made in level)
    return [candidate for row in best for candidate in row]


def _rerank(root: int, pool: Sequence[_Candidate], budget: int) -> CandidateTree:
    kept = sorted(pool, key=lambda candidate: candidate.key)[: max(budget, 0)]
    kept.sort(key=lambda candidate: candidate.node.number)
    index = {0: 0} | {candidate.node.number: at for at, candidate in enumerate(kept, start=1)}
    return CandidateTree(
        (root, *(candidate.node.path[-1] for candidate in kept)),
        (-1, *(index[candidate.node.parent] for candidate in kept)),
        scores=(0.0, *(candidate.score for candidate in kept)),
    )
