"""Rules for trees whose tokens were chosen, not drawn: q is a point mass on each child.

They are exact for every tree that was fixed before the target's draws, whatever chose it. Both
accept a node's children with their total mass under p; they differ in how many draws they take.
"""

from __future__ import annotations

from torch import Tensor

from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.types import Verdict


def match(tree: CandidateTree, p: Tensor, uniforms: Uniforms) -> Verdict:
    """Draw y from p; where y is a child descend to it, else y is the bonus.

    Every emitted token is the target's own draw, so nothing about the drafter is needed. On drafts
    that *were* drawn from q this stays exact but accepts sum p q instead of sum min(p, q).

    Args:
        tree: N nodes, any shape; q is not read. Of two children with one token the first is taken.
        p: [N, V] laws of the target after each node.
        uniforms: verification randomness, one ``choose`` a visited node.
    """
    children = tree.children()
    path = [0]
    while True:
        token = uniforms.choose(p[path[-1]])
        child = next((c for c in children[path[-1]] if tree.tokens[c] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)


def point_siblings(tree: CandidateTree, p: Tensor, uniforms: Uniforms) -> Verdict:
    """One uniform a child against the residual (EAGLE-2, arXiv 2406.16858, official code).

    With r = p, a child x is accepted with r(x); on rejection x is taken out of r. After all are
    rejected the bonus comes from r, at a leaf from p.

    Args: as for :func:`match`; ``uniforms`` gives one ``accept`` a tried child and one ``choose``.
    """
    children = tree.children()
    path = [0]
    while True:
        law = p[path[-1]]
        tokens = [tree.tokens[child] for child in children[path[-1]]]
        accepted = _try_children(law, tokens, uniforms)
        if accepted < len(tokens):
            path.append(children[path[-1]][accepted])
            continue
        if tokens:
            law = law.clone()
            law[tokens] = 0
            if not law.any():  # p was one on a child and only rounding rejected it
                law = p[path[-1]]
        return Verdict(tuple(path), uniforms.choose(law))


def _try_children(law: Tensor, tokens: list[int], uniforms: Uniforms) -> int:
    """Index of the first accepted token, len(tokens) when none is."""
    if not tokens:
        return 0
    left = float(law.sum())
    masses: list[float] = law[tokens].tolist()
    for at, (token, mass) in enumerate(zip(tokens, masses, strict=True)):
        fresh = token not in tokens[:at]
        if left > 0 and uniforms.accept(mass / left if fresh else 0.0):
            return at
        left -= mass if fresh else 0.0
    return len(tokens)
