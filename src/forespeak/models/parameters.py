"""Intake of a decoder's weights: given out layer by layer, in whatever order they come.

Files are streamed, so no more than the incomplete layers are held in float at a time. Names and
shapes were checked where the weights come from (``loading.checked_weights``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from forespeak.models.config import ModelConfig, weight_shapes

_LAYERS = "model.layers."
_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_FIELDS = {
    "input_layernorm.weight": "attention_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_norm.weight": "query_norm",
    "self_attn.k_norm.weight": "key_norm",
    **{f"self_attn.{name}_proj.weight": name for name in "qkvo"},
    **{f"self_attn.{name}_proj.bias": f"{name}_bias" for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": name for name in ("gate", "up", "down")},
    **{f"mlp.{name}_proj.bias": f"{name}_bias" for name in ("gate", "up", "down")},
}


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


def read_parameters(
    config: ModelConfig, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[int, LayerTensors] | OuterTensors]:
    """Yields (layer index, tensors) for each layer once complete, and at the end the outer ones.

    Args:
        config: says which tensors there are.
        weights: each of ``weight_shapes(config)`` once, HF names, any order.
    """
    per_layer = sum(name.startswith(f"{_LAYERS}0.") for name in weight_shapes(config))
    outer: dict[str, Tensor] = {}
    partial: dict[int, dict[str, Tensor]] = {}
    for name, tensor in weights:
        if not name.startswith(_LAYERS):
            outer[name] = tensor
            continue
        number, _, rest = name.removeprefix(_LAYERS).partition(".")
        layer = int(number)
        fields = partial.setdefault(layer, {})
        fields[_FIELDS[rest]] = tensor
        if len(fields) == per_layer:
            yield layer, LayerTensors(**partial.pop(layer))
    assert not partial, f"incomplete layers {sorted(partial)}"
    head = outer[_EMBED] if config.tie_word_embeddings else outer[_HEAD]
    yield OuterTensors(outer[_EMBED], outer[_NORM], head)
