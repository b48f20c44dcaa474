"""Which guesses of a batch count: starts, and the depths below them.

A round that begins when t is the newest token in the target's cache has the root x_{t+1}; its draft
token of depth k (from 0) is x_{t+k+2}, and the target's law for it follows from the state at
t + k + 1::

    x_0 ... x_t | x_{t+1} | x_{t+2}   x_{t+3} ...
    seen          root      depth 0   depth 1

A guess counts when it and everything from the root on is answer: a round begins in an answer and
ends with it. B texts, S tokens, n rows (guesses), N starts, D depths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.train.objective import Batch

_RUN = 32  # neighbouring starts that are sampled together: they share states of the target


@dataclass(frozen=True)
class Guesses:
    """n guesses below N starts, start by start.

    Attributes:
        texts, places: [N] int64, the text and the token t of each start; rising.
        start: [n] int64, the start of each guess; rising.
        depth: [n] int64, from 0.
        num_tokens: S.
        num_depths: D.
    """

    texts: Tensor
    places: Tensor
    start: Tensor
    depth: Tensor
    num_tokens: int
    num_depths: int

    @property
    def law_index(self) -> Tensor:
        """[n] place of the target's state in [B * S]."""
        return self.flat_starts[self.start] + self.depth + 1

    @property
    def flat_starts(self) -> Tensor:
        """[N] place of each start in [B * S]."""
        return self.texts * self.num_tokens + self.places

    def labels(self, tokens: Tensor) -> Tensor:
        """[n] the true token of each guess, of tokens [B, S]."""
        return tokens.flatten()[self.law_index + 1]

    def first_depth(self) -> Guesses:
        """Those at depth 0 alone, one a start."""
        start = torch.arange(len(self.texts), device=self.texts.device)
        return replace(self, start=start, depth=torch.zeros_like(start), num_depths=1)

    def padded(self, num_texts: int) -> tuple[Tensor, Tensor]:
        """Starts text by text.

        Returns:
            Their places [B, most of a text], 0 where there are fewer; and for each of the N starts
            its place [N] in those, flattened.
        """
        counts = torch.bincount(self.texts, minlength=num_texts)
        most = max(1, int(counts.max()))
        before = (counts.cumsum(0) - counts)[self.texts]
        slots = self.texts * most + torch.arange(len(self.texts), device=counts.device) - before
        starts = torch.zeros(num_texts * most, dtype=torch.long, device=counts.device)
        starts[slots] = self.places
        return starts.view(num_texts, most), slots

    def acceptance_length(self, chances: Tensor) -> float:
        """Expected tokens of a round, bonus included.

        Args:
            chances: [n] that each draft token is accepted, given those before it.
        """
        if not len(self.places):
            return 1.0
        table = torch.zeros(len(self.places), self.num_depths, device=chances.device)
        table[self.start, self.depth] = chances.float()
        return 1.0 + float(table.cumprod(1).sum(1).mean())


def ahead(values: Tensor, steps: int) -> Tensor:
    """[B, S, ...] values of the token so many places on, zeros past the end."""
    if not steps:
        return values
    pad = [0, 0] * (values.ndim - 2) + [0, steps]
    return F.pad(values[:, steps:], pad)


def find_guesses(
    batch: Batch,
    num_depths: int,
    *,
    max_positions: int | None = None,
    generator: torch.Generator | None = None,
    whole_runs: bool = True,
) -> Guesses:
    """All guesses that count, or those below some starts.

    Args:
        batch: the texts.
        num_depths: D.
        max_positions: about how many starts to draw; None takes all.
        generator: draws them, in runs of neighbours.
        whole_runs: False takes every guess whose own token is answer, as many trainers do, also
            those that no round will ever make.
    """
    counts = torch.stack([ahead(batch.supervised, k + 2) for k in range(num_depths)], -1)
    if whole_runs:
        counts = counts & ahead(batch.supervised, 1)[..., None]
        counts = counts.long().cumprod(-1).bool()  # [B, S, D]
    texts, places = counts.any(-1).nonzero(as_tuple=True)
    if max_positions is not None and len(texts) > max_positions:
        chosen = _drawn_runs(len(texts), max_positions, generator).to(texts.device)
        texts, places = texts[chosen], places[chosen]
    start, depth = counts[texts, places].nonzero(as_tuple=True)
    return Guesses(texts, places, start, depth, batch.tokens.shape[1], num_depths)


def _drawn_runs(count: int, wanted: int, generator: torch.Generator | None) -> Tensor:
    """About ``wanted`` of so many starts, in runs."""
    length = min(_RUN, wanted)
    num_runs = -(-count // length)
    order = torch.randperm(num_runs, generator=generator)[: max(1, wanted // length)]
    places = (order.sort().values[:, None] * length + torch.arange(length)).flatten()
    return places[places < count]


class DraftVocabulary:
    """Target ids as draft ids.

    Args:
        token_ids: [Vd] rising target ids, None when it is the whole vocabulary.
        vocab_size: V.
    """

    def __init__(self, token_ids: Tensor | None, vocab_size: int, device: torch.device) -> None:
        self.token_ids = None if token_ids is None else token_ids.to(device)
        self._places: Tensor | None = None
        if self.token_ids is not None:
            self._places = torch.full((vocab_size,), -1, device=device)
            self._places[self.token_ids] = torch.arange(len(self.token_ids), device=device)

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids, -1 for a word outside."""
        return tokens if self._places is None else self._places[tokens]

    def rows_of(self, head: Tensor) -> Tensor:
        """[Vd, H] of a head [V, H]."""
        return head if self.token_ids is None else head[self.token_ids].contiguous()
