"""Training of Medusa heads beside a target that is left as it is (Medusa-1, arXiv 2401.10774).

With h_t the target's state after its final norm, head k (from 0) reads h_t and is to say the token
k + 2 places on::

    loss = mean over starts t of  sum_k depth_decay ** k * loss(head_k(h_t), law of x_{t+k+2})

What differs from the paper: its labels are the tokens of the text (``hard``), here the target's law
at that place by default, which says more about each place. ``official`` is the training fork's sum:
each head's mean over its own labels, weights 0.8 ** (k + 1), the tokens as labels, and every label
that is answer, also where the round would have begun in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.drafters.medusa import MedusaHeads
from forespeak.formats.medusa_config import MedusaConfig
from forespeak.train.laws import GuessLoss, LawSettings, Scored, depth_weights
from forespeak.train.losses import HARD, Mix
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, Guesses, find_guesses
from forespeak.train.weights import begin, copied, load


@dataclass(frozen=True, kw_only=True)
class MedusaTraining(LawSettings):
    """Settings of Medusa heads.

    Attributes:
        official: the training fork's labels, masks and means, which soft, hard, l1 and
            max_positions must then be left out for.
    """

    official: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.official:
            self.check_official()


class MedusaObjective(Objective):
    """See the top of the file."""

    def __init__(
        self,
        config: MedusaConfig,
        target: TargetView,
        settings: MedusaTraining,
        network: MedusaHeads,
        token_ids: Tensor | None,
    ) -> None:
        self.config, self.network, self.token_ids = config, network, token_ids
        self._settings = settings
        vocabulary = DraftVocabulary(token_ids, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, vocabulary)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        assert batch.hidden is not None
        settings, count = self._settings, self.config.num_heads
        guesses = find_guesses(
            batch, count, generator=generator, whole_runs=not settings.official,
            max_positions=None if settings.official else settings.max_positions,
        )  # fmt: skip
        heads = self.network
        assert isinstance(heads, MedusaHeads)
        states = batch.hidden[guesses.texts, guesses.places].float()  # [N, H]
        outputs = heads(states)[guesses.start, guesses.depth]  # [n, H]
        weights, mix = depth_weights(guesses, settings.depth_decay), settings.mix
        if settings.official:
            weights, mix = self._official_weights(guesses), Mix(hard=1.0)
        scored = self._scored(outputs, guesses, weights, batch, mix)
        parts = scored.by_depth(guesses)
        if settings.official:
            parts |= _mean_hard(scored, guesses)
        length = guesses.acceptance_length(scored.chances)
        return Loss(scored.total, parts, length, float(len(guesses.places)))

    def _official_weights(self, guesses: Guesses) -> Tensor:
        counts = torch.bincount(guesses.depth, minlength=guesses.num_depths).clamp(min=1)
        decay: Tensor = self._settings.depth_decay ** (guesses.depth.float() + 1)
        return decay / counts[guesses.depth]

    def _scored(
        self, outputs: Tensor, guesses: Guesses, weights: Tensor, batch: Batch, mix: Mix
    ) -> Scored:
        """All heads at once where they share a matrix, else one after another."""
        heads = self.network
        assert isinstance(heads, MedusaHeads)
        own = heads.output_weights()
        if len(own) < 2:
            matrix = own[0] if own else self._score.head
            return self._score([(outputs, matrix)], guesses, weights, batch, mix)
        total = outputs.new_zeros(())
        numbers, chances = outputs.new_zeros(len(outputs), 6), outputs.new_zeros(len(outputs))
        for depth, matrix in enumerate(own):
            at = (guesses.depth == depth).nonzero()[:, 0]
            part = self._score([(outputs[at], matrix)], guesses, weights[at], batch, mix, at=at)
            total = total + part.total
            numbers[at], chances[at] = part.numbers, part.chances
        return Scored(total, numbers.float(), chances.float())


def _mean_hard(scored: Scored, guesses: Guesses) -> dict[str, float]:
    """Each head's mean cross-entropy."""
    return {
        f"ce_{depth + 1}": float(scored.numbers[guesses.depth == depth, HARD].nanmean())
        for depth in range(guesses.num_depths)
    }


def make(
    config: MedusaConfig, target: TargetView, settings: MedusaTraining, start: Start
) -> MedusaObjective:
    """The method's objective; see ``objective.make_objective``.

    Matrices of logits of its own start from the target's head.
    """
    tensors, token_ids = begin("medusa", config, target, start)
    if settings.from_target and start.tensors is None:
        vocabulary = DraftVocabulary(token_ids, target.config.vocab_size, target.device)
        for name in tensors:
            if name.endswith("output.weight"):
                tensors[name] = copied(vocabulary.rows_of(target.head))
    network = MedusaHeads(config)
    load(network, tensors, target)
    return MedusaObjective(config, target, settings, network, token_ids)
