"""Intake of a decoder's weights: names and shapes checked, given out layer by layer.

Tensors may come in any order (files are streamed); a layer is handed on as soon as it is complete,
so no more than the incomplete layers are held in float at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from forespeak.errors import CheckpointError
from forespeak.models.config import ModelConfig

_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class LayerTensors:
    """Weights of one decoder layer, [outputs, inputs]; None where the family has none."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True)
class OuterTensors:
    """Weights outside the layers; ``head`` is the embedding itself when the two are tied."""

    embedding: Tensor  # [V, H]
    norm: Tensor  # [H]
    head: Tensor  # [V, H]


def layer_shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """HF name below ``model.layers.{i}.`` -> (field of LayerTensors, shape)."""
    h, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * d, config.num_kv_heads * d
    outputs = {"q": (queries, h), "k": (keys, h), "v": (keys, h), "o": (h, queries)}
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_layernorm.weight": ("attention_norm", (h,)),
        "post_attention_layernorm.weight": ("mlp_norm", (h,)),
        "mlp.gate_proj.weight": ("gate", (inner, h)),
        "mlp.up_proj.weight": ("up", (inner, h)),
        "mlp.down_proj.weight": ("down", (h, inner)),
    }
    for name, shape in outputs.items():
        table[f"self_attn.{name}_proj.weight"] = (name, shape)
        if config.output_bias if name == "o" else config.attention_bias:
            table[f"self_attn.{name}_proj.bias"] = (f"{name}_bias", shape[:1])
    if config.mlp_bias:
        for name, size in (("gate", inner), ("up", inner), ("down", h)):
            table[f"mlp.{name}_proj.bias"] = (f"{name}_bias", (size,))
    if config.qk_norm:
        table["self_attn.q_norm.weight"] = ("query_norm", (d,))
        table["self_attn.k_norm.weight"] = ("key_norm", (d,))
    return table


def read_parameters(
    config: ModelConfig, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[int, LayerTensors] | OuterTensors]:
    """Yields (layer index, tensors) for each layer once complete, and at the end the outer ones.

    Raises:
        CheckpointError: a tensor is unknown, missing, doubled, or of another shape.
    """
    table = layer_shapes(config)
    outer_shapes = {_EMBED: (config.vocab_size, config.hidden_size), _NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        outer_shapes[_HEAD] = outer_shapes[_EMBED]
    outer: dict[str, Tensor] = {}
    partial: dict[int, dict[str, Tensor]] = {i: {} for i in range(config.num_layers)}
    for name, tensor in weights:
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints; computed from the config
            continue
        if name in outer_shapes:
            _put(outer, name, name, tensor, outer_shapes[name])
        elif name == _HEAD:  # a copy of the embedding that the config says is shared
            continue
        else:
            layer, rest = _split(name, config.num_layers, table)
            if layer not in partial:
                raise CheckpointError(f"Tensor {name} is in the checkpoint twice; expected once.")
            field, shape = table[rest]
            _put(partial[layer], field, name, tensor, shape)
            if len(partial[layer]) == len(table):
                yield layer, LayerTensors(**partial.pop(layer))
    _refuse_missing(partial, table, outer_shapes, outer)
    head = outer[_EMBED] if config.tie_word_embeddings else outer[_HEAD]
    yield OuterTensors(outer[_EMBED], outer[_NORM], head)


def _put(
    store: dict[str, Tensor], key: str, name: str, tensor: Tensor, shape: tuple[int, ...]
) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"Tensor {name} has shape {list(tensor.shape)}; the config says {list(shape)}. "
            "Config and weights are not of the same model."
        )
    if key in store:
        raise CheckpointError(f"Tensor {name} is in the checkpoint twice; expected once.")
    store[key] = tensor


def _split(
    name: str, num_layers: int, table: dict[str, tuple[str, tuple[int, ...]]]
) -> tuple[int, str]:
    prefix = "model.layers."
    number, _, rest = name.removeprefix(prefix).partition(".")
    if not name.startswith(prefix) or not number.isdigit() or rest not in table:
        raise CheckpointError(
            f"Tensor {name} is not part of this kind of model; expected names like "
            f"{_EMBED} and {prefix}0.{next(iter(table))}. Check that config and weights belong "
            "together."
        )
    if int(number) >= num_layers:
        raise CheckpointError(
            f"Tensor {name} is of layer {number}; the config says {num_layers} layers (0 to "
            f"{num_layers - 1}). Config and weights are not of the same model."
        )
    return int(number), rest


def _refuse_missing(
    partial: dict[int, dict[str, Tensor]],
    table: dict[str, tuple[str, tuple[int, ...]]],
    outer_shapes: dict[str, tuple[int, ...]],
    outer: dict[str, Tensor],
) -> None:
    missing = [name for name in outer_shapes if name not in outer]
    for layer, fields in partial.items():
        missing += [
            f"model.layers.{layer}.{name}" for name, (key, _) in table.items() if key not in fields
        ]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise CheckpointError(
            f"{len(missing)} tensors are missing from the checkpoint: {shown}. "
            "Get the complete set of files."
        )
