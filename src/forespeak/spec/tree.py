"""CandidateTree: what one round puts before the target.

Node 0 is the root: the newest token, sampled from the target and not yet in its cache. Parents
come before children, and mask, positions and paths follow from ``parents`` alone. A chain is the
tree of width one. The compact encoding (tokens and parents) is that of EAGLE-2
(arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class CandidateTree:
    """Tokens to verify in one round.

    Attributes:
        tokens: N token ids, the root's first.
        parents: N node indices, -1 for the root and smaller than the node's own index elsewhere.
        q: law each node's token was really drawn from, [N, V] float32 (row 0 unused); None when
            every draft token is a point mass (chosen, not drawn).
        scores: N cumulative log-probabilities of the paths under the draft's own laws (root 0),
            where the builder has them. Only for chosen tokens: the score of a drawn token is a
            function of the draw, and a cut by it would break law 3.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: Tensor | None = None
    scores: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        assert self.tokens and len(self.tokens) == len(self.parents), (self.tokens, self.parents)
        assert self.parents[0] == -1, self.parents
        assert all(0 <= p < i for i, p in enumerate(self.parents) if i), self.parents
        assert self.scores is None or len(self.scores) == len(self.tokens), self.scores
        assert self.scores is None or self.q is None, "scores of drawn tokens"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Draft tokens: nodes without the root."""
        return len(self.tokens) - 1

    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        depths = [0] * len(self)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def mask(self) -> Tensor:
        """Which nodes each node sees: itself and its ancestors. [N, N] bool."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            parent = self.parents[node]
            mask[node, :node] = mask[parent, :node]
        return torch.from_numpy(mask)

    def is_chain(self) -> bool:
        """Whether the mask is the ordinary causal one."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def positions(self, start: int) -> list[int]:
        """Position ids when the root stands at position ``start``."""
        return [start + depth for depth in self.depths()]

    def children(self) -> list[list[int]]:
        """Child nodes of each node in order of index."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self)):
            children[self.parents[node]].append(node)
        return children

    def leaf_paths(self) -> list[list[int]]:
        """Nodes from the root to each node without children, in order of the leaf's index."""
        parents = set(self.parents)
        return [self.path_to(node) for node in range(len(self)) if node not in parents]

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


def chain(root: int, tokens: Sequence[int], q: Tensor | None = None) -> CandidateTree:
    """The tree of width one: the root, then each token under the one before.

    ``q`` is [len(tokens) + 1, V], see :class:`CandidateTree`.
    """
    return CandidateTree((root, *tokens), tuple(range(-1, len(tokens))), q)


def cut(tree: CandidateTree, keep: Sequence[bool]) -> CandidateTree:
    """The tree without some of its nodes; a node whose parent goes, goes too.

    Law 3: whether a node is kept may depend on draft laws, on its ancestors, on older rounds and on
    cost, never on its own random draw or on later ones. (Of drawn siblings, earlier ones may count
    too: they were drawn before.) Then nothing about a cut node needs remembering: a node that
    has lost its children is a leaf, and the token after it is an unconditional draw from p.
    A cut that has looked at a drawn token biases the output.

    Args:
        tree: N nodes.
        keep: N answers; the root stays whatever its answer.
    """
    assert len(keep) == len(tree), (len(keep), len(tree))
    new_index: dict[int, int] = {-1: -1}
    kept: list[int] = []
    for node, parent in enumerate(tree.parents):
        if node == 0 or (keep[node] and parent in new_index):
            new_index[node] = len(kept)
            kept.append(node)
    return CandidateTree(
        tuple(tree.tokens[node] for node in kept),
        tuple(new_index[tree.parents[node]] for node in kept),
        None if tree.q is None else tree.q[kept],
        None if tree.scores is None else tuple(tree.scores[node] for node in kept),
    )
