"""Prompt lookup (n-gram) drafting.

Where the last n tokens of the text (prompt, output and root) stood before, what followed them then
is proposed again. Longest match first, of equal lengths the most recent one. The copy may run into
what it writes itself, as in LZ77, so that a text that repeats with a short period is proposed at
full length.

After A. Saxena, "Prompt Lookup Decoding" (2023), which scans the whole text every round and takes
the earliest match; here a table of n-grams grows with the text, so a round costs the same however
long the text is.

Every proposal is a point mass. How many tokens a match is worth follows from how earlier proposals
of this row fared: what was won whole is doubled, what was lost is cut back to a little more than
was accepted. That looks at older rounds only (law 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.drafters.table import NGRAM
from forespeak.errors import OptionError
from forespeak.types import Observation, PointLaws, SpeculationConfig

_FIRST_LIMIT = 4


@dataclass
class _Row:
    """Tokens of a row, and where each n-gram ended last (index of its last token)."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    proposed: tuple[int, ...] = ()
    limit: int = _FIRST_LIMIT


class NgramDrafter(Drafter):
    """Proposes what followed an earlier occurrence of the last tokens.

    Args:
        lookup_min, lookup_max: shortest and longest n-gram that is matched, 1 or more.
        adaptive: follow how a row's proposals fared; without it every match is copied as far as
            the caller asks.

    Raises:
        OptionError: the lengths are not 1 <= lookup_min <= lookup_max.
    """

    info = NGRAM.info

    def __init__(self, *, lookup_min: int, lookup_max: int, adaptive: bool = True) -> None:
        if not 1 <= lookup_min <= lookup_max:
            raise OptionError(
                f"lookup_min is {lookup_min} and lookup_max is {lookup_max}; allowed: "
                "1 <= lookup_min <= lookup_max. Raise the one or lower the other."
            )
        self._lengths = range(lookup_min, lookup_max + 1)
        self._adaptive = adaptive
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int) -> None:
        assert row not in self._rows, row
        self._rows[row] = _Row()

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            row = self._rows[observation.row]
            if row.proposed:  # observed: the root and those of the proposed that were accepted
                self._learn(row, len(observation.tokens) - 1)
            for token in observation.tokens:
                row.tokens.append(token)
                self._index(row)

    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> PointLaws:
        return PointLaws(
            tuple(
                self._propose_one(self._rows[row], root, depth)
                for row, root in zip(rows, roots, strict=True)
            )
        )

    def _index(self, row: _Row) -> None:
        """Enter the n-grams that the newest token ends."""
        last = len(row.tokens) - 1
        for n in self._lengths:
            if n <= len(row.tokens):
                row.ends[tuple(row.tokens[-n:])] = last

    def _learn(self, row: _Row, num_accepted: int) -> None:
        if num_accepted >= len(row.proposed):
            row.limit = max(row.limit, 2 * len(row.proposed))
        else:
            row.limit = max(num_accepted + 2, row.limit // 2)
        row.proposed = ()

    def _propose_one(self, row: _Row, root: int, depth: int) -> tuple[int, ...]:
        row.proposed = ()
        text = [*row.tokens[-self._lengths[-1] :], root]
        for n in reversed(self._lengths):
            end = row.ends.get(tuple(text[-n:])) if n <= len(text) else None
            if end is not None:
                length = min(depth, row.limit) if self._adaptive else depth
                row.proposed = _copy(row.tokens, root, end + 1, length)
                break
        return row.proposed


def _copy(tokens: Sequence[int], root: int, start: int, length: int) -> tuple[int, ...]:
    """``length`` tokens of the text from ``start`` on, the copy itself being part of the text.

    Index map, m = len(tokens)::

        0 .... start .... m-1 | m     | m+1 ......
        tokens                | root  | the copy
    """
    out: list[int] = []
    for at in range(start, start + length):
        if at < len(tokens):
            out.append(tokens[at])
        else:
            out.append(root if at == len(tokens) else out[at - len(tokens) - 1])
    return tuple(out)


def open_drafter(config: SpeculationConfig, target: TargetParts, num_rows: int) -> NgramDrafter:
    """The method's drafter; see ``loader.load_drafter``."""
    assert config.lookup_min is not None and config.lookup_max is not None
    return NgramDrafter(lookup_min=config.lookup_min, lookup_max=config.lookup_max)
