"""LockstepDecoding: plain texts by the hundred, one token each a step, with all that decides on the
device.

``BatchDecoding`` reads every row's tokens after every step, in Python; on a GPU that costs far more
than the forward. Here a step is one forward and a few operations over all rows, and the host looks
every few steps which texts have ended. It knows neither drafts nor controls: temperature, seed,
length and ending tokens are all. Texts are those of ``BatchDecoding``, up to rounding.

R rows, M tokens of the longest answer, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from forespeak.engine.batch import BatchText
from forespeak.errors import OptionError
from forespeak.models.decoder import Decoder
from forespeak.models.dense_rows import DenseRows
from forespeak.sampling import SamplingParams

_PLAIN = SamplingParams()


def is_plain(params: SamplingParams) -> bool:
    """Whether lockstep can write a text with these parameters."""
    free = ("max_new_tokens", "temperature", "seed", "ignore_eos", "stop_token_ids")
    return replace(params, **{name: getattr(_PLAIN, name) for name in free}) == _PLAIN


class LockstepDecoding:
    """Texts in the rows of one cache; ``submit`` and ``run`` are those of ``BatchDecoding``, but
    that an entry's ``pieces`` and ``stats`` stay empty.

    Args:
        model: the target.
        num_rows: texts at a time.
        check_every: steps between two looks at what has ended.
    """

    def __init__(self, model: Decoder, *, num_rows: int, check_every: int = 8) -> None:
        assert num_rows >= 1 and check_every >= 1, (num_rows, check_every)
        self._model, self._check_every = model, check_every
        self._rows = DenseRows(model, num_rows)
        self._texts: list[BatchText | None] = [None] * num_rows
        self._waiting: deque[BatchText] = deque()
        self._longest = 0  # at least every row's length
        self._state = _State(num_rows, model.device)

    @property
    def num_unfinished(self) -> int:
        """Texts that run or wait."""
        return sum(text is not None for text in self._texts) + len(self._waiting)

    def submit(self, entry: BatchText) -> None:
        """Add a text; it starts when a row is free."""
        assert is_plain(entry.text.params), "lockstep has no controls"
        self._waiting.append(entry)

    def run(self, entries: Iterable[BatchText]) -> Iterator[BatchText]:
        """Write texts and yield each when it has ended; takes new ones as rows become free."""
        source = iter(entries)
        more = True
        while more or self.num_unfinished:
            free = self._texts.count(None)
            while more and len(self._waiting) < free:
                entry = next(source, None)
                if entry is None:
                    more = False
                else:
                    self.submit(entry)
            if self.num_unfinished:
                try:
                    self._admit()
                    ended = self._steps()
                except torch.OutOfMemoryError:
                    raise OptionError(
                        f"{len(self._texts)} texts at a time do not fit into the memory of "
                        f"{self._model.device}; take fewer with --rows."
                    ) from None
                yield from ended

    @torch.inference_mode()
    def _admit(self) -> None:
        begun = []
        for row, text in enumerate(self._texts):
            if text is None and self._waiting:
                self._texts[row] = self._waiting.popleft()
                begun.append(row)
        if not begun:
            return
        entries = [self._texts[row] for row in begun]
        given = [entry for entry in entries if entry is not None]
        ends = [len(e.prompt_ids) + e.text.params.max_new_tokens for e in given]
        self._rows.reserve(max(ends))
        # The last token of a prompt is the first that is stepped over.
        heads = [list(entry.prompt_ids[:-1]) for entry in given]
        self._rows.lengths[begun] = 0
        some = [at for at, head in enumerate(heads) if head]
        if some:
            self._rows.prefill([begun[at] for at in some], [heads[at] for at in some])
        self._longest = max(self._longest, *(len(head) for head in heads))
        self._state.begin(begun, given)

    @torch.inference_mode()
    def _steps(self) -> list[BatchText]:
        """Some steps, and the texts that they ended."""
        state, rows = self._state, self._rows
        for _ in range(self._check_every):
            hidden = rows.step(state.newest, self._longest)
            rows.lengths += state.live
            self._longest += 1
            state.take(self._model.head(hidden))
        ended = []
        live, counts = state.live.tolist(), state.counts.tolist()
        for row, entry in enumerate(self._texts):
            if entry is not None and not live[row]:
                entry.text.write(state.tokens[row, : counts[row]].tolist())
                self._texts[row] = None
                ended.append(entry)
        self._longest = int(rows.lengths[state.live].max()) if any(live) else 0
        rows.lengths[~state.live] = 0  # what an empty row computes lands in its first slot
        return ended


class _State:
    """What is known of every row, on the device.

    Attributes:
        newest: [R] the token that the next step runs.
        live: [R] bool, the row writes.
        counts: [R] tokens written.
        tokens: [R, M] what was written.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self.newest = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.live = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.counts = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.tokens = torch.zeros((num_rows, 0), dtype=torch.long, device=device)
        self._limits = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._temperatures = torch.zeros(num_rows, device=device)
        self._uniforms = torch.zeros((num_rows, 0), dtype=torch.float64, device=device)
        self._ends = torch.full((num_rows, 1), -1, device=device)  # ids that end a row's text
        self._sampled = torch.zeros(0, dtype=torch.long, device=device)  # rows that draw
        self._all = torch.arange(num_rows, device=device)

    def begin(self, rows: list[int], entries: list[BatchText]) -> None:
        """Take up new texts, whose prompts are in the cache but for their last token."""
        limits = [entry.text.params.max_new_tokens for entry in entries]
        self._widen(max(limits), max(len(entry.text.ending_ids) for entry in entries))
        width = self.tokens.shape[1]
        uniforms = torch.zeros((len(rows), width), dtype=torch.float64)
        ends = torch.full((len(rows), self._ends.shape[1]), -1)
        for at, entry in enumerate(entries):
            if entry.text.params.temperature > 0:
                drawn = entry.text.uniforms(limits[at])
                uniforms[at, : limits[at]] = torch.tensor(drawn, dtype=torch.float64)
            ids = sorted(entry.text.ending_ids)
            ends[at, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        self.newest[rows] = self._put([entry.prompt_ids[-1] for entry in entries])
        self.live[rows] = True
        self.counts[rows] = 0
        self._limits[rows] = self._put(limits)
        temperatures = [float(entry.text.params.temperature) for entry in entries]
        self._temperatures[rows] = torch.tensor(temperatures, device=self._device)
        self._uniforms[rows] = uniforms.to(self._device)
        self._ends[rows] = ends.to(self._device)
        self._sampled = (self._temperatures > 0).nonzero()[:, 0]

    def take(self, logits: Tensor) -> None:
        """The next token of every row. [R, V]"""
        chosen = logits.argmax(-1)
        if len(self._sampled):
            at = self._sampled
            drawn = self._uniforms[at, self.counts[at].clamp(max=self._uniforms.shape[1] - 1)]
            chosen[at] = _draw(logits[at] / self._temperatures[at, None], drawn)
        place = self.counts.clamp(max=self.tokens.shape[1] - 1)
        kept = torch.where(self.live, chosen, self.tokens[self._all, place])
        self.tokens[self._all, place] = kept
        self.counts += self.live
        ended = (chosen[:, None] == self._ends).any(1) | (self.counts >= self._limits)
        self.live &= ~ended
        self.newest = torch.where(self.live, chosen, self.newest)

    def _put(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _widen(self, num_tokens: int, num_ends: int) -> None:
        more = num_tokens - self.tokens.shape[1]
        if more > 0:
            pad = torch.nn.functional.pad
            self.tokens, self._uniforms = (
                pad(self.tokens, (0, more)),
                pad(self._uniforms, (0, more)),
            )
        more = num_ends - self._ends.shape[1]
        if more > 0:
            self._ends = torch.nn.functional.pad(self._ends, (0, more), value=-1)


def _draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [n] at which the cumulative laws pass the uniforms, see ``spec.uniforms.invert``.

    Args:
        logits: [n, V] over the temperature.
        uniforms: [n] float64.
    """
    laws = logits.float().softmax(-1)
    cumulative = laws.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    tokens = tokens[:, 0].clamp(max=laws.shape[1] - 1)
    possible = laws.gather(1, tokens[:, None])[:, 0] > 0
    return torch.where(possible, tokens, laws.argmax(-1))
