"""Training of DSpark: DFlash's block, a sequential head and a confidence head (arXiv 2607.05147).

The laws are corrected by the true token before each place (teacher forcing), and the confidence
head is to say how likely a draft token is to be accepted, which is the overlap of the two laws::

    loss = sum of w_k * (hard * -log q(x) + l1 * sum |q - p| + confidence * bce(c_k, overlap))
           / sum of w_k                                    q = softmax(U_k + b_k)

The overlap is a target and gets no gradient; the confidence's gradient reaches the block and W1, as
in the official code. Weights of depths and blocks are DFlash's; the official code's are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forespeak.drafters.dspark import DSparkNetwork
from forespeak.errors import OptionError
from forespeak.formats.dflash_config import DFlashConfig
from forespeak.train.laws import Scored
from forespeak.train.losses import HIT, Mix, Product, chance_loss
from forespeak.train.objective import Batch, Start, TargetView
from forespeak.train.objectives.dflash import BlockObjective, Blocks, BlockSettings, begin_block
from forespeak.train.sts import calibrate


@dataclass(frozen=True, kw_only=True)
class DSparkTraining(BlockSettings):
    """Settings of DSpark.

    Attributes:
        soft, hard, l1: as everywhere, with the official weights as defaults.
        confidence: weight of the confidence head's loss.
        calibrate: fit the temperatures of the confidences to held-out texts in the end (STS).
        calibrate_greedy: to greedy acceptance instead of that at temperature 1.
    """

    soft: float = 0.0
    hard: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    calibrate: bool = True
    calibrate_greedy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence < 0:
            raise OptionError(f"confidence is {self.confidence}; allowed: 0 or more.")


class DSparkObjective(BlockObjective):
    """See the top of the file."""

    network: DSparkNetwork

    def __init__(
        self,
        config: DFlashConfig,
        target: TargetView,
        settings: DSparkTraining,
        network: DSparkNetwork,
        token_ids: Tensor | None,
    ) -> None:
        super().__init__(config, target, settings, network, token_ids)
        self._spark = settings

    def _corrections(self, blocks: Blocks, at: tuple[Tensor, Tensor]) -> list[Product]:
        head = self.network.markov_head
        if head is None:
            return []
        inner = head.inner(blocks.previous, blocks.states)
        return [(inner.flatten(0, 1)[at], head.markov_w2.weight)]

    def _further(
        self, blocks: Blocks, at: tuple[Tensor, Tensor], scored: Scored, weights: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        logits = self.network.confidence_logits(blocks.states, blocks.previous)
        if logits is None:
            return super()._further(blocks, at, scored, weights)
        losses = chance_loss(logits.flatten(0, 1)[at], scored.chances.clamp(0, 1))
        loss = (losses * weights).sum()
        return self._spark.confidence * loss, {"confidence": float(loss.detach())}

    def calibrate(self, batches: Iterable[tuple[Batch, torch.Generator]]) -> dict[str, Any]:
        """See ``sts.py``; texts too short to observe anything leave the confidences as they are."""
        if not (self._spark.calibrate and self.config.confidence_head):
            return {}
        greedy = self._spark.calibrate_greedy
        seen = [self.observed(batch, generator, greedy=greedy) for batch, generator in batches]
        if not sum(len(accepted) for _, accepted in seen):
            return {}
        found = calibrate(*(torch.cat(parts) for parts in zip(*seen, strict=True)))
        self.config = replace(self.config, temperatures=found.temperatures)
        return {"calibration": {"greedy": greedy, **asdict(found)}}

    @torch.no_grad()
    def observed(
        self, batch: Batch, generator: torch.Generator, *, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """What ``sts.calibrate`` reads, of blocks of held-out texts.

        Args:
            batch: the texts.
            generator: draws anchors, and whether drafts are accepted where not ``greedy``.
            greedy: a draft is accepted when the best word is the one that stands in the text, as in
                greedy decoding of texts that were written so; False draws it by the overlap of the
                laws, as at temperature 1.

        Returns:
            [N, D] logits of the confidences, NaN where a text ends sooner; [N] accepted drafts.
        """
        guesses = self.draw(batch, generator)
        blocks = self._run(batch, guesses)
        at = blocks.slots[guesses.start], guesses.depth + self._shift
        products = [(blocks.states.flatten(0, 1)[at], self._score.head)]
        products += self._corrections(blocks, at)
        weights = torch.ones(len(guesses.start), device=batch.tokens.device)
        scored = self._score(products, guesses, weights, batch, Mix(hard=1.0))
        happened = scored.numbers[:, HIT] > 0
        if not greedy:
            drawn = torch.rand(len(weights), generator=generator).to(weights.device)
            happened = drawn < scored.chances
        logits = self.network.confidence_logits(blocks.states, blocks.previous)
        assert logits is not None, "there is no confidence head"
        shape = (len(guesses.places), guesses.num_depths)
        table, run = torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.long)
        place = guesses.start.cpu(), guesses.depth.cpu()
        table[place] = logits.flatten(0, 1)[at].float().cpu()
        run[place] = happened.long().cpu()
        return table, run.cumprod(1).sum(1)


def make(
    config: DFlashConfig, target: TargetView, settings: DSparkTraining, start: Start
) -> DSparkObjective:
    """The method's objective; see ``objective.make_objective``.

    A fresh sequential head begins with corrections of zero.

    Raises:
        DrafterError: the target lacks the layers that the drafter reads.
        OptionError: the config has no confidence head and its loss a weight.
    """
    if not config.confidence_head and settings.confidence:
        raise OptionError(
            f"confidence is {settings.confidence} and the drafter has no confidence head; set "
            "confidence to 0, or give the drafter one (confidence_head)."
        )
    network = DSparkNetwork(config)
    token_ids = begin_block(network, "dspark", target, settings, start)
    head = network.markov_head
    if head is not None and start.tensors is None:
        torch.nn.init.zeros_(head.markov_w2.weight)
    return DSparkObjective(config, target, settings, network, token_ids)
