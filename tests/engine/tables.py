"""A target model that looks its laws up in a table: nothing to compute, every slip shows.

The row of the table is a running hash of the whole text, so a token that is left out, doubled or
seen in the wrong place gives another law. Its cache keeps the tokens themselves and checks what it
is asked to keep. Cut to its first layer it becomes a drafter that is right most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.models.base import Cache, TargetModel
from forespeak.types import Segment, TargetOutput
from tests.tiny import tiny_config

_NUM_LAWS = 4093  # prime, so that multiplying never forgets an early token


class TableCache(Cache):
    """The tokens of each row; those that wait keep the list of waiting ones that they see."""

    def __init__(self, num_rows: int) -> None:
        self.lengths = [0] * num_rows
        self.pending = [0] * num_rows
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]
        self.waiting: list[list[int]] = [[] for _ in range(num_rows)]
        self.seen: list[list[list[int]]] = [[] for _ in range(num_rows)]

    def append(self, segment: Segment, tokens: Sequence[int], positions: Sequence[int]) -> None:
        row, start = segment.row, self.pending[segment.row]
        for at, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            own = start + at
            if segment.mask is None:
                seen = list(range(own + 1))
            else:
                assert segment.mask.shape == (len(tokens), start + len(tokens))
                seen = segment.mask[at].nonzero()[:, 0].tolist()
            assert seen[-1] == own, "a token sees itself and nothing after it"
            assert position == self.lengths[row] + len(seen) - 1, (position, seen)
            self.waiting[row].append(token)
            self.seen[row].append(seen)
        self.pending[row] += len(tokens)

    def text(self, row: int, at: int) -> list[int]:
        """Everything that a waiting token sees, itself included."""
        return self.texts[row] + [self.waiting[row][index] for index in self.seen[row][at]]

    def commit(self, row: int, kept: Sequence[int]) -> None:
        kept = list(kept)
        assert not kept or self.seen[row][kept[-1]] == kept, "only a whole path can be kept"
        self.texts[row] += [self.waiting[row][index] for index in kept]
        self.truncate(row, len(self.texts[row]))

    def settle(self, row: int, count: int) -> None:
        assert not count or self.seen[row][count - 1] == list(range(count))
        self.texts[row] += self.waiting[row][:count]
        del self.waiting[row][:count]
        left = self.seen[row][count:]
        assert all(seen[:count] == list(range(count)) for seen in left)
        self.seen[row] = [[index - count for index in seen[count:]] for seen in left]
        super().settle(row, count)

    def truncate(self, row: int, length: int) -> None:
        del self.texts[row][length:]
        self.waiting[row], self.seen[row] = [], []
        self.lengths[row], self.pending[row] = len(self.texts[row]), 0

    def release(self, row: int) -> None:
        self.truncate(row, 0)


class TableModel(TargetModel):
    """Random logits for each text.

    Args:
        vocab_size: V.
        seed: of the table.
        spread: standard deviation of the logits.
        likeness: of the model of the first layer: 1 agrees always, 0 by chance alone.
        eos_ids: end-of-sequence.
        context_length: tokens a text may have.
        favourites: tokens that are likely everywhere, so that texts repeat themselves.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 0,
        spread: float = 1.5,
        likeness: float = 0.7,
        eos_ids: tuple[int, ...] = (),
        context_length: int = 512,
        favourites: Sequence[int] = (),
    ) -> None:
        self.config = tiny_config(
            vocab_size=vocab_size, eos_token_ids=eos_ids, max_position_embeddings=context_length
        )
        self.device, self.dtype_name = torch.device("cpu"), "float32"
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(_NUM_LAWS, vocab_size, generator=generator) * spread
        self.table[:, list(favourites)] += 2 * spread
        self._noise = torch.randn(_NUM_LAWS, vocab_size, generator=generator) * spread
        self._likeness = likeness
        self.num_forwards = 0

    def law_row(self, text: Sequence[int]) -> Tensor:
        """Logits [V] of the token after a text."""
        place = 7
        for token in text:
            place = (place * 31 + token + 1) % _NUM_LAWS
        return self.table[place]

    def new_cache(self, num_rows: int, capacity: int) -> TableCache:
        return TableCache(num_rows)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        segments: Sequence[Segment],
        *,
        logits_at: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        assert isinstance(cache, TableCache)
        self.num_forwards += 1
        ids, places = tokens.tolist(), positions.tolist()
        found: list[tuple[int, int]] = []
        at = 0
        for segment in segments:
            end = at + segment.num_tokens
            start = cache.pending[segment.row]
            cache.append(segment, ids[at:end], places[at:end])
            found += [(segment.row, start + index) for index in range(segment.num_tokens)]
            at = end
        asked = range(len(ids)) if logits_at is None else logits_at.tolist()
        rows = [self.law_row(cache.text(*found[index])) for index in asked]
        logits = torch.stack(rows) if rows else torch.empty((0, self.config.vocab_size))
        return TargetOutput(logits, torch.zeros(len(ids), 1))

    def truncated(self, num_layers: int) -> TargetModel:
        cut = TableModel(self.config.vocab_size, eos_ids=self.config.eos_token_ids)
        cut.table = self._likeness * self.table + (1 - self._likeness) * self._noise
        return cut

    def embed(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def norm(self, states: Tensor) -> Tensor:
        raise AssertionError("no drafter here shares the norm")

    def head_rows(self, tokens: Tensor) -> Tensor:
        raise AssertionError("no drafter here shares the head")

    def head(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError
