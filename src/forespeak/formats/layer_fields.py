"""Sizes and switches of decoder layers as the fields of an HF config: what ``ModelConfig.from_hf``
reads back, and other engines read too."""

from __future__ import annotations

from dataclasses import dataclass

from forespeak.models.config import ModelConfig

_QWEN = ("mimo", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class LayeredConfig:
    """What every drafter made of decoder layers says of itself by their sizes.

    Attributes:
        layers: their sizes, and the target's vocabulary.
        draft_vocab_size: Vd of a reduced draft vocabulary.
    """

    layers: ModelConfig
    draft_vocab_size: int | None = None

    @property
    def hidden_size(self) -> int:
        """The target's; the layers' own where a family does not say otherwise."""
        return self.layers.hidden_size

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.layers.vocab_size

    @property
    def max_positions(self) -> int:
        """Tokens of context that the layers can serve."""
        return self.layers.max_position_embeddings

    @property
    def context_values(self) -> int:
        """Keys and values of a token of context in all layers."""
        c = self.layers
        return c.num_layers * 2 * c.num_kv_heads * c.head_dim


def layer_fields(config: ModelConfig) -> dict[str, object]:
    """The fields of a config.json that say what ``config`` says."""
    family = _family(config)
    fields: dict[str, object] = {
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_parameters["rope_theta"],  # for readers of the older layout
        "rope_parameters": dict(config.rope_parameters),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    return fields | _window_fields(config, family)


def _family(config: ModelConfig) -> str:
    """A family whose layers are these; mostly the config's own."""
    if config.attention_bias and not config.output_bias and config.model_type not in _QWEN:
        return "qwen2"  # a GGUF file may hold a Llama like that; in HF's form it is a Qwen2
    return config.model_type


def _window_fields(config: ModelConfig, family: str) -> dict[str, object]:
    if family == "mistral":
        return {"sliding_window": config.sliding_window}
    if family not in _QWEN:
        return {}
    kinds = [
        "sliding_attention" if slides else "full_attention" for slides in config.sliding_layers
    ]
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": kinds or ["full_attention"] * config.num_layers,
    }
