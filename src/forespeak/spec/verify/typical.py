"""Typical acceptance: faster, and not the target's law. Only when asked for by name."""

from __future__ import annotations

import math

from torch import Tensor

from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.types import Verdict


def typical(
    tree: CandidateTree,
    p: Tensor,
    uniforms: Uniforms,
    *,
    threshold: float = 0.09,
    alpha: float = 0.3,
) -> Verdict:
    """Accept tokens that are not too improbable (Medusa, arXiv 2401.10774, section 2.3.1).

    A token x below a node with law p is typical if p(x) > min(threshold, alpha exp(-H(p))), where
    H(p) = -sum p log(p + 1e-5) as in the official code. The longest path of typical tokens wins,
    then the one with the largest sum of log p. The bonus is drawn from p at its end.

    Args:
        tree: N nodes, any shape; q is not read.
        p: [N, V] laws of the target after each node.
        uniforms: verification randomness, one ``choose``.
        threshold, alpha: epsilon and delta of the paper; higher accepts less.
    """
    entropy = -(p * (p + 1e-5).log()).sum(-1)  # [N]
    limits: list[float] = (alpha * (-entropy).exp()).clamp_max(threshold).tolist()
    if len(tree) > 1:
        drawn: list[float] = p[list(tree.parents[1:]), list(tree.tokens[1:])].tolist()
    else:
        drawn = []
    depths = tree.depths()
    scores = [0.0]  # sum of log p along the path, -inf where a token of it is not typical
    best = 0
    for node, mass in enumerate(drawn, start=1):
        parent = tree.parents[node]
        typical_so_far = scores[parent] > -math.inf and mass > limits[parent]
        scores.append(scores[parent] + math.log(mass) if typical_so_far else -math.inf)
        if typical_so_far and (depths[node], scores[node]) > (depths[best], scores[best]):
            best = node
    return Verdict(tuple(tree.path_to(best)), uniforms.choose(p[best]))
