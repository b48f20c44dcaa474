"""BatchDecoding: many texts in the rows of one cache, coming and going (continuous batching).

A step is one forward of the target over what every row has for it: a tree of draft tokens of rows
that write, the next chunk of the prompt of rows that have just come. All tokens lie on one axis, so
a row with few of them costs little; rows do not see each other. Each text is what ``Decoding``
would write of it alone.

N nodes of a tree, V vocabulary, T tokens of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forespeak.engine.decode import count_round
from forespeak.engine.proposer import DraftRequest, Proposing
from forespeak.engine.settings import RuleChoice
from forespeak.engine.text import Plan, TextState
from forespeak.models.base import TargetModel
from forespeak.spec.builders import DraftPath
from forespeak.spec.tree import CandidateTree
from forespeak.types import Observation, RoundStats, Segment, TargetOutput


@dataclass(eq=False)
class BatchText:
    """One text of a batch.

    Attributes:
        prompt_ids: at least one token.
        text: the state to write in; its ``end`` says how it went.
        rules: what decides.
        sampled_drafts: draw draft tokens from q instead of taking the best.
        stats: counts of its rounds; times are the batch's and stay zero here.
        pieces: text as it was settled.
    """

    prompt_ids: Sequence[int]
    text: TextState
    rules: RuleChoice
    sampled_drafts: bool = False
    stats: RoundStats = field(default_factory=RoundStats)
    pieces: list[str] = field(default_factory=list)


@dataclass
class _Row:
    """A row in use: how much of the prompt is in the cache, and the newest token once it all is."""

    entry: BatchText
    num_prefilled: int = 0
    root: int | None = None


@dataclass(frozen=True)
class _Part:
    """What a row has for a step: a chunk of its prompt, or the plan of a tree."""

    row: int
    tokens: Sequence[int]
    positions: Sequence[int]
    plan: Plan | None
    asks: Sequence[int]  # indices into tokens whose logits are wanted

    def segment(self) -> Segment:
        tree = None if self.plan is None else self.plan.verified
        mask = None if tree is None or tree.is_chain() else tree.mask()
        return Segment(self.row, len(self.tokens), mask)


class BatchDecoding:
    """Texts in the rows of one cache.

    Args:
        model: the target.
        proposer: the method, with as many rows; None for plain decoding.
        num_rows: texts at a time.
        prefill_tokens: prompt tokens that go into a step at most.
    """

    def __init__(
        self,
        model: TargetModel,
        proposer: Proposing | None = None,
        *,
        num_rows: int,
        prefill_tokens: int = 256,
    ) -> None:
        assert num_rows >= 1 and prefill_tokens >= 1, (num_rows, prefill_tokens)
        self._model, self._proposer = model, proposer
        self._prefill_tokens = prefill_tokens
        self._cache = model.new_cache(num_rows, 256)
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[int, _Row] = {}
        self._waiting: deque[BatchText] = deque()

    @property
    def num_unfinished(self) -> int:
        """Texts that run or wait."""
        return len(self._rows) + len(self._waiting)

    def submit(self, entry: BatchText) -> None:
        """Add a text; it starts when a row is free."""
        self._waiting.append(entry)

    def cancel(self, entry: BatchText) -> None:
        """Forget a text that runs or waits."""
        if entry in self._waiting:
            self._waiting.remove(entry)
        for row, state in list(self._rows.items()):
            if state.entry is entry:
                self._end(row)

    def run(self, entries: Iterable[BatchText]) -> Iterator[BatchText]:
        """Write texts and yield each when it has ended; takes new ones as rows become free."""
        source = iter(entries)
        more = True
        while more or self.num_unfinished:
            while more and not self._waiting:
                entry = next(source, None)
                if entry is None:
                    more = False
                else:
                    self.submit(entry)
                    self._admit()
            yield from self.step()

    def step(self) -> list[BatchText]:
        """One forward; returns the texts that it ended."""
        self._admit()
        parts = self._chunks() + self._trees()
        if not parts:
            return []
        output, starts = self._forward(parts)
        ended, at = [], 0
        observations: list[Observation] = []
        for part, start in zip(parts, starts, strict=True):
            logits = output.logits[at : at + len(part.asks)]
            at += len(part.asks)
            observations += self._settle(part, start, logits, output)
            entry = self._rows[part.row].entry
            if entry.text.end is not None:
                ended.append(entry)
        if self._proposer is not None and observations:
            self._proposer.observe(observations)
        for row in [r for r, state in self._rows.items() if state.entry.text.end is not None]:
            self._end(row)
        return ended

    def _admit(self) -> None:
        while self._free and self._waiting:
            row = self._free.pop()
            self._rows[row] = _Row(self._waiting.popleft())
            if self._proposer is not None:
                self._proposer.admit(row)

    def _end(self, row: int) -> None:
        del self._rows[row]
        self._cache.release(row)
        if self._proposer is not None:
            self._proposer.release(row)
        self._free.append(row)

    def _chunks(self) -> list[_Part]:
        """The next prompt tokens of rows that have not got them all, first come first served."""
        left, parts = self._prefill_tokens, []
        for row, state in self._rows.items():
            prompt, first = state.entry.prompt_ids, state.num_prefilled
            count = min(left, len(prompt) - first)
            if state.root is not None or count < 1:
                continue
            left -= count
            whole = first + count == len(prompt)
            parts.append(
                _Part(
                    row,
                    prompt[first : first + count],
                    range(first, first + count),
                    None,
                    [count - 1] if whole else [],
                )  # fmt: skip
            )
        return parts

    def _trees(self) -> list[_Part]:
        """Planned trees of the rows that write."""
        writing = [row for row, state in self._rows.items() if state.root is not None]
        trees = {row: CandidateTree((self._root(row),), (-1,)) for row in writing}
        if self._proposer is not None:
            for sampled in (False, True):
                asked = [
                    row for row in writing
                    if self._rows[row].entry.sampled_drafts == sampled and self._limit(row) > 0
                ]  # fmt: skip
                if asked:
                    proposed = self._proposer.propose(self._request(asked, sampled))
                    trees |= dict(zip(asked, proposed, strict=True))
        parts = []
        for row in writing:
            plan = self._rows[row].entry.text.plan(trees[row])
            tokens = plan.verified.tokens
            positions = plan.verified.positions(self._cache.lengths[row])
            parts.append(_Part(row, tokens, positions, plan, range(len(tokens))))
        return parts

    def _root(self, row: int) -> int:
        root = self._rows[row].root
        assert root is not None
        return root

    def _limit(self, row: int) -> int:
        """Draft tokens worth having: the bonus takes one of the tokens that are left."""
        return self._rows[row].entry.text.num_left - 1

    def _request(self, rows: Sequence[int], sampled: bool) -> DraftRequest:
        texts = [self._rows[row].entry.text for row in rows]
        return DraftRequest(
            rows, [self._root(row) for row in rows], [self._limit(row) for row in rows],
            draws=[text.draft_uniforms for text in texts] if sampled else None,
            process=self._process if any(text.shapes_drafts for text in texts) else None,
        )  # fmt: skip

    def _process(self, logits: Tensor, paths: Sequence[DraftPath]) -> Tensor:
        """Each row's own processors on its draft rows."""
        processed = logits.clone()
        for row in dict.fromkeys(path.row for path in paths):
            text = self._rows[row].entry.text
            at = [index for index, path in enumerate(paths) if path.row == row]
            if text.shapes_drafts:
                own = [paths[index].tokens[1:] for index in at]
                processed[at] = text.draft_process(logits[at], own)
        return processed

    def _forward(self, parts: Sequence[_Part]) -> tuple[TargetOutput, list[int]]:
        """One forward over all parts, and where the tokens of each begin."""
        tokens: list[int] = []
        positions: list[int] = []
        asks: list[int] = []
        starts: list[int] = []
        for part in parts:
            start = len(tokens)
            starts.append(start)
            asks += [start + index for index in part.asks]
            tokens += part.tokens
            positions += part.positions
        taps = () if self._proposer is None else self._proposer.taps
        output = self._model.forward(
            torch.tensor(tokens), torch.tensor(positions), self._cache,
            [part.segment() for part in parts], logits_at=torch.tensor(asks, dtype=torch.long),
            taps=taps,
        )  # fmt: skip
        return output, starts

    def _settle(
        self, part: _Part, start: int, logits: Tensor, output: TargetOutput
    ) -> list[Observation]:
        """Decide, commit and write on, for one row; what its drafter is to see."""
        state = self._rows[part.row]
        if part.plan is None:
            state.num_prefilled += len(part.tokens)
            self._cache.commit_all(part.row)
            if part.asks:
                self._begin(state, logits)
            return self._observed(part.row, part.tokens, start, range(len(part.tokens)), output)
        plan, entry = part.plan, state.entry
        verdict = entry.text.decide(plan, logits, entry.rules.of(plan.tree))
        place = {node: at for at, node in enumerate(plan.kept)}
        path = [place[node] for node in verdict.path]
        self._cache.commit(part.row, path)
        block = entry.text.extend(plan, verdict, logits)
        entry.pieces.append(block.text)
        state.root = verdict.bonus
        count_round(entry.stats, plan, verdict, block.num_kept)
        tokens = [plan.tree.tokens[node] for node in verdict.path]
        return self._observed(part.row, tokens, start, path, output)

    def _begin(self, state: _Row, logits: Tensor) -> None:
        """The first token, from a tree of nothing but the prompt's last."""
        entry = state.entry
        plan = entry.text.plan(CandidateTree((entry.prompt_ids[-1],), (-1,)))
        verdict = entry.text.decide(plan, logits, entry.rules.of(plan.tree))
        state.root = verdict.bonus
        entry.pieces.append(entry.text.extend(plan, verdict, logits).text)

    def _observed(
        self, row: int, tokens: Sequence[int], start: int, at: Sequence[int], output: TargetOutput
    ) -> list[Observation]:
        if self._proposer is None or self._rows[row].entry.text.end is not None:
            return []
        places = [start + index for index in at]
        taps = None if output.taps is None else output.taps[places]
        return [Observation(row, tuple(tokens), output.hidden[places], taps)]
