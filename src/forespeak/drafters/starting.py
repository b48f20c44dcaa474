"""A fresh drafter of random weights for a target: where training starts, what tests draft with."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from forespeak.drafters.loader import named
from forespeak.drafters.table import METHODS
from forespeak.errors import OptionError, unknown_choice
from forespeak.formats.drafters import D2T, FAMILIES, DrafterCheckpoint, read_drafter
from forespeak.models.config import ModelConfig


def startable() -> tuple[str, ...]:
    """Methods whose drafters can be started from nothing."""
    return tuple(name for name, entry in METHODS.items() if entry.starts)


def fresh_config(method: str, target: ModelConfig, changes: Mapping[str, str]) -> Any:
    """The config of a new drafter.

    Args:
        method: one of :func:`startable`.
        target: what it is for.
        changes: fields of the method's config (``layers.num_layers`` for one inside) and their
            values as text.

    Raises:
        OptionError: no such method or field, or a value of another kind.
    """
    if method not in startable():
        raise OptionError(unknown_choice("Method to start a drafter of", method, startable()))
    family = import_module(FAMILIES[method])
    return with_changes(family.CONFIGS[method].for_target(target), changes)


def with_changes(config: Any, changes: Mapping[str, str]) -> Any:
    """A config dataclass with some fields changed.

    Args:
        config: any.
        changes: fields (``layers.num_layers`` for one inside) and their values as text.

    Raises:
        OptionError: no such field, or a value of another kind.
    """
    for name, text in changes.items():
        config = _changed(config, name.split("."), text, name)
    return config


def start_drafter(
    method: str,
    target: ModelConfig,
    folder: Path,
    *,
    changes: Mapping[str, str] | None = None,
    seed: int = 0,
) -> DrafterCheckpoint:
    """Write a drafter of random weights in its canonical layout.

    Args:
        method, target, changes: see :func:`fresh_config`.
        folder: is made; must not hold anything.
        seed: of the weights.

    Raises:
        OptionError: see :func:`fresh_config`, or the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(
            f"{folder} is there already and not empty; a new drafter gets a folder of its own. "
            "Name another one or empty this one."
        )
    config = fresh_config(method, target, changes or {})
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = named(METHODS[method].starts)(config, generator)
    if config.draft_vocab_size is not None and D2T not in tensors:
        tensors[D2T] = spread_vocabulary(target.vocab_size, config.draft_vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    import_module(FAMILIES[method]).write(folder, config, tensors)
    return read_drafter(folder, modules=[FAMILIES[method]])


def spread_vocabulary(vocab_size: int, draft_vocab_size: int) -> Tensor:
    """d2t [Vd] of ids spread evenly over the vocabulary, for want of frequencies.

    Raises:
        OptionError: the draft vocabulary is not smaller than the target's.
    """
    if not 0 < draft_vocab_size < vocab_size:
        raise OptionError(
            f"draft_vocab_size is {draft_vocab_size}; allowed: 1 to {vocab_size - 1}, fewer than "
            "the target's tokens. Leave it out for the whole vocabulary."
        )
    draft_ids = torch.arange(draft_vocab_size)
    ids = (2 * draft_ids + 1) * vocab_size // (2 * draft_vocab_size)
    return ids - draft_ids


def _changed(config: Any, path: list[str], text: str, name: str) -> Any:
    known = {field.name for field in fields(config)}
    if path[0] not in known:
        raise OptionError(unknown_choice("Setting", name, known))
    old = getattr(config, path[0])
    if len(path) > 1:
        if not is_dataclass(old):
            raise OptionError(f"Setting {name!r} has nothing inside; give {path[0]}=VALUE.")
        return replace(config, **{path[0]: _changed(old, path[1:], text, name)})
    value = _parsed(get_type_hints(type(config))[path[0]], text, name)
    return replace(config, **{path[0]: value})


def _parsed(hint: Any, text: str, name: str) -> Any:
    """A value of a field's type."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = get_args(hint)
        if text.lower() == "none" and type(None) in kinds:
            return None
        return _parsed(next(kind for kind in kinds if kind is not type(None)), text, name)
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return tuple(_parsed(inner, part.strip(), name) for part in text.split(",") if part.strip())
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            pass
    elif hint is str:
        return text
    kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(hint)
    raise OptionError(
        f"Setting {name}={text!r} is not {kind or 'something that can be given here'}; such as "
        f"--set {name}={'1,2' if kind is None else '1' if hint is not bool else 'true'}."
    )
