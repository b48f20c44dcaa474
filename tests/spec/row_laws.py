"""Rows of random draft laws behind the seam that builders use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.spec.tree import CandidateTree
from forespeak.types import DenseLaws, Frontier

Path = tuple[int, ...]


class Rows:
    """R rows of random laws that depend on the row's root and the whole path; counts its calls."""

    def __init__(self, roots: Sequence[int], vocab_size: int, *, seed: int = 0) -> None:
        self.roots, self.vocab_size, self.seed = list(roots), vocab_size, seed
        self.rows = [10 * at for at in range(len(roots))]
        self.calls = 0
        self._paths: dict[tuple[int, int], Path] = {
            (row, 0): (root,) for row, root in zip(self.rows, roots, strict=True)
        }

    def logits(self, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
        return torch.randn(self.vocab_size, generator=generator) * 2

    def laws(self) -> DenseLaws:
        return DenseLaws(torch.stack([self.logits((root,)) for root in self.roots])[:, None])

    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        self.calls += 1
        found = []
        for frontier in frontiers:
            assert len(set(frontier.nodes)) == len(frontier.nodes) and 0 not in frontier.nodes
            for number, token, parent in zip(
                frontier.nodes, frontier.tokens, frontier.parents, strict=True
            ):
                assert parent < number and (frontier.row, number) not in self._paths
                path = (*self._paths[frontier.row, parent], token)
                self._paths[frontier.row, number] = path
                found.append(self.logits(path))
        return DenseLaws(torch.stack(found)[:, None])


def paths_of(tree: CandidateTree) -> list[Path]:
    """Token paths of the draft nodes, root left out."""
    return [tuple(tree.tokens[at] for at in tree.path_to(node)[1:]) for node in range(1, len(tree))]


def score_of(rows: Rows, root: int, path: Path) -> float:
    total = 0.0
    for depth, token in enumerate(path):
        total += float(rows.logits((root, *path[:depth])).log_softmax(-1)[token])
    return total
