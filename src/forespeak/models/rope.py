"""Rotary frequencies, taken from transformers' own functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forespeak.errors import ModelError, unknown_choice
from forespeak.models.config import ROPE_KINDS, ModelConfig


def rope_frequencies(config: ModelConfig, context_length: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32 and the factor on cos and sin.

    A token's rotation depends on its position alone, never on what else is in the forward. So for
    ``dynamic`` the frequencies are fixed once for the served ``context_length``, where transformers
    changes them while a text grows. They equal those of ``default`` as long as ``context_length``
    is at most ``max_position_embeddings``, and transformers' for a text of that length beyond it.

    Raises:
        ModelError: the kind of rotary embedding is not known, or factors do not fit the heads.
    """
    rope = dict(config.rope_parameters)
    factors = rope.pop("frequency_factors", None)
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise ModelError(
            unknown_choice("Rotary embedding type", str(kind), ROPE_KINDS)
            + " Choose another model."
        )
    if kind == "default":
        frequencies, scaling = _default_frequencies(config), 1.0
    else:
        hf_config = _as_transformers(config, rope)
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, seq_len=context_length)
    if factors is not None:
        if len(factors) != len(frequencies):
            raise ModelError(
                f"The model has {len(factors)} rotary frequency factors; {len(frequencies)} are "
                "needed, one for each pair of a head. Get the model again."
            )
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float32)
    return frequencies.to(torch.float32), float(scaling)


def _default_frequencies(config: ModelConfig) -> Tensor:
    """theta ** (-2i / head_dim); transformers has it on each model class, not in its table."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies: Tensor = 1.0 / (config.rope_parameters["rope_theta"] ** exponents)
    return frequencies


def _as_transformers(config: ModelConfig, rope: dict[str, Any]) -> LlamaConfig:
    """The least config that transformers' functions read."""
    return LlamaConfig(
        # Its class wants a multiple of the number of heads; head_dim alone enters the formulas.
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
