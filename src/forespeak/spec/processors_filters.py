"""Filters: which tokens stay possible, from the shape of the law alone.

Each takes logits [N, V] and returns logits [N, V] with the dropped tokens at minus infinity, so
renormalising is left to the softmax at the end and to the next filter. N rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEGATIVE_INFINITY = -math.inf
# Sorting a whole vocabulary is the cost of top-p and typical-p. The wanted set is nearly always
# among the few best tokens; rows where it is not try the next number, then all.
NUM_CANDIDATES = (512, 4096)


def temper(logits: Tensor, temperature: float) -> Tensor:
    """Logits over temperature, shifted so that the best is 0: tiny temperatures do not overflow."""
    if temperature == 1:
        return logits
    divisor = max(temperature, torch.finfo(logits.dtype).tiny)  # smaller would be 0 in this dtype
    return (logits - logits.amax(-1, keepdim=True)).div_(divisor)  # [N, V]


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Tokens at least ``min_p`` times as likely as the best (arXiv 2407.01082)."""
    limit = logits.amax(-1, keepdim=True) + math.log(min_p)  # [N, 1]
    return logits.masked_fill(logits < limit, NEGATIVE_INFINITY)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` best tokens and all that tie with the last of them."""
    if top_k >= logits.shape[-1]:
        return logits
    limit = logits.topk(top_k).values[:, -1:]  # [N, 1]
    return logits.masked_fill(logits < limit, NEGATIVE_INFINITY)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """The smallest set of best tokens whose mass reaches ``top_p``; of equals the lower id first.

    The token that crosses the limit stays (arXiv 1904.09751).
    """
    limit, place = _reach(logits, logits.softmax(-1), top_p)
    drop = logits < limit
    surplus = drop.shape[-1] - drop.sum(-1) - (place[:, 0] + 1)  # [N] equals that are too many
    for row in surplus.nonzero()[:, 0].tolist():
        equals = (logits[row] == limit[row]).nonzero()[:, 0]  # in order of id
        drop[row, equals[len(equals) - int(surplus[row]) :]] = True
    return logits.masked_fill(drop, NEGATIVE_INFINITY)


def keep_typical_p(logits: Tensor, typical_p: float) -> Tensor:
    """Tokens whose surprise is nearest to the average, until their mass reaches ``typical_p``.

    Tokens as near as the last one stay too (arXiv 2202.00666). The set need not hold the best
    token; only in the limit of temperature 0 it always does.
    """
    log_p = logits.log_softmax(-1)  # [N, V]
    p = log_p.exp()
    entropy = -(log_p * p).nansum(-1, keepdim=True)  # [N, 1]; 0 * -inf is 0 here
    distance = (log_p + entropy).abs_()  # [N, V]
    limit, _ = _reach(-distance, p, typical_p)
    return logits.masked_fill(distance > -limit, NEGATIVE_INFINITY)


def _reach(keys: Tensor, p: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Where the mass of tokens, taken by falling key, first reaches ``share``.

    Args:
        keys: [N, V] what to order by.
        p: [N, V] law.

    Returns:
        The key of the token that crosses [N, 1] and its place in the order, from 0 [N, 1].
    """
    num_rows, vocab_size = keys.shape
    limit = keys.new_empty(num_rows, 1)
    place = torch.zeros(num_rows, 1, dtype=torch.long, device=keys.device)
    rows = torch.arange(num_rows, device=keys.device)  # [M] rows not settled yet
    for num in (*(c for c in NUM_CANDIDATES if c < vocab_size), vocab_size):
        if num < vocab_size:
            best, order = keys[rows].topk(num)  # [M, num]
        else:
            best, order = keys[rows].sort(-1, descending=True)
        reached = p[rows].gather(-1, order).cumsum(-1)  # [M, num]
        last = (reached[:, :-1] < share).sum(-1, keepdim=True)  # [M, 1]
        limit[rows], place[rows] = best.gather(-1, last), last
        rows = rows[reached[:, -1] < share]
        if not len(rows):
            break
    return limit, place


def point_mass(logits: Tensor) -> Tensor:
    """The law that is 1 at the best token, of equals at the lowest id. [N, V] -> [N, V]."""
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
