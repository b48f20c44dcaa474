"""Log-probabilities of written tokens, computed only for texts that ask for them.

As OpenAI's API means them they come from the model's own logits, before any control; given the
output of ``LogitsPipeline.apply`` instead, they are those after the controls. A row of logits says
what follows its node, so the token that belongs to a node's row is the next one on the path, and
the bonus at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.types import TokenLogprob


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of written tokens.

    Args:
        logits: [n, V] the rows that each token was drawn from: for a round's kept tokens the rows
            of the path's nodes, ``logits[list(verdict.path)[:num_kept]]``.
        tokens: n ids.
        num_top: how many best tokens to report besides.

    Raises:
        OptionError: more best tokens than the vocabulary has.
    """
    num_rows, vocab_size = logits.shape
    assert num_rows == len(tokens), (num_rows, len(tokens))
    if num_top > vocab_size:
        raise OptionError(
            f"logprobs is {num_top}; allowed: 0 to {vocab_size}, the size of the vocabulary. Ask "
            "for fewer."
        )
    if logits.element_size() < 4:
        logits = logits.float()
    log_p = logits.log_softmax(-1)  # [n, V]
    chosen = log_p[torch.arange(num_rows), torch.tensor(tokens, dtype=torch.long)].tolist()
    tops = _best(log_p, num_top)
    return [
        TokenLogprob(token, logprob, top)
        for token, logprob, top in zip(tokens, chosen, tops, strict=True)
    ]


def _best(log_p: Tensor, num_top: int) -> list[tuple[tuple[int, float], ...]]:
    if num_top == 0:
        return [()] * len(log_p)
    limits = log_p.topk(num_top).values[:, -1:]  # [n, 1]
    tops = []
    for row, is_candidate in zip(log_p, log_p >= limits, strict=True):
        ids = is_candidate.nonzero()[:, 0]  # topk promises no order among equals: all of them
        values = row[ids]
        order = values.argsort(descending=True, stable=True)[:num_top]
        pairs = zip(ids[order].tolist(), values[order].tolist(), strict=True)
        tops.append(tuple((i, value) for i, value in pairs if value > -torch.inf))
    return tops
