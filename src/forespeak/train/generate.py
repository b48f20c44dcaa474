"""Answers by our own engine: many dialogues in the rows of one cache (``engine/batch.py``).

A row that becomes free takes the next turn of a dialogue or the next prompt at once. Each answer is
what the target would have written alone; in int8 bit for bit, whatever ran beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from forespeak.engine.batch import BatchDecoding, BatchText
from forespeak.engine.settings import choose_rules, resolve
from forespeak.engine.target import Target
from forespeak.engine.text import TextState, Vocabulary
from forespeak.errors import ModelError
from forespeak.models.tokenizer import Tokenizer
from forespeak.sampling import SamplingParams
from forespeak.train.talks import Job, Limits, Outcome, Talk
from forespeak.train.turns import TurnMarks
from forespeak.types import SpeculationConfig

_PREFILL_TOKENS = 512  # a step of that many is still short beside a row's whole answer


@dataclass(frozen=True)
class Writer:
    """The target as plain batched decoding.

    Attributes:
        target: with a tokenizer.
        num_rows: texts at a time.
    """

    target: Target
    num_rows: int

    def text(self, prompt_ids: list[int], params: SamplingParams) -> BatchText:
        """A text to write. It is not decoded to characters: data are token ids."""
        size, eos_ids = self.target.model.config.vocab_size, self.target.eos_ids
        rules = choose_rules(resolve(SpeculationConfig()), params.temperature)
        return BatchText(
            prompt_ids, TextState(params, prompt_ids, Vocabulary(size, eos_ids)), rules
        )

    def batch(self) -> BatchDecoding:
        """Rows to write in."""
        return BatchDecoding(
            self.target.model, num_rows=self.num_rows, prefill_tokens=_PREFILL_TOKENS
        )


def tokenizer_of(target: Target) -> Tokenizer:
    """The target's tokenizer.

    Raises:
        ModelError: it has none.
    """
    if target.tokenizer is None:
        raise ModelError(
            f"{target.description} has no tokenizer, and dialogues need its chat template; put the "
            "tokenizer files beside the weights."
        )
    return target.tokenizer


class EngineAnswers:
    """Dialogues answered by the target in this process.

    Args:
        target: what answers.
        num_rows: texts at a time.
        limits: of prompts and answers.
    """

    def __init__(self, target: Target, *, num_rows: int, limits: Limits) -> None:
        self._tokenizer = tokenizer_of(target)
        self._marks = TurnMarks.of(self._tokenizer)
        self._writer = Writer(target, num_rows)
        self._limits = limits

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Answer jobs; each comes out when it has ended, in no particular order."""
        batch = self._writer.batch()
        talks: dict[BatchText, Talk] = {}
        refused: list[Outcome] = []

        def ask(talk: Talk) -> BatchText | None:
            ids = talk.ask()
            if ids is None:
                return None
            params = SamplingParams(
                max_new_tokens=talk.num_new_tokens, temperature=talk.job.temperature,
                seed=talk.seed,
            )  # fmt: skip
            text = self._writer.text(ids, params)
            talks[text] = talk
            return text

        def first_turns() -> Iterator[BatchText]:
            for job in jobs:
                talk = Talk(job, self._tokenizer, self._marks, self._limits)
                text = ask(talk)
                if text is None:
                    refused.append(talk.outcome())
                else:
                    yield text

        for ended in batch.run(first_turns()):
            yield from _drained(refused)
            talk, end = talks.pop(ended), ended.text.end
            assert end is not None and end.finish_reason is not None
            talk.take(ended.text.token_ids, end.finish_reason)
            following = ask(talk)
            if following is None:
                yield talk.outcome()
            else:
                batch.submit(following)
        yield from _drained(refused)


def _drained(outcomes: list[Outcome]) -> Iterator[Outcome]:
    while outcomes:
        yield outcomes.pop(0)
