"""Random decoders of a few thousand weights, of every family and with every switch.

Sizes are small and awkward on purpose: no multiple of 32, more than one query head a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forespeak.models.base import TargetModel
from forespeak.models.config import ModelConfig, weight_shapes
from forespeak.models.decoder import Decoder
from forespeak.models.int8_decoder import Int8Decoder
from forespeak.types import Segment, TargetOutput

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "mistral": {"sliding_window": 7, "sliding_layers": (True, True, True)},
}
"""What sets each family apart, with a window smaller than the texts of the tests."""

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def tiny_config(model_type: str = "llama", rope: str = "default", **changes: Any) -> ModelConfig:
    """A config of a family; ``changes`` are fields of :class:`ModelConfig`."""
    config = ModelConfig(
        model_type=model_type,
        vocab_size=83,
        hidden_size=40,
        intermediate_size=72,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_parameters=dict(ROPES[rope]),
        eos_token_ids=(2,),
    )
    changes = FAMILIES[model_type] | changes
    layers = changes.get("num_layers", config.num_layers)
    if changes.get("sliding_window") and len(changes.get("sliding_layers", ())) != layers:
        changes["sliding_layers"] = (True,) * layers
    return replace(config, **changes)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights under HF names, sized so that activations stay near one and logits differ clearly.

    Gains are not one and biases are not zero, so that leaving one out shows.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        elif name == "lm_head.weight" or config.tie_word_embeddings and "embed" in name:
            values = values * 2 / shape[1] ** 0.5
        elif "embed" not in name:
            values = values / shape[1] ** 0.5
        weights[name] = values
    return weights


def tiny_decoder(config: ModelConfig | None = None, *, seed: int = 0, **options: Any) -> Decoder:
    """``options``: dtype, device, context_length, plain_attention."""
    config = config or tiny_config()
    return Decoder(config, random_weights(config, seed).items(), **options)


def tiny_int8(config: ModelConfig | None = None, *, seed: int = 0, **options: Any) -> Int8Decoder:
    """``options``: context_length, threads (one, as so small a model wants), portable."""
    config = config or tiny_config()
    options.setdefault("threads", 1)
    return Int8Decoder(config, random_weights(config, seed).items(), **options)


def random_tokens(count: int, seed: int = 0, vocab_size: int = 83) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def run(
    model: TargetModel,
    tokens: Sequence[int],
    *,
    taps: Sequence[int] = (),
    logits_at: Tensor | None = None,
) -> TargetOutput:
    """One forward of a whole text in a cache of its own."""
    cache = model.new_cache(1, len(tokens))
    device = model.device
    return model.forward(
        torch.tensor(tokens, device=device),
        torch.arange(len(tokens), device=device),
        cache,
        [Segment(0, len(tokens))],
        logits_at=logits_at,
        taps=taps,
    )
