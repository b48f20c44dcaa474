"""Exclusion: prompts that evaluation uses never become training data.

A prompt is left out when one of its turns is equal to an excluded turn, or shares a run of 13 words
with one, the measure that GPT-3's authors used for contamination (arXiv 2005.14165, appendix C).
Both look at words alone: case, punctuation, spaces and Unicode's forms of one character do not
count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

RUN_WORDS = 13

_WORD = re.compile(r"\w+")


def words_of(text: str) -> tuple[str, ...]:
    """The words that are compared."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


class Exclusion:
    """What must not enter.

    Args:
        turns: user turns of evaluation prompts.
    """

    def __init__(self, turns: Iterable[str] = ()) -> None:
        self._whole: set[tuple[str, ...]] = set()
        self._runs: set[tuple[str, ...]] = set()
        for turn in turns:
            words = words_of(turn)
            # Two turns of signs alone ("1 + 1 = ?" has words, "..." has none) say nothing.
            if words:
                self._whole.add(words)
            self._runs.update(_runs(words))

    def overlaps(self, turns: Sequence[str]) -> bool:
        """Whether a prompt with these turns must stay out."""
        if not self._whole:
            return False
        return any(self._has(words_of(turn)) for turn in turns)

    def _has(self, words: tuple[str, ...]) -> bool:
        return words in self._whole or any(run in self._runs for run in _runs(words))


def _runs(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for at in range(len(words) - RUN_WORDS + 1):
        yield words[at : at + RUN_WORDS]
