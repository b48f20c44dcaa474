"""Trees whose shape is fixed beforehand: chosen tokens (Medusa, EAGLE-1) or drawn ones.

A shape is a list of paths such as (0,), (0, 0), (1,): the last number says which child of the path
before it a node is, the best (or first drawn) being 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.spec.builders.source import DraftNode, DraftProcess, Expand, LawSource
from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.types import Laws

Path = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """A fixed shape: its paths by length, then in lexicographic order; node i + 1 is path i.

    Raises:
        OptionError: a path is empty, has a negative rank, stands twice or lacks its parent.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))
        known: set[Path] = {()}
        for path in self.paths:
            if not path or min(path) < 0:
                raise OptionError(
                    f"Tree path {path} is not allowed; a path is one or more ranks from 0."
                )
            if path in known:
                raise OptionError(f"Tree path {path} is given twice; give each path once.")
            if path[:-1] not in known:
                raise OptionError(f"Tree path {path} lacks its parent; add path {path[:-1]}.")
            known.add(path)

    @property
    def depth(self) -> int:
        """Longest path."""
        return max((len(path) for path in self.paths), default=0)

    def level(self, depth: int) -> list[Path]:
        """Paths of one length, in order."""
        return [path for path in self.paths if len(path) == depth]


def fit_shape(accuracies: Sequence[Sequence[float]], budget: int) -> TreeShape:
    """The shape with the most expected accepted tokens, if ranks are right independently.

    Medusa's search (arXiv 2401.10774, section 2.3.3): the value of a node is the product of the
    accuracies along its path, and the reachable node of largest value is added until the budget is
    spent. Ties go to the shorter and then the lexicographically smaller path.

    Args:
        accuracies: ``accuracies[d][r]`` is how often the guess of rank r at depth d + 1 was right.
        budget: nodes, the root not counted; fewer where guesses with an accuracy run out.
    """
    chosen: list[Path] = []
    heap: list[tuple[float, int, Path]] = []

    def reach(path: Path, value: float) -> None:
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if accuracy > 0:
                    heappush(heap, (-value * accuracy, len(path) + 1, (*path, rank)))

    reach((), 1.0)
    while heap and len(chosen) < budget:
        value, _, path = heappop(heap)
        chosen.append(path)
        reach(path, -value)
    return TreeShape(tuple(chosen))


def build_static_tree(
    roots: Sequence[int],
    laws: Laws,
    expand: Expand | None,
    rows: Sequence[int],
    *,
    shape: TreeShape,
    process: DraftProcess | None = None,
    vocab_size: int | None = None,
) -> list[CandidateTree]:
    """Trees of one shape: rank r at a node is the r-th best token of the law there.

    Args:
        roots, laws, expand, rows, process, vocab_size: see :class:`LawSource`.
        shape: nodes come in its order; a node whose token is impossible (forbidden by ``process``,
            or the law has fewer tokens than its rank asks for) is left out with all below it.

    Raises:
        OptionError: the shape is deeper than the drafter's laws.
    """
    source = LawSource(roots, laws, expand, rows, process=process, vocab_size=vocab_size)
    _check_depth(shape, source)
    planted = [_Planted(root) for root in source.roots]
    for depth in range(1, shape.depth + 1):
        below = shape.level(depth)
        expanded = _expanded(planted, below)
        if not expanded:
            break
        most = max(path[-1] for path in below) + 1
        ids, log_probs = source.top([node for _, _, node in expanded], most)
        for (row, parent, _), tokens, logs in zip(expanded, ids, log_probs, strict=True):
            for path in below:
                rank = path[-1]
                if path[:-1] == parent and rank < len(tokens) and logs[rank] > float("-inf"):
                    row.add(path, tokens[rank], logs[rank])
    return [row.tree(None) for row in planted]


def build_sampled_tree(
    roots: Sequence[int],
    laws: Laws,
    expand: Expand | None,
    rows: Sequence[int],
    *,
    shape: TreeShape,
    draws: Sequence[Uniforms],
    process: DraftProcess | None = None,
    vocab_size: int | None = None,
) -> list[CandidateTree]:
    """Trees of one shape with drawn tokens, siblings without replacement.

    Child r of a node is drawn from the law there without its earlier siblings, renormalised, and q
    keeps that law: a rule divides by what the token was really drawn from (law 4). Where
    a law runs out of tokens further children do not exist, nor does what would hang from them.

    Args:
        roots, laws, expand, rows, process, vocab_size: see :class:`LawSource`.
        shape: siblings must have the ranks 0, 1, 2, ... without gaps.
        draws: R sources of draft randomness.

    Raises:
        OptionError: the shape is deeper than the drafter's laws, or skips a sibling.
    """
    source = LawSource(roots, laws, expand, rows, process=process, vocab_size=vocab_size)
    _check_depth(shape, source)
    known = set(shape.paths)
    for path in shape.paths:
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            raise OptionError(
                f"Tree path {path} skips a sibling; drawn siblings are numbered without gaps."
            )
    planted = [_Planted(root) for root in source.roots]
    kept: list[list[Tensor]] = [[] for _ in planted]
    for depth in range(1, shape.depth + 1):
        below = shape.level(depth)
        expanded = _expanded(planted, below)
        if not expanded:
            break
        for (row, parent, node), law in zip(
            expanded, source.laws([node for _, _, node in expanded]), strict=True
        ):
            children = [path for path in below if path[:-1] == parent]
            for path, (token, q) in zip(
                children, _draw(law, len(children), draws[node.slot]), strict=False
            ):
                row.add(path, token, 0.0)
                kept[node.slot].append(q)
    return [
        row.tree(torch.stack([torch.zeros_like(q[0]), *q]) if q else None, drawn=True)
        for row, q in zip(planted, kept, strict=True)
    ]


def _draw(law: Tensor, count: int, draws: Uniforms) -> list[tuple[int, Tensor]]:
    """Up to ``count`` tokens without replacement, each with the law it was drawn from. [V]"""
    drawn: list[tuple[int, Tensor]] = []
    for _ in range(count):
        if drawn:
            law = drawn[-1][1].clone()
            law[drawn[-1][0]] = 0
            mass = law.sum()
            if not mass > 0:
                break
            law = law / mass
        drawn.append((draws.choose(law), law))
    return drawn


class _Planted:
    """One row's nodes so far, by path, in order of creation."""

    def __init__(self, root: DraftNode) -> None:
        self.nodes: dict[Path, DraftNode] = {(): root}
        self.scores: dict[Path, float] = {(): 0.0}

    def add(self, path: Path, token: int, log_prob: float) -> None:
        self.nodes[path] = self.nodes[path[:-1]].child(len(self.nodes), token)
        self.scores[path] = self.scores[path[:-1]] + log_prob

    def tree(self, q: Tensor | None, *, drawn: bool = False) -> CandidateTree:
        return CandidateTree(
            tuple(node.path[-1] for node in self.nodes.values()),
            tuple(node.parent for node in self.nodes.values()),
            q,
            None if drawn else tuple(self.scores.values()),
        )


def _expanded(
    planted: Sequence[_Planted], below: Sequence[Path]
) -> list[tuple[_Planted, Path, DraftNode]]:
    """The nodes that have children in the level ``below``, row by row, in order of creation."""
    parents = dict.fromkeys(path[:-1] for path in below)
    return [
        (row, parent, row.nodes[parent])
        for row in planted
        for parent in parents
        if parent in row.nodes
    ]


def _check_depth(shape: TreeShape, source: LawSource) -> None:
    if source.max_depth is not None and shape.depth > source.max_depth:
        raise OptionError(
            f"The tree is {shape.depth} deep and the drafter gives {source.max_depth} depths; "
            "allowed: paths of at most that length. Take a shallower tree."
        )
