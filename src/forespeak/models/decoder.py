"""Decoder: Llama, Qwen2, Qwen3 and Mistral in torch (float32, bfloat16; CPU and CUDA).

One forward over the flattened new tokens of all rows; only attention runs row by row. Letters as
in ``types.py``, and G query heads, kv key-value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.models.attention import attend_rows, dense_mask
from forespeak.models.base import Cache, TargetModel, first_layers_config
from forespeak.models.config import ModelConfig
from forespeak.models.kv_cache import KVCache
from forespeak.models.parameters import LayerTensors, OuterTensors, read_parameters
from forespeak.models.rope import rope_frequencies
from forespeak.types import Segment, TargetOutput

Mix = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (its number, q [T, heads, D], k and v [T, kv, D]) -> [T, heads * D]."""

_CLIFF_ROWS = 5
_TABLE_STEP = 1024  # positions are tabulated in chunks of one shape, so values never depend on use


class RopeTable:
    """cos and sin of every position, [P, D/2] float32, computed once and grown when needed."""

    def __init__(self, config: ModelConfig, context_length: int) -> None:
        self._frequencies, self._factor = rope_frequencies(config, context_length)
        self.cos = torch.empty((0, config.head_dim // 2))
        self.sin = torch.empty((0, config.head_dim // 2))

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, D/2] on the CPU, of positions [T]."""
        self.grow(int(positions.max()) + 1)
        at = positions.cpu()
        return self.cos[at], self.sin[at]

    def grow(self, count: int) -> None:
        """Tabulate the first ``count`` positions, at least."""
        while count > self.cos.shape[0]:
            start = self.cos.shape[0]
            steps = torch.arange(start, start + _TABLE_STEP, dtype=torch.float32)
            angles = steps[:, None] * self._frequencies
            self.cos = torch.cat([self.cos, angles.cos() * self._factor])
            self.sin = torch.cat([self.sin, angles.sin() * self._factor])


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, computed in float32 as the families do."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, around a cliff of the CPU's float32 product: 2 to 4 rows take longer than 8."""
    rows = x.shape[0]
    if x.device.type != "cpu" or x.dtype != torch.float32 or not 1 < rows < _CLIFF_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, _CLIFF_ROWS - rows)), weight, bias)[:rows]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of x [T, heads, D] with cos, sin [T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass(frozen=True)
class _Layer:
    """One layer's weights with q, k, v and gate, up each fused into one product."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


def _joined(*parts: Tensor | None) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _fuse(layer: LayerTensors, dtype: torch.dtype, device: torch.device) -> _Layer:
    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device=device, dtype=dtype)

    def sure(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype)

    return _Layer(
        qkv=sure(torch.cat([layer.q, layer.k, layer.v])),
        qkv_bias=moved(_joined(layer.q_bias, layer.k_bias, layer.v_bias)),
        out=sure(layer.o),
        out_bias=moved(layer.o_bias),
        gate_up=sure(torch.cat([layer.gate, layer.up])),
        gate_up_bias=moved(_joined(layer.gate_bias, layer.up_bias)),
        down=sure(layer.down),
        down_bias=moved(layer.down_bias),
        attention_norm=sure(layer.attention_norm),
        mlp_norm=sure(layer.mlp_norm),
        query_norm=moved(layer.query_norm),
        key_norm=moved(layer.key_norm),
    )


def window_flags(config: ModelConfig) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[L] 1 where the layer has a sliding window."""
    flags = np.zeros(config.num_layers, np.int64)
    if config.sliding_window is not None:
        flags[:] = config.sliding_layers or (True,) * config.num_layers
    return flags


class Decoder(TargetModel):
    """A dense decoder in torch.

    Args:
        config: its sizes.
        weights: HF-named tensors in any order, read once.
        dtype: float32 or bfloat16.
        device: cpu or cuda.
        context_length: tokens a row may hold; fixes the frequencies of dynamic RoPE.
        plain_attention: spell attention out in float32 (slow; the oracle of the library kernels).

    Raises:
        CheckpointError: weights and config do not fit together.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        context_length: int | None = None,
        plain_attention: bool = False,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.plain_attention = plain_attention
        self._rope = RopeTable(config, context_length or config.max_position_embeddings)
        self._windowed = window_flags(config)
        layers: dict[int, _Layer] = {}
        for item in read_parameters(config, weights):
            if isinstance(item, OuterTensors):
                self._embedding = item.embedding.to(device=self.device, dtype=dtype)
                self._norm = item.norm.to(device=self.device, dtype=dtype)
                tied = item.head is item.embedding
                self._head = (
                    self._embedding if tied else item.head.to(device=self.device, dtype=dtype)
                )
            else:
                layers[item[0]] = _fuse(item[1], dtype, self.device)
        self._layers = [layers[i] for i in range(config.num_layers)]

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(
            c.num_layers, num_rows, c.num_kv_heads, c.head_dim, capacity,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip

    @property
    def windowed(self) -> list[bool]:
        """[L] which layers have a sliding window."""
        return [bool(flag) for flag in self._windowed]

    def rotations(self, count: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [P, D/2] on the device, of at least the first ``count`` positions."""
        self._rope.grow(count)
        return self._rope.cos.to(self.device), self._rope.sin.to(self.device)

    def truncated(self, num_layers: int) -> Decoder:
        model = copy.copy(self)
        model.config = first_layers_config(self.config, num_layers)
        model._layers = self._layers[:num_layers]
        model._windowed = self._windowed[:num_layers]
        return model

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.to(self.device), self._embedding)

    def norm(self, states: Tensor) -> Tensor:
        return rms_norm(states.to(self.dtype), self._norm, self.config.rms_norm_eps)

    def head_rows(self, tokens: Tensor) -> Tensor:
        return self._head[tokens.to(self.device)]

    def head(self, hidden: Tensor) -> Tensor:
        rows = hidden.to(self.dtype).reshape(-1, hidden.shape[-1])
        logits = linear(rows, self._head).float()
        return logits.view(*hidden.shape[:-1], self._head.shape[0])

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        segments: Sequence[Segment],
        *,
        logits_at: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        assert isinstance(cache, KVCache)
        cache.append(segments, positions.tolist())
        cos, sin = (t.to(self.device) for t in self._rope.lookup(positions))
        masks = self._masks(cache, segments)

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = masks[int(self._windowed[layer])]
            return attend_rows(q, k, v, layer, cache, segments, seen, plain=self.plain_attention)

        hidden, tapped = self.through_layers(self.embed(tokens), cos, sin, mix, taps)
        asked = hidden if logits_at is None else hidden[logits_at.to(self.device)]
        return TargetOutput(
            logits=self.head(asked),
            hidden=hidden,
            taps=torch.stack([tapped[i] for i in taps], dim=1) if taps else None,
        )

    def _masks(self, cache: KVCache, segments: Sequence[Segment]) -> list[list[Tensor]]:
        """For full and windowed layers: the mask of each segment."""
        spans = [None, self.config.sliding_window] if self._windowed.any() else [None]
        return [[dense_mask(cache, s, span, self.device) for s in segments] for span in spans]

    def through_layers(
        self,
        hidden: Tensor,  # [T, H]
        cos: Tensor,  # [T, D/2]
        sin: Tensor,
        mix: Mix,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """All layers and the final norm, whoever keeps the keys and values.

        Returns:
            [T, H], and the outputs of the tapped layers by number.
        """
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            hidden = self._layer(hidden, index, layer, cos, sin, mix)
            if index in taps:
                tapped[index] = hidden
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps), tapped

    def _layer(
        self, hidden: Tensor, index: int, layer: _Layer, cos: Tensor, sin: Tensor, mix: Mix
    ) -> Tensor:
        c = self.config
        normed = rms_norm(hidden, layer.attention_norm, c.rms_norm_eps)
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q = rms_norm(q, layer.query_norm, c.rms_norm_eps)
            k = rms_norm(k, layer.key_norm, c.rms_norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        hidden = hidden + linear(mix(index, q, k, v), layer.out, layer.out_bias)
        normed = rms_norm(hidden, layer.mlp_norm, c.rms_norm_eps)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return hidden + linear(F.silu(gate) * up, layer.down, layer.down_bias)
