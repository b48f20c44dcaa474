"""What the layouts of block drafters share: layers, heads, vocabulary, temperatures, refusals."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from forespeak.errors import CheckpointError, OptionError
from forespeak.formats.dflash_config import (
    DFlashConfig,
    DSparkConfig,
    copy_shapes,
    tensor_shapes,
)
from forespeak.formats.drafter_files import DrafterFiles
from forespeak.formats.drafters import D2T, T2D, DrafterCheckpoint, match_tensors
from forespeak.formats.fields import refuse_other_fields, switch, whole_number
from forespeak.formats.weights import read_json_object
from forespeak.models.config import ModelConfig

CONFIGS = {"dflash": DFlashConfig, "dspark": DSparkConfig}
TEMPERATURES_FILE = "sts.json"

LAYER_FIELDS = {
    *("attention_bias", "attention_dropout", "head_dim", "hidden_act", "hidden_size"),
    *("intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers"),
    *("mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("original_max_position_embeddings", "pretraining_tp", "rms_norm_eps", "rope_parameters"),
    *("rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window"),
    "vocab_size",
}
BLOCK_FIELDS = {"block_size", "mask_token_id", "sample_from_anchor"}
HEAD_FIELDS = {
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
}
# Of training, or about the target: they change no number that a trained drafter gives.
_TRAINING = {
    *("num_anchors", "max_anchors", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha"),
    *("loss_decay_gamma", "embed_requires_grad", "auf", "lambda_base_start"),
    *("lambda_base_decay_ratio", "target_model_type", "target_text_model_type"),
}
RELATIVES = {
    "DFlash2DraftModel": "DFlash2 has convolutions around its layers and a candidate selector",
    "Gemma4DSparkModel": "Gemma 4's layers have four norms, keys that serve as values, partly "
    "rotated heads, scaled embeddings and capped logits",
}
"""Relatives that are not read, and what they have that these layers lack."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """What a layout means where a field is absent.

    Attributes:
        sample_from_anchor: of the rows.
        block_size: None where it must be there.
        markov_rank: of the sequential head.
        heads: there is a confidence head, and it reads the token before.
    """

    sample_from_anchor: bool
    block_size: int | None = None
    markov_rank: int = 0
    heads: bool = False


def make_checkpoint(
    files: DrafterFiles,
    dialect: str,
    layers: ModelConfig,
    ids: tuple[int, ...],
    *,
    absent: Absent,
    num_target_layers: int | None = None,
    causal_windows: bool = False,
    anchored_windows: bool = False,
    notes: tuple[str, ...] = (),
) -> DrafterCheckpoint:
    """What all layouts share: block, heads, vocabulary, temperatures and tensors."""
    rank = whole_number(files, "markov_rank", default=absent.markov_rank, least=0)
    confidence = switch(files, "enable_confidence_head", default=absent.heads)
    joined = switch(files, "confidence_head_with_markov", default=absent.heads)
    kind = CONFIGS["dspark" if rank or confidence else "dflash"]
    try:
        config = kind(
            layers=layers,
            block_size=whole_number(files, "block_size", default=absent.block_size),
            mask_token_id=whole_number(files, "mask_token_id", least=0),
            target_layer_ids=ids,
            num_target_layers=num_target_layers,
            sample_from_anchor=switch(
                files, "sample_from_anchor", default=absent.sample_from_anchor
            ),
            causal_windows=causal_windows,
            anchored_windows=anchored_windows,
            markov_rank=rank,
            markov_head_type=str(files.config.get("markov_head_type") or "vanilla"),
            confidence_head=confidence,
            confidence_with_markov=confidence and joined,
            confidence_bias="confidence_head.proj.bias" in files.shapes or not confidence,
            temperatures=_read_temperatures(files.folder),
            draft_vocab_size=_draft_vocabulary(files, layers.vocab_size),
        )
    except OptionError as error:
        raise wrong(files, str(error).rstrip(".")) from None
    expected, optional = tensor_shapes(config), copy_shapes(config)
    if config.draft_vocab_size is not None:
        optional[T2D] = (config.vocab_size,)
    names = {name: name for name in (*expected, *optional)}
    # Copies that trainers keep for their losses and that never draft.
    unused = ("verifier_lm_head.weight", "verifier_norm.weight")
    found = match_tensors(files, names, expected, optional=optional, ignored=unused)
    if not config.has_heads:
        return DrafterCheckpoint("dflash", dialect, files.folder, config, found, files, notes=notes)
    notes += ("Method dflash drafts with it too, without its heads.",)
    return DrafterCheckpoint("dspark", dialect, files.folder, config, found, files, notes=notes)


def _draft_vocabulary(files: DrafterFiles, vocab_size: int) -> int | None:
    """Vd; None for the whole vocabulary, which needs no map."""
    mapped = files.shapes.get(D2T)
    if files.config.get("draft_vocab_size") is None:
        return None if mapped is None else files.rows(D2T)
    size = whole_number(files, "draft_vocab_size")
    return size if size != vocab_size or mapped is not None else None


def layer_ids(files: DrafterFiles, key: str) -> tuple[int, ...] | None:
    """A list of layers; None where it is absent."""
    value = files.config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or any(
        not isinstance(i, int) or isinstance(i, bool) for i in value
    ):
        raise wrong(files, f"{key} is {value!r}; it must be a list of layer numbers")
    return tuple(value)


def read_layers(files: DrafterFiles) -> ModelConfig:
    """The decoder layers: always Qwen 3's, whatever class the config is of."""
    values = {"model_type": "qwen3", **files.config}
    if values["model_type"] not in ("llama", "qwen3"):
        raise wrong(files, f"model_type is {values['model_type']!r}; allowed: llama, qwen3")
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if values["model_type"] == "llama" and isinstance(heads, int) and isinstance(hidden, int):
        values["head_dim"] = values.get("head_dim") or hidden // max(heads, 1)
        values.setdefault("num_key_value_heads", heads)
    values["model_type"] = "qwen3"
    return ModelConfig.from_hf(values, origin=str(files.folder / "config.json"))


def head_values(config: DFlashConfig) -> dict[str, object]:
    """The fields of the heads."""
    values: dict[str, object] = {
        "markov_rank": config.markov_rank, "enable_confidence_head": config.confidence_head,
    }  # fmt: skip
    if config.markov_rank:
        values["markov_head_type"] = config.markov_head_type
    if config.confidence_head:
        values["confidence_head_with_markov"] = config.confidence_with_markov
    return values


def _read_temperatures(folder: Path) -> tuple[float, ...]:
    path = folder / TEMPERATURES_FILE
    if not path.is_file():
        return ()
    values = read_json_object(path).get("temperatures")
    if not isinstance(values, list) or any(
        not isinstance(v, int | float) or isinstance(v, bool) or not abs(v) <= 1e18 for v in values
    ):
        raise CheckpointError(
            f'{path} has no list of temperatures; expected is {{"temperatures": [...]}} with a '
            "number for each draft token. Make it again or remove it."
        )
    return tuple(float(v) for v in values)


def write_temperatures(folder: Path, temperatures: tuple[float, ...]) -> None:
    """Write or remove the file of temperatures."""
    path = folder / TEMPERATURES_FILE
    if not temperatures:
        path.unlink(missing_ok=True)
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
        made = Path(part) / TEMPERATURES_FILE
        made.write_text(json.dumps({"temperatures": list(temperatures)}) + "\n", encoding="utf-8")
        os.replace(made, path)


def classes(files: DrafterFiles) -> list[str]:
    """The model classes that a config names."""
    names = files.config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def refuse_relatives(files: DrafterFiles) -> None:
    """Refuse what has a familiar config and other layers."""
    for name in classes(files):
        if name in RELATIVES:
            raise wrong(files, f"it is a {name}, which is not read here: {RELATIVES[name]}")


def refuse_fields(files: DrafterFiles, known: set[str], layout: str) -> None:
    """Refuse fields beyond those known; one that is off or null asks for nothing."""
    asked = {k: v for k, v in files.config.items() if v is not None and v is not False}
    refuse_other_fields(replace(files, config=asked), known | _TRAINING, layout=layout)


def wrong(files: DrafterFiles, what: str) -> CheckpointError:
    """The error of a config."""
    return CheckpointError(
        f"{files.folder / 'config.json'}: {what}. Take a drafter that is so, or get the file again."
    )
