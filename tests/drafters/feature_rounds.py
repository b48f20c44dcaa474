"""Rounds of an engine for drafters that read the target's features: random trees, random verdicts.

The features of a token follow from the token and its position, so that anyone can compute them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forespeak.drafters.base import Drafter
from forespeak.types import DenseLaws, Frontier, Observation

Path = tuple[int, ...]
Observe = Callable[[int, Sequence[int], int], Observation]
"""(row, tokens, position of the first) -> what the target would report of them."""


@dataclass(frozen=True)
class Law:
    """A law that a drafter gave: below ``path``, after ``text`` (root included)."""

    text: tuple[int, ...]
    path: Path
    logits: Tensor


@dataclass
class Row:
    """One text under way and this round's nodes: number 0 is the root."""

    text: list[int]
    root: int
    paths: dict[int, Path] = field(default_factory=dict)


class FeatureRounds:
    """Drives a drafter; ``laws`` collects what it says.

    Args:
        drafter: with its rows admitted.
        observe: makes observations.
        rng: of everything that is left to chance.
        vocab_size: tokens are drawn below it.
        chunk: tokens of a prompt that are observed at a time; None observes it at once.
    """

    def __init__(
        self,
        drafter: Drafter,
        observe: Observe,
        rng: random.Random,
        vocab_size: int,
        chunk: int | None = None,
    ) -> None:
        self.drafter, self.rng = drafter, rng
        self._observe, self._size, self._chunk = observe, vocab_size, chunk
        self.rows: dict[int, Row] = {}
        self.laws: list[Law] = []

    def start(self, number: int, length: int) -> None:
        """Admit a row with a random prompt."""
        self.drafter.admit(number)
        self.rows[number] = Row([], self._token())
        text = [self._token() for _ in range(length)]
        step = self._chunk or length
        for at in range(0, length, step):
            self._append(number, text[at : at + step])

    def stop(self, number: int) -> None:
        self.drafter.release(number)
        del self.rows[number]

    def round(self, depth: int, width: int) -> None:
        """Draft trees for all rows and accept some path of each, or another token at once."""
        self._propose()
        for level in range(1, depth + 1):
            self._expand(level, width)
        self._accept()

    def _propose(self) -> None:
        numbers = list(self.rows)
        laws = self.drafter.propose(numbers, [self.rows[n].root for n in numbers], 4)
        assert isinstance(laws, DenseLaws) and laws.logits.shape[:2] == (len(numbers), 1)
        for number, logits in zip(numbers, laws.logits[:, 0], strict=True):
            row = self.rows[number]
            row.paths = {0: ()}
            self.laws.append(Law((*row.text, row.root), (), logits))

    def _expand(self, level: int, width: int) -> None:
        frontiers, asked = [], []
        for number, row in self.rows.items():
            above = [node for node, path in row.paths.items() if len(path) == level - 1]
            made = []
            for _ in range(self.rng.randint(1, width)):
                parent = self.rng.choice(above)
                node, token = max(row.paths) + self.rng.randint(1, 3), self._token()
                row.paths[node] = (*row.paths[parent], token)
                made.append((node, token, parent))
                asked.append((row, row.paths[node]))
            frontiers.append(Frontier(number, *map(tuple, zip(*made, strict=True))))
        laws = self.drafter.expand(frontiers).logits
        assert laws.shape[:2] == (len(asked), 1)
        for (row, path), logits in zip(asked, laws[:, 0], strict=True):
            self.laws.append(Law((*row.text, row.root), path, logits))

    def _accept(self) -> None:
        for number, row in self.rows.items():
            path = self.rng.choice(list(row.paths.values()))
            self._append(number, [row.root, *path])
            row.root = self._token()

    def _append(self, number: int, tokens: Sequence[int]) -> None:
        row = self.rows[number]
        self.drafter.observe([self._observe(number, tokens, len(row.text))])
        row.text += tokens

    def _token(self) -> int:
        return self.rng.randrange(self._size)
