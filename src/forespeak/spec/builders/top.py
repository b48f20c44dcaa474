"""Best tokens of draft laws and their log-probabilities.

F laws, V vocabulary, K tokens of each. On CPU a compiled loop reads the logits once; elsewhere, and
wherever ``compiled=False`` asks for it, plain torch gives the same tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def top_log_probs(logits: Tensor, top_k: int, *, compiled: bool = True) -> tuple[Tensor, Tensor]:
    """The K best tokens of each law, best first, of equal logits the lower id first.

    Args:
        logits: [F, V]; read as float32.
        top_k: K, at most V of them are returned.
        compiled: False takes the plain torch form.

    Returns:
        token indices [F, K] int64 and their log-probabilities under the full law [F, K] float32.
    """
    top_k = min(top_k, logits.shape[-1])
    logits = logits.detach().float()
    if compiled and logits.device.type == "cpu":
        values, tokens, log_sums = scan(logits.contiguous().numpy(), top_k)
        log_probs = values - log_sums[:, None].astype(np.float32)
        return torch.from_numpy(tokens), torch.from_numpy(log_probs)
    best, indices = _plain_top(logits, top_k)
    return indices, best - logits.logsumexp(-1, keepdim=True)


def _plain_top(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """torch.topk leaves the order of equal values open: settle it, and where the cut falls among
    equal values take the lower ids, by a full stable sort."""
    values, indices = logits.topk(top_k)
    if bool(((logits >= values[:, -1:]).sum(-1) > top_k).any()):
        values, indices = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :top_k], indices[:, :top_k]
    indices = indices.sort(-1).values
    values, order = logits.gather(1, indices).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(1, order)


def scan(
    logits: NDArray[np.float32], top_k: int, *, log_sums: bool = True
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
    """Best K logits, their indices and the log-sum-exp of each row: [F, K], [F, K], [F].

    On one thread: it takes as long as waking a second one, whose core is often still held by
    torch's own threads, which spin for a while after the draft's forward.

    Args:
        log_sums: False leaves the sums out, half of the work; then the last result is empty.
    """
    from forespeak.spec.builders.scan_kernel import scan_rows  # numba loads on first use

    num_rows = logits.shape[0]
    values = np.empty((num_rows, top_k), np.float32)
    tokens = np.empty((num_rows, top_k), np.int64)
    sums = np.empty(num_rows if log_sums else 0, np.float64)
    scan_rows(logits, values, tokens, sums)
    return values, tokens, sums
