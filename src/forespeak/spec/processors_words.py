"""Bad words: token sequences that may not be completed.

A text has several tokenisations. As in vLLM each word is forbidden as it is written at the start
of a text and as it is written after a space; unlike vLLM both are kept also where they differ in
length. Only the output counts: a word that begins in the prompt is not the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from forespeak.errors import OptionError


def bad_word_sequences(
    words: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words, without repeats and without those implied by a shorter one.

    ``encode`` is the tokenizer's, without special tokens.

    Raises:
        OptionError: a word that the tokenizer turns into nothing.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, " " + bare):
            sequence = tuple(encode(text))
            if not sequence:
                raise OptionError(
                    f"bad_words has {word!r}, which the model's tokenizer turns into no token at "
                    "all; allowed: words that can be written with its tokens. Drop the word."
                )
            sequences[sequence] = None
    return tuple(s for s in sequences if not any(_ends_with(s, t) for t in sequences if t != s))


def _ends_with(sequence: Sequence[int], end: Sequence[int]) -> bool:
    return len(end) <= len(sequence) and tuple(sequence[-len(end) :]) == tuple(end)


class BadWords:
    """Which tokens would complete a forbidden sequence."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._last_of: dict[tuple[int, ...], set[int]] = {}  # all but the last token -> last ones
        for sequence in sequences:
            assert sequence, "an empty sequence forbids everything"
            self._last_of.setdefault(tuple(sequence[:-1]), set()).add(sequence[-1])
        self._lengths = sorted({len(start) for start in self._last_of} - {0})

    @property
    def is_active(self) -> bool:
        """Whether any sequence is forbidden."""
        return bool(self._last_of)

    @property
    def lookback(self) -> int:
        """How many tokens of history decide; 0 when only single tokens are forbidden."""
        return self._lengths[-1] if self._lengths else 0

    @property
    def single_ids(self) -> list[int]:
        """Tokens that are a forbidden word alone."""
        return sorted(self._last_of.get((), ()))

    @property
    def all_ids(self) -> set[int]:
        """Every token id that stands in a sequence."""
        return {i for start, lasts in self._last_of.items() for i in (*start, *lasts)}

    def completing(self, history: Sequence[int]) -> set[int]:
        """Tokens that would complete a sequence of two or more after this output."""
        banned: set[int] = set()
        for length in self._lengths:
            if length <= len(history):
                banned |= self._last_of.get(tuple(history[-length:]), set())
        return banned
