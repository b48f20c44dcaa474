"""Training of EAGLE-1 (arXiv 2401.15077).

With f_t the target's state after its final norm, the drafter reads the pair of f_t and x_{t+1} and
makes what stands for f_{t+1}; the target's head on it is the law of x_{t+2}::

    loss = mean over starts t of  feature * smooth_l1(out_t, f_{t+1})
                                 + sum_k depth_decay ** k * loss(head(out_k), law of x_{t+k+2})

The paper has one step (k = 0), the feature weighing 1 and the law 0.1 (``soft``), and noise on f;
more ``steps`` run on the drafter's own states as EAGLE-3's training does (``chain.py``).

What differs from the official trainer, which ``official`` gives: its mask is that of token t while
x_{t+2} is predicted, the last token of a text left out, and its means are over mask + 1e-5. The
amplitude of its noise shrinks with the length of a text, ``noise * 512 / S`` (``noise_by_length``);
the paper's does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.drafters.eagle import EagleNetwork
from forespeak.errors import OptionError
from forespeak.formats.eagle import EagleConfig
from forespeak.train.chain import Unroll
from forespeak.train.laws import GuessLoss, LawSettings, Scored, depth_weights
from forespeak.train.losses import SOFT, Mix, smooth_l1
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, Guesses, find_guesses
from forespeak.train.weights import begin, load, pass_through

_MOST_STEPS = 16
_NOISE_LENGTH = 512  # tokens of a text at which the official noise has its full amplitude


@dataclass(frozen=True, kw_only=True)
class EagleTraining(LawSettings):
    """Settings of EAGLE-1.

    Attributes:
        soft: weighs a tenth by default, beside the feature's loss.
        feature: weight of the distance between states.
        steps: on the drafter's own states; 1 is the paper's teacher forcing.
        noise: features get uniform noise up to this; the paper has 0.1.
        noise_by_length: the amplitude is ``noise * 512 / S`` for texts of S tokens.
        official: the official trainer's mask and means; the law's weight is then ``soft`` on the
            cross-entropy.
    """

    soft: float = 0.1
    feature: float = 1.0
    steps: int = 1
    noise: float = 0.0
    noise_by_length: bool = False
    official: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.steps <= _MOST_STEPS:
            raise OptionError(f"steps is {self.steps}; allowed: 1 to {_MOST_STEPS}.")
        if min(self.noise, self.feature) < 0:
            raise OptionError(
                f"noise is {self.noise} and feature {self.feature}; allowed: 0 or more."
            )
        if self.noise_by_length and not self.noise:
            raise OptionError(
                "noise_by_length is true and noise is 0; give the noise, or leave it."
            )
        if self.official and (self.steps, self.hard, self.l1, self.max_positions) != (
            1,
            0,
            0,
            None,
        ):
            raise OptionError(
                "official is true, which has one step and no hard, l1 or max_positions; leave them "
                "or official out."
            )


class EagleObjective(Objective):
    """See the top of the file."""

    def __init__(
        self,
        config: EagleConfig,
        target: TargetView,
        settings: EagleTraining,
        network: EagleNetwork,
        token_ids: Tensor | None,
    ) -> None:
        self.config, self.network, self.token_ids = config, network, token_ids
        self._settings = settings
        vocabulary = DraftVocabulary(token_ids, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, vocabulary)
        self._unroll = Unroll(config.layers, target.embedding, network, lambda outputs: outputs)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        assert batch.hidden is not None
        settings = self._settings
        guesses = self._guesses(batch, generator)
        starts, slots = guesses.padded(len(batch.tokens))
        features = self._noisy(batch.hidden.float(), generator)
        outputs = self._unroll(batch.tokens, features, starts, settings.steps)
        picked = outputs.flatten(0, 1)[slots[guesses.start], guesses.depth]
        more = 1e-5 if settings.official else 0.0
        weights = depth_weights(guesses, settings.depth_decay, more=more)
        mix = Mix(soft=settings.soft) if settings.official else settings.mix
        scored = self._score(
            [(picked, self._score.head)], guesses, weights, batch, mix,
            all_words=settings.official,
        )  # fmt: skip
        wanted = batch.hidden.flatten(0, 1)[guesses.law_index]
        apart = (smooth_l1(picked, wanted) * weights).sum()
        parts = {"feature": float(apart.detach())} | self._parts(scored, guesses, weights)
        total = settings.feature * apart + scored.total
        length = guesses.acceptance_length(scored.chances)
        return Loss(total, parts, length, float(len(guesses.places)))

    def _guesses(self, batch: Batch, generator: torch.Generator) -> Guesses:
        settings = self._settings
        if not settings.official:
            return find_guesses(
                batch, settings.steps, generator=generator, max_positions=settings.max_positions
            )
        counted = batch.supervised.clone()
        counted[torch.arange(len(counted)), batch.lengths - 1] = False
        texts, places = counted.nonzero(as_tuple=True)
        start = torch.arange(len(texts), device=texts.device)
        return Guesses(texts, places, start, torch.zeros_like(start), counted.shape[1], 1)

    def _noisy(self, features: Tensor, generator: torch.Generator) -> Tensor:
        settings = self._settings
        if not settings.noise:
            return features
        drawn = torch.rand(features.shape, generator=generator).to(features.device)
        amplitude = settings.noise
        if settings.noise_by_length:
            amplitude *= _NOISE_LENGTH / features.shape[1]
        return features + (2 * drawn - 1) * amplitude

    def _parts(self, scored: Scored, guesses: Guesses, weights: Tensor) -> dict[str, float]:
        found = scored.by_depth(guesses)
        if self._settings.official:
            found["law"] = float((scored.numbers[:, SOFT] * weights).sum())
        return found


def make(
    config: EagleConfig, target: TargetView, settings: EagleTraining, start: Start
) -> EagleObjective:
    """The method's objective; see ``objective.make_objective``.

    From the target comes the state itself: a fresh drafter hands it on, and its layers add nothing
    yet. The target's layers would be a bad start, since they read and add to states before the
    norm, which are an order of magnitude larger (SmolLM2: a first loss of 87 instead of 3).
    """
    tensors, token_ids = begin("eagle", config, target, start)
    if settings.from_target and start.tensors is None:
        tensors["fc.weight"] = pass_through(tensors["fc.weight"], config.hidden_size)
        for at in range(config.layers.num_layers):
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                tensors[f"layers.{at}.{name}"] = torch.zeros_like(tensors[f"layers.{at}.{name}"])
    network = EagleNetwork(config)
    load(network, tensors, target)
    return EagleObjective(config, target, settings, network, token_ids)
