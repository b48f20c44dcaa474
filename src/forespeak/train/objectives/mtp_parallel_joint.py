"""Training of parallel prediction heads together with their target (arXiv 2404.19737).

The trunk z and all heads on it are trained: the target's last layers, which say the next token, and
the further heads (``drafters/mtp_parallel.py``), each on the same states::

    loss = mean over answer tokens of  keep(law now)
           + heads_weight * mean over starts of  sum_i depth_decay ** (i - 1) * loss(head_i)

``keep`` is the divergence from the unchanged target's law (``teacher = "target"``, so that it stays
the model it was), or the cross-entropy with the text's tokens (``"text"``, as in the paper, which
trains from the start). Heads are differentiated one after another (``sequential.py``), so memory
holds the logits and activations of one.

With ``rank`` above 0 the target changes by LoRA, with 0 all its weights move (the paper). What is
written is a new target, and its heads in the folder ``heads`` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forespeak.drafters.mtp_parallel import ParallelHeads, random_drafter
from forespeak.drafters.starting import with_changes
from forespeak.errors import OptionError, unknown_choice
from forespeak.formats import mtp_parallel
from forespeak.formats.mtp_parallel import MtpParallelConfig
from forespeak.models.blocks import load_parameters
from forespeak.models.config import ModelConfig
from forespeak.train.attention import CausalAttention, Rotations
from forespeak.train.laws import GuessLoss, LawSettings, Scored, depth_weights
from forespeak.train.lora import add_lora, head_products, merged
from forespeak.train.losses import Mix
from forespeak.train.network import DecoderNetwork, weights_of, write_model
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, Guesses, find_guesses
from forespeak.train.sequential import HeadLoss, add_heads
from forespeak.train.weights import copy_layer, last_layers

TEACHERS = ("target", "text")
HEADS_FOLDER = "heads"
_HEADS = "heads."


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """A target and its parallel heads.

    Attributes:
        model: the target's sizes.
        heads: the heads'; they take the target's head for their logits.
    """

    model: ModelConfig
    heads: MtpParallelConfig

    def __post_init__(self) -> None:
        if self.heads.draft_vocab_size is not None:
            raise OptionError(
                "Heads that are trained with their target take its whole head; leave "
                "heads.draft_vocab_size out."
            )

    @property
    def draft_vocab_size(self) -> None:
        """Always the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class JointTraining(LawSettings):
    """Settings of parallel heads with their target.

    Attributes:
        rank, alpha: of LoRA on the target; a rank of 0 trains all its weights.
        heads_weight: of the heads' loss.
        heads_rate: learning rate of the heads relative to the target's.
        teacher: one of ``TEACHERS``.
    """

    rank: int = 32
    alpha: float = 16.0
    heads_weight: float = 1.0
    heads_rate: float = 1.0
    teacher: str = "target"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 0:
            raise OptionError(f"rank is {self.rank}; allowed: 0 (all weights) or more.")
        for name in ("alpha", "heads_weight", "heads_rate"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} is {getattr(self, name)}; allowed: above 0.")
        if self.teacher not in TEACHERS:
            raise OptionError(unknown_choice("Teacher", self.teacher, TEACHERS))


class JointNetwork(nn.Module):
    """The target and the heads."""

    def __init__(self, backbone: DecoderNetwork, heads: ParallelHeads) -> None:
        super().__init__()
        self.backbone, self.heads = backbone, heads


class JointObjective(Objective):
    """See the top of the file."""

    network: JointNetwork

    def __init__(
        self,
        config: JointConfig,
        target: TargetView,
        settings: JointTraining,
        network: JointNetwork,
    ) -> None:
        self.config, self.network, self._settings = config, network, settings
        self.rates = {_HEADS: settings.heads_rate}
        vocabulary = DraftVocabulary(None, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, vocabulary)
        self._rotations = Rotations(config.heads.layer, target.device)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        guesses = find_guesses(
            batch, self.config.heads.num_heads, generator=generator,
            max_positions=self._settings.max_positions,
        )  # fmt: skip
        backbone, heads = self.network.backbone, self.network.heads
        trunk = backbone.below(batch.tokens, self.config.heads.trunk_layer + 1)
        chances = torch.zeros(len(guesses.start), device=trunk.device)
        runs: list[tuple[HeadLoss, list[nn.Parameter]]] = []

        def keep(states: Tensor) -> Tensor:
            return self._keep(states, guesses, batch).total

        shared = [*backbone.model.norm.parameters(), *self._head_parameters()]
        above = backbone.model.layers[self.config.heads.trunk_layer + 1 :]
        runs.append((keep, [*above.parameters(), *shared]))
        for number, head in enumerate(heads.heads):

            def guess(states: Tensor, number: int = number) -> Tensor:
                at, scored = self._guess(states, number, guesses, batch)
                chances[at] = scored.chances
                return self._settings.heads_weight * scored.total

            runs.append((guess, [*head.parameters(), *shared]))
        total, values = add_heads(trunk, runs)
        every = Scored(total, chances.new_zeros(0, 6), chances)
        parts = every.by_depth(guesses) | {"keep": values[0], "heads": sum(values[1:])}
        length = guesses.acceptance_length(chances)
        return Loss(total, parts, length, float(len(guesses.places)))

    def _head_parameters(self) -> list[nn.Parameter]:
        backbone = self.network.backbone
        head = backbone.model.embed_tokens if backbone.lm_head is None else backbone.lm_head
        return list(head.parameters())

    def _keep(self, trunk: Tensor, guesses: Guesses, batch: Batch) -> Scored:
        """The target's own loss on its trunk states."""
        first = guesses.first_depth()
        states = self.network.backbone.above(trunk, self.config.heads.trunk_layer + 1)
        products = head_products(self.network.backbone, states.flatten(0, 1)[first.law_index])
        mix = Mix(kl=1.0) if self._settings.teacher == "target" else Mix(hard=1.0)
        return self._score(products, first, depth_weights(first, 1.0), batch, mix)

    def _guess(
        self, trunk: Tensor, number: int, guesses: Guesses, batch: Batch
    ) -> tuple[Tensor, Scored]:
        """One head's guesses, and what they come to."""
        at = (guesses.depth == number).nonzero()[:, 0]
        rotation = self._rotations(torch.arange(trunk.shape[1]))
        attend = CausalAttention(self.config.heads.layer)
        outputs = self.network.heads.heads[number](trunk, 0, rotation, attend)
        picked = outputs.flatten(0, 1)[guesses.flat_starts[guesses.start[at]]]
        states = self.network.backbone.model.norm(picked)
        weights = depth_weights(guesses, self._settings.depth_decay)[at]
        products = head_products(self.network.backbone, states)
        scored = self._score(products, guesses, weights, batch, self._settings.mix, at=at)
        return at, scored

    def tensors(self) -> dict[str, Tensor]:
        """The changed target under HF names, and the heads under theirs."""
        heads = self.network.heads.state_dict()
        return merged(self.network.backbone) | {n: t.detach() for n, t in heads.items()}


def start_config(target: ModelConfig, changes: Mapping[str, str]) -> JointConfig:
    """The target with three heads.

    Raises:
        OptionError: the target runs through transformers or has one layer, or a change cannot be.
    """
    others = [name for name in changes if not name.startswith(_HEADS)]
    if others:
        raise OptionError(
            f"{others[0]} is no field of the heads; allowed: {_HEADS}num_heads, "
            f"{_HEADS}trunk_layer and fields of {_HEADS}layer."
        )
    begun = JointConfig(model=target, heads=MtpParallelConfig.for_target(target))
    made: JointConfig = with_changes(begun, changes)
    return made


def make(
    config: JointConfig, target: TargetView, settings: JointTraining, start: Start
) -> JointObjective:
    """The objective; see ``objective.make_objective``.

    ``start.tensors`` are those of heads to go on from; fresh ones start as the target's last layer.

    Raises:
        DrafterError: the target lacks the trunk layer.
    """
    config.heads.check_target(target.config)
    given = start.tensors
    tensors = random_drafter(config.heads, start.generator) if given is None else dict(given)
    if given is None and settings.from_target:
        for layer in last_layers(target, 1):
            for head in range(config.heads.num_heads):
                copy_layer(tensors, f"{_HEADS}{head}.", layer)
    heads, backbone = ParallelHeads(config.heads), DecoderNetwork(config.model)
    load_parameters(heads, tensors, "what training begins from")
    load_parameters(backbone, weights_of(target), "the target")
    if settings.rank:
        add_lora(backbone, rank=settings.rank, alpha=settings.alpha, generator=start.generator)
    network = JointNetwork(backbone, heads)
    network.to(device=target.device, dtype=torch.float32)
    return JointObjective(config, target, settings, network)


def write(folder: Path, config: JointConfig, tensors: Mapping[str, Tensor]) -> None:
    """The changed target, and in ``heads`` its heads; the target's tokenizer is to be put beside
    it."""
    heads = {name: tensor for name, tensor in tensors.items() if name.startswith(_HEADS)}
    mtp_parallel.write(folder / HEADS_FOLDER, config.heads, heads)
    write_model(folder, config.model, {n: t for n, t in tensors.items() if n not in heads})
