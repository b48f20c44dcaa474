"""DFlash: a small block that fills all draft positions at once (Chen et al., arXiv 2602.06036).

With C the target's features of a token (the outputs of the layers ``target_layer_ids``, one after
another), x the block's states and l a layer::

    c        = hidden_norm(fc(C))                      fuse, once for all layers
    q        = q_norm(Wq_l norm_l(x))                  of block rows only
    k, v     = k_norm(Wk_l [c ; norm_l(x)]), Wv_l [c ; norm_l(x)]
    x        = x + Wo_l attention(q, k, v);  x = x + mlp(post_norm(x))
    logits   = head(norm(x))

    position   0 ... start-1 | start   start+1 ... start+B-1
    key        context c     | root    mask    ... mask        every block row sees all of them

The root has no feature yet: the context lies strictly before it. Context rows have no queries, so
their keys and values are computed once and kept; the block's are dropped after each round. Row i
gives the law of the token at start + i and row 0 nothing (z-lab), or of the token at start + i + 1
(``sample_from_anchor``, DeepSpec). All depths [R, D, Vd] come at once and do not depend on each
other: laws of a chain, and marginals for DDTree (arXiv 2604.12989).

What differs from the official code: its loop always drafts greedily, here the builder decides; it
crops block keys after each forward, here they never are part of the context; only the rows that are
asked for go through the head.

R rows, B block rows, S context tokens, K features, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.drafters.dflash_block import BlockLayers, window_mask
from forespeak.drafters.sharing import (
    Embedding,
    Head,
    map_of,
    open_checkpoint,
    shared_or_own_head,
)
from forespeak.drafters.starting import random_weights, spread_vocabulary
from forespeak.drafters.table import METHODS
from forespeak.formats.dflash_config import (
    EMBED,
    EMBEDDING_OUTPUT,
    HEAD,
    DFlashConfig,
    tensor_shapes,
)
from forespeak.formats.drafters import D2T, DrafterCheckpoint
from forespeak.models.blocks import (
    DecoderLayer,
    Linear,
    RMSNorm,
    Rotation,
    blank,
    load_parameters,
)
from forespeak.models.decoder import rms_norm
from forespeak.types import DenseLaws, DrafterInfo, Observation, SpeculationConfig

FAMILY = "forespeak.formats.dflash"


_DEVIATION = 0.02  # of weights in a fresh drafter

# --- network --------------------------------------------------------------------------------------


class DFlashNetwork(nn.Module):
    """The block, for training and as the plain form of what :class:`BlockLayers` computes."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        c = config.layers
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList([DecoderLayer(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        blank(self)

    def fuse(self, features: Tensor) -> Tensor:
        """c [..., S, H] of features [..., S, K * H]."""
        fused: Tensor = self.hidden_norm(self.fc(features))
        return fused

    def forward(
        self,
        features: Tensor,  # [..., S, K * H]
        embedded: Tensor,  # [..., T, H]
        context: Rotation,  # [..., S, D / 2] each
        blocks: Rotation,  # [..., T, D / 2] each
        masks: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """States [..., T, H] after the last norm of one or several blocks at once.

        Args:
            features: of the context.
            embedded: embeddings of the blocks' roots and masks.
            context, blocks: rotations of their positions.
            masks: [..., T, S + T] bool for full and for windowed layers (:func:`block_masks`);
                None where every row sees everything.
        """
        fused = self.fuse(features)
        windowed = self.config.layers.sliding_layers or (False,) * len(self.layers)
        x = embedded
        for layer, flag in zip(self.layers, windowed, strict=True):
            assert isinstance(layer, DecoderLayer)
            before_k, before_v = layer.self_attn.keys_values(fused, context)
            mask = masks[flag]

            def attend(
                index: int, q: Tensor, k: Tensor, v: Tensor,
                before_k: Tensor = before_k, before_v: Tensor = before_v,
                mask: Tensor | None = mask,
            ) -> Tensor:  # fmt: skip
                keys, values = torch.cat([before_k, k], -3), torch.cat([before_v, v], -3)
                mixed = F.scaled_dot_product_attention(
                    q.transpose(-2, -3), keys.transpose(-2, -3), values.transpose(-2, -3),
                    attn_mask=None if mask is None else mask[..., None, :, :],
                    enable_gqa=q.shape[-2] != k.shape[-2],
                )  # fmt: skip
                return mixed.transpose(-2, -3).flatten(-2)

            x = layer(x, 0, blocks, attend)
        out: Tensor = self.norm(x)
        return out


def block_masks(config: DFlashConfig, anchors: Tensor, num_context: int) -> tuple[Tensor, Tensor]:
    """What the rows of several blocks see, for full and for windowed layers.

    A block sees the context strictly before its anchor, and itself; no other block.

    Args:
        anchors: [A] positions of the blocks' roots.
        num_context: S.

    Returns:
        Two of [A * B, S + A * B] bool.
    """
    size, count = config.block_size, len(anchors)
    own = torch.eye(count, dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(size, 0).repeat_interleave(size, 1)
    slots = torch.arange(num_context, device=anchors.device)
    before = slots < anchors[:, None]
    full = torch.cat([before.repeat_interleave(size, 0), own], 1)
    if config.layers.sliding_window is None:
        return full, full
    windows = []
    for index, start in enumerate(anchors.tolist()):
        own_slots = torch.arange(start, start + size, device=anchors.device)
        seen = window_mask(config, start, torch.cat([slots, own_slots]), size)
        inside = torch.zeros((size, count * size), dtype=torch.bool, device=anchors.device)
        inside[:, index * size : (index + 1) * size] = seen[:, num_context:]
        windows.append(torch.cat([seen[:, :num_context] & before[index], inside], 1))
    return full, torch.cat(windows)


# --- drafter --------------------------------------------------------------------------------------


class DFlashDrafter(Drafter):
    """Drafts a block at a time.

    Args:
        info: what it says of itself.
        network: loaded; its weights are copied.
        target: whose embedding, and features, it reads.
        embedding, head: the target's or its own.
        num_rows: most rows at a time.
    """

    def __init__(
        self,
        info: DrafterInfo,
        network: DFlashNetwork,
        target: TargetParts,
        *,
        embedding: Embedding,
        head: Head,
        num_rows: int,
    ) -> None:
        self.info = info
        self._config = config = network.config
        self._model, self._embedding, self._head = target.model, embedding, head
        self._device, self._dtype = target.model.device, target.drafting_dtype

        def moved(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=self._device, dtype=self._dtype)

        ids, rising = config.target_layer_ids, sorted(set(config.target_layer_ids))
        self._order = None if list(ids) == rising else [rising.index(i) for i in ids]
        self._eps = config.layers.rms_norm_eps
        self._fc = target.product(network.fc.weight.detach())
        self._fused_norm = moved(network.hidden_norm.weight)
        self._norm = moved(network.norm.weight)
        layers = [layer for layer in network.layers if isinstance(layer, DecoderLayer)]
        self._layers = BlockLayers(config, layers, num_rows, target)
        self._admitted: set[int] = set()

    def admit(self, row: int) -> None:
        assert row not in self._admitted, row
        self._admitted.add(row)

    def release(self, row: int) -> None:
        if row in self._admitted:
            self._admitted.remove(row)
            self._layers.rows.release(row)

    @torch.inference_mode()
    def observe(self, observations: Sequence[Observation]) -> None:
        if len({observation.row for observation in observations}) < len(observations):
            for observation in observations:  # the second of a row stands after the first
                self.observe([observation])
            return
        features = torch.cat([self._features(observation) for observation in observations])
        fused = rms_norm(self._fc(features), self._fused_norm, self._eps)
        self._layers.append_context(
            [o.row for o in observations], [len(o.tokens) for o in observations], fused
        )

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> DenseLaws:
        first = 0 if self._config.sample_from_anchor else 1
        states = self._states(rows, roots, first, first + depth)
        return DenseLaws(self._head(states), self._head.token_ids)

    def _states(self, rows: Sequence[int], roots: Sequence[int], first: int, end: int) -> Tensor:
        """[R, n, H] states after the last norm of the block rows from ``first`` to before ``end``,
        fewer where the block ends sooner."""
        assert all(row in self._admitted for row in rows), rows
        size = self._config.block_size
        tokens = torch.full((len(rows), size), self._config.mask_token_id)
        tokens[:, 0] = torch.tensor(roots)
        states = self._layers.run_block(rows, self._embedding(tokens.flatten()))
        asked = states.view(len(rows), size, -1)[:, first:end]
        return rms_norm(asked, self._norm, self._eps)

    def _features(self, observation: Observation) -> Tensor:
        """[n, K * H], in the order of the config; the engine's taps are in rising order."""
        parts = [] if observation.taps is None else [observation.taps.to(self._dtype)]
        if EMBEDDING_OUTPUT in self._config.target_layer_ids:
            embedded = self._model.embed(torch.tensor(observation.tokens)).to(self._dtype)
            parts.insert(0, embedded[:, None])
        features = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return (features if self._order is None else features[:, self._order]).flatten(1)


# --- opening and starting -------------------------------------------------------------------------


def open_drafter(config: SpeculationConfig, target: TargetParts, num_rows: int) -> DFlashDrafter:
    """The method's drafter, also from a DSpark checkpoint, whose heads then are off."""
    checkpoint = open_block_checkpoint(config, target)
    return plain_drafter(config.method, checkpoint, target, num_rows)


def open_block_checkpoint(config: SpeculationConfig, target: TargetParts) -> DrafterCheckpoint:
    """A checkpoint of either kind that fits the target.

    Raises:
        CheckpointError, DrafterError: see ``sharing.open_checkpoint``; or the target lacks what it
            reads.
    """
    checkpoint = open_checkpoint(config, target, FAMILY)
    checkpoint.config.check_target(target.model.config)
    return checkpoint


@dataclass(frozen=True)
class BlockParts:
    """A checkpoint's tensors, sorted: the network's, and embedding and head, borrowed or own."""

    tensors: dict[str, Tensor]
    embedding: Embedding
    head: Head


def block_parts(checkpoint: DrafterCheckpoint, target: TargetParts) -> BlockParts:
    """Reads a checkpoint.

    Raises:
        CheckpointError: a file is damaged, or the vocabulary map is impossible.
    """
    tensors = checkpoint.tensors()
    token_ids = map_of(tensors)
    embedding = Embedding(target, tensors.pop(EMBED, None))
    head = shared_or_own_head(target, tensors.pop(HEAD, None), token_ids)
    return BlockParts(tensors, embedding, head)


def plain_drafter(
    method: str, checkpoint: DrafterCheckpoint, target: TargetParts, num_rows: int
) -> DFlashDrafter:
    """The drafter without heads."""
    config: DFlashConfig = checkpoint.config
    network, parts = DFlashNetwork(config), block_parts(checkpoint, target)
    own = set(dict(network.named_parameters()))
    tensors = {name: tensor for name, tensor in parts.tensors.items() if name in own}
    load_parameters(network, tensors, str(checkpoint.origin))
    return DFlashDrafter(
        block_info(method, config), network, target, embedding=parts.embedding, head=parts.head,
        num_rows=num_rows,
    )  # fmt: skip


def block_info(method: str, config: DFlashConfig) -> DrafterInfo:
    """What a drafter without a sequential head says of itself."""
    return replace(
        METHODS[method].info, expansion="none", max_depth=config.max_depth, taps=config.taps
    )


def random_drafter(config: DFlashConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of a fresh drafter: norms are ones, everything else is small and random."""
    products = {name: shape for name, shape in tensor_shapes(config).items() if name != D2T}
    tensors = random_weights(products, generator, lambda name, shape: _DEVIATION)
    if config.draft_vocab_size is not None:
        tensors[D2T] = spread_vocabulary(config.vocab_size, config.draft_vocab_size)
    return tensors
