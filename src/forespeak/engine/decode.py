"""Decoding: one text through a target and a proposer, round by round.

    prefill   the prompt, in chunks; the target's best (or drawn) token becomes the root
    round     draft -> verify -> decide -> commit; the bonus becomes the next root

Plain decoding is the same loop with no proposer: every tree is a root alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forespeak.engine.proposer import DraftRequest, Proposing
from forespeak.engine.settings import RuleChoice
from forespeak.engine.text import Plan, TextState
from forespeak.models.base import Cache, TargetModel
from forespeak.spec.builders import DraftPath
from forespeak.spec.tree import CandidateTree
from forespeak.types import Observation, RoundStats, Segment, TargetOutput, Verdict

PREFILL_CHUNK = 512


class Decoding:
    """One text in one row of a cache.

    Args:
        model: the target.
        text: the text to write.
        rules: what decides.
        proposer: the method; None for plain decoding.
        row: row of proposer and cache.
        sampled_drafts: draw draft tokens from q instead of taking the best.
    """

    def __init__(
        self,
        model: TargetModel,
        text: TextState,
        rules: RuleChoice,
        proposer: Proposing | None = None,
        *,
        sampled_drafts: bool = False,
    ) -> None:
        self._model = model
        self._text = text
        self._rules = rules
        self._proposer = proposer
        self._sampled_drafts = sampled_drafts
        self._row = 0
        self.stats = RoundStats()

    def run(self, prompt_ids: Sequence[int]) -> Iterator[str]:
        """Write the text; yields pieces of it, each of whole characters, as they are settled."""
        if self._proposer is not None:
            self._proposer.admit(self._row)
        try:
            yield from self._rounds(prompt_ids)
        finally:
            if self._proposer is not None:
                self._proposer.release(self._row)

    def _rounds(self, prompt_ids: Sequence[int]) -> Iterator[str]:
        capacity = len(prompt_ids) + min(self._text.num_left, PREFILL_CHUNK) + 1
        cache = self._model.new_cache(1, capacity)
        start = time.perf_counter()
        piece = self._prefill(prompt_ids, cache)
        self.stats.prefill_s = time.perf_counter() - start
        yield piece
        while self._text.end is None:
            yield self._round(cache)

    def _prefill(self, prompt_ids: Sequence[int], cache: Cache) -> str:
        """Run the prompt and yield the first token, from a tree of nothing but its last token."""
        tokens = torch.tensor(prompt_ids)
        for at in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[at : at + PREFILL_CHUNK]
            output = self._model.forward(
                chunk, torch.arange(at, at + len(chunk)), cache, [Segment(0, len(chunk))],
                logits_at=torch.tensor([len(chunk) - 1]), taps=self._taps,
            )  # fmt: skip
            cache.commit_all(0)
            self._observe(chunk.tolist(), output, range(len(chunk)))
        plan = self._text.plan(CandidateTree((int(tokens[-1]),), (-1,)))
        verdict = self._text.decide(plan, output.logits, self._rules.of(plan.tree))
        self._root = verdict.bonus
        return self._text.extend(plan, verdict, output.logits).text

    def _round(self, cache: Cache) -> str:
        begun, drafter_s = time.perf_counter(), self._drafter_s
        plan = self._text.plan(self._propose())
        planned = time.perf_counter()
        output = self._verify(plan.verified, cache)
        verified = time.perf_counter()
        verdict = self._text.decide(plan, output.logits, self._rules.of(plan.tree))
        place = {node: at for at, node in enumerate(plan.kept)}
        path = [place[node] for node in verdict.path]
        cache.commit(0, path)
        block = self._text.extend(plan, verdict, output.logits)
        if self._text.end is None:
            self._observe([plan.tree.tokens[node] for node in verdict.path], output, path)
            self._root = verdict.bonus
        count_round(self.stats, plan, verdict, block.num_kept)
        round_s = time.perf_counter() - begun
        drafter_s = self._drafter_s - drafter_s
        self.stats.draft_s += drafter_s
        self.stats.verify_s += verified - planned
        self.stats.other_s += round_s - drafter_s - (verified - planned)
        return block.text

    @property
    def _drafter_s(self) -> float:
        return 0.0 if self._proposer is None else self._proposer.drafter_s

    @property
    def _taps(self) -> tuple[int, ...]:
        return () if self._proposer is None else self._proposer.taps

    def _propose(self) -> CandidateTree:
        # The bonus takes one of the tokens that are left, so drafts are worth one less.
        limit = self._text.num_left - 1
        if self._proposer is None or limit < 1:
            return CandidateTree((self._root,), (-1,))
        request = DraftRequest(
            [self._row], [self._root], [limit],
            draws=[self._text.draft_uniforms] if self._sampled_drafts else None,
            process=self._process if self._text.shapes_drafts else None,
        )  # fmt: skip
        return self._proposer.propose(request)[0]

    def _process(self, logits: Tensor, paths: Sequence[DraftPath]) -> Tensor:
        return self._text.draft_process(logits, [path.tokens[1:] for path in paths])

    def _verify(self, tree: CandidateTree, cache: Cache) -> TargetOutput:
        mask = None if tree.is_chain() else tree.mask()
        return self._model.forward(
            torch.tensor(tree.tokens), torch.tensor(tree.positions(cache.lengths[0])), cache,
            [Segment(0, len(tree), mask)], taps=self._taps,
        )  # fmt: skip

    def _observe(self, tokens: Sequence[int], output: TargetOutput, at: Sequence[int]) -> None:
        if self._proposer is None:
            return
        places = list(at)
        taps = None if output.taps is None else output.taps[places]
        self._proposer.observe([Observation(self._row, tuple(tokens), output.hidden[places], taps)])


def count_round(stats: RoundStats, plan: Plan, verdict: Verdict, num_kept: int) -> None:
    """Add a round. Every count is of what the user gets: tokens after the end are not in it."""
    stats.num_rounds += 1
    stats.num_tokens += num_kept
    stats.num_drafted += plan.verified.num_drafted
    stats.num_forbidden += plan.num_forbidden
    stats.num_accepted += min(verdict.num_accepted, num_kept)
    stats.round_lengths.append(num_kept)
