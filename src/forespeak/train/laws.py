"""The loss of guesses: what methods share whose drafts are laws at depths below a start.

Each guess has a state x of the drafter; its law is softmax(W x) over the draft vocabulary and its
model the target's law at that place, known from the target's true state. Words outside the draft
vocabulary are left out: where the true token is one of them the guess has no loss and no chance.

n guesses, N starts, D depths, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.train.losses import HIT, OVERLAP, Mix, Product, Rows, TargetLaw, law_loss
from forespeak.train.objective import Batch
from forespeak.train.rows import DraftVocabulary, Guesses


@dataclass(frozen=True, kw_only=True)
class LawSettings:
    """Settings that methods share.

    Attributes:
        soft: weight of the divergence (KL) from the target's law.
        hard: weight of the cross-entropy with the token that stands in the text.
        l1: weight of the distance sum |q - p|, which is what acceptance depends on.
        depth_decay: depth k (from 0) weighs depth_decay ** k.
        max_positions: about how many starts of a batch are in the loss, drawn anew each time; None
            takes all.
        from_target: layers, norms and heads start from the target's own where shapes allow.

    Raises:
        OptionError: values that cannot be.
    """

    soft: float = 1.0
    hard: float = 0.0
    l1: float = 0.0
    depth_decay: float = 0.8
    max_positions: int | None = None
    from_target: bool = True

    def __post_init__(self) -> None:
        weights = (self.soft, self.hard, self.l1)
        if min(weights) < 0 or max(weights) == 0:
            raise OptionError(
                f"soft, hard and l1 are {self.soft}, {self.hard} and {self.l1}; allowed: 0 or "
                "more, one of them above 0."
            )
        if not 0 < self.depth_decay <= 1:
            raise OptionError(f"depth_decay is {self.depth_decay}; allowed: above 0, up to 1.")
        if self.max_positions is not None and self.max_positions < 1:
            raise OptionError(
                f"max_positions is {self.max_positions}; allowed: 1 or more starts of a batch in "
                "the loss, or none to take them all."
            )

    def check_official(self) -> None:
        """Refuse settings that an official trainer's sum has no place for.

        Raises:
            OptionError: naming the first.
        """
        for name in ("soft", "hard", "l1", "max_positions"):
            default = getattr(LawSettings, name)
            if getattr(self, name) != default:
                raise OptionError(
                    f"{name} is {getattr(self, name)} and official is true, which fixes the loss; "
                    f"leave {name} or official out."
                )

    @property
    def mix(self) -> Mix:
        """For the losses."""
        return Mix(hard=self.hard, kl=self.soft, l1=self.l1)

    @property
    def needs_law(self) -> bool:
        """The target's law is in the loss, not only its tokens."""
        return self.soft > 0 or self.l1 > 0


@dataclass(frozen=True)
class Scored:
    """What guesses come to.

    Attributes:
        total: weighted sum, with gradient.
        numbers: [n, 6] see ``losses.law_loss``.
        chances: [n] of acceptance: the overlap of the laws, or whether the best word is the true
            one where the target's law is not known.
    """

    total: Tensor
    numbers: Tensor
    chances: Tensor

    def by_depth(self, guesses: Guesses) -> dict[str, float]:
        """Mean chance of acceptance at each depth, for the log."""
        count = torch.bincount(guesses.depth, minlength=guesses.num_depths)
        summed = torch.zeros(guesses.num_depths, device=self.chances.device)
        summed = summed.index_add(0, guesses.depth, self.chances) / count.clamp(min=1)
        return {f"accept_{k + 1}": value for k, value in enumerate(summed.tolist())}


class GuessLoss:
    """Scores guesses against one target.

    Args:
        head: [V, H] the target's.
        vocabulary: the draft vocabulary.
    """

    def __init__(self, head: Tensor, vocabulary: DraftVocabulary) -> None:
        self.vocabulary = vocabulary
        self.head = vocabulary.rows_of(head)  # [Vd, H]

    def __call__(
        self,
        products: Sequence[Product],
        guesses: Guesses,
        weights: Tensor,
        batch: Batch,
        mix: Mix,
        *,
        at: Tensor | None = None,
        all_words: bool = False,
    ) -> Scored:
        """Score guesses.

        Args:
            products: [n, I] states and [Vd, I] weights that make the logits.
            guesses: where they are.
            weights: [n] of each in the sum.
            batch: with ``hidden`` where the target's laws are to be known.
            mix: the losses.
            at: [m] int64, the guesses that are meant, of which products and weights then are; None
                for all.
            all_words: also guesses whose true token is outside the draft vocabulary.
        """
        index, labels = guesses.law_index, guesses.labels(batch.tokens)
        if at is not None:
            index, labels = index[at], labels[at]
        labels = self.vocabulary.draft_ids(labels)
        known = torch.ones_like(labels, dtype=torch.bool) if all_words else labels >= 0
        law = None
        if batch.hidden is not None:
            law = TargetLaw(batch.hidden.flatten(0, 1), self.head, index)
        rows = Rows(torch.where(known, weights, 0.0), labels, law)
        total, numbers = law_loss(products, rows, mix)
        chances = numbers[:, HIT if law is None else OVERLAP]
        return Scored(total, numbers, torch.where(known, chances, 0.0))


def depth_weights(guesses: Guesses, decay: float, *, more: float = 0.0) -> Tensor:
    """[n] decay ** depth over the number of starts: the mean over starts of a sum over depths.

    Args:
        guesses: n of them.
        decay: from a depth to the next.
        more: added to the number of starts.
    """
    share: Tensor = decay ** guesses.depth.float()
    return share / (max(1, len(guesses.places)) + more)
