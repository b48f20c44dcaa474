"""Talk: one dialogue while it is being answered, turn by turn, whoever answers.

It says what to ask next, takes the answer and decides how the dialogue ends, so that our engine and
an endpoint give the same dialogues for the same answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from forespeak.bench.prompts import Prompt
from forespeak.errors import PromptError
from forespeak.models.tokenizer import Tokenizer
from forespeak.train.dialogues import Dialogue, Fate
from forespeak.train.turns import TurnMarks, has_special_tokens
from forespeak.types import FinishReason

_SEEDS = 2**31  # what every server takes


@dataclass(frozen=True)
class Limits:
    """How long things get, in tokens.

    Attributes:
        new_tokens: of an answer.
        prompt_tokens: of all that comes before an answer, the template's included.
        context: of both together.
    """

    new_tokens: int
    prompt_tokens: int
    context: int


@dataclass(frozen=True)
class Job:
    """A prompt and how to answer it.

    Attributes:
        place: its number in the run's order.
        source: name of its prompt set.
        prompt: the user's turns.
        temperature, seed: see :class:`Dialogue`.
    """

    place: int
    source: str
    prompt: Prompt
    temperature: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """A job that has ended; ``dialogue`` is None when nothing came of it."""

    job: Job
    fate: Fate
    dialogue: Dialogue | None


def derived(base: int, *names: str) -> tuple[int, float]:
    """A seed and a uniform in [0, 1) that follow from a base seed and names alone.

    So a run that goes on after a crash draws what it would have drawn.
    """
    text = "\n".join((str(base), *names))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    number, share = (int.from_bytes(digest[at : at + 8], "big") for at in (0, 8))
    return number % _SEEDS, share / 2**64


def make_job(
    place: int,
    source: str,
    prompt: Prompt,
    *,
    base_seed: int,
    temperature: float,
    greedy_share: float,
) -> Job:
    """A prompt's job; which prompts are answered greedily follows from seed, source and id."""
    seed, share = derived(base_seed, source, prompt.id)
    return Job(place, source, prompt, 0.0 if share < greedy_share else temperature, seed)


class Talk:
    """A dialogue being answered.

    Args:
        job: whose.
        tokenizer, marks: of the target.
        limits: of prompts and answers.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, marks: TurnMarks, limits: Limits) -> None:
        self.job = job
        self.messages: list[dict[str, str]] = []
        self._tokenizer, self._marks, self._limits = tokenizer, marks, limits
        self._answers: list[tuple[int, ...]] = []
        self._reasons: list[FinishReason] = []
        self._ids: list[int] = []  # all so far, as the last prompt and its answer have it
        self._fate: Fate | None = None

    @property
    def seed(self) -> int:
        """Of the next answer."""
        return (self.job.seed + len(self._answers)) % _SEEDS

    @property
    def num_new_tokens(self) -> int:
        """What the next answer may have, after :meth:`ask`."""
        return min(self._limits.new_tokens, self._limits.context - len(self._ids))

    def ask(self) -> list[int] | None:
        """Token ids up to the next answer; None when the dialogue has ended."""
        if self._fate is None and len(self._answers) == len(self.job.prompt.turns):
            self._fate = Fate.WHOLE
        if self._fate is None:
            self._fate = self._open_turn()
        return list(self._ids) if self._fate is None else None

    def take(self, ids: Sequence[int], reason: FinishReason) -> None:
        """The answer's token ids, with the end-of-turn token when it was written."""
        content = ids[:-1] if reason == "stop" else ids
        text = self._tokenizer.decode(content)
        if not text.strip():
            self._fate = self._ended(Fate.EMPTY, Fate.CUT_EMPTY)
            return
        self._answers.append(tuple(ids))
        self._reasons.append(reason)
        self._ids += ids
        self.messages.append({"role": "assistant", "content": text})
        more = len(self._answers) < len(self.job.prompt.turns)
        if reason == "length" and more:
            self._fate = Fate.CUT_LENGTH

    def reject(self) -> None:
        """The next turn was refused by who was to answer it."""
        self._fate = self._ended(Fate.REJECTED, Fate.CUT_REJECTED)

    def outcome(self) -> Outcome:
        """What has come of it, after :meth:`ask` gave None."""
        assert self._fate is not None
        job, number = self.job, len(self._answers)
        if not number:
            return Outcome(job, self._fate, None)
        dialogue = Dialogue(
            job.prompt.id, job.source, job.prompt.turns[:number], tuple(self._answers),
            tuple(self._reasons), job.temperature, job.seed, self._fate,
        )  # fmt: skip
        return Outcome(job, self._fate, dialogue)

    def _open_turn(self) -> Fate | None:
        """Render the next turn; a fate when it cannot be asked."""
        turn = self.job.prompt.turns[len(self._answers)]
        messages = [*self.messages, {"role": "user", "content": turn}]
        try:
            if has_special_tokens(self._tokenizer, [turn]):
                return self._ended(Fate.SPECIAL_TOKENS, Fate.CUT_TEMPLATE)
            ids = self._tokenizer.render_chat(messages)
        except PromptError:
            return self._ended(Fate.TEMPLATE, Fate.CUT_TEMPLATE)
        if ids[: len(self._ids)] != self._ids:
            return Fate.CUT_TEMPLATE
        if len(ids) > min(self._limits.prompt_tokens, self._limits.context - 1):
            return self._ended(Fate.TOO_LONG, Fate.CUT_CONTEXT)
        self.messages, self._ids = messages, ids
        return None

    def _ended(self, first: Fate, later: Fate) -> Fate:
        return later if self._answers else first
