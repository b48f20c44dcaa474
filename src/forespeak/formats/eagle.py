"""EAGLE-1 drafters on disk (EAGLE-2 drafts with the same weights).

Internal names are those of the official releases::

    fc.weight [H, 2H], fc.bias [H]       on [embedding, feature], in this order
    layers.0. ...                        a Llama layer without input_layernorm
    layers.{i}. ...                      further layers, whole
    d2t [Vd]                             offsets of a reduced draft vocabulary (not in releases)
    embed_tokens.weight, lm_head.weight  copies of the target's

Layouts that are read:

- ``eagle``: yuhuili's, ``model.safetensors`` or ``pytorch_model.bin``. ``write`` writes this one.
- ``vllm eagle``: what early vLLM wanted, ``{"model_type": "eagle", "model": {...}}`` around the
  official config, names with or without ``model.``, a copy of the head, and a reduced vocabulary as
  ``token_map`` (ids, not offsets).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.formats.drafter_files import DrafterFiles, Shape, write_drafter_files
from forespeak.formats.drafters import D2T, Dialect, DrafterCheckpoint, match_tensors
from forespeak.formats.eagle_layers import (
    LAYER_FIELDS,
    UNUSED_FIELDS,
    layer_shapes,
    official_layers,
    official_values,
    small_layers,
    wrong,
)
from forespeak.formats.fields import refuse_other_fields, switch, whole_number
from forespeak.formats.layer_fields import LayeredConfig
from forespeak.models.config import ModelConfig

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_FIRST_NORM = "layers.0.input_layernorm.weight"
_FIELDS = LAYER_FIELDS | UNUSED_FIELDS | {"bias", "draft_vocab_size"}


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayeredConfig):
    """An EAGLE-1 drafter.

    Attributes:
        layers: sizes of its decoder layers; ``vocab_size`` is the target's. The first has no norm
            before attention.
        fc_bias: the layer that joins embedding and feature has a bias.
        draft_vocab_size: Vd of a reduced draft vocabulary.

    Raises:
        OptionError: values that cannot be.
    """

    fc_bias: bool = True

    def __post_init__(self) -> None:
        if self.layers.sliding_window is not None:
            raise OptionError("The layers of EAGLE-1 have no sliding window; leave it out.")
        check_draft_vocabulary(self.draft_vocab_size, self.layers.vocab_size)

    def facts(self) -> dict[str, str]:
        facts = {"layers": str(self.layers.num_layers), "reads": "the target's final state"}
        if self.draft_vocab_size is not None:
            facts["draft vocabulary"] = str(self.draft_vocab_size)
        return facts

    def check_target(self, target: ModelConfig) -> None:
        """Any target has a final state."""

    @classmethod
    def for_target(cls, target: ModelConfig) -> EagleConfig:
        """One layer of the target's width."""
        return cls(layers=small_layers(target), fc_bias=False)


CONFIGS: Mapping[str, type[EagleConfig]] = {"eagle": EagleConfig}


def check_draft_vocabulary(size: int | None, vocab_size: int) -> None:
    """Refuse a draft vocabulary that is larger than the target's.

    Raises:
        OptionError: it is.
    """
    if size is not None and not 0 < size <= vocab_size:
        raise OptionError(
            f"draft_vocab_size is {size}; allowed: 1 to {vocab_size}, the target's tokens."
        )


def tensor_shapes(config: EagleConfig) -> dict[str, Shape]:
    """Tensors of the network and their shapes, and ``d2t`` where the vocabulary is reduced."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"fc.weight": (hidden, 2 * hidden)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    shapes |= layer_shapes(config.layers)
    del shapes[_FIRST_NORM]
    if config.draft_vocab_size is not None:
        shapes[D2T] = (config.draft_vocab_size,)
    return shapes


def write(folder: Path, config: EagleConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter in the layout ``eagle``; ``tensors`` by internal names."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        **official_values(config.layers),
        "bias": config.fc_bias,
    }
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    write_drafter_files(folder, values, {name: tensors[name] for name in tensor_shapes(config)})


# --- the official layout --------------------------------------------------------------------------


def _is_official(files: DrafterFiles) -> bool:
    """It has an fc over two states, a plain first layer and none of EAGLE-3's or DFlash's norms."""
    shape = files.shapes.get("fc.weight", ())
    return (
        len(shape) == 2
        and shape[1] == 2 * shape[0]
        and "speculators_model_type" not in files.config
        and "layers.0.self_attn.q_proj.weight" in files.shapes
        and not {"hidden_norm.weight", "layers.0.hidden_norm.weight"} & files.shapes.keys()
    )


def _read_official(files: DrafterFiles) -> DrafterCheckpoint:
    refuse_other_fields(files, _FIELDS, layout="eagle")
    layers = official_layers(files, "layers.0.")
    size = whole_number(files, "draft_vocab_size", default=layers.vocab_size)
    reduced = size if size != layers.vocab_size or D2T in files.shapes else None
    return _checkpoint(
        files, "eagle", layers, {}, reduced, fc_bias=switch(files, "bias", default=True)
    )


def _checkpoint(
    files: DrafterFiles,
    dialect: str,
    layers: ModelConfig,
    names: Mapping[str, str],
    draft_vocab_size: int | None,
    *,
    fc_bias: bool,
    changes: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ignored: tuple[str, ...] = (),
) -> DrafterCheckpoint:
    """What both layouts share; ``names`` are those that differ from the internal ones."""
    try:
        config = EagleConfig(layers=layers, fc_bias=fc_bias, draft_vocab_size=draft_vocab_size)
    except OptionError as error:
        raise wrong(files, str(error).rstrip(".")) from None
    expected, hidden = tensor_shapes(config), config.hidden_size
    head_size = (files.shapes.get(names.get(HEAD, HEAD)) or (0,))[0]
    sizes = {config.vocab_size, draft_vocab_size or config.vocab_size}
    optional: dict[str, Shape] = {
        EMBED: (config.vocab_size, hidden),
        HEAD: (head_size if head_size in sizes else config.vocab_size, hidden),
    }
    stored = {name: name for name in (*expected, *optional)} | dict(names)
    found = match_tensors(files, stored, expected, optional=optional, ignored=ignored)
    return DrafterCheckpoint(
        "eagle", dialect, files.folder, config, found, files, changes=changes or {}
    )


# --- early vLLM's layout --------------------------------------------------------------------------

_OUTER = {"eagle_fc_bias", "model", "truncated_vocab_size", "vocab_size", "logit_scale"}
_INNER = _FIELDS | {"eagle_fc_bias", "skip_prenorm", "skip_output_norm", "add_para_norm"}
# What vLLM fills by itself with the model's own values.
_REPEATED = {"hidden_size", "rms_norm_eps", "num_attention_heads", "num_hidden_layers"}


def _is_vllm(files: DrafterFiles) -> bool:
    return files.config.get("model_type") == "eagle" and isinstance(files.config.get("model"), dict)


def _read_vllm(files: DrafterFiles) -> DrafterCheckpoint:
    inner = files.config["model"]
    assert isinstance(inner, dict)
    refuse_other_fields(files, _OUTER | _REPEATED, layout="vllm eagle")
    if files.config.get("logit_scale") not in (None, 1, 1.0):
        raise wrong(files, f"logit_scale is {files.config['logit_scale']!r}; allowed: 1")
    names = {_bare(name): name for name in files.shapes}
    # The layers are described inside, under names that are looked for without their prefix.
    nested = replace(files, config=inner, shapes={_bare(n): s for n, s in files.shapes.items()})
    refuse_other_fields(nested, _INNER, layout="vllm eagle")
    _refuse_norms(nested)
    layers = official_layers(nested, "layers.0.")
    size = whole_number(files, "truncated_vocab_size", default=layers.vocab_size)
    reduced = size if "token_map" in names else None
    if reduced is None and size != layers.vocab_size:
        raise wrong(files, f"truncated_vocab_size is {size} and there is no token_map")
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    if reduced is not None:
        changes = {D2T: _offsets_of_ids, HEAD: _rows_by_id(files, names["token_map"])}
        names[D2T] = names.pop("token_map")
    inside = switch(nested, "eagle_fc_bias", default=False)
    # vLLM leaves these two out although a writer may have kept them.
    ignored = tuple(names.pop(n) for n in (_FIRST_NORM, "norm.weight") if n in names)
    return _checkpoint(
        files, "vllm eagle", layers, names, reduced,
        fc_bias=switch(files, "eagle_fc_bias", default=inside), changes=changes, ignored=ignored,
    )  # fmt: skip


def _bare(name: str) -> str:
    """vLLM takes names as they are, and with ``model.`` before them once or twice."""
    return name.removeprefix("model.").removeprefix("model.")


def _refuse_norms(files: DrafterFiles) -> None:
    """vLLM can run a variant of the paper's drafter with more norms."""
    for key, usual in (
        ("skip_prenorm", True),
        ("skip_output_norm", True),
        ("add_para_norm", False),
    ):
        if switch(files, key, default=usual) is not usual:
            raise wrong(
                files, f"{key} is {not usual}, which asks for norms that EAGLE-1 does not have; "
                f"allowed: {usual}",
            )  # fmt: skip


def _offsets_of_ids(token_map: Tensor) -> Tensor:
    """[Vd] ids in any order to [Vd] offsets of the same ids, rising."""
    ids = token_map.long().sort().values
    return ids - torch.arange(len(ids))


def _rows_by_id(files: DrafterFiles, token_map: str) -> Callable[[Tensor], Tensor]:
    """Brings the rows of a head of the map's size into the order of ids; leaves a whole head."""

    def change(head: Tensor) -> Tensor:
        ids = files.read([token_map])[token_map]
        return head[ids.argsort()] if len(head) == len(ids) else head

    return change


DIALECTS: tuple[Dialect, ...] = (
    Dialect("vllm eagle", _is_vllm, _read_vllm),
    Dialect("eagle", _is_official, _read_official),
)
