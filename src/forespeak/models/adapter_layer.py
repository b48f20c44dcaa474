"""FamilyLayer: one decoder layer of an adapted model's own kind, with weights and cache of its own.

For drafters whose layers are made like the target's (prediction modules of DeepSeek-V3 and GLM).
The layer is transformers' class, its settings and its rotary embedding are the target's. One
forward for each row, as in ``adapter_model.py``.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forespeak.errors import ModelError
from forespeak.models.adapter_cache import TransformersCache
from forespeak.models.adapter_config import stated
from forespeak.models.adapter_masks import FULL, segment_masks
from forespeak.models.adapter_model import TransformersModel
from forespeak.models.blocks import check_parameters
from forespeak.types import Segment

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


class FamilyLayer:
    """A layer like those of a model.

    Args:
        model: the adapted model.
        tensors: the layer's weights by the names of a checkpoint; experts one by one or stacked.
        num_rows: most rows at a time.
        origin: where the weights came from, for messages.
        first_position: where the first token of a row stands.

    Raises:
        ModelError: layers of this kind cannot run alone.
        CheckpointError: the weights are not those of such a layer.

    Attributes:
        module: transformers' layer.
        cache: its keys and values (or what stands for them).
    """

    def __init__(
        self,
        model: TransformersModel,
        tensors: Mapping[str, Tensor],
        num_rows: int,
        *,
        origin: str,
        first_position: int = 0,
    ) -> None:
        self._model, self._first = model, first_position
        self.module = _new_layer(model)
        _fill(self.module, tensors, model, origin)
        self.cache = TransformersCache(num_rows, 64)

    def run(self, states: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
        """The layer's outputs [T, H] for states [T, H] at positions [T]; they become pending."""
        outputs, at = [], 0
        for segment in segments:
            span = slice(at, at + segment.num_tokens)
            outputs.append(self._row(states[span], positions[span], segment))
            at = span.stop
        return torch.cat(outputs)

    def _row(self, states: Tensor, positions: Tensor, segment: Segment) -> Tensor:
        model, decoder = self._model, _as_any(self._model.decoder)
        # A window counts positions from slot 0 of the cache.
        self.cache.append(segment, (positions - self._first).tolist())
        masks = segment_masks(model.rules, self.cache, segment, states.dtype, states.device)
        places = positions[None].to(states.device)
        output = self.module(
            states[None],
            attention_mask=masks if isinstance(masks, Tensor) else masks[FULL],
            position_ids=places,
            position_embeddings=decoder.rotary_emb(states[None], places),
            use_cache=True,
            **{model.cache_argument: self.cache.rows[segment.row]},
        )
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden[0]


def _as_any(module: nn.Module) -> Any:
    return module


def _new_layer(model: TransformersModel) -> nn.Module:
    """A layer of the class of the model's last one, without weights."""
    layers = model.layers
    needed = {"hidden_states", "attention_mask", "position_embeddings", model.cache_argument}
    takes = set(inspect.signature(layers[-1].forward).parameters) if layers else set()
    rotary = isinstance(getattr(model.decoder, "rotary_emb", None), nn.Module)
    if not needed <= takes or not rotary or FULL not in model.rules.kinds:
        raise ModelError(
            f"A layer of a {model.config.model_type} model cannot run alone (it takes "
            f"{', '.join(sorted(takes)) or 'nothing known'}); allowed are models with rotary "
            "embedding and full attention. Choose a method without such modules."
        )
    layer_class: Any = type(layers[-1])
    with torch.device("meta"):
        layer: nn.Module = layer_class(_one_layer(_as_any(model.decoder).config), 0)
    return layer.eval()


def _one_layer(config: Any) -> Any:
    """The model's settings for a prediction module: one layer, of full attention, with experts
    where the model has any."""
    config = copy.deepcopy(config)
    if stated(config, "layer_types") is not None:
        config.layer_types = [FULL]
    if (kinds := stated(config, "mlp_layer_types")) is not None:
        config.mlp_layer_types = kinds[-1:]
    if stated(config, "first_k_dense_replace") is not None:
        config.first_k_dense_replace = 0
    config.num_hidden_layers = 1
    return config


def _fill(
    layer: nn.Module, tensors: Mapping[str, Tensor], model: TransformersModel, origin: str
) -> None:
    """Gives a layer its weights, in the dtypes that the model's own layers have."""
    wanted = layer.state_dict()
    weights = _stacked(tensors, set(wanted))
    check_parameters({name: tensor.shape for name, tensor in wanted.items()}, weights, origin)
    like = {
        name: tensor.dtype for known in model.layers for name, tensor in known.state_dict().items()
    }
    ready = {
        name: tensor.to(model.device, like.get(name, model.dtype))
        for name, tensor in weights.items()
    }
    layer.load_state_dict(ready, assign=True)
    if any(buffer.is_meta for buffer in layer.buffers()):
        raise ModelError(
            f"A layer of a {model.config.model_type} model holds tables that no checkpoint has, so "
            "it cannot be made from one. Choose a method without such modules."
        )


def _stacked(tensors: Mapping[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """Experts that lie one by one, stacked as transformers has them."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None or name in wanted:
            found[name] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        if {
            (i, kind) for i in range(count) for kind in ("gate_proj", "up_proj", "down_proj")
        } != set(parts):
            continue  # what is missing is reported by name
        gates = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)]
        found[f"{prefix}.gate_up_proj"] = torch.stack(gates)
        found[f"{prefix}.down_proj"] = torch.stack([parts[i, "down_proj"] for i in range(count)])
    return found
