"""A reduced draft vocabulary: the words that the target writes most.

Counted are the supervised tokens of training texts, because those are the ones to draft. A smaller
head is cheaper in every draft step, and the text stays the target's: a word outside is one that the
drafter never proposes.

V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forespeak.errors import OptionError


@dataclass(frozen=True)
class DraftWords:
    """A draft vocabulary.

    Attributes:
        token_ids: [Vd] int64 rising target ids.
        coverage: share of the counted tokens that are inside.
    """

    token_ids: Tensor
    coverage: float

    @property
    def d2t(self) -> Tensor:
        """[Vd] offsets: the target id of draft id i is i + d2t[i]."""
        return self.token_ids - torch.arange(len(self.token_ids))


def count_tokens(
    texts: Iterable[tuple[Sequence[int], Sequence[tuple[int, int]]]], vocab_size: int
) -> Tensor:
    """[V] int64, how often each token is supervised.

    Args:
        texts: token ids, and the half-open ranges of them that are supervised.
        vocab_size: V.
    """
    counts = np.zeros(vocab_size, np.int64)
    for ids, spans in texts:
        for begin, end in spans:
            np.add.at(counts, np.asarray(ids[begin:end], np.int64), 1)
    return torch.from_numpy(counts)


def choose_words(counts: Tensor, size: int, *, always: Sequence[int] = ()) -> DraftWords:
    """The most frequent tokens.

    Of equally frequent ones the lower id goes first, so tokens that were never seen fill up from
    the lowest.

    Args:
        counts: [V] of each token.
        size: Vd.
        always: ids that are inside however rare, such as those that end a text.

    Raises:
        OptionError: the size is not between the number of ``always`` and V.
    """
    vocab_size, kept = len(counts), sorted(set(always))
    if not max(1, len(kept)) <= size < vocab_size:
        raise OptionError(
            f"draft_vocab_size is {size}; allowed: {max(1, len(kept))} to {vocab_size - 1}, fewer "
            "than the target's tokens. Leave it out for the whole vocabulary."
        )
    ranked = counts.double()
    ranked[kept] = float("inf")
    ids = ranked.argsort(descending=True, stable=True)[:size].sort().values
    total = int(counts.sum())
    return DraftWords(ids, int(counts[ids].sum()) / total if total else 0.0)
