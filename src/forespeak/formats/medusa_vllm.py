"""Medusa heads in vLLM's layout.

::

    blocks.{k}.layers.{b}.weight [H, H]   .bias where config.medusa_fc_bias is on
    lm_heads.{k}.weight [Vd or V, H]      or one lm_head.weight for all (original_lm_head)
    token_map [Vd]                        ids of a reduced vocabulary, in any order

Names may stand after ``medusa_heads.``. The draft vocabulary is reduced when
``truncated_vocab_size`` is below ``vocab_size``; matrices may then have all V rows, of which only
those of the map are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.errors import CheckpointError
from forespeak.formats.drafter_files import DrafterFiles, Shape
from forespeak.formats.drafters import D2T, INTEGERS, DrafterCheckpoint, match_tensors
from forespeak.formats.fields import MOST_PARTS, refuse_other_fields, switch, whole_number
from forespeak.formats.medusa_config import MedusaConfig, stored_shapes

_KNOWN = {
    *("num_heads", "num_hidden_layers", "hidden_size", "vocab_size", "truncated_vocab_size"),
    *("medusa_fc_bias", "original_lm_head", "logit_scale"),
    # How its own trees and buffers are sized; here the builder decides.
    *("max_paths", "topk", "max_seq_len", "max_position_embeddings", "num_lookahead_tokens"),
}
_MAP = "token_map"


@dataclass(frozen=True)
class _Found:
    """Tensors under their names without the prefix."""

    names: dict[str, str]
    shapes: dict[str, Shape]


def _bare(files: DrafterFiles) -> _Found:
    names = {name.removeprefix("medusa_heads."): name for name in files.shapes}
    return _Found(names, {bare: files.shapes[name] for bare, name in names.items()})


def recognises(files: DrafterFiles) -> bool:
    """By the names of its tensors."""
    return "blocks.0.layers.0.weight" in _bare(files).shapes


def read(files: DrafterFiles) -> DrafterCheckpoint:
    """Translate.

    Raises:
        CheckpointError: config and tensors do not fit together, or ask for what is not known.
    """
    refuse_other_fields(files, _KNOWN, layout="vllm medusa")
    if files.config.get("logit_scale") not in (None, 1, 1.0):
        raise CheckpointError(
            f"{files.folder / 'config.json'}: logit_scale is {files.config['logit_scale']!r}; "
            "allowed: 1. Scale the heads' matrices instead."
        )
    found = _bare(files)
    shared = _shared_output(files, found)
    config = _config(files, found, shared)
    names = {name: _stored(name, shared) for name in stored_shapes(config)}
    ids = _token_ids(files, found, config)
    shapes = dict(stored_shapes(config))
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    if ids is not None:
        order, size = ids.argsort(), len(ids)
        changes[D2T] = lambda token_map: token_map.long().sort().values - torch.arange(size)
        for name in names:
            if name.endswith("output.weight"):
                whole = found.shapes.get(names[name], ())[:1] == (config.vocab_size,)
                changes[name] = _rows(ids[order] if whole else order)
                if whole and config.vocab_size is not None:
                    shapes[name] = (config.vocab_size, config.hidden_size)
    stored = {name: found.names.get(bare, bare) for name, bare in names.items()}
    return DrafterCheckpoint(
        method="medusa", dialect="vllm medusa", origin=files.folder, config=config,
        names=match_tensors(files, stored, shapes, ignored=_unused(found, config, shared)),
        files=files, changes=changes, notes=_notes(files, config),
    )  # fmt: skip


def _notes(files: DrafterFiles, config: MedusaConfig) -> tuple[str, ...]:
    asked = files.config["num_heads"]
    if asked == config.num_heads:
        return ()
    return (f"The config says {asked} heads and the file holds {config.num_heads}; all are used.",)


def _rows(which: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight[which]


def _shared_output(files: DrafterFiles, found: _Found) -> str | None:
    """The one matrix of all heads; None where each has its own or the target's is used."""
    if "lm_head.weight" in found.shapes:
        return "lm_head.weight"
    original = switch(files, "original_lm_head", default=False)
    return "lm_heads.0.weight" if original and "lm_heads.0.weight" in found.shapes else None


def _config(files: DrafterFiles, found: _Found, shared: str | None) -> MedusaConfig:
    vocab_size: int | None = None
    if files.config.get("vocab_size") is not None:
        vocab_size = whole_number(files, "vocab_size")
    reduced: int | None = None
    if files.config.get("truncated_vocab_size") is not None:
        reduced = whole_number(files, "truncated_vocab_size")
        if vocab_size is None:
            whole_number(files, "vocab_size")  # says that it is missing
        if reduced == vocab_size:
            reduced = None
    borrowed = switch(files, "original_lm_head", default=False) and shared is None
    matrix = shared or "lm_heads.0.weight"
    if vocab_size is None and matrix in found.shapes:
        vocab_size = files.rows(found.names[matrix])
    has_bias = "blocks.0.layers.0.bias" in found.shapes
    # As in the official layout, a config may say fewer heads than there are.
    count = whole_number(files, "num_heads", most=MOST_PARTS)
    while f"blocks.{count}.layers.0.weight" in found.shapes:
        count += 1
    return MedusaConfig(
        hidden_size=whole_number(files, "hidden_size"),
        vocab_size=vocab_size,
        num_heads=count,
        num_blocks=whole_number(files, "num_hidden_layers", default=1, most=MOST_PARTS),
        bias=switch(files, "medusa_fc_bias", default=has_bias),
        output="target" if borrowed else "shared" if shared else "own",
        draft_vocab_size=reduced,
    )


def _token_ids(files: DrafterFiles, found: _Found, config: MedusaConfig) -> Tensor | None:
    """[Vd] ids of the draft vocabulary in the order of the file; None when it is the whole."""
    if config.draft_vocab_size is None or _MAP not in found.names:
        return None
    name = found.names[_MAP]
    ids = files.read([name])[name]
    allowed = ids.dtype in INTEGERS and ids.ndim == 1
    if not allowed or len(set(ids.tolist())) != len(ids) or bool((ids < 0).any()):
        raise CheckpointError(
            f"{files.folder}: token_map is not a list of different token ids. Get the drafter "
            "again from where it came from."
        )
    if config.vocab_size is not None and bool((ids >= config.vocab_size).any()):
        raise CheckpointError(
            f"{files.folder}: token_map has the id {int(ids.max())}; allowed: 0 to "
            f"{config.vocab_size - 1}. Get the drafter again from where it came from."
        )
    return ids.long()


def _stored(name: str, shared: str | None) -> str:
    """The layout's name of an internal one."""
    parts = name.split(".")
    if parts[0] != "heads":
        return {"output.weight": shared or "lm_head.weight", D2T: _MAP}[name]
    if parts[2] == "output":
        return f"lm_heads.{parts[1]}.weight"
    return f"blocks.{parts[1]}.layers.{parts[3]}.{parts[4]}"


def _unused(found: _Found, config: MedusaConfig, shared: str | None) -> list[str]:
    """What vLLM passes over: copies of the one matrix, and a map of the whole vocabulary."""
    ignored = [] if config.draft_vocab_size is not None else [_MAP]
    if shared is not None:
        ignored += [f"lm_heads.{head}.weight" for head in range(config.num_heads)]
    return [found.names[bare] for bare in ignored if bare in found.names and bare != shared]
