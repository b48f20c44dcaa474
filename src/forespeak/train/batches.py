"""Which texts a step sees, from one number: the step. Nothing else has to be kept to go on.

    step --Order--> micro-batches of text numbers --Collator--> Batch

Texts of about equal length lie together, so that little is padding; which texts, and in which
order, is drawn from the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.train.dialogues import Sample
from forespeak.train.features import Features, FeatureSource
from forespeak.train.objective import Batch
from forespeak.train.recipe import BatchSettings, DataSettings

_POOL_BATCHES = 16  # texts of so many batches are sorted by length together

Group = tuple[int, ...]
"""Numbers of the texts of one micro-batch."""


@dataclass(frozen=True)
class TextSet:
    """The texts of a run.

    Attributes:
        texts: token ids of every text of the data, cut to ``max_length``.
        spans: of each text, the ranges to predict, cut likewise.
        trained: numbers of those to train on.
        held_out: numbers of those that measure progress.
        too_short: texts left out, for too little to predict.
    """

    texts: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    trained: tuple[int, ...]
    held_out: tuple[int, ...]
    too_short: int


def select_texts(samples: Sequence[Sample], settings: DataSettings, seed: int) -> TextSet:
    """Cut texts and part them into those to train on and those held out.

    Raises:
        OptionError: none is left to train on.
    """
    most = settings.max_length
    texts = tuple(sample.token_ids[:most] for sample in samples)
    spans = tuple(
        tuple((begin, min(end, most)) for begin, end in sample.spans if begin < most)
        for sample in samples
    )
    fit = [
        number
        for number, ranges in enumerate(spans)
        if sum(end - begin for begin, end in ranges) >= settings.min_supervised
    ]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(fit), generator=generator).tolist()
    aside = min(round(settings.held_out * len(fit)), len(fit) - 1)
    held_out = {fit[place] for place in drawn[: max(aside, 0)]}
    trained = tuple(number for number in fit if number not in held_out)
    if not trained:
        raise OptionError(
            f"None of the {len(samples)} texts has the {settings.min_supervised} tokens to predict "
            f"within its first {most} that data.min_supervised and data.max_length ask for; "
            "generate more or longer answers, or lower data.min_supervised."
        )
    return TextSet(texts, spans, trained, tuple(sorted(held_out)), len(samples) - len(fit))


class Order:
    """The micro-batches of every step.

    Args:
        numbers: of the texts to train on.
        lengths: tokens of each text, by number.
        settings: sizes.
        seed: of the order.
    """

    def __init__(
        self, numbers: Sequence[int], lengths: Sequence[int], settings: BatchSettings, seed: int
    ) -> None:
        self._numbers, self._lengths = list(numbers), lengths
        self._settings, self._seed = settings, seed
        self._ends: list[int] = []  # steps before the end of each epoch
        self._kept: tuple[int, list[Group]] | None = None

    def num_steps(self, epochs: int) -> int:
        """Steps of some epochs."""
        while len(self._ends) < epochs:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + self._steps_of(self._epoch(len(self._ends))))
        return self._ends[epochs - 1]

    def step(self, step: int) -> tuple[Group, ...]:
        """The micro-batches of a step, counted from 0."""
        epoch = self.epoch_of(step)
        first = step - (self._ends[epoch - 1] if epoch else 0)
        groups, each = self._epoch(epoch), self._settings.micro_batches
        return tuple(groups[first * each : (first + 1) * each])

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, both counted from 0."""
        epoch = 0
        while self.num_steps(epoch + 1) <= step:
            epoch += 1
        return epoch

    def _steps_of(self, groups: Sequence[Group]) -> int:
        # What is left over at an epoch's end makes no step, unless it is all there is.
        return max(1, len(groups) // self._settings.micro_batches)

    def _epoch(self, epoch: int) -> list[Group]:
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._drawn(epoch))
        return self._kept[1]

    def _drawn(self, epoch: int) -> list[Group]:
        generator = torch.Generator().manual_seed(_mixed(self._seed, epoch))
        drawn = torch.randperm(len(self._numbers), generator=generator).tolist()
        shuffled = [self._numbers[place] for place in drawn]
        mean = sum(self._lengths[n] for n in shuffled) / len(shuffled)
        pool = max(1, int(_POOL_BATCHES * self._settings.tokens / mean))
        groups: list[Group] = []
        for start in range(0, len(shuffled), pool):
            near = sorted(shuffled[start : start + pool], key=lambda n: (self._lengths[n], n))
            groups += self._cut(near)
        return [groups[place] for place in torch.randperm(len(groups), generator=generator)]

    def _cut(self, rising: Sequence[int]) -> list[Group]:
        """Texts of rising length as groups that have at most so many tokens with padding."""
        groups: list[list[int]] = []
        for number in rising:
            fits = groups and (len(groups[-1]) + 1) * self._lengths[number] <= self._settings.tokens
            if fits:
                groups[-1].append(number)
            else:
                groups.append([number])
        return [tuple(group) for group in groups]


def drawing(seed: int, step: int, micro_batch: int) -> torch.Generator:
    """The randomness of one micro-batch: what a process drew before changes nothing."""
    return torch.Generator().manual_seed(_mixed(seed, step, micro_batch, 1))


class Collator:
    """Makes batches.

    Args:
        data: the texts.
        source: their features; None when none are needed.
        device: where batches go.
    """

    def __init__(self, data: TextSet, source: FeatureSource | None, device: torch.device) -> None:
        self._data, self._source, self._device = data, source, device

    def batch(self, group: Group) -> Batch:
        """The batch of some texts; features in float32."""
        lengths = [len(self._data.texts[number]) for number in group]
        shape = (len(group), max(lengths))
        tokens = torch.zeros(shape, dtype=torch.long)
        supervised = torch.zeros(shape, dtype=torch.bool)
        for row, number in enumerate(group):
            tokens[row, : lengths[row]] = torch.tensor(self._data.texts[number])
            for begin, end in self._data.spans[number]:
                supervised[row, begin:end] = True
        found: Sequence[Features] = ()
        if self._source is not None:
            found = self._source.get(group, lengths)
        return Batch(
            tokens=tokens.to(self._device),
            supervised=supervised.to(self._device),
            lengths=torch.tensor(lengths, device=self._device),
            hidden=self._padded([features.hidden for features in found], shape[1]),
            taps=self._padded([features.taps for features in found], shape[1]),
        )

    def _padded(self, parts: Sequence[Tensor | None], length: int) -> Tensor | None:
        given = [part for part in parts if part is not None]
        if not given:
            return None
        shape = (len(given), length, *given[0].shape[1:])
        padded = given[0].new_zeros(shape)
        for row, part in enumerate(given):
            padded[row, : len(part)] = part
        return padded.to(self._device).float()  # in one go, as bfloat16


def _mixed(*numbers: int) -> int:
    """One seed from several numbers; neighbours lead to seeds that have nothing in common."""
    state = 0
    for number in numbers:
        state = (state ^ (number + 1)) * 0x9E3779B97F4A7C15 % 2**64
        state ^= state >> 29
    return state % 2**63
