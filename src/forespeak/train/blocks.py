"""Blocks of a block drafter, all anchors of all texts at once.

    keys of a row     context before its anchor, and the rows of its own block; no other block

which is what one block sees at inference: the context that is verified, and itself.

B texts, S tokens, A anchors of a text, W rows of a block, K features, H hidden size, G query heads,
kv key heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forespeak.drafters.dflash import DFlashNetwork
from forespeak.formats.dflash_config import DFlashConfig
from forespeak.models.blocks import DecoderLayer
from forespeak.train.attention import Rotations


def run_blocks(
    network: DFlashNetwork,
    rotations: Rotations,
    features: Tensor,
    embedded: Tensor,
    anchors: Tensor,
) -> Tensor:
    """States of all blocks after the last norm.

    Args:
        network: the drafter's.
        rotations: of its layers.
        features: [B, S, K * H] of all tokens.
        embedded: [B, A, W, H] embeddings of the blocks' roots and masks.
        anchors: [B, A] int64 places of the roots; at 0 a block sees itself alone.

    Returns:
        [B, A, W, H].
    """
    config, size = network.config, embedded.shape[2]
    fused = network.fuse(features)
    context = rotations(torch.arange(features.shape[1]))
    rows = anchors[..., None] + torch.arange(size, device=anchors.device)  # [B, A, W]
    blocks = rotations(rows)
    windowed = config.layers.sliding_layers or (False,) * len(network.layers)
    x = embedded
    for layer, flag in zip(network.layers, windowed, strict=True):
        assert isinstance(layer, DecoderLayer)
        before = layer.self_attn.keys_values(fused, context)
        seen = _seen(config, anchors, rows, features.shape[1], flag)
        x = layer(x, 0, blocks, _BlockAttention(*before, *seen))
    out: Tensor = network.norm(x)
    return out


class _BlockAttention:
    """An ``Attend`` for blocks.

    Args:
        keys, values: [B, S, kv, D] of the context.
        context: [B, A, W or 1, S] bool, what rows see of it.
        own: [W, W] bool, what rows see of their block.
    """

    def __init__(self, keys: Tensor, values: Tensor, context: Tensor, own: Tensor) -> None:
        self._keys, self._values, self._context, self._own = keys, values, context, own

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys, self._values
        grouped = q.view(*q.shape[:-2], keys.shape[2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        before = torch.einsum("bawkgd,bskd->bakgws", grouped, keys).float()
        before = before.masked_fill(~self._context[:, :, None, None], -torch.inf)
        inside = torch.einsum("bawkgd,bavkd->bakgwv", grouped, k).float()
        inside = inside.masked_fill(~self._own, -torch.inf)
        weights = torch.cat([before, inside], -1).softmax(-1).to(values.dtype)
        count = keys.shape[1]
        mixed = torch.einsum("bakgws,bskd->bawkgd", weights[..., :count], values)
        mixed = mixed + torch.einsum("bakgwv,bavkd->bawkgd", weights[..., count:], v)
        return mixed.flatten(3)


def _seen(
    config: DFlashConfig, anchors: Tensor, rows: Tensor, count: int, windowed: bool
) -> tuple[Tensor, Tensor]:
    """Masks over context [B, A, W or 1, S] and block [W, W], by ``dflash_block.window_mask``."""
    slots = torch.arange(count, device=anchors.device)
    context = slots < anchors[..., None, None]
    size = rows.shape[2]
    places = torch.arange(size, device=anchors.device)
    back = places[:, None] - places
    whole = torch.ones_like(back, dtype=torch.bool)
    if not windowed:
        return context, whole
    span = config.layers.sliding_window
    assert span is not None
    if not config.anchored_windows:
        return context & (rows[..., None] - slots < span), back.abs() < span
    context = context & (slots >= anchors[..., None, None] - span)
    return context, back >= 0 if config.causal_windows else whole
