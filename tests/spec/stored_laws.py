"""Stored tables of laws as targets and drafters of the enumeration."""

from __future__ import annotations

from torch import Tensor

from tests.spec.enumeration import RandomTarget
from tests.spec.golden_data import Case, rows


class Stored(RandomTarget):
    """Laws from stored tables: ``<name>0`` [V], ``<name>1`` [V, V] by the first token, ..."""

    def __init__(self, case: Case, name: str) -> None:
        self._tables: list[Tensor] = []
        while case.has(f"{name}{len(self._tables)}"):
            self._tables.append(case.tensors[f"{name}{len(self._tables)}"])
        super().__init__(self._tables[0].shape[0], 0)

    @property
    def depth(self) -> int:
        return len(self._tables)

    def logits(self, path: tuple[int, ...]) -> Tensor:
        law = self._tables[len(path)]
        for token in path:
            law = law[token]
        return law.log()


class OneLaw(RandomTarget):
    """The same law after every path."""

    def __init__(self, law: Tensor) -> None:
        super().__init__(law.shape[0], 0)
        self._only = law

    def logits(self, path: tuple[int, ...]) -> Tensor:
        return self._only.log()


def sequences(case: Case, name: str) -> dict[tuple[int, ...], float]:
    stored = rows(case.tensors[f"{name}.out_sequences"])
    weights = case.tensors[f"{name}.out_probs"].tolist()
    return {tuple(row): weight for row, weight in zip(stored, weights, strict=True) if weight > 0}


def repeated(law: Tensor, count: int = 2) -> Tensor:
    return law.expand(count, -1)
