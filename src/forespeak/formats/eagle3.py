"""EAGLE-3 drafters on disk; names and shapes inside here: ``eagle3_config.py``.

Layouts that are read:

- ``eagle3``: the official releases (yuhuili), the first layer as ``midlayer``. No layers named: the
  default ones.
- ``sglang eagle3``: the same names as SpecForge exports and SGLang serves them. ``eagle_config``
  may name layers by their outputs, as here.
- ``speculators``: what the speculators package writes and vLLM serves. ``write`` writes this one,
  every field of it. Layers are named by their inputs (2 is the output of layer 1).

One word means two things. In the speculators layout ``norm_output`` hands the normed state to the
next step. SpecForge calls the norm before the head so, and always hands on the raw state; only
beside ``fc_norm``, the other half of EAGLE-3.1, is it read as EAGLE-3.1's here. A note says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.formats.drafter_files import DrafterFiles, Shape, write_drafter_files
from forespeak.formats.drafters import (
    D2T,
    T2D,
    Dialect,
    DrafterCheckpoint,
    draft_token_ids,
    match_tensors,
)
from forespeak.formats.eagle3_config import (
    CONFIGS,
    EMBED,
    HEAD,
    Eagle3Config,
    tensor_shapes,
)
from forespeak.formats.eagle_layers import (
    LAYER_FIELDS,
    UNUSED_FIELDS,
    official_layers,
    package_layers,
    package_values,
    wrong,
)
from forespeak.formats.fields import refuse_other_fields, switch, whole_number
from forespeak.models.config import ModelConfig

__all__ = ["CONFIGS", "DIALECTS", "Eagle3Config", "tensor_shapes", "write"]

_IDS = "eagle_aux_hidden_state_layer_ids"
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


# --- the official layout, and SGLang's ------------------------------------------------------------

_FIELDS = LAYER_FIELDS | UNUSED_FIELDS | {
    *("bias", "draft_vocab_size", "target_hidden_size", "eagle_config", _IDS), *_SWITCHES,
}  # fmt: skip
_EAGLE_FIELDS = {_IDS, "use_aux_hidden_state", *_SWITCHES}


def _prefix(files: DrafterFiles) -> str | None:
    """What the names of the first layer begin with."""
    found = (p for p in ("midlayer.", "layers.0.") if f"{p}hidden_norm.weight" in files.shapes)
    return next(found, None)


def _is_official(files: DrafterFiles) -> bool:
    return _prefix(files) is not None and "speculators_model_type" not in files.config


def _read_official(files: DrafterFiles) -> DrafterCheckpoint:
    values = _joined(files)
    prefix = _prefix(files)
    assert prefix is not None
    layers = official_layers(files, prefix)
    if prefix == "midlayer." and layers.num_layers > 1:
        raise wrong(files, f"num_hidden_layers is {layers.num_layers}; allowed in this layout: 1")
    exported = "eagle_config" in files.config or "LlamaForCausalLMEagle3" in str(
        files.config.get("architectures")
    )
    per_feature = switch(values, "fc_norm", default=False)
    named = switch(values, "norm_output", default=False)
    notes = []
    if named:
        notes.append(
            "norm_output is read as EAGLE-3.1's beside fc_norm: each step hands on the normed "
            "state. SpecForge means the norm before the head by that word."
            if per_feature
            else "norm_output is read as SpecForge's word for the norm before the head: each step "
            "hands on the raw state. EAGLE-3.1 means the normed one by it."
        )
    names = {
        name: prefix + name.removeprefix("layers.0.")
        for name in _all_names(files, prefix)
        if name.startswith("layers.0.")
    }
    return _checkpoint(
        values, "sglang eagle3" if exported else "eagle3", layers, names, _layer_ids(values, 0),
        draft_vocab_size=whole_number(values, "draft_vocab_size", default=layers.vocab_size),
        norm_output=named and per_feature, notes=tuple(notes),
    )  # fmt: skip


def _joined(files: DrafterFiles) -> DrafterFiles:
    """The config with the fields of ``eagle_config`` beside the others; some tools put them there.

    Raises:
        CheckpointError: a field that is not known, or one that is given twice and differs.
    """
    refuse_other_fields(files, _FIELDS, layout="eagle3")
    inner = files.config.get("eagle_config")
    if inner is None:
        return files
    if not isinstance(inner, dict):
        raise wrong(files, f"eagle_config is {inner!r}; it must be an object")
    nested = replace(files, config=inner)
    refuse_other_fields(nested, _EAGLE_FIELDS, layout="eagle3, eagle_config")
    if not switch(nested, "use_aux_hidden_state", default=True):
        raise wrong(
            files, "use_aux_hidden_state is false, so it reads the final state as EAGLE-1 does; "
            "allowed: true",
        )  # fmt: skip
    for key in inner.keys() & files.config.keys():
        if inner[key] != files.config[key]:
            raise wrong(files, f"{key} is {files.config[key]!r} and in eagle_config {inner[key]!r}")
    return replace(files, config={**files.config, **inner})


def _all_names(files: DrafterFiles, prefix: str) -> list[str]:
    """Internal names of the stored tensors."""
    return [
        f"layers.0.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
        for name in files.shapes
    ]


# --- the layout of the speculators package --------------------------------------------------------

_PACKAGE_FIELDS = {
    *("draft_vocab_size", "embed_requires_grad", "speculators_config", "speculators_model_type"),
    *("speculators_version", "target_hidden_size", "tie_word_embeddings", _IDS, *_SWITCHES),
    *("transformer_layer_config", "has_no_defaults_at_init"),
}


def _is_package(files: DrafterFiles) -> bool:
    return files.config.get("speculators_model_type") == "eagle3"


def _read_package(files: DrafterFiles) -> DrafterCheckpoint:
    refuse_other_fields(files, _PACKAGE_FIELDS, layout="speculators")
    inner = files.config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise wrong(files, "transformer_layer_config is missing; it must be an object")
    refuse_other_fields(replace(files, config=inner), LAYER_FIELDS, layout="speculators")
    notes: tuple[str, ...] = ()
    if "norm_before_residual" not in files.config:
        notes = (
            "norm_before_residual is left out and read as false, the package's default; vLLM takes "
            "it for true. Write it into the config.",
        )
    return _checkpoint(
        files, "speculators", package_layers(files, inner), {}, _layer_ids(files, -1),
        draft_vocab_size=whole_number(files, "draft_vocab_size", default=32000),
        norm_output=switch(files, "norm_output", default=False), notes=notes,
    )  # fmt: skip


def write(folder: Path, config: Eagle3Config, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter in the layout ``speculators``; ``tensors`` by internal names.

    Raises:
        OptionError: a drafter that this layout cannot hold.
    """
    if config.fc_bias:
        raise OptionError("The speculators layout has no bias on fc; use fc_bias=false.")
    layers = config.layers
    if layers.model_type == "llama" and layers.attention_bias != layers.output_bias:
        raise OptionError(
            f"layers.attention_bias is {layers.attention_bias} and layers.output_bias is "
            f"{layers.output_bias}; in the speculators layout a Llama layer has biases on q, k, v "
            "and o or on none. Set both."
        )
    stored = {name: tensors[name] for name in tensor_shapes(config)}
    if config.draft_vocab_size is not None:
        members = torch.zeros(config.vocab_size, dtype=torch.bool)
        members[draft_token_ids(stored[D2T].cpu())] = True
        stored[T2D] = members
    ids = config.target_layer_ids
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": 4, "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }  # fmt: skip
    values: dict[str, object] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        _IDS: None if ids is None else [i + 1 for i in ids],
        **{name: getattr(config, name) for name in _SWITCHES},
        "embed_requires_grad": False,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "transformer_layer_config": package_values(config.layers),
    }
    write_drafter_files(folder, values, stored)


# --- what the layouts share -----------------------------------------------------------------------


def _layer_ids(files: DrafterFiles, shift: int) -> tuple[int, ...] | None:
    """The named layers as ids of outputs, rising, as engines walk through them."""
    value = files.config.get(_IDS)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or not value
        or any(not isinstance(i, int) or isinstance(i, bool) for i in value)
        or len(set(value)) < len(value)
    ):
        raise wrong(files, f"{_IDS} is {value!r}; it must be a list of different layer numbers")
    return tuple(sorted(i + shift for i in value))


def _checkpoint(
    files: DrafterFiles,
    dialect: str,
    layers: ModelConfig,
    names: Mapping[str, str],
    ids: tuple[int, ...] | None,
    *,
    draft_vocab_size: int,
    norm_output: bool,
    notes: tuple[str, ...],
) -> DrafterCheckpoint:
    """Config and tensors; ``names`` are those that differ from the internal ones."""
    reduced = draft_vocab_size != layers.vocab_size or D2T in files.shapes
    width = files.config.get("target_hidden_size")
    size = layers.hidden_size if width is None else whole_number(files, "target_hidden_size")
    columns = (files.shapes.get("fc.weight") or (0,))[-1]
    try:
        config = Eagle3Config(
            layers=layers,
            target_hidden_size=None if size == layers.hidden_size else size,
            num_features=max(1, columns // size) if ids is None else len(ids),
            target_layer_ids=ids,
            draft_vocab_size=draft_vocab_size if reduced else None,
            own_head=HEAD in files.shapes,
            fc_bias="fc.bias" in files.shapes or switch(files, "bias", default=False),
            norm_before_residual=switch(files, "norm_before_residual", default=False),
            norm_before_fc=switch(files, "norm_before_fc", default=False),
            fc_norm=switch(files, "fc_norm", default=False),
            norm_output=norm_output,
        )
    except OptionError as error:
        raise wrong(files, str(error).rstrip(".")) from None
    expected = tensor_shapes(config)
    optional: dict[str, Shape] = {EMBED: (config.vocab_size, layers.hidden_size)}
    if reduced:
        optional[T2D] = (config.vocab_size,)
    stored = {name: name for name in (*expected, *optional)} | dict(names)
    found = match_tensors(files, stored, expected, optional=optional)
    return DrafterCheckpoint(
        "eagle3", dialect, files.folder, config, found, files, notes=notes
    )  # fmt: skip


DIALECTS: tuple[Dialect, ...] = (
    Dialect("speculators", _is_package, _read_package),
    Dialect("eagle3", _is_official, _read_official),
)
