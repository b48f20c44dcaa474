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

from forespeak.formats.dflash_config import DFlashConfig
from forespeak.models.blocks import DecoderLayer
from forespeak.models.decoder import RopeTable, linear, rms_norm, rotate, window_flags
from forespeak.models.kv_cache import KVCache
from forespeak.types import Segment


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, q, k, v and gate, up each in one product."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
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
        context_length: tokens a row may hold, for dynamic rotary embedding.
        dtype, device: of weights, keys and values.
    """

    def __init__(
        self,
        config: DFlashConfig,
        layers: Sequence[DecoderLayer],
        num_rows: int,
        *,
        context_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        c = config.layers
        self._config, self._device = config, device
        self._eps, self._heads = c.rms_norm_eps, [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        self._head_dim, self._queries = c.head_dim, c.num_heads * c.head_dim
        self._rope = RopeTable(c, context_length)
        self._windowed = [bool(flag) for flag in window_flags(c)]
        stacked = torch.stack([_joined(layer, "weight") for layer in layers])
        self._qkv = stacked.to(device=device, dtype=dtype)  # [L, (G + 2 kv) D, H]
        self._qkv_bias: Tensor | None = None
        if c.attention_bias:
            biases = torch.stack([_joined(layer, "bias") for layer in layers])
            self._qkv_bias = biases.to(device=device, dtype=dtype)
        self._layers = [self._fused(index, layer, dtype) for index, layer in enumerate(layers)]
        self._key_norms = torch.stack([layer.key_norm for layer in self._layers])  # [L, D]
        self.rows = KVCache(
            c.num_layers, num_rows, c.num_kv_heads, c.head_dim, 64, dtype=dtype, device=device
        )

    def _fused(self, index: int, layer: DecoderLayer, dtype: torch.dtype) -> _Layer:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=self._device, dtype=dtype)

        attention, mlp = layer.self_attn, layer.mlp
        assert attention.q_norm is not None and attention.k_norm is not None
        assert layer.input_layernorm is not None
        bias = attention.o_proj.bias
        return _Layer(
            qkv=self._qkv[index],
            qkv_bias=None if self._qkv_bias is None else self._qkv_bias[index],
            out=moved(attention.o_proj.weight),
            out_bias=None if bias is None else moved(bias),
            gate_up=moved(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
            down=moved(mlp.down_proj.weight),
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
        weight = self._qkv[:, self._queries :]  # [L, 2 kv D, H]
        both = torch.matmul(fused, weight.transpose(1, 2))  # [L, T, 2 kv D]
        if self._qkv_bias is not None:
            both = both + self._qkv_bias[:, None, self._queries :]
        keys, values = both.view(*both.shape[:2], -1, self._head_dim).chunk(2, dim=2)
        # [L, T, kv, D]
        keys = rms_norm(keys, self._key_norms[:, None, None], self._eps)
        cos, sin = self._rotation(positions)
        keys = rotate(keys.flatten(0, 1), cos.repeat(len(keys), 1), sin.repeat(len(keys), 1))
        keys = keys.view_as(values).transpose(1, 2)  # [L, kv, T, D]
        values, at = values.transpose(1, 2), 0
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
            qkv = linear(normed, layer.qkv, layer.qkv_bias).view(len(x), -1, self._head_dim)
            q, k, v = torch.split(qkv, self._heads, dim=1)
            q = rotate(rms_norm(q, layer.query_norm, self._eps), cos, sin)
            k = rotate(rms_norm(k, layer.key_norm, self._eps), cos, sin)
            mixed = self._attend(index, rows, views, q, k, v)
            x = x + linear(mixed, layer.out, layer.out_bias)
            normed = rms_norm(x, layer.mlp_norm, self._eps)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            x = x + linear(F.silu(gate) * up, layer.down)
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
        size = len(q) // len(rows)
        mixed = []
        for at, (row, seen) in enumerate(zip(rows, views, strict=True)):
            start, part = self.rows.lengths[row], slice(at * size, (at + 1) * size)
            end = start + size
            first, mask = seen[self._windowed[index]]
            keys, values = self.rows.keys[index, row], self.rows.values[index, row]  # [kv, C, D]
            keys[:, start:end] = k[part].transpose(0, 1)
            values[:, start:end] = v[part].transpose(0, 1)
            out = F.scaled_dot_product_attention(
                q[part].transpose(0, 1)[None], keys[None, :, first:end],
                values[None, :, first:end], attn_mask=mask,
                enable_gqa=self._heads[0] != self._heads[1],
            )  # fmt: skip
            mixed.append(out[0].transpose(0, 1))
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


def _joined(layer: DecoderLayer, name: str) -> Tensor:
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    return torch.cat([getattr(part, name).detach() for part in parts])
