"""Decoder layers as torch modules, for drafters: the same weights serve drafting and training.

Parameter names are those of Hugging Face's Llama and Qwen layers, so a module's ``state_dict`` is
what a checkpoint holds. Where keys and values go is the caller's affair: a layer hands its rotated
queries, keys and values to a function and takes the mixed values back.

Letters as in ``types.py``, and G query heads, kv key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forespeak.errors import CheckpointError
from forespeak.formats.weights import check_weight
from forespeak.models.config import ModelConfig

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [..., T, D / 2]."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q [..., T, G, D], k [..., T, kv, D], v [..., T, kv, D]) -> [..., T, G * D]."""


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, in float32 as the families do.

    Args:
        unit_offset: the weight is a distance from one (Gemma, Qwen3-Next): (1 + w) * x.
    """

    def __init__(self, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.unit_offset = eps, unit_offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class Linear(nn.Linear):
    """A product without torch's random initialisation; see :func:`blank`."""

    def reset_parameters(self) -> None:
        pass


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Half-split rotary embedding of x [..., T, heads, D]."""
    cos, sin = (table[..., None, :].to(x.dtype) for table in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Projections of grouped-query attention.

    Args:
        config: head counts, biases, q and k norms.
        input_size: width of what q, k and v read; None takes the hidden size.
    """

    def __init__(self, config: ModelConfig, input_size: int | None = None) -> None:
        super().__init__()
        width, size = input_size or config.hidden_size, config.head_dim
        bias = config.attention_bias
        self.head_dim = size
        self.q_proj = Linear(width, config.num_heads * size, bias=bias)
        self.k_proj = Linear(width, config.num_kv_heads * size, bias=bias)
        self.v_proj = Linear(width, config.num_kv_heads * size, bias=bias)
        self.o_proj = Linear(config.num_heads * size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[..., T, G, D]"""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(q if self.q_norm is None else self.q_norm(q), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[..., T, kv, D] each."""
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(k if self.k_norm is None else self.k_norm(k), rotation), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer.

    Args:
        config: sizes and switches.
        input_norm: False leaves the norm before attention out (EAGLE-1's first layer).
    """

    def __init__(self, config: ModelConfig, *, input_norm: bool = True) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps) if input_norm else None
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, index: int, rotation: Rotation, attend: Attend) -> Tensor:
        """x [..., T, H] through layer ``index`` of the caller's cache."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        q = self.self_attn.queries(normed, rotation)
        k, v = self.self_attn.keys_values(normed, rotation)
        x = x + self.self_attn.o_proj(attend(index, q, k, v))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def blank(module: nn.Module) -> nn.Module:
    """Fills every parameter with NaN, so that one that is never loaded cannot pass unseen."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    return module


def load_parameters(module: nn.Module, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Copies a checkpoint's tensors into a module of the same names and shapes.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or not finite.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    check_parameters({name: tensor.shape for name, tensor in own.items()}, tensors, origin)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def check_parameters(
    shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor], origin: str
) -> None:
    """Refuse tensors that are not just those of a module.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or not finite.
    """
    missing, unknown = (
        sorted(shapes.keys() - tensors.keys()),
        sorted(tensors.keys() - shapes.keys()),
    )
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which has no place"
        raise CheckpointError(f"{origin} {what}; get the drafter again from where it came from.")
    for name, tensor in tensors.items():
        if tuple(shapes[name]) != tuple(tensor.shape):
            raise CheckpointError(
                f"{origin} has {name} of shape {tuple(tensor.shape)}; expected is "
                f"{tuple(shapes[name])}. Get the drafter again from where it came from."
            )
        check_weight(tensor, name, origin)
