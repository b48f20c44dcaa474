"""Block drafters as the speculators package and vLLM store them."""

from __future__ import annotations

from dataclasses import replace

from forespeak.formats.dflash_config import DFlashConfig
from forespeak.formats.dflash_layouts import (
    BLOCK_FIELDS,
    HEAD_FIELDS,
    LAYER_FIELDS,
    RELATIVES,
    Absent,
    head_values,
    layer_ids,
    make_checkpoint,
    read_layers,
    refuse_fields,
    refuse_relatives,
    wrong,
)
from forespeak.formats.drafter_files import DrafterFiles
from forespeak.formats.drafters import DrafterCheckpoint
from forespeak.formats.fields import switch
from forespeak.formats.layer_fields import layer_fields

# The package writes differences to class defaults: of its own, and of transformers' Qwen3Config and
# LlamaConfig for the layers.
_ABSENT: dict[object, Absent] = {
    "dflash": Absent(sample_from_anchor=False, block_size=8),
    "dspark": Absent(sample_from_anchor=True, block_size=8, markov_rank=256, heads=True),
}
_CLASS_DEFAULTS: dict[str, dict[str, object]] = {
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 32768,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
}  # fmt: skip


def is_speculators(files: DrafterFiles) -> bool:
    return speculators_type(files) in ("dflash", "dspark", "dflash2")


def speculators_type(files: DrafterFiles) -> object:
    inner = files.config.get("speculators_config")
    named = inner.get("algorithm") if isinstance(inner, dict) else None
    return files.config.get("speculators_model_type", named)


def read_speculators(files: DrafterFiles) -> DrafterCheckpoint:
    kind = speculators_type(files)
    if kind == "dflash2":
        raise wrong(files, f"it is of type dflash2 ({RELATIVES['DFlash2DraftModel']})")
    refuse_relatives(files)
    refuse_fields(files, BLOCK_FIELDS | HEAD_FIELDS | {
        *("aux_hidden_state_layer_ids", "draft_vocab_size", "projector_type", "shift_label"),
        *("sliding_window_non_causal", "speculators_config", "speculators_model_type"),
        *("speculators_version", "target_hidden_size", "tie_word_embeddings"),
        *("transformer_layer_config", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"),
    }, "speculators")  # fmt: skip
    if files.config.get("projector_type") not in (None, "dflash"):
        raise wrong(files, f"projector_type is {files.config['projector_type']!r}; allowed: dflash")
    if switch(files, "shift_label", default=False):
        raise wrong(files, "shift_label is true; allowed: false (sample_from_anchor shifts rows)")
    inner = files.config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise wrong(files, "transformer_layer_config is missing; it must be an object")
    nested = replace(files, config=inner)
    refuse_fields(nested, LAYER_FIELDS, "speculators")
    kind_of_layers = inner.get("model_type", "qwen3")
    defaults = _CLASS_DEFAULTS.get(str(kind_of_layers), {})
    layers = read_layers(replace(files, config={**defaults, **inner}))
    ids = layer_ids(files, "aux_hidden_state_layer_ids")
    if ids is None:
        raise wrong(files, "aux_hidden_state_layer_ids is missing; it must be a list of layers")
    width = files.config.get("target_hidden_size")
    if width not in (None, layers.hidden_size):
        raise wrong(
            files, f"target_hidden_size is {width!r}; allowed: {layers.hidden_size}, the drafter's"
        )
    windowed = layers.sliding_window is not None
    causal = not switch(files, "sliding_window_non_causal", default=False)
    return make_checkpoint(
        files, "speculators", layers, tuple(i - 1 for i in ids),
        absent=_ABSENT[kind], causal_windows=windowed and causal,
        anchored_windows=windowed,
    )  # fmt: skip


def speculators_values(config: DFlashConfig) -> dict[str, object]:
    kind = "dspark" if config.has_heads else "dflash"
    # The package serialises differences to class defaults; every value is written here.
    return {
        "architectures": ["DSparkDraftModel" if config.has_heads else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id, "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.causal_windows,
        **(head_values(config) if config.has_heads else {}),
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": config.max_depth,
                "accept_tolerance": 0.0, "verifier_accept_k": 1,
            }],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": kind, "target_hidden_size": None, "tie_word_embeddings": False,
        "transformer_layer_config": layer_fields(config.layers),
    }  # fmt: skip
