"""What a block drafter runs a round: its layers with products fused, over a cache of the context.

    cache of a row:  0 ......... start-1 | start ........ start+B-1
                     context, committed  | block, pending, dropped when it has been run

R rows, B block rows, T new context tokens, L layers, G query heads, kv key-value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.drafters.base import Product, TargetParts
from forespeak.formats.dflash_config import DFlashConfig
from forespeak.models.blocks import DecoderLayer
from forespeak.models.decoder import RopeTable, rms_norm, rotate, window_flags
from forespeak.models.kv_cache import KVCache
from forespeak.types import Segment


@dataclass(frozen=True)
class _Layer:
    """One layer's products, q, k, v and gate, up each in one, and its norms."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor
    key_norm: Tensor


class BlockLayers:
    """The layers of a block drafter and the context that they see.

    Args:
        config: sizes and windows.
        layers: L layers as trained; their weights are copied.
        num_rows: most rows at a time.
        target: where and in which precision it drafts, and for how long a context.
    """

    def __init__(
        self,
        config: DFlashConfig,
        layers: Sequence[DecoderLayer],
        num_rows: int,
        target: TargetParts,
    ) -> None:
        c, device, dtype = config.layers, target.model.device, target.drafting_dtype
        self._config, self._device, self._target = config, device, target
        self._eps, self._heads = c.rms_norm_eps, [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        self._head_dim = c.head_dim
        self._rope = RopeTable(c, target.served_length)
        self._windowed = [bool(flag) for flag in window_flags(c)]
        self._layers = [self._fused(layer) for layer in layers]
        parts = [
            _joined(layer, ("k_proj", "v_proj")) for layer in layers
        ]  # [2 kv D, H] and [2 kv D]
        biases = [bias for _, bias in parts if bias is not None]
        # One product for all layers, so that a few tokens of context cost a few operations.
        self._keys_values = target.product(
            torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None
        )
        self._key_norms = torch.stack([layer.key_norm for layer in self._layers])  # [L, D]
        self.rows = KVCache(
            c.num_layers, num_rows, c.num_kv_heads, c.head_dim, 64, dtype=dtype, device=device
        )

    def _fused(self, layer: DecoderLayer) -> _Layer:
        product, dtype = self._target.product, self._target.drafting_dtype

        def moved(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=self._device, dtype=dtype)

        attention, mlp = layer.self_attn, layer.mlp
        assert attention.q_norm is not None and attention.k_norm is not None
        assert layer.input_layernorm is not None
        names = ("q_proj", "k_proj", "v_proj")
        return _Layer(
            qkv=product(*_joined(layer, names)),
            out=product(attention.o_proj.weight.detach(), attention.o_proj.bias),
            gate_up=product(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()),
            down=product(mlp.down_proj.weight.detach()),
            attention_norm=moved(layer.input_layernorm.weight),
            mlp_norm=moved(layer.post_attention_layernorm.weight),
            query_norm=moved(attention.q_norm.weight),
            key_norm=moved(attention.k_norm.weight),
        )

    def append_context(self, rows: Sequence[int], counts: Sequence[int], fused: Tensor) -> None:
        """Keys and values of new context, for all layers in one product.

        Args:
            rows: whose it is.
            counts: tokens of each.
            fused: [T, H] fused features, the rows' one after another.
        """
        lengths = self.rows.lengths
        positions: list[int] = []
        for row, count in zip(rows, counts, strict=True):
            positions += range(lengths[row], lengths[row] + count)
        segments = [Segment(row, count) for row, count in zip(rows, counts, strict=True)]
        self.rows.append(segments, positions)
        both = self._keys_values(fused).view(len(fused), len(self._layers), -1, self._head_dim)
        keys, values = both.chunk(2, dim=2)  # [T, L, kv, D] each
        keys = rms_norm(keys, self._key_norms[:, None], self._eps)
        cos, sin = self._rotation(positions)
        keys = rotate(keys.flatten(1, 2), cos, sin).view_as(keys)
        keys, values, at = keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3), 0  # [L, kv, T, D]
        for row, count in zip(rows, counts, strict=True):
            place = slice(lengths[row], lengths[row] + count)
            self.rows.keys[:, row, :, place] = keys[:, :, at : at + count]
            self.rows.values[:, row, :, place] = values[:, :, at : at + count]
            self.rows.commit_all(row)
            at += count

    def run_block(self, rows: Sequence[int], x: Tensor) -> Tensor:
        """Blocks through the layers; the cache is afterwards as before.

        Args:
            rows: R rows.
            x: [R * B, H] embeddings of their blocks, one after another.

        Returns:
            [R * B, H] states before the last norm.
        """
        size = len(x) // len(rows)
        positions: list[int] = []
        for row in rows:
            positions += range(self.rows.lengths[row], self.rows.lengths[row] + size)
        self.rows.append([Segment(row, size) for row in rows], positions)
        cos, sin = self._rotation(positions)
        views = [self._views(row, size) for row in rows]
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.attention_norm, self._eps)
            qkv = layer.qkv(normed).view(len(x), -1, self._head_dim)
            q, k, v = torch.split(qkv, self._heads, dim=1)
            q = rotate(rms_norm(q, layer.query_norm, self._eps), cos, sin)
            k = rotate(rms_norm(k, layer.key_norm, self._eps), cos, sin)
            mixed = self._attend(index, rows, views, q, k, v)
            x = x + layer.out(mixed)
            normed = rms_norm(x, layer.mlp_norm, self._eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        for row in rows:
            self.rows.commit(row, ())
        return x

    def _rotation(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        cos, sin = self._rope.lookup(torch.tensor(positions))
        return cos.to(self._device), sin.to(self._device)

    def _views(self, row: int, size: int) -> tuple[tuple[int, Tensor | None], ...]:
        """For full and windowed layers: the first slot that a block sees, and a mask over the slots
        from there on, None where every row sees them all."""
        full: tuple[int, Tensor | None] = (0, None)
        if not any(self._windowed):
            return (full,)
        start = self.rows.lengths[row]
        span = self._config.layers.sliding_window
        assert span is not None
        first = max(0, start - span if self._config.anchored_windows else start - span + 1)
        seen = window_mask(self._config, start, torch.arange(first, start + size), size)
        return full, (first, None if bool(seen.all()) else seen.to(self._device))

    def _attend(
        self,
        index: int,
        rows: Sequence[int],
        views: Sequence[tuple[tuple[int, Tensor | None], ...]],
        q: Tensor,  # [R * B, G, D]
        k: Tensor,  # [R * B, kv, D]
        v: Tensor,
    ) -> Tensor:
        """[R * B, G D]"""
        size, (heads, shared, _) = len(q) // len(rows), self._heads
        groups, mixed = heads // shared, []
        for at, (row, seen) in enumerate(zip(rows, views, strict=True)):
            start, part = self.rows.lengths[row], slice(at * size, (at + 1) * size)
            end = start + size
            first, mask = seen[self._windowed[index]]
            keys, values = self.rows.keys[index, row], self.rows.values[index, row]  # [kv, C, D]
            keys[:, start:end] = k[part].transpose(0, 1)
            values[:, start:end] = v[part].transpose(0, 1)
            # Heads that share keys are rows of one head: their keys are read once.
            folded = q[part].transpose(0, 1).reshape(1, shared, groups * size, -1)
            out = F.scaled_dot_product_attention(
                folded, keys[None, :, first:end], values[None, :, first:end],
                attn_mask=None if mask is None else mask.repeat(groups, 1),
            )  # fmt: skip
            mixed.append(out.view(heads, size, -1).transpose(0, 1))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(1)


def window_mask(config: DFlashConfig, start: int, slots: Tensor, size: int) -> Tensor:
    """What the rows of a block see in a windowed layer.

    Args:
        start: position of its first row.
        slots: [n] positions of the keys; from ``start`` on they are the block's own.
        size: B.

    Returns:
        [B, n] bool.
    """
    span = config.layers.sliding_window
    assert span is not None
    own = torch.arange(start, start + size, device=slots.device)[:, None]
    inside = slots >= start
    if not config.anchored_windows:
        return (own - slots).abs() < span
    context = ~inside & (slots >= start - span)
    return context | (inside & (slots <= own if config.causal_windows else inside))


def _joined(layer: DecoderLayer, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of some projections in one."""
    parts = [getattr(layer.self_attn, name) for name in names]
    weight = torch.cat([part.weight.detach() for part in parts])
    if parts[0].bias is None:
        return weight, None
    return weight, torch.cat([part.bias.detach() for part in parts])
