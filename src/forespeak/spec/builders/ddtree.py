"""DDTree: the prefixes that are most probable under the draft (arXiv 2604.12989).

If a drafter's laws do not depend on what was drafted before, one law a depth, the N best prefixes
come out of a best-first heap. If they do, each parent has its own law and levels are searched one
after the other, which finds the same set with one call of the drafter a level.

R rows, D depths, V vocabulary, K tokens of a law, N node budget of a row without the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from forespeak.spec.builders.ddtree_levels import search_levels
from forespeak.spec.builders.source import DraftProcess, Expand, LawSource
from forespeak.spec.builders.top import scan, top_log_probs
from forespeak.spec.tree import CandidateTree
from forespeak.types import DenseLaws, Laws

_FIRST_WIDTH = 16  # tokens of each law that are sorted at first; few trees need more at any depth
_WIDEN = 4

_Entry = tuple[float, tuple[int, ...], int, int, int, float]


def build_ddtree(
    roots: Sequence[int],
    laws: Laws,
    expand: Expand | None,
    rows: Sequence[int],
    *,
    budgets: Sequence[int],
    max_depth: int | None = None,
    process: DraftProcess | None = None,
    vocab_size: int | None = None,
    compiled: bool = True,
) -> list[CandidateTree]:
    """The N most probable prefixes of each row, most probable first, with their scores.

    Probabilities are the draft's own at temperature 1 (after ``process`` if given). Equal ones go
    by the smaller rank path, ranks within a law by the lower draft id. A tree for a smaller budget
    is the beginning of that for a larger one. Impossible tokens never become nodes.

    Args:
        roots, laws, expand, rows, process, vocab_size: see :class:`LawSource`. With ``expand`` or
            ``process`` laws depend on the path and the conditional form is built.
        budgets: R node budgets, roots not counted.
        max_depth: longest path, needed with ``expand``.
        compiled: False takes the slow, obvious form of the heap; the nodes are the same.
    """
    assert len(budgets) == len(roots), (budgets, roots)
    source = LawSource(roots, laws, expand, rows, process=process, vocab_size=vocab_size)
    limits = [limit for limit in (max_depth, source.max_depth) if limit is not None]
    assert limits, "a drafter that goes step by step needs max_depth"
    depth = min(limits)
    logits = source.all_depths
    if logits is None:
        return search_levels(source, budgets, depth)
    logits = logits[:, :depth].detach().float()  # [R, D, V]
    plant = _plant_fast if compiled else _plant_plainly
    return [
        plant(root, row, budget, source.token_ids)
        for root, row, budget in zip(roots, logits, budgets, strict=True)
    ]


def prepare() -> None:
    """Gets the compiled loops of the tree builders ready, so that no round waits for them.

    The first time on a machine this compiles for several seconds; later it reads numba's cache in
    under one.
    """
    build_ddtree([0], DenseLaws(torch.zeros(1, 1, 2)), None, [0], budgets=[1])


def _plant_fast(root: int, logits: Tensor, budget: int, token_ids: Tensor | None) -> CandidateTree:
    """One row's tree with compiled loops. ``logits`` is [D, V] float32.

    Sorting N tokens of every law would be the larger part of the work and few are ever looked at:
    laws are read to a small width first, and a law that the heap finds too short is read again.
    """
    from forespeak.spec.builders.heap_kernel import Nodes, best_first  # numba loads on first use

    depth, vocab_size = logits.shape
    if budget <= 0 or depth == 0:
        return CandidateTree((root,), (-1,), scores=(0.0,))
    capacity = min(budget, vocab_size)
    parents, depths, ranks = (np.empty(budget + 1, np.int64) for _ in range(3))
    nodes = Nodes(parents, depths, ranks, weights=np.empty(budget + 1))
    table = _RankTable(logits, capacity)
    while True:
        count, short = best_first(table.log_probs, table.widths, nodes, capacity)
        if short == 0:
            break
        table.widen(short - 1)
    tokens = table.tokens
    drafted = tokens[depths[1 : count + 1] - 1, ranks[1 : count + 1]]
    if token_ids is not None:
        drafted = token_ids.cpu().numpy()[drafted]
    return CandidateTree(
        (root, *drafted.tolist()),
        tuple(parents[: count + 1].tolist()),
        scores=tuple(nodes.weights[: count + 1].tolist()),
    )


class _RankTable:
    """Best tokens of D laws with their log-probabilities, as far as they have been read.

    Attributes:
        tokens, log_probs: [D, K], best first.
        widths: [D] how many of the K have been read.
    """

    def __init__(self, logits: Tensor, capacity: int) -> None:
        self._capacity = capacity
        self._rows = logits.contiguous().numpy() if logits.device.type == "cpu" else None
        if self._rows is None:  # sorting all of them costs an accelerator less than coming back
            indices, log_probs = top_log_probs(logits, capacity)
            self.tokens, self.log_probs = indices.cpu().numpy(), log_probs.cpu().numpy()
        else:
            values, self.tokens, self._log_sums = scan(self._rows, min(capacity, _FIRST_WIDTH))
            self.log_probs = values - self._log_sums[:, None].astype(np.float32)
        self.widths = np.full(len(self.tokens), self.tokens.shape[1])

    def widen(self, at: int) -> None:
        """Reads the law of depth ``at + 1`` further."""
        assert self._rows is not None
        width = min(self._capacity, int(self.widths[at]) * _WIDEN)
        values, tokens, _ = scan(self._rows[at : at + 1], width, log_sums=False)
        missing = max(0, width - self.tokens.shape[1])
        self.tokens = np.pad(self.tokens, ((0, 0), (0, missing)))
        self.log_probs = np.pad(self.log_probs, ((0, 0), (0, missing)))
        self.tokens[at, :width] = tokens[0]
        self.log_probs[at, :width] = values[0] - np.float32(self._log_sums[at])
        self.widths[at] = width


def _plant_plainly(
    root: int, logits: Tensor, budget: int, token_ids: Tensor | None
) -> CandidateTree:
    """One row's tree as the paper writes it: top-K of every law, then a heap of tuples."""
    depth = logits.shape[0]
    if budget <= 0 or depth == 0:
        return CandidateTree((root,), (-1,), scores=(0.0,))
    indices, log_probs = top_log_probs(logits, budget, compiled=False)  # [D, K] each
    ids = (indices if token_ids is None else token_ids[indices]).tolist()
    lp = log_probs.tolist()
    tokens, parents, scores = [root], [-1], [0.0]
    heap: list[_Entry] = [(-lp[0][0], (0,), 0, 1, 0, lp[0][0])]
    while heap and len(tokens) <= budget:
        _, ranks, parent, level, rank, weight = heappop(heap)
        if weight == float("-inf"):
            break
        node = len(tokens)
        tokens.append(ids[level - 1][rank])
        parents.append(parent)
        scores.append(weight)
        if rank + 1 < len(lp[level - 1]):
            beside = weight - lp[level - 1][rank] + lp[level - 1][rank + 1]
            heappush(heap, (-beside, (*ranks[:-1], rank + 1), parent, level, rank + 1, beside))
        if level < depth:
            below = weight + lp[level][0]
            heappush(heap, (-below, (*ranks, 0), node, level + 1, 0, below))
    return CandidateTree(tuple(tokens), tuple(parents), scores=tuple(scores))
