"""A block drafter spelled out from the formulas: one row of one block at a time, no cache.

H hidden size, B block rows, S tokens of context, r Markov rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.drafters.naive import Sizes, below, mlp, product, rms, turn


@dataclass(frozen=True)
class Windows:
    """Of some layers. ``own`` counts from each row's place, both ways; ``before`` takes so many
    places before the root and the whole block; ``causal`` those places and the rows so far."""

    kind: str
    span: int
    layers: tuple[bool, ...]


def sees(windows: Windows | None, layer: int, start: int, row: int, key: int) -> bool:
    """Whether block row ``row`` sees the key at position ``key``."""
    if windows is None or not windows.layers[layer]:
        return True
    if windows.kind == "own":
        return abs(start + row - key) < windows.span
    if key < start:
        return start - key <= windows.span
    return windows.kind == "before" or key <= start + row


def block_states(
    weights: Mapping[str, Tensor],
    sizes: Sizes,
    features: Tensor,
    embedded: Tensor,
    windows: Windows | None = None,
) -> Tensor:
    """States [B, H] after the last norm, of features [S, K * H] and embeddings [B, H]."""
    start, count = len(features), len(embedded)
    context = rms(product(features, weights, "fc"), weights["hidden_norm.weight"], sizes.eps)
    places = list(range(start + count))
    x, layer = embedded, 0
    while f"layers.{layer}.mlp.up_proj.weight" in weights:
        own = below(weights, f"layers.{layer}.")
        attn = below(own, "self_attn.")
        z = torch.cat([context, rms(x, own["input_layernorm.weight"], sizes.eps)])
        mixed = []
        for head in range(sizes.num_heads):
            q, k, v = (_head(product(z, attn, f"{n}_proj"), n, head, sizes) for n in "qkv")
            q = turn(rms(q, attn["q_norm.weight"], sizes.eps), places, sizes.theta)
            k = turn(rms(k, attn["k_norm.weight"], sizes.eps), places, sizes.theta)
            rows = []
            for row in range(count):
                keys = [p for p in places if sees(windows, layer, start, row, p)]
                scores = k[keys] @ q[start + row] / math.sqrt(sizes.head_dim)
                rows.append(scores.softmax(0) @ v[keys])
            mixed.append(torch.stack(rows))
        x = x + product(torch.cat(mixed, -1), attn, "o_proj")
        x = x + mlp(rms(x, own["post_attention_layernorm.weight"], sizes.eps), below(own, "mlp."))
        layer += 1
    return rms(x, weights["norm.weight"], sizes.eps)


def _head(z: Tensor, name: str, head: int, sizes: Sizes) -> Tensor:
    at = head if name == "q" else head // (sizes.num_heads // sizes.num_kv_heads)
    return z[:, at * sizes.head_dim : (at + 1) * sizes.head_dim]


def corrections(
    weights: Mapping[str, Tensor], states: Tensor, path: Sequence[int], first: int, kind: str
) -> Tensor:
    """What the sequential head adds to the law below a path.

    Args:
        states: [B, H] of all rows.
        path: tokens from the root down.
        first: the row that gives depth 1.
        kind: the head's type.
    """
    w1 = weights["markov_head.markov_w1.weight"]
    head = below(weights, "markov_head.")
    state = torch.zeros(w1.shape[1])
    steps = [(0, path[0])] * first + [(first + i, token) for i, token in enumerate(path)]
    for row, token in steps:
        e, h = w1[token], states[row]
        if kind == "vanilla":
            inner = e
        elif kind == "gated":
            inner = product(torch.cat([h, e]), head, "gate_proj").sigmoid() * e
        else:
            joined = product(torch.cat([state, e, h]), head, "joint_proj")
            gate, candidate, out = joined.view(3, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            inner = out.tanh()
    return weights["markov_head.markov_w2.weight"] @ inner


def chance(
    weights: Mapping[str, Tensor],
    states: Tensor,
    path: Sequence[int],
    first: int,
    temperature: float,
) -> float:
    """The estimate for a draft token below a path."""
    inputs = states[first + len(path) - 1]
    if weights["confidence_head.proj.weight"].shape[1] > len(inputs):
        inputs = torch.cat([inputs, weights["markov_head.markov_w1.weight"][path[-1]]])
    logit = product(inputs, weights, "confidence_head.proj")
    return 1 / (1 + math.exp(-float(logit) / temperature))
