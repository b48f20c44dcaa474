"""Drafters that follow a script instead of computing, and one text decoded with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.drafters.base import Drafter
from forespeak.engine.decode import Decoding
from forespeak.engine.proposer import Proposer, Proposing
from forespeak.engine.settings import RuleChoice
from forespeak.engine.text import TextState, Vocabulary
from forespeak.models.base import TargetModel
from forespeak.sampling import SamplingParams
from forespeak.spec.verify import RULES
from forespeak.types import (
    Completion,
    DenseLaws,
    DrafterInfo,
    Expansion,
    Frontier,
    Laws,
    Observation,
    SpeculationConfig,
)

SIZES = SpeculationConfig(num_speculative_tokens=5, node_budget=9, tree_depth=4, tree_top_k=3)
GREEDY = RuleChoice(RULES["greedy"], RULES["greedy"])


class ScriptedDrafter(Drafter):
    """Knows a text and favours its next token with a given probability, else a wrong one.

    Args:
        known: the whole text, prompt included; the laws are for what stands at each place of it.
        right: how often a law's best token is the known one: 0 never, 1 always.
        expansion: ``none`` gives ``depths`` laws at once, ``forward`` one a call.
        vocab_size: V.
        seed: of everything that is left to chance.

    Attributes:
        observed: tokens taken in so far, by row; must stay a beginning of the known text.
    """

    def __init__(
        self,
        known: Sequence[int],
        right: float,
        *,
        expansion: Expansion,
        vocab_size: int,
        depths: int = 5,
        seed: int = 0,
    ) -> None:
        self.info = DrafterInfo(
            method="scripted", expansion=expansion,
            max_depth=depths if expansion == "none" else None, trained=False,
        )  # fmt: skip
        self.known = list(known)
        self.observed: dict[int, list[int]] = {}
        self._right, self._depths, self._size = right, depths, vocab_size
        self._generator = torch.Generator().manual_seed(seed)
        self._depth_of: dict[tuple[int, int], int] = {}

    def admit(self, row: int) -> None:
        assert row not in self.observed
        self.observed[row] = []

    def release(self, row: int) -> None:
        del self.observed[row]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            assert observation.hidden.shape[0] == len(observation.tokens)
            self.observed[observation.row] += observation.tokens
            self._check(self.observed[observation.row])

    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> Laws:
        for row, root in zip(rows, roots, strict=True):
            self._check([*self.observed[row], root])
            self._depth_of = {k: d for k, d in self._depth_of.items() if k[0] != row}
            self._depth_of[row, 0] = 0
        count = 1 if self.info.expansion == "forward" else self._depths
        return DenseLaws(
            torch.stack([torch.stack([self._law(row, d) for d in range(count)]) for row in rows])
        )

    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        laws = []
        for frontier in frontiers:
            for node, parent in zip(frontier.nodes, frontier.parents, strict=True):
                depth = self._depth_of[frontier.row, parent] + 1
                self._depth_of[frontier.row, node] = depth
                laws.append(self._law(frontier.row, depth))
        return DenseLaws(torch.stack(laws)[:, None])

    def _law(self, row: int, depth: int) -> Tensor:
        logits = torch.randn(self._size, generator=self._generator)
        place = len(self.observed[row]) + 1 + depth
        known = self.known[place] if place < len(self.known) else 0
        chance = float(torch.rand((), generator=self._generator))
        logits[known] = -20  # not impossible: a grammar may leave no other
        best = known if chance < self._right else int(logits.argmax())
        top = float(logits.max())
        if 0 < self._right <= chance < (1 + self._right) / 2:
            logits[known] = top + 2  # second best: only a tree finds it
        logits[best] = top + 3
        return logits

    def _check(self, text: Sequence[int]) -> None:
        assert list(text) == self.known[: len(text)], "what was observed is not the target's text"


@dataclass
class Written:
    """One decoded text: the state it ended in, and what the user would get."""

    text: TextState
    completion: Completion


def write(
    model: TargetModel,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    proposer: Proposing | None = None,
    *,
    rules: RuleChoice = GREEDY,
    sampled_drafts: bool = False,
    vocabulary: Vocabulary | None = None,
) -> Written:
    """One text through the engine's loop, below the settings of ``LLM``."""
    vocabulary = vocabulary or Vocabulary(model.config.vocab_size, model.config.eos_token_ids)
    state = TextState(params, prompt_ids, vocabulary)
    decoding = Decoding(model, state, rules, proposer, sampled_drafts=sampled_drafts)
    pieces = "".join(decoding.run(prompt_ids))
    assert state.end is not None and state.end.finish_reason is not None
    completion = Completion(
        text=pieces, token_ids=tuple(state.token_ids), finish_reason=state.end.finish_reason,
        stats=decoding.stats, time_to_first_token_s=0.0, stop_reason=state.end.stop_reason,
        logprobs=tuple(state.logprobs) if params.logprobs is not None else None,
    )  # fmt: skip
    return Written(state, completion)


def scripted(
    known: Sequence[int],
    right: float,
    *,
    builder: str,
    vocab_size: int,
    expansion: Expansion = "forward",
    seed: int = 0,
) -> Proposer:
    """A scripted drafter under a builder."""
    drafter = ScriptedDrafter(known, right, expansion=expansion, vocab_size=vocab_size, seed=seed)
    return Proposer(drafter, builder, SIZES, vocab_size=vocab_size)


def check_counts(completion: Completion) -> None:
    """What the figures promise, whatever the method: they count what the user gets."""
    stats = completion.stats
    assert sum(stats.round_lengths) == stats.num_tokens == len(completion.token_ids) - 1
    assert len(stats.round_lengths) == stats.num_rounds
    assert all(length >= 1 for length in stats.round_lengths)
    if not stats.num_rounds:
        assert stats.num_accepted == stats.num_drafted == 0
        return
    # Each round's tokens are its accepted drafts and one bonus; the last round may lack the bonus.
    assert stats.num_tokens - stats.num_accepted in (stats.num_rounds, stats.num_rounds - 1)
    assert stats.num_accepted <= stats.num_drafted
