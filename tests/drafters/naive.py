"""Decoder layers spelled out: one text, no cache, nothing shared with the package.

T tokens, H hidden size, D head size. Weights are tables of tensors by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """What attention needs to know."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float = 10000.0
    eps: float = 1e-5
    window: int | None = None


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def product(x: Tensor, weights: Weights, name: str) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def turn(x: Tensor, positions: Sequence[int], theta: float) -> Tensor:
    """Rotary embedding of one head [T, D]: number i and i + D/2 are one complex number."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)])
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * speeds
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention(z: Tensor, weights: Weights, positions: Sequence[int], sizes: Sizes) -> Tensor:
    """Causal attention of z [T, any], [T, H]."""
    dim, groups = sizes.head_dim, sizes.num_heads // sizes.num_kv_heads
    queries, keys, values = (product(z, weights, f"{name}_proj") for name in "qkv")
    places = torch.tensor(positions)
    hidden = torch.ones(len(positions), len(positions)).triu(1).bool()
    if sizes.window is not None:
        hidden |= places[None, :] <= places[:, None] - sizes.window
    mixed = []
    for head in range(sizes.num_heads):
        own = slice(head * dim, (head + 1) * dim)
        shared = slice(head // groups * dim, (head // groups + 1) * dim)
        q, k = queries[:, own], keys[:, shared]
        if "q_norm.weight" in weights:
            q = rms(q, weights["q_norm.weight"], sizes.eps)
            k = rms(k, weights["k_norm.weight"], sizes.eps)
        q, k = turn(q, positions, sizes.theta), turn(k, positions, sizes.theta)
        scores = (q @ k.T / math.sqrt(dim)).masked_fill(hidden, float("-inf"))
        mixed.append(scores.softmax(-1) @ values[:, shared])
    return product(torch.cat(mixed, dim=-1), weights, "o_proj")


def mlp(x: Tensor, weights: Weights) -> Tensor:
    gate, up = (product(x, weights, f"{name}_proj") for name in ("gate", "up"))
    return product(gate * gate.sigmoid() * up, weights, "down_proj")


def below(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def decoder_layer(x: Tensor, weights: Weights, positions: Sequence[int], sizes: Sizes) -> Tensor:
    """One pre-norm layer on x [T, H]; without a norm before attention where there is none."""
    normed = x
    if "input_layernorm.weight" in weights:
        normed = rms(x, weights["input_layernorm.weight"], sizes.eps)
    x = x + attention(normed, below(weights, "self_attn."), positions, sizes)
    normed = rms(x, weights["post_attention_layernorm.weight"], sizes.eps)
    return x + mlp(normed, below(weights, "mlp."))
