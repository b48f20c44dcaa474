"""Decoder layers of EAGLE drafters in a config: what its layouts share.

The official code builds Llama layers whatever ``model_type`` says, with biases where ``qkv_bias``
or ``attention_bias`` ask for them. The speculators package builds those of ``model_type`` and
leaves out fields that equal the defaults of transformers' class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forespeak.errors import CheckpointError, shown
from forespeak.formats.drafter_files import DrafterFiles, Shape
from forespeak.formats.fields import switch, whole_number
from forespeak.formats.layer_fields import layer_fields
from forespeak.models.config import ModelConfig, weight_shapes

LAYER_FIELDS = frozenset(
    {
        *("attention_bias", "attention_dropout", "head_dim", "hidden_act", "hidden_size"),
        *("intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers"),
        *("mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers", "qkv_bias"),
        *("num_key_value_heads", "original_max_position_embeddings", "pretraining_tp"),
        *("quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
        *("sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size"),
    }
)
"""Fields of a config that describe decoder layers or change none of their numbers."""

# Those that the official code takes from its target's config and has no use for.
UNUSED_FIELDS = frozenset(
    {
        *("num_experts_per_tok", "num_local_experts", "output_router_logits"),
        *("router_aux_loss_coef", "router_jitter_noise", "target_model_type"),
    }
)

# What transformers' classes have where a field is left out.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def official_layers(files: DrafterFiles, layer: str) -> ModelConfig:
    """Llama layers as the official code builds them.

    Args:
        files: with the layers' fields in the config.
        layer: what the names of the first layer's tensors begin with, such as ``layers.0.``.

    Raises:
        CheckpointError: a field is missing or asks for what these layers do not have.
    """
    values = files.config
    kinds = values.get("layer_types")
    if values.get("use_sliding_window") or (
        isinstance(kinds, list) and any(kind != _FULL for kind in kinds)
    ):
        raise wrong(
            files,
            "the layers have sliding windows, which the official code does not have; allowed: "
            f"use_sliding_window false, and {_FULL} in layer_types",
        )
    # Of its fields a Llama layer has no window, so what is said of one has no effect there either.
    layers = ModelConfig.from_hf({**values, "model_type": "llama"}, origin=_place(files))
    bias, output = _biases(files, layer)
    normed = f"{layer}self_attn.q_norm.weight" in files.shapes
    return replace(layers, attention_bias=bias, output_bias=output, qk_norm=normed)


def _biases(files: DrafterFiles, layer: str) -> tuple[bool, bool]:
    """Of q, k, v and of o. Where no field says, the tensors do: Qwen2's drafters have them."""
    stored = f"{layer}self_attn.q_proj.bias" in files.shapes
    both = switch(files, "attention_bias", default=False)
    bias = switch(files, "qkv_bias", default=stored or both)
    return bias, both and f"{layer}self_attn.o_proj.bias" in files.shapes


def official_values(config: ModelConfig) -> dict[str, object]:
    """The fields that :func:`official_layers` reads back."""
    values = layer_fields(replace(config, model_type="llama", output_bias=config.attention_bias))
    return values | {
        "attention_bias": config.attention_bias and config.output_bias,
        "qkv_bias": config.attention_bias,
    }


def package_layers(files: DrafterFiles, values: Mapping[str, object]) -> ModelConfig:
    """Layers as the speculators package builds them.

    Args:
        files: for messages.
        values: its ``transformer_layer_config``.

    Raises:
        CheckpointError: a field is wrong or asks for what these layers do not have.
    """
    family = values.get("model_type", "llama")
    if not isinstance(family, str) or family not in _DEFAULTS:
        raise wrong(
            files,
            f"transformer_layer_config has model_type {shown(family)}; allowed: "
            f"{', '.join(_DEFAULTS)}",
        )
    filled = {**values, "model_type": family}
    for key, default in _DEFAULTS[str(family)].items():
        if filled.get(key) is None:
            filled[key] = default
    layers = ModelConfig.from_hf(filled, origin=_place(files))
    if family == "llama":
        layers = _windowed(files, filled, layers)
    return layers


def _windowed(
    files: DrafterFiles, values: Mapping[str, object], layers: ModelConfig
) -> ModelConfig:
    """Windows of Llama layers, which transformers' class does not have and the package does."""
    kinds = values.get("layer_types")
    if kinds is None:
        return layers
    known = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not known or len(kinds) != layers.num_layers:  # type: ignore[arg-type]
        raise wrong(
            files,
            f"layer_types is {shown(kinds)}; it must be a list of {layers.num_layers} of {_FULL}, "
            f"{_SLIDING}",
        )
    slides = tuple(kind == _SLIDING for kind in kinds)  # type: ignore[attr-defined]
    if not any(slides):
        return layers
    if values.get("use_sliding_window") is False:
        raise wrong(files, f"layer_types has {_SLIDING} and use_sliding_window is false")
    window = whole_number(replace(files, config=values), "sliding_window")
    return replace(layers, sliding_window=window, sliding_layers=slides)


def package_values(config: ModelConfig) -> dict[str, object]:
    """The fields that :func:`package_layers` reads back, every one written."""
    values = layer_fields(config)
    if config.model_type == "llama" and config.sliding_window is not None:
        flags = config.sliding_layers or (True,) * config.num_layers
        values |= {
            "sliding_window": config.sliding_window,
            "use_sliding_window": True,
            "layer_types": [_SLIDING if flag else _FULL for flag in flags],
        }
    return values


def small_layers(target: ModelConfig) -> ModelConfig:
    """One Llama layer of a target's width, as the official recipes take."""
    theta = target.rope_parameters.get("rope_theta", 10000.0)
    return ModelConfig(
        model_type="llama", vocab_size=target.vocab_size, hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size, num_layers=1, num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads, head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip


def layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """``layers.{i}.`` names of plain decoder layers and their shapes."""
    return {
        name.removeprefix("model."): shape
        for name, shape in weight_shapes(config).items()
        if name.startswith("model.layers.")
    }


def wrong(files: DrafterFiles, what: str) -> CheckpointError:
    """A refusal of a folder's config."""
    return CheckpointError(f"{_place(files)}: {what}. Get the drafter again, or choose another.")


def _place(files: DrafterFiles) -> str:
    return str(files.folder / "config.json")


_FULL, _SLIDING = "full_attention", "sliding_attention"
