"""Drives a target over several cache rows and knows what every pending token's path is.

What a test then compares with is simple: the plain forward of a path, alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forespeak.models.base import TargetModel
from forespeak.models.kv_cache import KVCache
from forespeak.types import Segment, TargetOutput

Node = tuple[int, int]
"""(token, parent), the parent as an index into the row's pending tokens, -1 for none."""


def chain(tokens: Sequence[int], after: int = -1) -> list[Node]:
    """Nodes of a chain whose first parent is ``after``; the others follow each other."""
    return [(token, after + i) for i, token in enumerate(tokens)]


@dataclass
class Row:
    """What a cache row should hold."""

    text: list[int] = field(default_factory=list)
    pending: list[Node] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """Pending indices from the first ancestor to the node itself."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.pending[node][1]
        return nodes[::-1]

    def tokens_to(self, node: int) -> list[int]:
        """The whole text that the node ends."""
        return self.text + [self.pending[i][0] for i in self.path(node)]

    def leaves(self) -> list[int]:
        parents = {parent for _, parent in self.pending}
        return [i for i in range(len(self.pending)) if i not in parents]


class Driver:
    """A model and a cache of several rows."""

    def __init__(self, model: TargetModel, num_rows: int = 1, capacity: int = 64) -> None:
        self.model = model
        cache = model.new_cache(num_rows, capacity)
        assert isinstance(cache, KVCache)
        self.cache = cache
        self.rows = [Row() for _ in range(num_rows)]

    def _segment(self, row: int, num_new: int) -> Segment:
        """A mask from ancestry, or none where that says the same (a chain)."""
        state = self.rows[row]
        total = len(state.pending)
        if all(parent == i - 1 for i, (_, parent) in enumerate(state.pending)):
            return Segment(row, num_new)
        mask = torch.zeros((num_new, total), dtype=torch.bool)
        for i in range(num_new):
            mask[i, state.path(total - num_new + i)] = True
        return Segment(row, num_new, mask.to(self.model.device))

    def forward(
        self, new: Mapping[int, Sequence[Node]], taps: Sequence[int] = ()
    ) -> dict[int, TargetOutput]:
        """One forward over new nodes of some rows; for each row its part of what came out."""
        tokens: list[int] = []
        positions: list[int] = []
        segments = []
        for row, nodes in new.items():
            state = self.rows[row]
            for node in nodes:
                state.pending.append(node)
                tokens.append(node[0])
                depth = len(state.path(len(state.pending) - 1))
                positions.append(len(state.text) + depth - 1)
            segments.append(self._segment(row, len(nodes)))
        out = self.model.forward(
            torch.tensor(tokens, device=self.model.device),
            torch.tensor(positions, device=self.model.device),
            self.cache,
            segments,
            taps=taps,
        )
        return _split(out, {row: len(nodes) for row, nodes in new.items()})

    def commit(self, row: int, node: int) -> None:
        """Keep the path to a pending node."""
        state = self.rows[row]
        kept = state.path(node)
        state.text = state.tokens_to(node)
        state.pending = []
        self.cache.commit(row, kept)

    def settle(self, row: int, count: int) -> None:
        """Commit the first pending tokens (a chain) and leave the others."""
        state = self.rows[row]
        assert all(parent == i - 1 for i, (_, parent) in enumerate(state.pending[:count]))
        state.text += [token for token, _ in state.pending[:count]]
        state.pending = [
            (token, max(parent - count, -1)) for token, parent in state.pending[count:]
        ]
        self.cache.settle(row, count)

    def truncate(self, row: int, length: int) -> None:
        self.rows[row] = Row(self.rows[row].text[:length])
        self.cache.truncate(row, length)

    def release(self, row: int) -> None:
        self.rows[row] = Row()
        self.cache.release(row)

    def prefill(self, row: int, tokens: Sequence[int], chunk: int | None = None) -> TargetOutput:
        """Commits tokens, in chunks; what came out for all of them."""
        size = chunk or len(tokens)
        parts = []
        for at in range(0, len(tokens), size):
            part = tokens[at : at + size]
            parts.append(self.forward({row: chain(part)})[row])
            self.commit(row, len(part) - 1)
        return TargetOutput(
            torch.cat([p.logits for p in parts]), torch.cat([p.hidden for p in parts])
        )


def _split(out: TargetOutput, sizes: Mapping[int, int]) -> dict[int, TargetOutput]:
    parts: dict[int, TargetOutput] = {}
    at = 0
    for row, size in sizes.items():
        part = slice(at, at + size)
        taps: Tensor | None = None if out.taps is None else out.taps[part]
        parts[row] = TargetOutput(out.logits[part], out.hidden[part], taps)
        at += size
    assert at == len(out.hidden) == len(out.logits)
    return parts


def random_tree(
    count: int, seed: int, *, vocab_size: int = 83, first_parent: int = -1, spread: int = 100
) -> list[Node]:
    """Nodes with random parents among the ``spread`` nodes before; all below one root."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    start = first_parent + 1
    nodes = [(draw(0, vocab_size), first_parent)]
    for i in range(start + 1, start + count):
        nodes.append((draw(0, vocab_size), draw(max(start, i - spread), i)))
    return nodes
