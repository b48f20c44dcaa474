"""A fresh drafter of random weights for a target: where training starts, what tests draft with."""

from __future__ import annotations

import os
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from forespeak.drafters.loader import named
from forespeak.drafters.new_sizes import check_number, check_sizes
from forespeak.drafters.table import METHODS
from forespeak.errors import ForespeakError, OptionError, unknown_choice
from forespeak.formats.drafter_files import Shape
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
        OptionError: no such method or field, a value of another kind, or one that cannot be.
        DrafterError: the target lacks what the drafter would read.
    """
    if method not in startable():
        raise OptionError(unknown_choice("Method to start a drafter of", method, startable()))
    family = import_module(FAMILIES[method])
    config = with_changes(family.CONFIGS[method].for_target(target), changes)
    check_sizes(config, target)
    return config


def with_changes(config: Any, changes: Mapping[str, str]) -> Any:
    """A config dataclass with some fields changed.

    Args:
        config: any.
        changes: fields (``layers.num_layers`` for one inside) and their values as text.

    Raises:
        OptionError: no such field, or a value of another kind.
    """
    return _changed(config, {tuple(name.split(".")): text for name, text in changes.items()}, ())


def start_drafter(
    method: str,
    target: ModelConfig,
    folder: Path,
    *,
    changes: Mapping[str, str] | None = None,
    seed: int = 0,
) -> DrafterCheckpoint:
    """Write a drafter of random weights in its canonical layout, whole or not at all.

    Args:
        method, target, changes: see :func:`fresh_config`.
        folder: is made; must not hold anything.
        seed: of the weights.

    Raises:
        OptionError: see :func:`fresh_config`; the folder is not empty or cannot be written; or
            the layout has no place for a setting.
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
    try:
        _write_whole(method, folder, config, tensors, changes or {})
    except OSError as error:
        raise OptionError(
            f"{folder} cannot be written ({error.strerror or error}). Name another folder."
        ) from None
    return read_drafter(folder, modules=[FAMILIES[method]])


def _write_whole(
    method: str,
    folder: Path,
    config: Any,
    tensors: Mapping[str, Tensor],
    changes: Mapping[str, str],
) -> None:
    """Write beside the folder and read back before anything appears in its place."""
    family = FAMILIES[method]
    # The nearest folder that is there, so that the last step is a renaming on one disk.
    beside = next(parent for parent in folder.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=beside, prefix=".new-drafter-") as part:
        made = Path(part) / "drafter"
        import_module(family).write(made, config, tensors)
        try:
            checkpoint = read_drafter(made, modules=[family])
            checkpoint.tensors()
        except ForespeakError as error:
            reason = str(error).replace(str(made), "it")
            raise OptionError(
                f"A drafter of method {method} with these settings could not be read back: {reason}"
            ) from None
        for name in changes:
            _check_kept(name, _value(config, name), _value(checkpoint.config, name))
        folder.mkdir(parents=True, exist_ok=True)
        # A folder without a config is no drafter yet, so that comes last.
        for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, folder / path.name)


def _value(config: Any, name: str) -> object:
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def _check_kept(name: str, given: object, read: object) -> None:
    if given != read:
        raise OptionError(
            f"{name} is {given!r}, and the files of such a drafter can only say {read!r} together "
            "with its other settings. Leave this setting out."
        )


def random_weights(
    shapes: Mapping[str, Shape],
    generator: torch.Generator,
    deviation: Callable[[str, Shape], float],
) -> dict[str, Tensor]:
    """Fresh tensors: norms of one, biases zero, products drawn with their standard deviation.

    Args:
        shapes: name -> shape of each.
        generator: of the draws.
        deviation: (name, shape) -> standard deviation of a product's weights.
    """
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith(".bias"):
            tensors[name] = torch.zeros(shape)
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * deviation(name, shape)
    return tensors


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


def _changed(config: Any, changes: Mapping[tuple[str, ...], str], at: tuple[str, ...]) -> Any:
    """All changes of one dataclass at once, as some hold together only; ``at`` is where it is."""
    known = {field.name for field in fields(config)}
    inner: dict[str, dict[tuple[str, ...], str]] = {}
    values: dict[str, object] = {}
    for path, text in changes.items():
        name = ".".join(at + path)
        if path[0] not in known:
            raise OptionError(unknown_choice("Setting", name, known))
        if len(path) > 1:
            if not is_dataclass(getattr(config, path[0])):
                raise OptionError(f"Setting {name!r} has nothing inside; give {path[0]}=VALUE.")
            inner.setdefault(path[0], {})[path[1:]] = text
            continue
        values[path[0]] = _parsed(get_type_hints(type(config))[path[0]], text, name)
        check_number(name, values[path[0]])
    for field, parts in inner.items():
        values[field] = _changed(getattr(config, field), parts, (*at, field))
    return replace(config, **values)


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
