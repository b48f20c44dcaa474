"""Distillation of a small decoder into a draft model of a target.

The draft model is a decoder of the target's vocabulary. Its law at each place is to be the target's
at that place (generalised knowledge distillation on the target's own texts, arXiv 2306.13649)::

    loss = mean over answer tokens of  loss(draft model's law, target's law)

Fresh, it has the target's width and some of its layers, spread evenly and started from them, with
the target's embedding, norm and head; layers left out are what it has to make up for. Where widths
differ nothing is taken over but what fits.

The target's embedding and head are kept fixed where the draft model has them
(``train_embedding``), because they are most of a small model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forespeak.drafters.starting import random_weights, with_changes
from forespeak.errors import OptionError
from forespeak.models.blocks import load_parameters
from forespeak.models.config import OUR_FAMILIES, ModelConfig, weight_shapes
from forespeak.train.laws import GuessLoss, LawSettings, depth_weights
from forespeak.train.network import DecoderNetwork, write_model
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, find_guesses
from forespeak.train.weights import copied, copy_layer

_SHARE = 5  # one of the target's layers in so many
_DEVIATION = 0.02  # of fresh weights


@dataclass(frozen=True, kw_only=True)
class DraftModelTraining(LawSettings):
    """Settings of a draft model.

    Attributes:
        depths: draft tokens of a round, for the acceptance length in the log.
        train_embedding: embedding and head are trained, too.
        depth_decay: has no meaning here and must be left out.
    """

    depths: int = 4
    train_embedding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depths < 1:
            raise OptionError(f"depths is {self.depths}; allowed: 1 or more.")
        if self.depth_decay != LawSettings.depth_decay:
            raise OptionError("A draft model's places all weigh the same; leave depth_decay out.")


class DraftModelObjective(Objective):
    """See the top of the file."""

    network: DecoderNetwork

    def __init__(
        self,
        config: ModelConfig,
        target: TargetView,
        settings: DraftModelTraining,
        network: DecoderNetwork,
    ) -> None:
        self.config, self.network, self._settings = config, network, settings
        vocabulary = DraftVocabulary(None, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, vocabulary)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        settings = self._settings
        rows = find_guesses(batch, 1, generator=generator, max_positions=settings.max_positions)
        states = self.network(batch.tokens).flatten(0, 1)[rows.law_index]  # [n, H]
        weights = depth_weights(rows, 1.0)
        scored = self._score([(states, self.network.head)], rows, weights, batch, settings.mix)
        # Under teacher forcing a law is the same whichever start it is counted from.
        chances = torch.zeros(batch.tokens.numel(), device=states.device)
        chances[rows.law_index] = scored.chances
        deep = find_guesses(batch, settings.depths)
        length = deep.acceptance_length(chances[deep.law_index])
        return Loss(scored.total, scored.by_depth(rows), length, float(len(rows.places)))

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.network.state_dict().items()}


def start_config(target: ModelConfig, changes: Mapping[str, str]) -> ModelConfig:
    """A decoder like the target with a fifth of its layers.

    Raises:
        OptionError: the target runs through transformers, or a change cannot be.
    """
    if target.model_type not in OUR_FAMILIES:
        raise OptionError(
            f"A new draft model is a decoder like the target, and a {target.model_type} model runs "
            f"through transformers; allowed targets: {', '.join(OUR_FAMILIES)}."
        )
    small = replace(target, num_layers=max(1, target.num_layers // _SHARE))
    config: ModelConfig = with_changes(small, changes)
    if config.sliding_layers and len(config.sliding_layers) != config.num_layers:
        config = replace(config, sliding_layers=config.sliding_layers[: config.num_layers])
    if config.vocab_size != target.vocab_size:
        raise OptionError(
            f"vocab_size is {config.vocab_size}; a draft model has the target's "
            f"{target.vocab_size} tokens. Leave it out."
        )
    return config


def make(
    config: ModelConfig, target: TargetView, settings: DraftModelTraining, start: Start
) -> DraftModelObjective:
    """The objective; see ``objective.make_objective``.

    Raises:
        OptionError: the embedding is to stay fixed and is not the target's.
    """
    tensors = start.tensors
    if tensors is None:
        tensors = _fresh(config, target, settings, start.generator)
    same = config.hidden_size == target.config.hidden_size and settings.from_target
    if not settings.train_embedding and not same:
        raise OptionError(
            "train_embedding is false and the draft model's embedding does not come from the "
            f"target (hidden size {config.hidden_size}, the target's {target.config.hidden_size}; "
            f"from_target {str(settings.from_target).lower()}); set train_embedding to true."
        )
    network = DecoderNetwork(config)
    load_parameters(network, tensors, "what training begins from")
    network.to(device=target.device, dtype=torch.float32)
    if not settings.train_embedding:
        network.model.embed_tokens.weight.requires_grad_(False)
        network.head.requires_grad_(False)
    return DraftModelObjective(config, target, settings, network)


def _fresh(
    config: ModelConfig,
    target: TargetView,
    settings: DraftModelTraining,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    tensors = random_weights(weight_shapes(config), generator, lambda name, shape: _DEVIATION)
    if not settings.from_target:
        return tensors
    outer = {
        "model.embed_tokens.weight": target.embedding, "lm_head.weight": target.head,
        "model.norm.weight": target.norm,
    }  # fmt: skip
    for name, tensor in outer.items():
        if name in tensors and tensors[name].shape == tensor.shape:
            tensors[name] = copied(tensor)
    for layer in range(config.num_layers):
        place = spread(layer, config.num_layers, target.config.num_layers)
        if place in target.layers:
            copy_layer(tensors, f"model.layers.{layer}.", target.layers[place])
    return tensors


def spread(layer: int, count: int, num_target_layers: int) -> int:
    """The target's layer that one of ``count`` layers starts from: first and last among them."""
    if count == 1:
        return num_target_layers - 1
    return round(layer * (num_target_layers - 1) / (count - 1))


def write(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """The draft model as a model folder; the target's tokenizer is to be put beside it."""
    write_model(folder, config, tensors)
