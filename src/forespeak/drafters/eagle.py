"""EAGLE-1: one decoder layer continues the target's features (Li et al., arXiv 2401.15077). EAGLE-2
(arXiv 2406.16858) is the same weights, or EAGLE-3's, under a tree that follows the drafter's
confidence; the tree is a builder's affair.

For the pair of position t, with feature_t the target's state after its final norm::

    u      = fc([embedding of x_{t+1}; feature_t])    embedding first            [2H] -> [H]
    output = layers(u)      attention over all pairs up to t; stands for feature_{t+1}   [H]
    logits = head(output)   the target's head, no norm before it; law of x_{t+2}

The first layer has no norm before attention; further layers, where there are any, have it. The
state of the next draft token is ``output`` itself.

What differs from the paper and the official code: the official code draws the token after an
acceptance without temperature and filters, and here every token is drawn from the target's whole
law; at equal scores EAGLE-2's tree keeps the shallower node. A reduced draft vocabulary (d2t) over
the target's head is possible, as FR-Spec (arXiv 2502.14856) has it. Early vLLM zeroed the input at
position 0, which has no pair here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from forespeak.drafters.base import TargetParts
from forespeak.drafters.eagle3 import cached, random_tensors, read_eagle
from forespeak.drafters.eagle3 import chain_of as eagle3_chain_of
from forespeak.drafters.feature_chain import ChainNetwork, FeatureChain
from forespeak.drafters.sharing import Embedding, Head, map_of, shared_or_own_head
from forespeak.drafters.table import EAGLE, EAGLE2
from forespeak.formats.drafters import DrafterCheckpoint
from forespeak.formats.eagle import EMBED, HEAD, EagleConfig, tensor_shapes
from forespeak.models.blocks import (
    Attend,
    DecoderLayer,
    Linear,
    Rotation,
    blank,
    load_parameters,
)
from forespeak.types import DrafterInfo, Observation, SpeculationConfig


class EagleNetwork(nn.Module):
    """Everything that is trained. Parameters are NaN until they are loaded.

    Args:
        config: sizes and switches.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layers, input_norm=index > 0)
            for index in range(config.layers.num_layers)
        )
        blank(self)

    def forward(
        self, embedded: Tensor, states: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """One step of drafting.

        Args:
            embedded: [..., T, H] embeddings of the tokens.
            states: [..., T, H] features of the target before them, or outputs of a step.
            rotation, attend: see ``models.blocks``.

        Returns:
            [..., T, H] outputs.
        """
        x: Tensor = self.fc(torch.cat([embedded, states], dim=-1))
        for index, layer in enumerate(self.layers):
            x = layer(x, index, rotation, attend)
        return x


class _EagleChain(ChainNetwork):
    """EAGLE-1 as the chain asks for it."""

    def __init__(self, embedding: Embedding, head: Head, dtype: torch.dtype) -> None:
        self.token_ids = head.token_ids
        self._embedding, self._head, self._dtype = embedding, head, dtype

    def enter(self, observation: Observation) -> Tensor:
        return observation.hidden.to(self._dtype)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._embedding(tokens)

    def hand_on(self, outputs: Tensor, module: int) -> Tensor:
        return outputs

    def logits(self, outputs: Tensor, module: int) -> Tensor:
        return self._head(outputs)


def open_drafter(config: SpeculationConfig, target: TargetParts, num_rows: int) -> FeatureChain:
    """The method's drafter; see ``loader.load_drafter``."""
    return chain_of(read_eagle(config, target, ["eagle"]), target, num_rows, EAGLE.info)


def open_either(config: SpeculationConfig, target: TargetParts, num_rows: int) -> FeatureChain:
    """EAGLE-2's drafter: of EAGLE-1 or EAGLE-3, as the checkpoint is."""
    checkpoint = read_eagle(config, target, ["eagle", "eagle3"])
    make = chain_of if checkpoint.method == "eagle" else eagle3_chain_of
    return make(checkpoint, target, num_rows, EAGLE2.info)


def chain_of(
    checkpoint: DrafterCheckpoint, target: TargetParts, num_rows: int, info: DrafterInfo
) -> FeatureChain:
    """The drafter of an EAGLE-1 checkpoint.

    Args:
        info: of the method that drafts with it.
    """
    tensors = checkpoint.tensors()
    token_ids, own = map_of(tensors), tensors.pop(HEAD, None)
    head = shared_or_own_head(target, own, token_ids)
    embedding = Embedding(target, tensors.pop(EMBED, None))
    network = EagleNetwork(checkpoint.config)
    load_parameters(network, tensors, str(checkpoint.origin))
    target.prepare(network)
    chain = _EagleChain(embedding, head, target.drafting_dtype)
    module = cached(network, checkpoint.config.layers, target, num_rows)
    return FeatureChain(replace(info, needs_hidden=True), chain, [module])


def random_drafter(config: EagleConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of a fresh drafter; see ``eagle3.random_tensors``."""
    return random_tensors(tensor_shapes(config), config.vocab_size, generator)
