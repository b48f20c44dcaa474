"""Answers by our own engine: many dialogues in the rows of one cache (``engine/batch.py``).

A row that becomes free takes the next turn of a dialogue or the next prompt at once. Each answer is
what the target would have written alone; in int8 bit for bit, whatever ran beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from forespeak.engine.batch import BatchDecoding, BatchText
from forespeak.engine.lockstep import LockstepDecoding
from forespeak.engine.settings import choose_rules, resolve
from forespeak.engine.target import Target
from forespeak.engine.text import TextState, Vocabulary
from forespeak.errors import ModelError, OptionError
from forespeak.models.decoder import Decoder
from forespeak.models.tokenizer import Tokenizer
from forespeak.sampling import SamplingParams
from forespeak.train.talks import Job, Limits, Outcome, Talk
from forespeak.train.turns import TurnMarks
from forespeak.types import Batching, SpeculationConfig

_PREFILL_TOKENS = 512  # a step of that many is still short beside a row's whole answer


_ROWS, _LOCKSTEP_ROWS = 48, 512


def picks_lockstep(target: Target, batching: Batching) -> bool:
    """Whether texts are written in lockstep.

    Raises:
        OptionError: lockstep was asked for and the model runs otherwise.
    """
    fits = isinstance(target.model, Decoder)
    if batching == "lockstep" and not fits:
        raise OptionError(
            "--batching lockstep runs models of the built-in families in float32 or bfloat16; "
            f"{target.name} runs in {target.model.dtype_name}. Take --batching rows, or another "
            "--dtype."
        )
    return fits and (batching == "lockstep" or (batching == "auto" and _on_gpu(target)))


def _on_gpu(target: Target) -> bool:
    return target.model.device.type == "cuda"


@dataclass(frozen=True)
class Writer:
    """The target as plain batched decoding.

    Attributes:
        target: with a tokenizer.
        num_rows: texts at a time; None takes 48, or 512 in lockstep.
        batching: how.
    """

    target: Target
    num_rows: int | None = None
    batching: Batching = "auto"

    def text(self, prompt_ids: list[int], params: SamplingParams) -> BatchText:
        """A text to write. It is not decoded to characters: data are token ids."""
        size, eos_ids = self.target.model.config.vocab_size, self.target.eos_ids
        rules = choose_rules(resolve(SpeculationConfig()), params.temperature)
        return BatchText(
            prompt_ids, TextState(params, prompt_ids, Vocabulary(size, eos_ids)), rules
        )

    def batch(self) -> BatchDecoding | LockstepDecoding:
        """Rows to write in.

        Raises:
            OptionError: see :func:`picks_lockstep`.
        """
        model = self.target.model
        if picks_lockstep(self.target, self.batching):
            assert isinstance(model, Decoder)
            return LockstepDecoding(model, num_rows=self.num_rows or _LOCKSTEP_ROWS)
        return BatchDecoding(model, num_rows=self.num_rows or _ROWS, prefill_tokens=_PREFILL_TOKENS)


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
        writer: what answers.
        limits: of prompts and answers.
    """

    def __init__(self, writer: Writer, *, limits: Limits) -> None:
        self._tokenizer = tokenizer_of(writer.target)
        self._marks = TurnMarks.of(self._tokenizer)
        self._writer = writer
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
