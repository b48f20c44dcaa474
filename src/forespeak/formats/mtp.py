"""Chained prediction modules (MTP) on disk; config and internal names in ``mtp_config.py``.

Layouts that are read, each in a target's own folder (the target's tensors are passed over) or in a
folder of its own:

================  ==============================  ====================  ==========  ==============
layout            names                           joined                handed on   position 0
================  ==============================  ====================  ==========  ==============
mimo              model.mtp_layers.{m}.           [state, embedding]    normed      zeros
nextn             model.layers.{L + m}.           [embedding, state]    raw         zeros
qwen              mtp.                            [embedding, state]    normed      kept
speculators mtp   mtp_layers.{m}.                 [embedding, state]    normed      kept
================  ==============================  ====================  ==========  ==============

``nextn`` is that of DeepSeek-V3, R1, GLM-4.5 and later, and SGLang's export of their modules alone
(L is 0 there). What is handed on follows vLLM; SGLang and transformers hand the normed state on in
``nextn`` too, and the setting recursion_state says which. ``write`` writes ``mimo``.

Fields of config.json that are ours: ``mtp_recursion_state`` (``normed`` or ``raw``) and
``mtp_zero_first_embedding`` (true or false) say otherwise than the table; ``draft_vocab_size``.

A block of a family that our decoder runs is ours, any other is made by transformers as a layer of
the target's own kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forespeak.errors import CheckpointError, shown
from forespeak.formats.drafter_files import DrafterFiles, Shape, write_drafter_files
from forespeak.formats.drafters import D2T, T2D, Dialect, DrafterCheckpoint, match_tensors
from forespeak.formats.eagle_layers import package_layers
from forespeak.formats.fields import (
    MOST_PARTS,
    part_number,
    positive,
    refuse_other_fields,
    switch,
    whole_number,
)
from forespeak.formats.layer_fields import layer_fields
from forespeak.formats.mtp_config import (
    OUTER,
    RECURSION_STATES,
    MtpConfig,
    extra_shapes,
    module_layer,
    tensor_shapes,
)
from forespeak.models.config import OUR_FAMILIES, ModelConfig

CONFIGS = {"mtp": MtpConfig}

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# In some layouts the modules are numbered on from the layers of the target.
_LAST_NUMBER = 4096 + MOST_PARTS
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True)
class _Layout:
    """Names and conventions of a layout.

    Attributes:
        block: what the names of a module's block begin with; {} is the number of the module.
        outer: names of ``OUTER``, in that order.
        embedding, head: names of the copies.
    """

    name: str
    block: str
    outer: tuple[str, ...]
    embedding: str
    head: str
    hidden_first: bool = False
    recursion_state: str = "normed"
    zero_first: bool = False


_MIMO = _Layout(
    "mimo", "model.mtp_layers.{}.", tuple("model.mtp_layers.{}." + n for n in OUTER),
    "model.embed_tokens.weight", "lm_head.weight", hidden_first=True, zero_first=True,
)  # fmt: skip
_SPECULATORS = _Layout(
    "speculators mtp", "mtp_layers.{}.", tuple("mtp_layers.{}." + n for n in OUTER),
    "embed_tokens.weight", "lm_head.weight",
)  # fmt: skip
_NEXTN = _Layout(
    "nextn", "model.layers.{}.",
    ("model.layers.{}.enorm.weight", "model.layers.{}.hnorm.weight",
     "model.layers.{}.eh_proj.weight", "model.layers.{}.shared_head.norm.weight"),
    "model.layers.{}.embed_tokens.weight", "model.layers.{}.shared_head.head.weight",
    recursion_state="raw", zero_first=True,
)  # fmt: skip
_QWEN = _Layout(
    "qwen", "mtp.layers.{}.",
    ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight",
     "mtp.norm.weight"),
    "mtp.embed_tokens.weight", "mtp.lm_head.weight",
)  # fmt: skip


def write(folder: Path, config: MtpConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write modules in the layout ``mimo``; ``tensors`` by internal names.

    Raises:
        CheckpointError: the block is one of transformers.
    """
    if config.layer is None:
        raise CheckpointError(
            f"Modules with a {config.model_type} layer of transformers cannot be written in the "
            "layout mimo; allowed: layers of the built-in families. Keep their own files."
        )
    values = layer_fields(config.layer) | {
        "architectures": ["MiMoMTPModel"],
        "num_nextn_predict_layers": config.num_modules,
        "mtp_recursion_state": config.recursion_state,
        "mtp_zero_first_embedding": config.zero_first_embedding,
    }
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    needed, _ = extra_shapes(config)
    names = _names(_MIMO, config, range(config.num_modules), {})
    # Copied, because modules may share tensors in another layout and a file holds each apart.
    stored = {names[name]: tensors[name].clone() for name in [*tensor_shapes(config), *needed]}
    if not config.hidden_first:
        for name in stored:
            if name.endswith("input_proj.weight"):
                embedding, state = stored[name].chunk(2, dim=1)
                stored[name] = torch.cat([state, embedding], dim=1)
    write_drafter_files(folder, values, stored)


# --- reading -------------------------------------------------------------------------------------


def _read_mimo(files: DrafterFiles) -> DrafterCheckpoint:
    numbers = _numbers(files, r"model\.mtp_layers\.(\d+)\.")
    return _read(files, _MIMO, _text_fields(files), numbers)


def _read_nextn(files: DrafterFiles) -> DrafterCheckpoint:
    numbers = _numbers(files, r"model\.layers\.(\d+)\.eh_proj\.weight")
    return _read(files, _NEXTN, _text_fields(files), numbers)


def _read_qwen(files: DrafterFiles) -> DrafterCheckpoint:
    fields = _text_fields(files)
    if fields.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(
            f"{files.folder / 'config.json'}: mtp_use_dedicated_embeddings is on; allowed are "
            "modules that share the target's embedding. Take another release."
        )
    return _read(files, _QWEN, fields, _numbers(files, r"mtp\.layers\.(\d+)\."))


_SPECULATORS_FIELDS = {
    *("speculators_model_type", "speculators_version", "speculators_config", "draft_vocab_size"),
    *("transformer_layer_config", "num_nextn_predict_layers", "tie_word_embeddings"),
    *("mtp_recursion_state", "mtp_zero_first_embedding"),
}


def _read_speculators(files: DrafterFiles) -> DrafterCheckpoint:
    refuse_other_fields(files, _SPECULATORS_FIELDS, layout="speculators mtp")
    inner = files.config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"{files.folder / 'config.json'}: transformer_layer_config is {shown(inner)}; it "
            "must be an object. Get the file again from where it came from."
        )
    if inner.get("model_type") in ("llama", "qwen3"):
        inner = layer_fields(package_layers(files, inner))  # what it leaves out is filled in
    ours = {key: files.config[key] for key in _SPECULATORS_FIELDS if key in files.config}
    fields = {**inner, **ours}
    return _read(files, _SPECULATORS, fields, _numbers(files, r"mtp_layers\.(\d+)\."))


def _text_fields(files: DrafterFiles) -> Mapping[str, object]:
    """The fields of the language model, which composite configs keep apart."""
    inner = files.config.get("text_config")
    return {**files.config, **inner} if isinstance(inner, dict) else files.config


def _numbers(files: DrafterFiles, pattern: str) -> range:
    """The numbers of the modules in the files' names, which follow each other."""
    found = {
        part_number(files, match[1], most=_LAST_NUMBER)
        for name in files.shapes
        if (match := re.match(pattern, name))
    }
    if not found:
        return range(0)
    numbers = range(min(found), max(found) + 1)
    if len(found) != len(numbers):
        missing = min(set(numbers) - found)
        raise CheckpointError(
            f"{files.folder} has modules up to number {numbers[-1]} and lacks number {missing}. "
            "Get the drafter again from where it came from."
        )
    return numbers


def _read(
    files: DrafterFiles, layout: _Layout, fields: Mapping[str, object], numbers: range
) -> DrafterCheckpoint:
    view = replace(files, config=fields)
    _refuse_quantised(files, layout, numbers)
    config = _config(view, layout, numbers)
    blocks = {} if config.layer is not None else _block_tensors(files, layout, config, numbers)
    if config.layer is not None:
        _refuse_other_blocks(files, layout, config.layer, numbers)
    needed, optional = extra_shapes(config)
    names = _names(layout, config, numbers, blocks)
    expected = tensor_shapes(config) | {n: files.shapes[place] for n, place in blocks.items()}
    ignored = _ignored(files, layout, numbers)
    optional = {n: s for n, s in optional.items() if names[n] not in ignored}
    found = match_tensors(files, names, expected | needed, optional=optional, ignored=ignored)
    return DrafterCheckpoint(
        method="mtp", dialect=layout.name, origin=files.folder, config=config, names=found,
        files=files, notes=_notes(config, layout),
    )  # fmt: skip


def _config(view: DrafterFiles, layout: _Layout, numbers: range) -> MtpConfig:
    family = view.config.get("model_type")
    if not isinstance(family, str):
        raise CheckpointError(
            f"{view.folder / 'config.json'}: model_type is {shown(family)}; it must be a name. "
            "Get the file again from where it came from."
        )
    count = _count(view, numbers)
    layer = None
    if family in OUR_FAMILIES:
        origin = str(view.folder / "config.json")
        layer = module_layer(ModelConfig.from_hf(view.config, origin=origin))
    state = view.config.get("mtp_recursion_state", layout.recursion_state)
    if state not in RECURSION_STATES:
        raise CheckpointError(
            f"{view.folder / 'config.json'}: mtp_recursion_state is {shown(state)}; allowed: "
            f"{' or '.join(RECURSION_STATES)}. Correct the config."
        )
    return MtpConfig(
        model_type=family, hidden_size=whole_number(view, "hidden_size"),
        vocab_size=whole_number(view, "vocab_size"), num_modules=count, layer=layer,
        rms_norm_eps=positive(view, "rms_norm_eps", default=1e-6),
        hidden_first=layout.hidden_first, recursion_state=str(state),
        zero_first_embedding=switch(view, "mtp_zero_first_embedding", default=layout.zero_first),
        draft_vocab_size=_draft_vocab_size(view), layer_values=_layer_values(view.config),
    )  # fmt: skip


def _count(view: DrafterFiles, numbers: range) -> int:
    """Modules; what the config says and what is there must agree."""
    key = next((key for key in _COUNTS if view.config.get(key) is not None), None)
    said = len(numbers) if key is None else whole_number(view, key, least=0)
    if said != len(numbers) or not said:
        raise CheckpointError(
            f"{view.folder} holds {len(numbers)} prediction modules and its config says {said} "
            f"({key or _COUNTS[0]}); the two must agree and be 1 or more. Get the whole drafter "
            "again, or correct the config."
        )
    return said


def _draft_vocab_size(view: DrafterFiles) -> int | None:
    if D2T in view.shapes:
        held = view.rows(D2T)
        return whole_number(view, "draft_vocab_size", default=held)
    size = whole_number(view, "draft_vocab_size", default=0)
    return size if 0 < size != view.config.get("vocab_size") else None


def _layer_values(fields: Mapping[str, object]) -> int:
    """Numbers that a layer of transformers caches for a token, 0 where the config does not say."""
    latent, rotary = fields.get("kv_lora_rank"), fields.get("qk_rope_head_dim")
    if isinstance(latent, int) and isinstance(rotary, int):
        return latent + rotary
    heads, size = fields.get("num_key_value_heads"), fields.get("head_dim")
    return 2 * heads * size if isinstance(heads, int) and isinstance(size, int) else 0


def _names(
    layout: _Layout, config: MtpConfig, numbers: range, blocks: Mapping[str, str]
) -> dict[str, str]:
    """Internal name -> name in the files, of everything that may be there."""
    names = {D2T: D2T, T2D: T2D, **blocks}
    for module, number in enumerate(numbers):
        for inner, place in zip(OUTER, layout.outer, strict=True):
            names[f"layers.{module}.{inner}"] = place.format(number)
        names[f"embed_tokens.{module}.weight"] = layout.embedding.format(number)
        names[f"lm_head.{module}.weight"] = layout.head.format(number)
    for name in tensor_shapes(config):
        at, _, part = name.removeprefix("layers.").partition(".block.")
        if part:
            names[name] = layout.block.format(numbers[int(at)]) + part
    return names


def _block_tensors(
    files: DrafterFiles, layout: _Layout, config: MtpConfig, numbers: range
) -> dict[str, str]:
    """Internal name -> name in the files, of the blocks of transformers: whatever is there."""
    found: dict[str, str] = {}
    for module, number in enumerate(numbers):
        prefix = layout.block.format(number)
        others = {place.format(number) for place in layout.outer}
        others |= {layout.embedding.format(number), layout.head.format(number)}
        for name in files.with_prefix(prefix):
            if name not in others:
                found[f"layers.{module}.block.{name.removeprefix(prefix)}"] = name
    return found


def _ignored(files: DrafterFiles, layout: _Layout, numbers: range) -> list[str]:
    """In a whole model's folder, everything that is not of the modules."""
    if not any(name.endswith("model.norm.weight") for name in files.shapes):
        return []
    own = _prefixes(layout, numbers)
    return [n for n in files.shapes if not n.startswith(own) and n not in (D2T, T2D)]


def _prefixes(layout: _Layout, numbers: range) -> tuple[str, ...]:
    """What the names of the modules' tensors begin with."""
    return ("mtp.",) if layout is _QWEN else tuple(layout.block.format(n) for n in numbers)


def _refuse_quantised(files: DrafterFiles, layout: _Layout, numbers: range) -> None:
    for name in files.shapes:
        if not name.startswith(_prefixes(layout, numbers)):
            continue
        if name.endswith("_scale_inv") or files.dtypes[name] not in _FLOATS:
            raise CheckpointError(
                f"{files.folder} holds its prediction modules quantised ({name}); allowed are "
                "plain float32, float16 or bfloat16 weights. Dequantise them first (for DeepSeek "
                "with its script fp8_cast_bf16.py), or take a bfloat16 release."
            )


def _refuse_other_blocks(
    files: DrafterFiles, layout: _Layout, layer: ModelConfig, numbers: range
) -> None:
    """Say what it is about a block that a layer of ours does not have."""
    for number in numbers:
        prefix = layout.block.format(number)
        rows: Shape = files.shapes.get(f"{prefix}self_attn.q_proj.weight", ())
        what = None
        if rows and rows[0] == 2 * layer.num_heads * layer.head_dim:
            what = "gated queries (q_proj has two rows for each), as in Qwen3-Next"
        elif any(name.startswith(f"{prefix}mlp.experts.") for name in files.shapes):
            what = "a mixture of experts"
        if what is not None:
            raise CheckpointError(
                f"{files.folder} has prediction modules with {what}, and its config says "
                f"{layer.model_type}, whose layers are dense and plain. Config and weights must "
                "belong together; modules like these need a target that runs through transformers."
            )


def _notes(config: MtpConfig, layout: _Layout) -> tuple[str, ...]:
    if config.num_modules == 1:
        notes = ["It is one module; drafts of more than one token use it again and again."]
    else:
        count = config.num_modules
        notes = [f"It has {count} modules; drafts of more than {count} tokens use them in turn."]
    if layout is _NEXTN:
        notes.append(
            "Engines disagree about what such a module hands on: vLLM its raw output, SGLang and "
            f"transformers the normed one. Here it is {config.recursion_state}; the setting "
            "recursion_state changes it."
        )
    return tuple(notes)


def _is_nextn(files: DrafterFiles) -> bool:
    return any(re.fullmatch(r"model\.layers\.\d+\.eh_proj\.weight", n) for n in files.shapes)


DIALECTS = (
    Dialect(
        "speculators mtp",
        lambda files: files.config.get("speculators_model_type") == "mtp",
        _read_speculators,
    ),
    Dialect("mimo", lambda files: bool(files.with_prefix("model.mtp_layers.")), _read_mimo),
    Dialect("qwen", lambda files: bool(files.with_prefix("mtp.")), _read_qwen),
    Dialect("nextn", _is_nextn, _read_nextn),
)
