"""Making dialogues: prompts in, answered dialogues in a folder out, from any answerer.

Each dialogue is on disk when it has ended, in the order of ending; when the run is complete the
lines are put into the order of the prompts. All draws follow from the base seed and the prompt's
name, so a run that was interrupted and goes on ends with the same bytes as one that was not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from forespeak.errors import DataError
from forespeak.models.tokenizer import Tokenizer
from forespeak.train.atomic import PART, remove_parts
from forespeak.train.dialogues import (
    DIALOGUES,
    MANIFEST,
    Dialogue,
    Fate,
    Manifest,
    Refusal,
    build_sample,
    dialogue_from,
    read_manifest,
    write_manifest,
)
from forespeak.train.journal import Journal
from forespeak.train.overlap import Exclusion
from forespeak.train.prompt_sets import PromptSet
from forespeak.train.talks import Job, Outcome, make_job
from forespeak.train.turns import TurnMarks

EXCLUDED = "excluded"
REFUSED = "refused_"  # before the reason, in counts
GROWING = ("limit", "max_tokens_total", "self_written")
"""Settings with which a later run may ask for more; None asks for all there is."""


class Answerer(Protocol):
    """Who answers: our engine or an endpoint."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Answer jobs; each comes out when it has ended, in no particular order."""
        ...


@dataclass(frozen=True)
class Jobs:
    """What is to be answered.

    Attributes:
        jobs: in order.
        num_excluded: prompts that were left out because evaluation uses them.
    """

    jobs: Sequence[Job]
    num_excluded: int


def jobs_of(
    sets: Sequence[PromptSet],
    exclusion: Exclusion,
    *,
    seed: int,
    temperature: float,
    greedy_share: float,
    limit: int | None = None,
) -> Jobs:
    """The jobs of prompt sets, one set after another.

    Args:
        limit: jobs at most; excluded prompts do not count.
    """
    jobs: list[Job] = []
    num_excluded = 0
    for one in sets:
        for prompt in one.prompts:
            if limit is not None and len(jobs) >= limit:
                return Jobs(jobs, num_excluded)
            if exclusion.overlaps(prompt.turns):
                num_excluded += 1
                continue
            job = make_job(
                len(jobs), one.name, prompt, base_seed=seed, temperature=temperature,
                greedy_share=greedy_share,
            )  # fmt: skip
            jobs.append(job)
    return Jobs(jobs, num_excluded)


def begin(folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> Manifest:
    """Open a folder for a run: a new one, or one that goes on with the same settings.

    Raises:
        DataError: the folder holds dialogues of another target or of other settings, other files,
            or cannot be written.
    """
    if (folder / MANIFEST).exists():
        old = read_manifest(folder)
        old.check_target(tokenizer, folder)
        _refuse_other_settings(folder, old, manifest)
    elif folder.is_dir() and any(not one.name.startswith(PART) for one in folder.iterdir()):
        raise DataError(
            f"{folder} holds files and no {MANIFEST}; allowed: a new or empty folder, or one that "
            "this command began. Name another with --out."
        )
    elif folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name a folder with --out.")
    remove_parts(folder)
    begun = replace(manifest, counts={}, complete=False)
    write_manifest(folder, begun)
    return begun


def _refuse_other_settings(folder: Path, old: Manifest, new: Manifest) -> None:
    was = {**old.settings, "prompts": list(old.prompts), "excluded": list(old.excluded)}
    now = {**new.settings, "prompts": list(new.prompts), "excluded": list(new.excluded)}
    for name in sorted(was.keys() | now.keys()):
        before, given = was.get(name), now.get(name)
        if name in GROWING:
            less = given is not None and (before is None or given < before)
            if less and name in was:
                raise DataError(
                    f"{folder} was begun with {name} {_said(before)} and {given} was given; "
                    "allowed: as many or more. Name another folder with --out for fewer."
                )
        elif before != given:
            raise DataError(
                f"{folder} was begun with {name} {_said(before)} and now has {_said(given)}; a run "
                "goes on with the settings it began with. Give the same, or name another folder "
                "with --out."
            )


def _said(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(f"{item['name']} ({item['sha256'][:12]})" for item in value) or "none"
    return "without a limit" if value is None else repr(value)


class Making:
    """One run over a folder that was begun.

    Args:
        folder: begun with ``manifest``.
        jobs: what is to be answered.
        tokenizer: the target's.
        max_tokens_total: stop after the first prompts, in order, whose answers have so many tokens.
        written: counts of self-written prompts, for the manifest.
        all_written: False when more of them are to come, so that the run cannot be complete.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        jobs: Jobs,
        tokenizer: Tokenizer,
        *,
        max_tokens_total: int | None = None,
        written: Mapping[str, int] | None = None,
        all_written: bool = True,
    ) -> None:
        self._folder, self._manifest, self._jobs = folder, manifest, jobs
        self._tokenizer, self._written = tokenizer, dict(written or {})
        self._most, self._all_written = max_tokens_total, all_written
        self._places = {(job.source, job.prompt.id): job.place for job in jobs.jobs}
        self._tokens: dict[int, int] = {}  # of each job that has ended
        self._fates: dict[int, Fate] = {}  # of those that became no dialogue
        self._front = 0  # all jobs before it have ended
        self._sum = 0  # their tokens

    @property
    def num_ended(self) -> int:
        """Jobs that have ended, those of earlier runs too."""
        return len(self._tokens)

    def run(
        self,
        answerer: Answerer,
        *,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
        deadline: float | None = None,
    ) -> Manifest:
        """Answer what is not answered yet; returns the manifest as written.

        Args:
            on_outcome: is told of each job that ends.
            deadline: ``time.monotonic()`` at which to stop. All that is answered then stays, the
                manifest says that more is to come, and a later run goes on.

        Raises:
            DataError: the folder's dialogues are damaged or belong to other prompts, or the disk is
                full. What was written stays.
        """
        with Journal(self._folder / DIALOGUES) as journal:
            numbers, late = self._read(journal), False
            left = (job for job in self._jobs.jobs if job.place not in self._tokens)
            if not self._is_enough():
                with closing(_generator(answerer.run(left))) as outcomes:
                    for outcome in outcomes:
                        if outcome.dialogue is not None:
                            journal.append(outcome.dialogue.record())
                            numbers[outcome.job.place] = len(numbers)
                        self._note(outcome.job.place, outcome.fate, outcome.dialogue)
                        on_outcome(outcome)
                        if self._is_enough():
                            break
                        passed = deadline is not None and time.monotonic() > deadline
                        if passed and len(self._tokens) < len(self._jobs.jobs):
                            late = True
                            break
            if not late:
                journal.keep([numbers[place] for place in sorted(numbers) if place < self._front])
        return self._finish(complete=not late and self._all_written)

    def _read(self, journal: Journal) -> dict[int, int]:
        """Line number of each job that an earlier run answered."""
        numbers: dict[int, int] = {}
        for number, line in enumerate(journal.lines()):
            dialogue = dialogue_from(line)
            place = self._places.get(dialogue.key)
            turns = () if place is None else self._jobs.jobs[place].prompt.turns
            if place is None or turns[: len(dialogue.turns)] != dialogue.turns:
                raise DataError(
                    f"{line.place} answers {dialogue.id!r} of {dialogue.source}, which is none of "
                    "the prompts given; give the prompts that the folder was begun with, or name "
                    "another folder with --out."
                )
            if place in numbers:
                raise DataError(f"{line.place} answers {dialogue.id!r} again; take the line out.")
            numbers[place] = number
            self._note(place, dialogue.fate, dialogue)
        return numbers

    def _note(self, place: int, fate: Fate, dialogue: Dialogue | None) -> None:
        self._tokens[place] = 0 if dialogue is None else dialogue.num_tokens
        if dialogue is None:
            self._fates[place] = fate
        while self._front in self._tokens and not self._is_enough():
            self._sum += self._tokens[self._front]
            self._front += 1

    def _is_enough(self) -> bool:
        return self._most is not None and self._sum >= self._most

    def _finish(self, *, complete: bool = True) -> Manifest:
        """Count over what is there now."""
        counts = Counter[str](self._written)
        counts.update({EXCLUDED: self._jobs.num_excluded} if self._jobs.num_excluded else {})
        counts.update(
            fate.value for place, fate in self._fates.items()
            if place < self._front or not complete
        )  # fmt: skip
        marks = TurnMarks.of(self._tokenizer)
        with Journal(self._folder / DIALOGUES) as journal:
            for line in journal.lines():
                dialogue = dialogue_from(line)
                counts[dialogue.fate.value] += 1
                built = build_sample(dialogue, self._tokenizer, marks)
                if isinstance(built, Refusal):
                    counts[REFUSED + built.name.lower()] += 1
        done = replace(self._manifest, counts=dict(sorted(counts.items())), complete=complete)
        write_manifest(self._folder, done)
        return done


def _generator(outcomes: Iterator[Outcome]) -> Any:
    """For ``closing``: both answerers are generators, a test's may be any iterator."""
    yield from outcomes
