"""Training of parallel prediction heads beside a target that is left as it is (arXiv 2404.19737).

With z the trunk states, the outputs of the target's layer ``trunk_layer``, head i (from 1) is a
causal decoder layer on them and is to say the token i + 1 places on::

    loss = mean over starts t of  sum_i depth_decay ** (i - 1) * loss(law_i, law of x_{t+1+i})
    law_i = softmax(U norm(heads[i - 1](z)_t))          norm and U the target's, frozen

The paper weighs all heads alike (``depth_decay`` 1) and takes the tokens as labels (``hard``). The
heads' losses are added chunk by chunk of rows (``losses.py``), so memory for logits is that of a
chunk, however many heads there are; the paper comes to one head's by going through them in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.drafters.mtp_parallel import ParallelHeads
from forespeak.formats.mtp_parallel import MtpParallelConfig
from forespeak.models.decoder import rms_norm
from forespeak.train.attention import CausalAttention, Rotations
from forespeak.train.laws import GuessLoss, LawSettings, depth_weights
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, find_guesses
from forespeak.train.weights import begin, copy_layer, last_layers, load


@dataclass(frozen=True, kw_only=True)
class MtpParallelTraining(LawSettings):
    """Settings of parallel heads."""


class MtpParallelObjective(Objective):
    """See the top of the file."""

    network: ParallelHeads

    def __init__(
        self,
        config: MtpParallelConfig,
        target: TargetView,
        settings: MtpParallelTraining,
        network: ParallelHeads,
        token_ids: Tensor | None,
    ) -> None:
        self.config, self.network, self.token_ids = config, network, token_ids
        self.taps = (config.trunk_layer,)
        self._settings, self._target = settings, target
        vocabulary = DraftVocabulary(token_ids, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, vocabulary)
        self._rotations = Rotations(config.layer, target.device)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        assert batch.taps is not None
        settings, target = self._settings, self._target
        guesses = find_guesses(
            batch, self.config.num_heads, generator=generator,
            max_positions=settings.max_positions,
        )  # fmt: skip
        rotation = self._rotations(torch.arange(batch.tokens.shape[1]))
        attend = CausalAttention(self.config.layer)
        outputs = self.network(batch.taps[:, :, 0].float(), rotation, attend)  # [B, S, N, H]
        picked = outputs.flatten(0, 1)[guesses.flat_starts[guesses.start], guesses.depth]
        states = rms_norm(picked.float(), target.norm.float(), target.norm_eps)
        weights = depth_weights(guesses, settings.depth_decay)
        scored = self._score([(states, self._score.head)], guesses, weights, batch, settings.mix)
        length = guesses.acceptance_length(scored.chances)
        return Loss(scored.total, scored.by_depth(guesses), length, float(len(guesses.places)))


def make(
    config: MtpParallelConfig, target: TargetView, settings: MtpParallelTraining, start: Start
) -> MtpParallelObjective:
    """The method's objective; see ``objective.make_objective``.

    Fresh heads start as the target's last layer.

    Raises:
        DrafterError: the target lacks the trunk layer.
    """
    config.check_target(target.config)
    tensors, token_ids = begin("mtp_parallel", config, target, start)
    if settings.from_target and start.tensors is None:
        for layer in last_layers(target, 1):
            for head in range(config.num_heads):
                copy_layer(tensors, f"heads.{head}.", layer)
    network = ParallelHeads(config)
    load(network, tensors, target)
    return MtpParallelObjective(config, target, settings, network, token_ids)
