"""Layouts of block drafters: DFlash and DSpark.

=============  ========================  ========================  =============================
               z-lab                     DeepSpec                  speculators
=============  ========================  ========================  =============================
settings       ``dflash_config``         top level                 top level
layers         top level                 top level                 ``transformer_layer_config``
features       ``target_layer_ids``:     the same, -1 for the      ``aux_hidden_state_layer_ids``:
               output of these layers    embedding's output        the same + 1
block rows     each its own place        each the place after      ``sample_from_anchor`` says
embed, head    the target's              copies                    copies, the head cut by d2t
=============  ========================  ========================  =============================

All three use the same tensor names. ``sts.json`` beside the weights, in SGLang's format
``{"temperatures": [...]}``, calibrates a confidence head in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from forespeak.errors import OptionError
from forespeak.formats.dflash_config import DFlashConfig, default_layer_ids
from forespeak.formats.dflash_layouts import (
    BLOCK_FIELDS,
    CONFIGS,
    HEAD_FIELDS,
    LAYER_FIELDS,
    Absent,
    classes,
    head_values,
    layer_ids,
    make_checkpoint,
    read_layers,
    refuse_fields,
    refuse_relatives,
    write_temperatures,
    wrong,
)
from forespeak.formats.dflash_speculators import (
    is_speculators,
    read_speculators,
    speculators_values,
)
from forespeak.formats.drafter_files import DrafterFiles, write_drafter_files
from forespeak.formats.drafters import Dialect, DrafterCheckpoint
from forespeak.formats.fields import switch, whole_number
from forespeak.formats.layer_fields import layer_fields

__all__ = ["CONFIGS", "DIALECTS", "write"]


def write(folder: Path, config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter in the layout that most engines read it from: z-lab's for plain DFlash,
    speculators' where only that can say it (a reduced vocabulary, windows of its kind), else
    DeepSpec's.

    Args:
        folder: made where it is missing.
        config: of the network.
        tensors: internal names; may have copies of the target's embedding and head.

    Raises:
        OptionError: no layout can say it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    windowed = config.layers.sliding_window is not None
    if windowed and config.draft_vocab_size is not None and not config.anchored_windows:
        raise OptionError(
            "A reduced draft vocabulary and windows that are not anchored: no layout has both; "
            "allowed: anchored_windows=true, the whole vocabulary, or no windows."
        )
    if config.draft_vocab_size is not None or config.anchored_windows:
        values = speculators_values(config)
    elif config.has_heads or config.sample_from_anchor:
        values = _deepspec_values(config)
    else:
        values = _zlab_values(config)
    write_temperatures(folder, config.temperatures)
    write_drafter_files(folder, values, tensors)


def _is_zlab(files: DrafterFiles) -> bool:
    return "dflash_config" in files.config or "DFlashDraftModel" in classes(files)


def _is_deepspec(files: DrafterFiles) -> bool:
    if any("DSpark" in name for name in classes(files)) and not is_speculators(files):
        return True
    return "markov_rank" in files.config and "target_layer_ids" in files.config


def _read_zlab(files: DrafterFiles) -> DrafterCheckpoint:
    return _read_flat(files, "z-lab", sample_from_anchor=False)


def _read_deepspec(files: DrafterFiles) -> DrafterCheckpoint:
    return _read_flat(files, "DeepSpec", sample_from_anchor=True)


def _read_flat(files: DrafterFiles, dialect: str, *, sample_from_anchor: bool) -> DrafterCheckpoint:
    refuse_relatives(files)
    inner = files.config.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise wrong(files, f"dflash_config is {inner!r}; it must be an object")
    outer = {key: value for key, value in files.config.items() if key != "dflash_config"}
    flat = replace(files, config={**outer, **inner})
    refuse_fields(flat, LAYER_FIELDS | BLOCK_FIELDS | HEAD_FIELDS | {
        "target_layer_ids", "num_target_layers", "is_causal", "causal", "draft_vocab_size",
    }, dialect)  # fmt: skip
    for key in ("is_causal", "causal"):
        if switch(flat, key, default=False):
            raise wrong(flat, f"{key} is true; the block of this method sees itself whole (false)")
    layers = read_layers(flat)
    count = flat.config.get("num_target_layers")
    num_target_layers = None if count is None else whole_number(flat, "num_target_layers")
    ids = layer_ids(flat, "target_layer_ids")
    if ids is None:
        num_target_layers = whole_number(flat, "num_target_layers")
        ids = default_layer_ids(num_target_layers, layers.num_layers)
    notes: tuple[str, ...] = ()
    if layers.sliding_window is not None and not {"is_causal", "causal"} & flat.config.keys():
        notes = (
            "Its config does not say whether rows of a block see later ones in windowed layers; "
            "they do here.",
        )
    return make_checkpoint(
        flat, dialect, layers, ids, absent=Absent(sample_from_anchor=sample_from_anchor),
        num_target_layers=num_target_layers, notes=notes,
    )  # fmt: skip


def _zlab_values(config: DFlashConfig) -> dict[str, object]:
    inner: dict[str, object] = {
        "mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids),
    }  # fmt: skip
    return {
        "architectures": ["DFlashDraftModel"], **layer_fields(config.layers),
        "block_size": config.block_size, "dflash_config": inner,
        "num_target_layers": config.num_target_layers, "is_causal": False,
    }  # fmt: skip


def _deepspec_values(config: DFlashConfig) -> dict[str, object]:
    values: dict[str, object] = {
        "architectures": ["Qwen3DSparkModel"], **layer_fields(config.layers),
        "block_size": config.block_size, "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers, "num_anchors": 512, **head_values(config),
    }  # fmt: skip
    return values if config.sample_from_anchor else {**values, "sample_from_anchor": False}


DIALECTS = (
    Dialect("speculators", is_speculators, read_speculators),
    Dialect("DeepSpec", _is_deepspec, _read_deepspec),
    Dialect("z-lab", _is_zlab, _read_zlab),
)
