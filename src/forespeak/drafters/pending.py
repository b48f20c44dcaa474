"""PendingNodes: the tree nodes of one row that went through a drafter's cache in this round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class PendingNodes:
    """Builder's numbers of the pending tokens of a cache row, and who hangs from whom.

    ``numbers[i]`` is the builder's number of pending token i and ``parents[i]`` the pending index
    of the nearest ancestor that is pending here, -1 when only committed text comes before it.
    """

    numbers: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, numbers: Sequence[int], parents: Sequence[int]) -> Tensor | None:
        """Append nodes; what they see.

        Args:
            numbers: the builder's.
            parents: the number of the nearest ancestor of each that goes through this cache; any
                other number means committed text.

        Returns:
            [n, m] bool of n new and m pending tokens, None when that is plain causal.
        """
        first = len(self.numbers)
        for number, parent in zip(numbers, parents, strict=True):
            at = self.numbers.index(parent) if parent in self.numbers else -1
            self.numbers.append(number)
            self.parents.append(at)
        return ancestor_mask(self.parents, first)

    def clear(self) -> None:
        """Forget all nodes."""
        self.numbers, self.parents = [], []


def ancestor_mask(parents: Sequence[int], first: int) -> Tensor | None:
    """What the pending tokens from ``first`` on see, [n, m] bool; None when it is plain causal."""
    if all(parent == index - 1 for index, parent in enumerate(parents)):
        return None
    mask = torch.zeros((len(parents) - first, len(parents)), dtype=torch.bool)
    for index in range(first, len(parents)):
        at = index
        while at >= 0:
            mask[index - first, at] = True
            at = parents[at]
    return mask
