"""What a text already holds, as the penalties need it, kept up to date token by token.

Penalties touch only tokens that have been seen, so the sums live in one column list (ids and how
often each was written) and never become an N x V matrix. Meanings, as in vLLM:

- repetition: tokens of prompt and output; a positive logit is divided by the penalty, any other
  multiplied;
- frequency: times the count in the output, presence: once, if in the output at all; both
  subtracted (OpenAI).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from forespeak.sampling import SamplingParams


class PenaltyCounts:
    """Counts of one text and the penalties that follow from them."""

    def __init__(self, controls: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._repetition = controls.repetition_penalty
        self._presence = controls.presence_penalty
        self._frequency = controls.frequency_penalty
        self._column_of: dict[int, int] = {}
        self._ids = torch.empty(64, dtype=torch.long)  # [C] capacity, the first len used
        self._counts = torch.zeros(64, dtype=torch.float64)  # [C] times in the output
        self.is_active = bool(self._repetition != 1 or self._presence or self._frequency)
        if self._repetition != 1:  # the only penalty that looks at the prompt
            for token in prompt_ids:
                self._column(token)

    def advance(self, tokens: Iterable[int]) -> None:
        """Count tokens that are now part of the output."""
        if self.is_active:
            for token in tokens:
                column = self._column(token)  # first: it may replace the buffers
                self._counts[column] += 1

    def _column(self, token: int) -> int:
        column = self._column_of.setdefault(token, len(self._column_of))
        if column == len(self._ids):
            self._ids = torch.cat([self._ids, torch.empty_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ids[column] = token
        return column

    def apply_(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Change logits [N, V] in place; row i counts the text so far and ``paths[i]``."""
        if not self.is_active:
            return
        rows, tokens, counts = self._path_cells(paths)
        own = self._penalised(logits[rows, tokens], counts) if len(rows) else None  # [E]
        num_seen = len(self._column_of)
        if num_seen:
            ids = self._ids[:num_seen].to(logits.device)
            shared = logits.index_select(1, ids)  # [N, C]
            logits.index_copy_(1, ids, self._penalised(shared, self._counts[:num_seen]))
        if own is not None:
            logits[rows, tokens] = own

    def _path_cells(self, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """The cells whose count differs from the shared one: rows, tokens, counts, each [E]."""
        rows: list[int] = []
        tokens: list[int] = []
        added: list[int] = []
        columns: list[int] = []
        for row, path in enumerate(paths):
            for token, times in Counter(path).items():
                rows.append(row)
                tokens.append(token)
                added.append(times)
                columns.append(self._column_of.get(token, -1))
        counts = torch.tensor(added, dtype=torch.float64)
        column = torch.tensor(columns, dtype=torch.long)
        counts += torch.where(column >= 0, self._counts[column.clamp_min(0)], 0.0)
        return torch.tensor(rows), torch.tensor(tokens), counts

    def _penalised(self, logits: Tensor, counts: Tensor) -> Tensor:
        """New values of seen tokens' logits [..., C] with their counts in the output [C]."""
        if self._repetition != 1:
            r = self._repetition
            logits = torch.where(logits > 0, logits / r, logits * r)
        subtract = self._frequency * counts + self._presence * (counts > 0).to(counts)
        return logits - subtract.to(logits)
