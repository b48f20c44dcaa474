"""Losses over a vocabulary without ever holding the logits of a whole batch.

A drafter's logits are products of states with weights, z = x_1 W_1^T + x_2 W_2^T + ..., and the
target's law is softmax(h U^T) over the same words. Rows go through in chunks: logits, loss and the
derivative by the logits are made at once, and only the derivatives by x and W are kept. So each
product is done once, and memory is a chunk's. ``losses_reference.py`` has the same written out.

Of a row with q = softmax(z), p the target's law and y the label::

    hard      -log q(y)
    soft      -sum p log q
    kl        sum p (log p - log q)         the gradient of soft, and 0 where q is p
    l1        sum |q - p|                   twice the total variation
    overlap   1 - l1 / 2 = sum min(p, q)    chance that a draft drawn from q is accepted

n rows, P target positions, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_NUMBERS = {"cpu": 2**21, "cuda": 2**27}  # logits of a chunk

HARD, SOFT, KL, L1, OVERLAP, HIT = range(6)
"""Columns of the numbers that :func:`law_loss` gives for each row."""


@dataclass(frozen=True)
class Mix:
    """How much of each loss; see the top of the file."""

    hard: float = 0.0
    soft: float = 0.0
    kl: float = 0.0
    l1: float = 0.0


@dataclass(frozen=True)
class TargetLaw:
    """The target's law of each row, as the states that it follows from.

    Attributes:
        states: [P, H] after the final norm.
        head: [Vd, H] the target's head, the rows of the draft vocabulary.
        index: [n] int64, the state of each row; neighbours that share one cost less.
    """

    states: Tensor
    head: Tensor
    index: Tensor


@dataclass(frozen=True)
class Rows:
    """What is known of n rows.

    Attributes:
        weights: [n] float32, of the rows in the sum.
        labels: [n] int64 draft ids, -1 for a word outside the draft vocabulary.
        law: the target's; None leaves soft, kl, l1 and overlap out.
    """

    weights: Tensor
    labels: Tensor
    law: TargetLaw | None = None


Product = tuple[Tensor, Tensor]
"""x [n, I] and W [Vd, I]."""


def law_loss(products: Sequence[Product], rows: Rows, mix: Mix) -> tuple[Tensor, Tensor]:
    """The weighted sum of the rows' losses.

    Args:
        products: one or several whose sum is the logits.
        rows: labels, laws and weights.
        mix: which losses.

    Returns:
        The sum, with gradient (once) by every x and W that asks for it; and [n, 6] float32 numbers
        of the rows without gradient (``HARD`` ... ``HIT``: the best word is the label), each
        without weight; NaN in ``HARD`` without label and in what needs a law without law.
    """
    assert rows.law is not None or not (mix.soft or mix.kl or mix.l1), mix
    flat: list[Tensor] = []
    for x, weight in products:
        flat += [x, weight]
    total, numbers = _LawLoss.apply(rows, mix, *flat)  # type: ignore[no-untyped-call]
    return total, numbers


class _LawLoss(torch.autograd.Function):
    """See :func:`law_loss`. Inputs after the first two: x_1, W_1, x_2, W_2, ..."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, mix: Mix, *flat: Tensor) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[2:]
        states, weights = flat[0::2], flat[1::2]
        dtype = _product_dtype(states[0])
        cast = [weight.to(dtype) for weight in weights]
        head = None if rows.law is None else rows.law.head.to(dtype)
        gradients = [
            torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) if want else None
            for tensor, want in zip(flat, wanted, strict=True)
        ]
        count, width = len(states[0]), len(weights[0])
        numbers = torch.empty(count, 6, device=states[0].device)
        total = torch.zeros((), dtype=torch.float32, device=states[0].device)
        step = max(32, _CHUNK_NUMBERS.get(states[0].device.type, 2**21) // width)
        with torch.autocast(states[0].device.type, enabled=False):
            for start in range(0, count, step):
                part = slice(start, start + step)
                inputs = [x[part].to(dtype) for x in states]
                slopes, numbers[part] = _chunk(inputs, cast, rows, head, mix, part, any(wanted))
                weighted = rows.weights[part] * _mixed(numbers[part], mix)
                total += torch.where(rows.weights[part] != 0, weighted, 0.0).sum()
                if slopes is not None:
                    slopes *= rows.weights[part, None]
                    _gather(gradients, slopes.to(dtype), inputs, cast, part)
        ctx.save_for_backward(*[g for g in gradients if g is not None])
        ctx.wanted = [(i, t.dtype) for i, t in enumerate(flat) if gradients[i] is not None]
        ctx.count = len(flat)
        ctx.mark_non_differentiable(numbers)
        return total, numbers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * ctx.count
        for (place, dtype), gradient in zip(ctx.wanted, ctx.saved_tensors, strict=True):
            found[place] = (gradient * by_total).to(dtype)
        return (None, None, *found)


def _product_dtype(states: Tensor) -> torch.dtype:
    device = states.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return states.dtype


def _chunk(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rows: Rows,
    head: Tensor | None,
    mix: Mix,
    part: slice,
    with_slopes: bool,
) -> tuple[Tensor | None, Tensor]:
    """(derivative of each row's mixed loss by its logits [c, Vd], numbers [c, 6]) of a chunk."""
    logits = F.linear(inputs[0], weights[0]).float()
    for x, weight in zip(inputs[1:], weights[1:], strict=True):
        logits += F.linear(x, weight)
    labels = rows.labels[part]
    known = labels >= 0
    hit = (logits.argmax(-1) == labels).float()
    log_q = logits.log_softmax(-1)
    at_label = log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    nothing = torch.full_like(at_label, float("nan"))
    hard = torch.where(known, -at_label, nothing)
    q = log_q.exp()
    if rows.law is None or head is None:
        slopes = _add_hard(q * mix.hard, labels, mix.hard) if with_slopes else None
        return slopes, torch.stack([hard, nothing, nothing, nothing, nothing, hit], 1)
    log_p = _target_log_law(rows.law, head, part)
    p = log_p.exp()
    soft = -(p * log_q).sum(-1)
    entropy = -(p * log_p).sum(-1)
    apart = q - p
    l1 = apart.abs().sum(-1)
    numbers = torch.stack([hard, soft, soft - entropy, l1, 1 - l1 / 2, hit], 1)
    if not with_slopes:
        return None, numbers
    follow = mix.soft + mix.kl
    slopes = q * (mix.hard + follow) - p * follow if follow else q * mix.hard
    if mix.l1:
        sign = apart.sign_()
        slopes += mix.l1 * q * (sign - (q * sign).sum(-1, keepdim=True))
    return _add_hard(slopes, labels, mix.hard), numbers


def _add_hard(slopes: Tensor, labels: Tensor, weight: float) -> Tensor:
    """Takes the hard loss's weight off at the labels."""
    if weight:
        slopes[torch.arange(len(labels), device=labels.device), labels.clamp(min=0)] -= weight
    return slopes


def _target_log_law(law: TargetLaw, head: Tensor, part: slice) -> Tensor:
    """[c, Vd] log p; a state that several rows share goes through the head once."""
    once, back = torch.unique(law.index[part], return_inverse=True)
    log_p = F.linear(law.states[once].to(head.dtype), head).float().log_softmax(-1)
    return log_p if len(once) == len(back) and bool((back[1:] > back[:-1]).all()) else log_p[back]


def _mixed(numbers: Tensor, mix: Mix) -> Tensor:
    """[c] mixed losses."""
    total = torch.zeros_like(numbers[:, 0])
    for column, weight in ((HARD, mix.hard), (SOFT, mix.soft), (KL, mix.kl), (L1, mix.l1)):
        if weight:
            total = total + weight * numbers[:, column]
    return total


def _gather(
    gradients: Sequence[Tensor | None],
    slopes: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    part: slice,
) -> None:
    """Adds a chunk's share to the gradients of x_1, W_1, x_2, W_2, ..."""
    for at, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
        by_x, by_weight = gradients[2 * at], gradients[2 * at + 1]
        if by_x is not None:
            by_x[part] = slopes @ weight
        if by_weight is not None:
            by_weight += slopes.T @ x


def smooth_l1(states: Tensor, wanted: Tensor) -> Tensor:
    """[n] smooth L1 (its bend at 1) of states [n, H], averaged over H, in float32."""
    return F.smooth_l1_loss(states.float(), wanted.float(), reduction="none").mean(-1)


def chance_loss(logits: Tensor, chances: Tensor) -> Tensor:
    """[n] binary cross-entropy of logits [n] and chances [n] between 0 and 1, in float32."""
    return F.binary_cross_entropy_with_logits(logits.float(), chances.float(), reduction="none")
