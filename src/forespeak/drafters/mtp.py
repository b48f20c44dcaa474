"""MTP: prediction modules that a target carries, in a chain (DeepSeek-V3, arXiv 2412.19437, 2.2).

Module m of M (from 0) reads what module m - 1 made of the token before, module 0 the target's state
after its final norm. With f_i the target's state at token x_i, E its embedding, U its head::

    s^0_i = f_i
    z^m_i = W_m [ norm_h(s^m_i) ; norm_e(E(x_{i+m+1})) ]        W_m [H, 2H]
    y^m_i = block_m(z^m_0 .. z^m_i)                             one causal decoder layer
    law of x_{i+m+2} = softmax(U norm_f(y^m_i))
    s^{m+1}_i = norm_f(y^m_i)  "normed", or  y^m_i  "raw"

The pair of s^m_i and x_{i+m+1} stands at position i + m; the caches and the chain of drafts are
``feature_chain.py``'s. A draft at depth d (from 0, the law below the root) comes from module d mod
M, so one module drafts any number of tokens by reading its own states, as engines run it.

Releases differ in the order of the two halves of W's input, in whether norm weights are distances
from one, and in whether the pair at position 0 has an embedding of zeros; ``formats/mtp.py`` has
the table. The paper hands on y and says no more of s^0 than "the representation given by the main
model"; engines take the state after the final norm.

What differs from engines: whether DeepSeek and GLM modules hand on y or norm_f(y) is undocumented.
vLLM hands on y, which is the default here; SGLang and transformers hand on norm_f(y)
(``recursion_state="normed"``). With M modules, vLLM has been seen to run the first one only; here
all run, each with a cache of its own, which verified text refills every round.

T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from forespeak.drafters.base import TargetParts
from forespeak.drafters.feature_chain import ChainModule, ChainNetwork, FeatureChain, LayersModule
from forespeak.drafters.layer_cache import LayerCache
from forespeak.drafters.sharing import (
    Embedding,
    Head,
    map_of,
    open_checkpoint,
    shared_or_own_head,
)
from forespeak.drafters.starting import random_weights, spread_vocabulary
from forespeak.drafters.table import MTP
from forespeak.errors import DrafterError
from forespeak.formats.drafters import D2T
from forespeak.formats.mtp_config import MtpConfig, tensor_shapes
from forespeak.models.adapter_layer import FamilyLayer
from forespeak.models.adapter_model import TransformersModel
from forespeak.models.blocks import (
    Attend,
    DecoderLayer,
    Linear,
    RMSNorm,
    Rotation,
    blank,
    load_parameters,
)
from forespeak.types import Observation, Segment, SpeculationConfig

_DEVIATION = 0.02  # of weights in a fresh drafter


class MtpModule(nn.Module):
    """One module; the block is inside where it is ours."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.unit_offset
        self.hidden_first = config.hidden_first
        self.token_layernorm = RMSNorm(size, eps, unit_offset=offset)
        self.hidden_layernorm = RMSNorm(size, eps, unit_offset=offset)
        self.input_proj = Linear(2 * size, size, bias=False)
        self.final_layernorm = RMSNorm(size, eps, unit_offset=offset)
        self.block = None if config.layer is None else DecoderLayer(config.layer)

    def join(self, embedded: Tensor, states: Tensor) -> Tensor:
        """What the block reads [..., T, H], of embeddings and states of that shape."""
        halves = [self.token_layernorm(embedded), self.hidden_layernorm(states)]
        if self.hidden_first:
            halves.reverse()
        joined: Tensor = self.input_proj(torch.cat(halves, dim=-1))
        return joined

    def forward(
        self, embedded: Tensor, states: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """Raw outputs [..., T, H] of a module with a block of ours."""
        assert self.block is not None, "the block is the target's kind of layer"
        outputs: Tensor = self.block(self.join(embedded, states), 0, rotation, attend)
        return outputs


class MtpModules(nn.Module):
    """All modules. Parameters are NaN until they are loaded.

    Args:
        config: their sizes.
    """

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(MtpModule(config) for _ in range(config.num_modules))
        blank(self)

    def module(self, number: int) -> MtpModule:
        """One of them."""
        return cast(MtpModule, self.layers[number])

    def hand_on(self, outputs: Tensor, number: int) -> Tensor:
        """States [..., H] that the raw outputs [..., H] of a module become for the next step."""
        raw = self.config.recursion_state == "raw"
        return outputs if raw else self.finish(outputs, number)

    def finish(self, outputs: Tensor, number: int) -> Tensor:
        """What the head reads [..., H], of the raw outputs of a module."""
        finished: Tensor = self.module(number).final_layernorm(outputs)
        return finished


class FamilyModule(ChainModule):
    """A module whose block is a layer of the target's own kind."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], layer: FamilyLayer) -> None:
        self._join, self.layer = join, layer
        self.cache = layer.cache

    def run(
        self, embedded: Tensor, states: Tensor, positions: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        return self.layer.run(self._join(embedded, states), positions, segments)


class MtpNetwork(ChainNetwork):
    """The method behind ``FeatureChain``.

    Args:
        modules: loaded, on the target's device and in the dtype they run in.
        embedding, head: the target's, or the drafter's own.
        dtype: of the states.
    """

    def __init__(
        self, modules: MtpModules, embedding: Embedding, head: Head, dtype: torch.dtype
    ) -> None:
        self._modules, self._embedding, self._head = modules, embedding, head
        self._dtype = dtype
        self.token_ids = head.token_ids

    def enter(self, observation: Observation) -> Tensor:
        return observation.hidden.to(self._dtype)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded = self._embedding(tokens)
        if self._modules.config.zero_first_embedding:
            embedded = embedded * (positions != 0)[:, None].to(embedded)
        return embedded

    def hand_on(self, outputs: Tensor, module: int) -> Tensor:
        return self._modules.hand_on(outputs, module)

    def logits(self, outputs: Tensor, module: int) -> Tensor:
        return self._head(self._modules.finish(outputs, module))


def open_drafter(config: SpeculationConfig, target: TargetParts, num_rows: int) -> FeatureChain:
    """The method's drafter; see ``loader.load_drafter``.

    Without a named drafter the target's own folder is searched: its modules lie beside it.
    """
    checkpoint = open_checkpoint(config, target, "forespeak.formats.mtp")
    family: MtpConfig = checkpoint.config
    family.check_target(target.model.config)
    if config.recursion_state is not None:
        family = replace(family, recursion_state=config.recursion_state)
    tensors, origin = checkpoint.tensors(), str(checkpoint.origin)
    token_ids = map_of(tensors)
    embedding = Embedding(target, _copy(tensors, "embed_tokens", origin))
    head = shared_or_own_head(target, _copy(tensors, "lm_head", origin), token_ids)
    modules = MtpModules(family)
    own = tensor_shapes(family)
    load_parameters(modules, {name: tensors.pop(name) for name in own}, origin)
    target.prepare(modules)
    chain: list[ChainModule] = []
    for number in range(family.num_modules):
        module = modules.module(number)
        if family.layer is None:
            block = _below(tensors, f"layers.{number}.block.")
            chain.append(_family_module(module, block, target, num_rows, number, origin))
        else:
            cache = LayerCache(
                family.layer, num_rows, context_length=target.served_length,
                dtype=target.drafting_dtype, device=target.model.device, first_position=number,
            )  # fmt: skip
            chain.append(LayersModule(module, cache))
    network = MtpNetwork(modules, embedding, head, target.drafting_dtype)
    return FeatureChain(MTP.info, network, chain)


def _family_module(
    module: MtpModule,
    tensors: Mapping[str, Tensor],
    target: TargetParts,
    num_rows: int,
    number: int,
    origin: str,
) -> FamilyModule:
    model = target.model
    assert isinstance(model, TransformersModel), "checked against the target's family"
    layer = FamilyLayer(model, tensors, num_rows, origin=origin, first_position=number)
    return FamilyModule(module.join, layer)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _copy(tensors: dict[str, Tensor], kind: str, origin: str) -> Tensor | None:
    """The copy of the target's embedding or head that the modules carry; takes it out.

    Raises:
        DrafterError: modules carry different ones.
    """
    places = [name for name in tensors if name.startswith(f"{kind}.")]
    copies = [tensors.pop(name) for name in places]
    if any(copy is not copies[0] and not torch.equal(copy, copies[0]) for copy in copies):
        raise DrafterError(
            f"The modules in {origin} have different {kind} weights; expected are copies of the "
            "target's. Get the drafter again from where it came from."
        )
    return copies[0] if copies else None


def random_drafter(config: MtpConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of a fresh drafter: small weights, norms of one, biases zero."""
    tensors = random_weights(tensor_shapes(config), generator, lambda name, shape: _DEVIATION)
    if config.draft_vocab_size is not None:
        tensors[D2T] = spread_vocabulary(config.vocab_size, config.draft_vocab_size)
    return tensors
