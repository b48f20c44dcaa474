"""What the target makes of the training texts: its states, and the outputs of tapped layers.

In bfloat16 however they come, so that live and cached features give the same numbers.

S tokens of a text, H hidden size, K tapped layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.models.base import Cache, TargetModel
from forespeak.types import Segment

FORWARD_TOKENS = 2048
"""Tokens of one forward; texts are packed into it, and longer ones cut into chunks."""


@dataclass(frozen=True)
class Needs:
    """What is read of the target.

    Attributes:
        taps: 0-based layers, in the order wanted.
        hidden: the state after the final norm.
    """

    taps: tuple[int, ...] = ()
    hidden: bool = True


@dataclass(frozen=True)
class Features:
    """Of one text.

    Attributes:
        hidden: [S, H] bfloat16, None when not asked for.
        taps: [S, K, H] bfloat16, None without any.
    """

    hidden: Tensor | None
    taps: Tensor | None


class FeatureSource(ABC):
    """Gives features of texts by their number in the data set."""

    @abstractmethod
    def get(self, indices: Sequence[int], lengths: Sequence[int]) -> list[Features]:
        """Features of some texts, of each its first tokens.

        Args:
            indices: of the texts.
            lengths: tokens wanted of each.
        """


class LiveFeatures(FeatureSource):
    """Runs the target when asked.

    Args:
        model: the target.
        texts: token ids of every text of the data set.
        needs: what is read.
    """

    def __init__(self, model: TargetModel, texts: Sequence[Sequence[int]], needs: Needs) -> None:
        self._model, self._texts, self._needs = model, texts, needs

    def get(self, indices: Sequence[int], lengths: Sequence[int]) -> list[Features]:
        asked = [self._texts[i][:n] for i, n in zip(indices, lengths, strict=True)]
        return target_features(self._model, asked, self._needs)


def target_features(
    model: TargetModel, texts: Sequence[Sequence[int]], needs: Needs
) -> list[Features]:
    """Features of texts, several in a forward; what lies together in one changes nothing for a
    text but its last bits (and not even these in int8).

    Args:
        model: the target.
        texts: token ids, none empty.
        needs: what is read.
    """
    found: list[Features] = []
    group: list[Sequence[int]] = []
    for text in texts:
        if group and sum(map(len, group)) + len(text) > FORWARD_TOKENS:
            found += _run(model, group, needs)
            group = []
        group.append(text)
    return found + (_run(model, group, needs) if group else [])


def _run(model: TargetModel, texts: Sequence[Sequence[int]], needs: Needs) -> list[Features]:
    cache = model.new_cache(len(texts), max(map(len, texts)))
    if len(texts) == 1:
        parts = [
            _forward(model, cache, [texts[0][start : start + FORWARD_TOKENS]], start, needs)[0]
            for start in range(0, len(texts[0]), FORWARD_TOKENS)
        ]
        return [Features(_joined([p.hidden for p in parts]), _joined([p.taps for p in parts]))]
    return _forward(model, cache, texts, 0, needs)


def _forward(
    model: TargetModel, cache: Cache, texts: Sequence[Sequence[int]], start: int, needs: Needs
) -> list[Features]:
    """One forward of the tokens from ``start`` on of some texts, a row each."""
    sizes = [len(text) for text in texts]
    tokens = torch.tensor([token for text in texts for token in text], device=model.device)
    positions = torch.cat([torch.arange(start, start + n) for n in sizes]).to(model.device)
    output = model.forward(
        tokens, positions, cache, [Segment(row, n) for row, n in enumerate(sizes)],
        logits_at=torch.zeros(1, dtype=torch.long, device=model.device), taps=needs.taps,
    )  # fmt: skip
    for row in range(len(texts)):
        cache.commit_all(row)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    hidden = output.hidden.bfloat16() if needs.hidden else None
    taps = None if output.taps is None else output.taps.bfloat16()
    return [
        Features(
            None if hidden is None else hidden[end - n : end],
            None if taps is None else taps[end - n : end],
        )
        for n, end in zip(sizes, ends, strict=True)
    ]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None
