"""The losses of ``losses.py`` written out: slow, whole, and differentiated by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.train.losses import Mix, Product, Rows


def law_loss(products: Sequence[Product], rows: Rows, mix: Mix) -> tuple[Tensor, Tensor]:
    """As ``losses.law_loss``, for a batch whose logits fit into memory at once."""
    logits = torch.stack([x @ weight.T for x, weight in products]).sum(0)
    q = torch.softmax(logits, -1)  # [n, Vd]
    losses = []
    for row, label in enumerate(rows.labels.tolist()):
        nan = q.new_tensor(float("nan"))
        hard = -torch.log(q[row, label]) if label >= 0 else nan
        soft = kl = l1 = overlap = nan
        if rows.law is not None:
            p = torch.softmax(rows.law.head @ rows.law.states[rows.law.index[row]], -1)
            soft = -(p * torch.log(q[row])).sum()
            kl = (p * torch.log(p / q[row])).sum()
            l1 = (p - q[row]).abs().sum()
            overlap = torch.minimum(p, q[row]).sum()
        hit = (q[row].argmax() == label).to(q)
        losses.append(torch.stack([hard, soft, kl, l1, overlap, hit]))
    numbers = torch.stack(losses) if losses else q.new_empty(0, 6)
    total = q.new_zeros(())
    for row, weight in enumerate(rows.weights.tolist()):
        for column, share in enumerate((mix.hard, mix.soft, mix.kl, mix.l1)):
            if share and weight:
                total = total + weight * share * numbers[row, column]
    return total, numbers.detach()


def smooth_l1(states: Tensor, wanted: Tensor) -> Tensor:
    """As ``losses.smooth_l1``."""
    apart = (states - wanted).abs()
    return torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean(-1)


def chance_loss(logits: Tensor, chances: Tensor) -> Tensor:
    """As ``losses.chance_loss``."""
    chance = torch.sigmoid(logits)
    return -(chances * torch.log(chance) + (1 - chances) * torch.log(1 - chance))
