"""Rotary frequencies against those inside transformers' models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forespeak.errors import ModelError
from forespeak.models.config import ModelConfig
from forespeak.models.rope import rope_frequencies

LENGTH = 64
SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}
KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED,
    {"rope_type": "yarn"} | SCALED,
    {"rope_type": "yarn", "beta_fast": 16.0, "truncate": False} | SCALED,
    {"rope_type": "yarn", "attention_factor": 1.5} | SCALED,
]


def _config(rope: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 96,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": LENGTH,
            "rope_theta": 5000.0,
            "rope_scaling": rope,
        }
    )


def _theirs(rope: dict[str, Any], length: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=96,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=LENGTH,
        rope_parameters=rope | {"rope_theta": 5000.0},
    )
    rotary = LlamaRotaryEmbedding(config)
    rotary(torch.zeros(1), torch.arange(length)[None])  # dynamic kinds settle on the length here
    return rotary


@pytest.mark.parametrize("length", [LENGTH, 3 * LENGTH])
@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: rope["rope_type"])
def test_same_as_transformers(rope: dict[str, Any], length: int):
    frequencies, scaling = rope_frequencies(_config(rope), length)
    theirs = _theirs(rope, length)
    assert frequencies.shape == (16,) and frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert scaling == theirs.attention_scaling


def test_dynamic_is_default_within_the_trained_length():
    dynamic, _ = rope_frequencies(_config(KINDS[2]), LENGTH // 2)
    default, _ = rope_frequencies(_config(KINDS[0]), LENGTH)
    assert torch.equal(dynamic, default)


def test_yarn_without_factor_takes_the_ratio_of_lengths():
    absent = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    ours, _ = rope_frequencies(_config(absent), LENGTH)
    stated, _ = rope_frequencies(_config(absent | {"factor": 4.0}), LENGTH)
    assert torch.equal(ours, stated)


def test_frequency_factors_divide():
    factors = [1.0] * 8 + [4.0] * 8
    ours, _ = rope_frequencies(_config({"frequency_factors": factors}), LENGTH)
    plain, _ = rope_frequencies(_config(KINDS[0]), LENGTH)
    assert torch.equal(ours, plain / torch.tensor(factors))
    with pytest.raises(ModelError, match="3 rotary frequency factors; 16 are needed"):
        rope_frequencies(_config({"frequency_factors": [1.0] * 3}), LENGTH)


def test_unknown_kind():
    config = dataclasses.replace(_config(KINDS[0]), rope_parameters={"rope_type": "longrope"})
    with pytest.raises(ModelError, match="allowed: default, dynamic, linear, llama3, yarn"):
        rope_frequencies(config, LENGTH)
