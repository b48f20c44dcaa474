"""Rounds of an engine without a target: random drafts, random acceptance, what must follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forespeak.drafters.base import Drafter
from forespeak.types import DenseLaws, Frontier, Observation

Path = tuple[int, ...]


def observation(tokens: Sequence[int], row: int = 0) -> Observation:
    return Observation(row, tuple(tokens), torch.zeros(len(tokens), 1))


@dataclass
class Row:
    """One text under way and this round's nodes: number 0 is the root."""

    text: list[int]
    root: int
    paths: dict[int, Path] = field(default_factory=dict)

    def after(self, number: int) -> list[int]:
        """Everything that the law below a node must have seen."""
        return [*self.text, self.root, *self.paths[number]]


class Rounds:
    """Drives a drafter that goes step by step. ``laws`` collects (text, law) pairs to check.

    Args:
        drafter: with its rows admitted.
        prompts: for each row.
        vocab_size: tokens are drawn below it.
    """

    def __init__(
        self, drafter: Drafter, prompts: dict[int, list[int]], rng: random.Random, vocab_size: int
    ) -> None:
        self.drafter, self.rng, self._size = drafter, rng, vocab_size
        self.rows = {row: Row(list(text), self._token()) for row, text in prompts.items()}
        self.laws: list[tuple[list[int], Tensor]] = []
        for row, text in prompts.items():
            drafter.observe([observation(text, row)])

    def propose(self) -> None:
        numbers = list(self.rows)
        roots = [self.rows[n].root for n in numbers]
        laws = self.drafter.propose(numbers, roots, 4)
        assert isinstance(laws, DenseLaws)
        assert laws.logits.shape[:2] == (len(numbers), 1)
        for number, law in zip(numbers, laws.logits[:, 0], strict=True):
            self.rows[number].paths = {0: ()}
            self.laws.append((self.rows[number].after(0), law))

    def expand(self, width: int, *, chain: bool = False) -> None:
        """Some new nodes below random ones (or below the newest), in one call for all rows."""
        frontiers = []
        asked: list[tuple[Row, int]] = []
        for number, row in self.rows.items():
            known = list(row.paths)
            made = []
            for _ in range(1 if chain else self.rng.randint(1, width)):
                parent = known[-1] if chain else self.rng.choice(known)
                node, token = max(row.paths) + self.rng.randint(1, 3), self._token()
                row.paths[node] = (*row.paths[parent], token)
                made.append((node, token, parent))
                asked.append((row, node))
            frontiers.append(Frontier(number, *map(tuple, zip(*made, strict=True))))
        laws = self.drafter.expand(frontiers).logits
        assert laws.shape[:2] == (len(asked), 1)
        self.laws += [(row.after(n), law) for (row, n), law in zip(asked, laws[:, 0], strict=True)]

    def accept(self, number: int, path: Path) -> None:
        """The verdict for one row: root and path go into its text, a new root follows."""
        row = self.rows[number]
        tokens = [row.root, *path]
        row.text += tokens
        row.root = self._token()
        self.drafter.observe([observation(tokens, number)])

    def accept_at_random(self) -> None:
        """Nothing, a drafted path, or a drafted path and tokens that this drafter never saw."""
        for number, row in self.rows.items():
            path = self.rng.choice([(), *row.paths.values()])
            extra = [self._token() for _ in range(self.rng.choice([0, 0, 1, 3]))]
            self.accept(number, (*path, *extra))

    def deepest(self, number: int) -> Path:
        return max(self.rows[number].paths.values(), key=len)

    def _token(self) -> int:
        return self.rng.randrange(self._size)
