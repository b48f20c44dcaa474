"""Training of Medusa heads and their target together (Medusa-2, arXiv 2401.10774).

The target changes by LoRA, so that its states come to say more of the tokens ahead, and is held to
what it was by self-distillation: its law before is the teacher of its law now::

    loss = mean over answer tokens of  KL(law before, law now)
           + heads_weight * ramp * mean over starts of  sum_k depth_decay ** k * loss(head_k)

The law before follows from the states of the batch, which the unchanged target made. The heads read
the states of the changed one. Two ways to begin, which may be joined:

- ``heads_first``: for this share of the run the heads train alone, which is Medusa-1;
- ``ramp``: the heads' weight then grows as sin(pi / 2 * progress).

What is written is a new target that carries its heads: one folder, which is both ``--target`` and
its own drafter. ``heads_rate`` is how much faster the heads move than the target.

What differs from the official code: it divides the divergence by all positions, here it is a mean
over those that are answer; LoRA has no dropout; a head tied to the embedding is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forespeak.drafters.medusa import MedusaHeads, random_drafter
from forespeak.drafters.starting import with_changes
from forespeak.errors import OptionError, unknown_choice
from forespeak.formats.drafter_files import write_drafter_files
from forespeak.formats.medusa_config import MedusaConfig
from forespeak.models.blocks import load_parameters
from forespeak.models.config import OUR_FAMILIES, ModelConfig
from forespeak.train.laws import GuessLoss, LawSettings, depth_weights
from forespeak.train.lora import add_lora, head_products, merged
from forespeak.train.losses import Mix
from forespeak.train.network import DecoderNetwork, model_fields, weights_of
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, find_guesses

RAMPS = ("none", "sine")
_HEADS = "heads."


@dataclass(frozen=True, kw_only=True)
class Medusa2Config:
    """A target that carries Medusa heads.

    Attributes:
        model: the target's sizes.
        heads: the heads'; they take the target's head for their logits.
    """

    model: ModelConfig
    heads: MedusaConfig

    def __post_init__(self) -> None:
        if self.heads.output != "target" or self.heads.draft_vocab_size is not None:
            raise OptionError(
                "Heads that are trained with their target take its head for their logits; leave "
                "heads.output and heads.draft_vocab_size out."
            )

    @property
    def draft_vocab_size(self) -> None:
        """Always the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Medusa2Training(LawSettings):
    """Settings of Medusa-2.

    Attributes:
        rank, alpha: of LoRA.
        heads_weight: of the heads' loss.
        heads_first: share of the run in which the heads train alone.
        ramp: one of ``RAMPS``.
        heads_rate: learning rate of the heads relative to the target's.
        soft, hard, l1: of the heads; the teacher of ``soft`` is the unchanged target.
    """

    rank: int = 32
    alpha: float = 16.0
    heads_weight: float = 0.2
    heads_first: float = 0.0
    ramp: str = "none"
    heads_rate: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise OptionError(f"rank is {self.rank}; allowed: 1 or more.")
        for name in ("alpha", "heads_weight", "heads_rate"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} is {getattr(self, name)}; allowed: above 0.")
        if not 0 <= self.heads_first < 1:
            raise OptionError(f"heads_first is {self.heads_first}; allowed: 0 to below 1.")
        if self.ramp not in RAMPS:
            raise OptionError(unknown_choice("Ramp", self.ramp, RAMPS))
        if not self.from_target:
            raise OptionError("Medusa-2 changes its target and begins from it; leave from_target.")


class Medusa2Network(nn.Module):
    """The target with its changes, and the heads."""

    def __init__(self, backbone: DecoderNetwork, heads: MedusaHeads) -> None:
        super().__init__()
        self.backbone, self.heads = backbone, heads


class Medusa2Objective(Objective):
    """See the top of the file."""

    network: Medusa2Network

    def __init__(
        self,
        config: Medusa2Config,
        target: TargetView,
        settings: Medusa2Training,
        network: Medusa2Network,
    ) -> None:
        self.config, self.network, self._settings = config, network, settings
        self.rates = {_HEADS: settings.heads_rate}
        vocabulary = DraftVocabulary(None, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, vocabulary)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        settings, alone = self._settings, self.progress < self._settings.heads_first
        guesses = find_guesses(
            batch, self.config.heads.num_heads, generator=generator,
            max_positions=settings.max_positions,
        )  # fmt: skip
        with torch.set_grad_enabled(torch.is_grad_enabled() and not alone):
            states = self.network.backbone(batch.tokens).flatten(0, 1)
        read = self.network.heads(states[guesses.flat_starts])[guesses.start, guesses.depth]
        weights = depth_weights(guesses, settings.depth_decay)
        logits = head_products(self.network.backbone, read, fixed=alone)
        scored = self._score(logits, guesses, weights, batch, settings.mix)
        parts = scored.by_depth(guesses) | {"heads": float(scored.total.detach())}
        total = scored.total
        if not alone:
            first = guesses.first_depth()
            now = head_products(self.network.backbone, states[first.law_index])
            kept = self._score(now, first, depth_weights(first, 1.0), batch, Mix(kl=1.0))
            parts["divergence"] = float(kept.total.detach())
            total = kept.total + settings.heads_weight * self._ramp() * total
        length = guesses.acceptance_length(scored.chances)
        return Loss(total, parts, length, float(len(guesses.places)))

    def _ramp(self) -> float:
        return 1.0 if self._settings.ramp == "none" else math.sin(math.pi / 2 * self.progress)

    def tensors(self) -> dict[str, Tensor]:
        """The changed target under HF names, and the heads under theirs."""
        heads = self.network.heads.state_dict()
        return merged(self.network.backbone) | {n: t.detach() for n, t in heads.items()}


def start_config(target: ModelConfig, changes: Mapping[str, str]) -> Medusa2Config:
    """The target with four heads.

    Raises:
        OptionError: the target runs through transformers, or a change cannot be.
    """
    if target.model_type not in OUR_FAMILIES:
        raise OptionError(
            f"Medusa-2 trains its target, and a {target.model_type} model runs through "
            f"transformers; allowed targets: {', '.join(OUR_FAMILIES)}. Train medusa instead."
        )
    heads = [name for name in changes if not name.startswith(_HEADS)]
    if heads:
        raise OptionError(
            f"{heads[0]} is no field of Medusa-2's heads; allowed: {_HEADS}num_heads, "
            f"{_HEADS}num_blocks and {_HEADS}bias."
        )
    made: Medusa2Config = with_changes(
        Medusa2Config(model=target, heads=MedusaConfig.for_target(target)), changes
    )
    return made


def make(
    config: Medusa2Config, target: TargetView, settings: Medusa2Training, start: Start
) -> Medusa2Objective:
    """The objective; see ``objective.make_objective``.

    ``start.tensors`` are those of Medusa-1 heads to go on from.
    """
    tensors = start.tensors
    if tensors is None:
        tensors = random_drafter(config.heads, start.generator)
    heads, backbone = MedusaHeads(config.heads), DecoderNetwork(config.model)
    load_parameters(heads, tensors, "what training begins from")
    load_parameters(backbone, weights_of(target), "the target")
    add_lora(backbone, rank=settings.rank, alpha=settings.alpha, generator=start.generator)
    network = Medusa2Network(backbone, heads)
    network.to(device=target.device, dtype=torch.float32)
    return Medusa2Objective(config, target, settings, network)


def write(folder: Path, config: Medusa2Config, tensors: Mapping[str, Tensor]) -> None:
    """The changed target with its heads in one folder, as Medusa-2 releases have it; the target's
    tokenizer is to be put beside it."""
    heads = config.heads
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(_HEADS):  # heads.{k}.blocks.{b}.weight
            _, head, _, block, part = name.split(".")
            name = f"medusa_head.{head}.{block}.linear.{part}"
        stored[name] = tensor
    values = model_fields(config.model) | {
        "medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_blocks,
    }  # fmt: skip
    write_drafter_files(folder, values, stored)
