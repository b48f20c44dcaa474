"""EAGLE-3: one layer on fused features of the target, trained on its own drafts (Li et al., arXiv
2503.01840), with the norms of EAGLE-3.1 and of the speculators package.

For the pair of position t, with taps_k the outputs of K layers of the target::

    features = [taps_1; ...; taps_K] at t                        enter   [K Ht]
    state    = fc(features)                                              [H]
    u        = [input_layernorm(embedding of x_{t+1}); hidden_norm(state)]    [2H]
    r        = state + attention(u)           attention over all pairs up to t
    output   = r + mlp(post_attention_layernorm(r))                      [H]
    logits   = lm_head(norm(output))          law of x_{t+2} over Vd     [Vd]
    hand_on  = output                         the state of the next draft token: fc is skipped

    norm_before_fc        fc(input_norm(features))
    fc_norm               fc([fc_norm_1(taps_1); ...; fc_norm_K(taps_K)])
    norm_before_residual  r = hidden_norm(state) + attention(u)
    norm_output           hand_on = norm(output)

Further layers, where there are any, are plain ones after the first.

What differs from the official code: a layer that is listed twice among the taps is refused (there
it is captured once, and the shapes no longer fit); pairs are numbered from position 0 as there, not
from 1 as the speculators package trains them, which rotary attention cannot tell apart; at equal
scores trees keep the shallower node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from forespeak.drafters.base import TargetParts
from forespeak.drafters.feature_chain import ChainNetwork, FeatureChain, LayersModule
from forespeak.drafters.layer_cache import LayerCache
from forespeak.drafters.sharing import (
    Embedding,
    Head,
    map_of,
    open_checkpoint,
    shared_or_own_head,
)
from forespeak.drafters.starting import random_weights, spread_vocabulary
from forespeak.drafters.table import EAGLE3
from forespeak.errors import DrafterError
from forespeak.formats.drafter_files import Shape
from forespeak.formats.drafters import D2T, DrafterCheckpoint
from forespeak.formats.eagle3_config import (
    EMBED,
    EMBEDDING_OUTPUT,
    HEAD,
    Eagle3Config,
    tensor_shapes,
)
from forespeak.models.blocks import (
    MLP,
    Attend,
    Attention,
    DecoderLayer,
    Linear,
    RMSNorm,
    Rotation,
    blank,
    load_parameters,
)
from forespeak.models.config import ModelConfig
from forespeak.types import DrafterInfo, Observation, SpeculationConfig

_FAMILIES = ("forespeak.formats.eagle3", "forespeak.formats.eagle")


class Eagle3Layer(nn.Module):
    """The first layer: attention over embedding and state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layers, hidden = config.layers, config.layers.hidden_size
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(hidden, layers.rms_norm_eps)
        self.input_layernorm = RMSNorm(hidden, layers.rms_norm_eps)
        self.self_attn = Attention(layers, input_size=2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, layers.rms_norm_eps)
        self.mlp = MLP(layers)

    def forward(
        self, embedded: Tensor, states: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """embedded, states [..., T, H] to outputs [..., T, H]; layer 0 of the caller's cache."""
        normed = self.hidden_norm(states)
        pair = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        q = self.self_attn.queries(pair, rotation)
        k, v = self.self_attn.keys_values(pair, rotation)
        residual = normed if self.norm_before_residual else states
        x = residual + self.self_attn.o_proj(attend(0, q, k, v))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Network(nn.Module):
    """Everything that is trained. Parameters are NaN until they are loaded.

    Args:
        config: sizes and switches.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        layers, hidden, eps = config.layers, config.layers.hidden_size, config.layers.rms_norm_eps
        width, count = config.feature_size, config.num_features
        self.config = config
        self.input_norm = RMSNorm(count * width, eps) if config.norm_before_fc else None
        norms = count if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(norms))
        self.fc = Linear(count * width, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(layers) if index else Eagle3Layer(config)
            for index in range(layers.num_layers)
        )
        self.norm = RMSNorm(hidden, eps)
        size = config.draft_vocab_size or config.vocab_size
        self.lm_head = Linear(hidden, size, bias=False) if config.own_head else None
        blank(self)

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [..., K, Ht] of the target to states [..., H]."""
        if self.config.fc_norm:
            parts = zip(self.fc_norm, taps.unbind(-2), strict=True)
            taps = torch.stack([norm(tap) for norm, tap in parts], dim=-2)
        features = taps.flatten(-2)
        if self.input_norm is not None:
            features = self.input_norm(features)
        states: Tensor = self.fc(features)
        return states

    def forward(
        self, embedded: Tensor, states: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """One step of drafting.

        Args:
            embedded: [..., T, H] embeddings of the tokens.
            states: [..., T, H] of :meth:`fuse` or :meth:`hand_on`.
            rotation, attend: see ``models.blocks``.

        Returns:
            [..., T, H] outputs, not normed.
        """
        x: Tensor = self.layers[0](embedded, states, rotation, attend)
        for index, layer in enumerate(self.layers[1:], start=1):
            x = layer(x, index, rotation, attend)
        return x

    def hand_on(self, outputs: Tensor) -> Tensor:
        """[..., H] outputs to the states of the next step."""
        return self.norm(outputs) if self.config.norm_output else outputs


class _Eagle3Chain(ChainNetwork):
    """EAGLE-3 as the chain asks for it."""

    def __init__(
        self, network: Eagle3Network, embedding: Embedding, head: Head, target: TargetParts
    ) -> None:
        self.token_ids = head.token_ids
        self._network, self._embedding, self._head = network, embedding, head
        self._model, self._dtype = target.model, target.drafting_dtype
        ids = network.config.layers_of(target.model.config.num_layers)
        self.taps = tuple(i for i in ids if i != EMBEDDING_OUTPUT)
        self._reads_embedding = len(self.taps) < len(ids)

    def enter(self, observation: Observation) -> Tensor:
        parts = []
        if self._reads_embedding:
            parts.append(self._model.embed(torch.tensor(observation.tokens))[:, None])
        if observation.taps is not None:
            parts.append(observation.taps)
        taps = torch.cat([part.to(self._dtype) for part in parts], dim=1)  # [n, K, Ht]
        return self._network.fuse(taps)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._embedding(tokens)

    def hand_on(self, outputs: Tensor, module: int) -> Tensor:
        return self._network.hand_on(outputs)

    def logits(self, outputs: Tensor, module: int) -> Tensor:
        return self._head(self._network.norm(outputs))


def read_eagle(
    config: SpeculationConfig, target: TargetParts, methods: Sequence[str]
) -> DrafterCheckpoint:
    """A checkpoint of EAGLE-1 or EAGLE-3, whichever it is.

    Args:
        methods: those that may be.

    Raises:
        DrafterError: it is of the other one, or for another target.
    """
    checkpoint = open_checkpoint(config, target, *_FAMILIES)
    if checkpoint.method not in methods:
        raise DrafterError(
            f"The drafter {checkpoint.origin} is of method {checkpoint.method}, and method "
            f"{config.method} was asked for. Take --method {checkpoint.method}, or eagle2, which "
            "drafts with both under its own tree."
        )
    checkpoint.config.check_target(target.model.config)
    return checkpoint


def open_drafter(config: SpeculationConfig, target: TargetParts, num_rows: int) -> FeatureChain:
    """The method's drafter; see ``loader.load_drafter``."""
    return chain_of(read_eagle(config, target, ["eagle3"]), target, num_rows, EAGLE3.info)


def chain_of(
    checkpoint: DrafterCheckpoint, target: TargetParts, num_rows: int, info: DrafterInfo
) -> FeatureChain:
    """The drafter of an EAGLE-3 checkpoint.

    Args:
        info: of the method that drafts with it.
    """
    tensors = checkpoint.tensors()
    token_ids, own = map_of(tensors), tensors.pop(EMBED, None)
    network = Eagle3Network(checkpoint.config)
    load_parameters(network, tensors, str(checkpoint.origin))
    network.lm_head = None  # the head has it
    target.prepare(network)
    head = shared_or_own_head(target, tensors.get(HEAD), token_ids)
    chain = _Eagle3Chain(network, Embedding(target, own), head, target)
    info = replace(info, taps=chain.taps, needs_hidden=False)
    return FeatureChain(info, chain, [cached(network, checkpoint.config.layers, target, num_rows)])


def cached(
    network: nn.Module, layers: ModelConfig, target: TargetParts, num_rows: int
) -> LayersModule:
    """A network of decoder layers with a cache of its own."""
    cache = LayerCache(
        layers, num_rows, context_length=target.served_length, dtype=target.drafting_dtype,
        device=target.model.device,
    )  # fmt: skip
    return LayersModule(network, cache)


def random_drafter(config: Eagle3Config, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of a fresh drafter; see :func:`random_tensors`."""
    return random_tensors(tensor_shapes(config), config.vocab_size, generator)


def random_tensors(
    shapes: Mapping[str, Shape], vocab_size: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Small random products, norms of one, no biases.

    A reduced draft vocabulary is spread evenly over the ids, to be replaced by that of the tokens
    that the target writes.
    """
    products = {name: shape for name, shape in shapes.items() if name != D2T}
    tensors = random_weights(products, generator, lambda name, shape: shape[1] ** -0.5)
    if D2T in shapes:
        tensors[D2T] = spread_vocabulary(vocab_size, shapes[D2T][0])
    return tensors
