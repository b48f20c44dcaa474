"""Prompts that the target writes itself: it continues the opening of a user turn (Magpie,
arXiv 2406.08464) at temperature 1.

Candidates are numbered and each is drawn with a seed of its own; they are judged in the order of
their numbers, so that the same prompts come out whichever candidate was finished first and however
often the run was interrupted. They are kept as they come in ``prompts.jsonl``.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forespeak.bench.prompts import Prompt
from forespeak.engine.batch import BatchText
from forespeak.errors import DataError
from forespeak.sampling import SamplingParams
from forespeak.train.dialogues import SELF_WRITTEN
from forespeak.train.generate import Writer, tokenizer_of
from forespeak.train.journal import Journal, Line
from forespeak.train.overlap import Exclusion, words_of
from forespeak.train.prompt_sets import PromptSet
from forespeak.train.talks import derived
from forespeak.train.turns import TurnMarks, has_special_tokens

PROMPTS = "prompts.jsonl"

_MOST_TRIES = 20  # a prompt wanted
_SPARE_TRIES = 200


@dataclass(frozen=True)
class PromptBounds:
    """What is kept, in tokens, the end-of-turn token not counted."""

    min_tokens: int
    max_tokens: int


class Verdict(enum.StrEnum):
    """What became of a candidate."""

    KEPT = "kept"
    UNFINISHED = "unfinished"  # it did not end its turn within the bound
    EMPTY = "empty"
    SHORT = "short"
    SPECIAL_TOKENS = "special_tokens"
    DUPLICATE = "duplicate"
    EXCLUDED = "excluded"


@dataclass(frozen=True)
class SelfWritten:
    """The prompts, and what became of all candidates up to the last one kept."""

    prompts: PromptSet
    counts: Counter[str]
    is_full: bool = True


@dataclass(frozen=True)
class _Candidate:
    number: int
    text: str
    num_tokens: int  # without the end of turn
    finished: bool


class PromptWriter:
    """Lets the target write prompts.

    Args:
        writer: who writes.
        bounds: what is kept.
        seed: of all draws.
        exclusion: what must not enter.
    """

    def __init__(
        self, writer: Writer, *, bounds: PromptBounds, seed: int, exclusion: Exclusion
    ) -> None:
        self._tokenizer = tokenizer_of(writer.target)
        self._marks = TurnMarks.of(self._tokenizer)
        self._writer = writer
        self._bounds, self._seed, self._exclusion = bounds, seed, exclusion

    def write(
        self,
        folder: Path,
        count: int,
        *,
        on_kept: Callable[[int], None] = lambda _: None,
        deadline: float | None = None,
    ) -> SelfWritten:
        """``count`` prompts, going on from what ``folder`` has of them.

        Args:
            on_kept: is told how many are kept so far, after each one.
            deadline: ``time.monotonic()`` at which those that there are must do.

        Raises:
            DataError: the target writes too few that are of use, or they cannot be written to disk.
        """
        with Journal(folder / PROMPTS) as journal:
            found = [_candidate(line) for line in journal.lines()]
            known = {candidate.number: candidate for candidate in found}
            numbers = [candidate.number for candidate in found]
            judge = _Judge(self._judged, count)
            for _ in judge.take(known):
                on_kept(judge.num_kept)
            most = _MOST_TRIES * count + _SPARE_TRIES
            missing = (n for n in itertools.count() if n not in known and n >= judge.next)
            source = self._texts(itertools.takewhile(lambda n: n < most, missing))
            late = False
            if not judge.is_full():
                for candidate in source:
                    journal.append(_record(candidate))
                    known[candidate.number] = candidate
                    numbers.append(candidate.number)
                    for _ in judge.take(known):
                        on_kept(judge.num_kept)
                    late = deadline is not None and time.monotonic() > deadline
                    if judge.is_full() or late:
                        break
            if not judge.is_full() and not late:
                raise DataError(
                    f"The target wrote {judge.num_kept} usable prompts in {most} tries, and "
                    f"{count} were asked for ({judge.told()}); ask for fewer, or give prompts of "
                    "your own with --prompts."
                )
            if judge.is_full():
                places = {number: place for place, number in enumerate(numbers)}
                journal.keep([places[number] for number in range(judge.next)])
        prompts = PromptSet(SELF_WRITTEN, "", judge.prompts)
        return SelfWritten(prompts, judge.counts, judge.is_full())

    def _texts(self, numbers: Iterator[int]) -> Iterator[_Candidate]:
        texts: dict[BatchText, int] = {}

        def begun() -> Iterator[BatchText]:
            for number in numbers:
                seed, _ = derived(self._seed, SELF_WRITTEN, str(number))
                params = SamplingParams(
                    max_new_tokens=self._bounds.max_tokens + 1, temperature=1.0, seed=seed,
                    stop_token_ids=(self._marks.end_of_prompt,),
                )  # fmt: skip
                text = self._writer.text(list(self._marks.opening_ids), params)
                texts[text] = number
                yield text

        for text in self._writer.batch().run(begun()):
            ids = text.text.token_ids
            finished = ids[-1] == self._marks.end_of_prompt
            content = ids[:-1] if finished else ids
            words = self._tokenizer.decode(content).strip()
            yield _Candidate(texts.pop(text), words, len(content), finished)

    def _judged(self, candidate: _Candidate, seen: set[tuple[str, ...]]) -> Verdict:
        if not candidate.finished:
            return Verdict.UNFINISHED
        words = words_of(candidate.text)
        if not words:
            return Verdict.EMPTY
        if candidate.num_tokens < self._bounds.min_tokens:
            return Verdict.SHORT
        if has_special_tokens(self._tokenizer, [candidate.text]):
            return Verdict.SPECIAL_TOKENS
        if words in seen:
            return Verdict.DUPLICATE
        seen.add(words)
        if self._exclusion.overlaps([candidate.text]):
            return Verdict.EXCLUDED
        return Verdict.KEPT


class _Judge:
    """Goes through the candidates in order until enough are kept."""

    def __init__(
        self, verdict: Callable[[_Candidate, set[tuple[str, ...]]], Verdict], count: int
    ) -> None:
        self._verdict, self._count = verdict, count
        self._seen: set[tuple[str, ...]] = set()
        self.next = 0
        self.prompts: list[Prompt] = []
        self.counts: Counter[str] = Counter()

    @property
    def num_kept(self) -> int:
        return len(self.prompts)

    def is_full(self) -> bool:
        return self.num_kept >= self._count

    def take(self, known: dict[int, _Candidate]) -> Iterator[Prompt]:
        """Judge what is next, as far as it is there; yields what is kept."""
        while not self.is_full() and self.next in known:
            candidate = known[self.next]
            self.next += 1
            verdict = self._verdict(candidate, self._seen)
            self.counts[verdict.value] += 1
            if verdict is Verdict.KEPT:
                self.prompts.append(Prompt(str(candidate.number), "", (candidate.text,)))
                yield self.prompts[-1]

    def told(self) -> str:
        """The counts in words."""
        return ", ".join(f"{name} {number}" for name, number in sorted(self.counts.items()))


def _record(candidate: _Candidate) -> dict[str, object]:
    return {
        "number": candidate.number, "text": candidate.text,
        "num_tokens": candidate.num_tokens, "finished": candidate.finished,
    }  # fmt: skip


def _candidate(line: Line) -> _Candidate:
    kinds = {"number": int, "text": str, "num_tokens": int, "finished": bool}
    if any(type(line.record.get(name)) is not kind for name, kind in kinds.items()):
        raise DataError(
            f"{line.place} is no prompt that the target wrote; remove the file to have them "
            "written again."
        )
    return _Candidate(**{name: line.record[name] for name in kinds})
