"""Rules for drafts that were drawn from q: chain, block, and siblings without replacement.

p is the target's law after all processors, q the law that the token was really drawn from (law 4);
N nodes, V vocabulary. All arithmetic over the vocabulary runs in the dtype of p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.types import Verdict


def rejection(tree: CandidateTree, p: Tensor, uniforms: Uniforms) -> Verdict:
    """Token-wise rejection sampling on a chain (Leviathan et al., arXiv 2211.17192, algorithm 1).

    A draft x is accepted with min(1, p(x) / q(x)). After the first rejection the bonus comes from
    norm(max(p - q, 0)); after none it comes from p at the last node.

    Args:
        tree: a chain whose draft tokens were drawn from ``tree.q``.
        p: [N, V] laws of the target after each node.
        uniforms: verification randomness, one ``accept`` a tried token and one ``choose``.
    """
    p_drawn, q_drawn, q = _chain_laws(tree, p)
    for node in range(1, len(tree)):
        if not uniforms.accept(p_drawn[node - 1] / q_drawn[node - 1]):
            bonus = uniforms.choose(_residual(p[node - 1], q[node]))
            return Verdict(tuple(range(node)), bonus)
    return Verdict(tuple(range(len(tree))), uniforms.choose(p[-1]))


def block(tree: CandidateTree, p: Tensor, uniforms: Uniforms) -> Verdict:
    """Block verification on a chain (Sun et al., arXiv 2403.10444): never fewer tokens a round.

    With r_0 = 1 and r_i = min(1, r_{i-1} p(x_i) / q(x_i)), length i < g succeeds with

        h_i = R_i / (R_i + 1 - r_i),    R_i = sum_x max(r_i p(x | x_1..x_i) - q(x | x_1..x_i), 0)

    and length g with h_g = r_g. The longest success is accepted, so a later one rescues an earlier
    failure; uniforms are asked from the longest length down and no further than needed. The bonus
    comes from norm(max(r_t p - q, 0)) after length t < g and from p after length g.

    Args: as for :func:`rejection`; q of node t + 1 is needed for every t < g.
    """
    p_drawn, q_drawn, q = _chain_laws(tree, p)
    last = len(tree) - 1
    joint = [1.0]
    for p_token, q_token in zip(p_drawn, q_drawn, strict=True):
        joint.append(min(joint[-1] * p_token / q_token, 1.0))
    if last == 0:
        return Verdict((0,), uniforms.choose(p[0]))
    weights = p.new_tensor(joint[:-1])[:, None]
    residuals = (weights * p[:-1] - q[1:]).clamp_min(0)  # [g, V]
    masses: list[float] = residuals.sum(-1).tolist()
    for length in range(last, 0, -1):
        if uniforms.accept(_block_success(joint, masses, length)):
            break
    else:
        length = 0
    path = tuple(range(length + 1))
    if length == last or masses[length] <= 0:
        return Verdict(path, uniforms.choose(p[length]))
    return Verdict(path, uniforms.choose(residuals[length]))


def _block_success(joint: list[float], masses: list[float], length: int) -> float:
    """h_i of :func:`block`."""
    if length == len(masses):
        return joint[length]
    below = masses[length] + 1 - joint[length]
    return masses[length] / below if below > 0 else 1.0


def siblings(tree: CandidateTree, p: Tensor, uniforms: Uniforms) -> Verdict:
    """Several drawn children a node (SpecInfer, arXiv 2305.09781; EAGLE, 2401.15077, algorithm 1).

    With r = p, children are tried in order of index: x_i is accepted with
    min(1, r(x_i) / q_i(x_i)), q_i being the law it was drawn from *given its earlier siblings*; on
    rejection r becomes norm(max(r - q_i, 0)). The bonus comes from r after all are rejected and
    from p at a leaf.

    Args:
        tree: any tree with q; on a chain this is :func:`rejection`.
        p, uniforms: as for :func:`rejection`.
    """
    assert tree.q is not None or len(tree) == 1, "the tokens were not drawn: no q"
    q = p[:0] if tree.q is None else tree.q.to(p.dtype)
    children = tree.children()
    path = [0]
    while True:
        law, accepted = p[path[-1]], None
        for child in children[path[-1]]:
            token = tree.tokens[child]
            if uniforms.accept(float(law[token]) / float(q[child, token])):
                accepted = child
                break
            law = _residual(law, q[child])
        if accepted is None:
            return Verdict(tuple(path), uniforms.choose(law))
        path.append(accepted)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)). [V], [V] -> [V]

    It has no mass only where p and q are the same law: nothing can be rejected there but by the
    rounding of p / q, and p is then the answer that changes least.
    """
    rest = (p - q).clamp_min(0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


def _chain_laws(tree: CandidateTree, p: Tensor) -> tuple[list[float], list[float], Tensor]:
    """p and q of each draft token of a chain, and q: ([N - 1], [N - 1], [N, V])."""
    assert tree.is_chain(), tree.parents
    if len(tree) == 1:
        return [], [], p[:0]
    assert tree.q is not None, "the tokens were not drawn: no q"
    q = tree.q.to(p.dtype)
    drawn = torch.tensor(tree.tokens[1:], device=p.device)[:, None]
    p_drawn: list[float] = p[:-1].gather(1, drawn)[:, 0].tolist()
    q_drawn: list[float] = q[1:].gather(1, drawn)[:, 0].tolist()
    return p_drawn, q_drawn, q
