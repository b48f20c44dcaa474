"""Bigram drafting: q(b | a) is how often b followed a in this text, each pair counted once more.

    q(b | a) = (count(a, b) + s) / (count(a) + s V)        logits are the logarithm of the numerator

A law depends on one token only, so the drafter needs no cache: a node's children follow from its
token. R rows, F nodes, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.types import DenseLaws, DrafterInfo, Frontier, Observation, SpeculationConfig
from forespeak_bigram import METHOD

_SMOOTHING = 0.01  # s: every token stays possible


class BigramDrafter(Drafter):
    """Drafts from the counts of each row's own text.

    Args:
        info: what it says of itself.
        vocab_size: V of the target.
    """

    def __init__(self, info: DrafterInfo, vocab_size: int) -> None:
        self.info = info
        self._size = vocab_size
        self._texts: dict[int, list[int]] = {}
        self._counts: dict[int, defaultdict[int, Counter[int]]] = {}

    def admit(self, row: int) -> None:
        self._texts[row], self._counts[row] = [], defaultdict(Counter)

    def release(self, row: int) -> None:
        self._texts.pop(row, None)
        self._counts.pop(row, None)

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            text, counts = self._texts[observation.row], self._counts[observation.row]
            for token in observation.tokens:
                if text:
                    counts[text[-1]][token] += 1
                text.append(token)

    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> DenseLaws:
        return self._laws(list(zip(rows, roots, strict=True)))

    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        return self._laws([(f.row, token) for f in frontiers for token in f.tokens])

    def _laws(self, places: Sequence[tuple[int, int]]) -> DenseLaws:
        """Laws below tokens of rows: [F, 1, V]."""
        return DenseLaws(torch.stack([self._law(*place) for place in places])[:, None])

    def _law(self, row: int, token: int) -> Tensor:
        numerators = torch.full((self._size,), _SMOOTHING)
        for following, count in self._counts[row][token].items():
            numerators[following] += count
        return numerators.log()


def open_drafter(config: SpeculationConfig, target: TargetParts, num_rows: int) -> BigramDrafter:
    """What the entry's ``opens`` names: the drafter of one method for one target."""
    return BigramDrafter(METHOD.info, target.model.config.vocab_size)
