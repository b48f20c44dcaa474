"""Greedy verification: follow the target's best token as long as it is in the tree."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.types import Verdict


def follow(tree: CandidateTree, best: Sequence[int]) -> Verdict:
    """The walk that takes ``best[node]`` after each node until no child holds it.

    Costs one pass over the nodes: a child always has a larger index than its parent, so the walk
    never turns back. Of two children with the same token the first is taken.

    Args:
        tree: N nodes.
        best: N token ids, what the target wants after each node.
    """
    assert len(best) == len(tree), (len(best), len(tree))
    path, wanted = [0], best[0]
    for node in range(1, len(tree)):
        if tree.parents[node] == path[-1] and tree.tokens[node] == wanted:
            path.append(node)
            wanted = best[node]
    return Verdict(tuple(path), int(wanted))


def greedy(tree: CandidateTree, p: Tensor, uniforms: Uniforms | None = None) -> Verdict:
    """Accept what plain greedy decoding would have written.

    Args:
        tree: N nodes.
        p: [N, V] laws or logits of the target, only their order matters. Ties go to the lowest id.
        uniforms: not used.
    """
    return follow(tree, p.argmax(-1).tolist())
