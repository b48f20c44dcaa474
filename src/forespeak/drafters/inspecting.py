"""What a drafter's checkpoint is: read from config and tensor names, checked against its target.

Nothing is run; tensors are read only to look for values that cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forespeak.errors import CheckpointError, DrafterError, ModelError
from forespeak.formats.drafters import D2T, T2D, DrafterCheckpoint, check_fits, read_drafter
from forespeak.formats.weights import read_json_object
from forespeak.models.config import ModelConfig
from forespeak.models.loading import load_checkpoint
from forespeak.models.sources import resolve


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known of a drafter.

    Attributes:
        method: the method that drafts with it.
        dialect: the layout it is stored in.
        path: its folder.
        num_parameters: numbers stored, index tables not counted.
        stored_bytes: of all its tensors.
        dtypes: that they are stored in.
        facts: names and values, for people: sizes, conventions, what it reads of the target.
        context_bytes: memory a token of context takes in its caches, in the stored dtype.
        target: name of the model it says it is for, where it says.
        notes: what a user should know.
        problems: what is wrong with it; empty when it can be used.
    """

    method: str
    dialect: str
    path: str
    num_parameters: int
    stored_bytes: int
    dtypes: tuple[str, ...]
    facts: Mapping[str, str]
    context_bytes: int
    target: str | None
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def inspect_drafter(name: str, target: str | None = None) -> Inspection:
    """Look at a drafter.

    Args:
        name: folder or Hub id.
        target: the model to check it against; None checks it alone.

    Raises:
        ModelError: there is no such drafter or target.
        CheckpointError: it is no drafter of a known layout, or damaged.
    """
    checkpoint = read_drafter(
        resolve(name, "drafter", "a folder with config.json or a Hub id").path
    )
    sizes_of_target = None if target is None else target_config(target)
    if sizes_of_target is not None:
        checkpoint = replace(checkpoint, target_vocab_size=sizes_of_target.vocab_size)
    problems = _damage(checkpoint)
    if sizes_of_target is not None:
        problems += _misfit(checkpoint, sizes_of_target)
    config, files = checkpoint.config, checkpoint.files
    stored = [files.dtypes[place] for place in checkpoint.names.values()]
    sizes = [torch.Size(files.shapes[place]).numel() for place in checkpoint.names.values()]
    weights = [t for n, t in zip(checkpoint.names, stored, strict=True) if n not in (D2T, T2D)]
    itemsize = max((t.itemsize for t in weights), default=2)
    return Inspection(
        method=checkpoint.method,
        dialect=checkpoint.dialect,
        path=str(checkpoint.origin),
        num_parameters=checkpoint.num_parameters,
        stored_bytes=sum(n * t.itemsize for n, t in zip(sizes, stored, strict=True)),
        dtypes=tuple(sorted({str(t).removeprefix("torch.") for t in weights})),
        facts=config.facts(),
        context_bytes=config.context_values * itemsize,
        target=_named_target(files.config) or _trained_for(checkpoint.origin),
        notes=checkpoint.notes,
        problems=tuple(problems),
    )


def _trained_for(folder: Path) -> str | None:
    """What the provenance says that `forespeak train` wrote, where it can be read."""
    if not (folder / "provenance.json").is_file():
        return None
    try:
        target = read_json_object(folder / "provenance.json").get("target")
    except CheckpointError:
        return None
    return target if isinstance(target, str) else None


def target_config(name: str) -> ModelConfig:
    """Sizes of a target, without its weights where that is possible.

    Raises:
        ModelError: no such model.
    """
    checkpoint = load_checkpoint(name)
    if checkpoint.config is not None:
        return checkpoint.config
    from forespeak.models.adapter import read_adapter_config

    return read_adapter_config(checkpoint.path)


def _damage(checkpoint: DrafterCheckpoint) -> list[str]:
    try:
        checkpoint.tensors()
    except CheckpointError as error:
        return [str(error)]
    return []


def _misfit(checkpoint: DrafterCheckpoint, target: ModelConfig) -> list[str]:
    try:
        check_fits(
            checkpoint, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
            context_length=target.max_position_embeddings,
        )  # fmt: skip
        checkpoint.config.check_target(target)
    except (DrafterError, ModelError) as error:
        return [str(error)]
    return []


def _named_target(config: Mapping[str, object]) -> str | None:
    """The target that a checkpoint's own config names."""
    inner = config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, dict) else None
    candidates = [
        verifier.get("name_or_path") if isinstance(verifier, dict) else None,
        config.get("base_model_name_or_path"),
        config.get("target_model"),
    ]
    return next((name for name in candidates if isinstance(name, str) and name), None)
