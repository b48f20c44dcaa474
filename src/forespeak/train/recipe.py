"""Recipes: everything that decides a training run, in one TOML file, typed and checked.

    method = "eagle3"        # what is trained
    extends = "..."          # another recipe whose values hold where this one says nothing
    [drafter]                # fields of the method's config; the family's defaults hold
    [objective]              # settings of the method's loss
    [data] [batch] [optimizer] [schedule] [compute] [save]

A key that is not known is refused. Reading a recipe does not import torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from forespeak.errors import OptionError, unknown_choice
from forespeak.train.typed_tables import (
    as_text,
    build,
    leaves,
    parse_value,
    plain,
    write_key,
    write_value,
)

Value = str | int | float | bool | tuple["Value", ...]


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise OptionError(f"{name} is {value!r}; allowed: {allowed}.")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which part of the dialogues is used, and how the target's features come.

    Attributes:
        max_length: tokens of a sample; what is longer is cut at its end.
        min_supervised: samples with fewer tokens to predict are left out.
        held_out: share of the samples that is never trained on and measures progress.
        features: ``live`` runs the target for every batch, ``cache`` once for all, on disk.
    """

    max_length: int = 2048
    min_supervised: int = 14
    held_out: float = 0.02
    features: Literal["live", "cache"] = "live"

    def __post_init__(self) -> None:
        _require("data.max_length", self.max_length, self.max_length >= 2, "2 or more")
        _require("data.min_supervised", self.min_supervised, self.min_supervised >= 1, "1 or more")
        _require("data.held_out", self.held_out, 0 <= self.held_out < 1, "0 to below 1")


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How many tokens a step sees.

    Attributes:
        tokens: of one micro-batch, padding counted; what has to fit into memory.
        micro_batches: a step's; their gradients are added up. Several processes share them.
    """

    tokens: int = 8192
    micro_batches: int = 1

    def __post_init__(self) -> None:
        _require("batch.tokens", self.tokens, self.tokens >= 1, "1 or more")
        _require("batch.micro_batches", self.micro_batches, self.micro_batches >= 1, "1 or more")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """How weights move.

    Attributes:
        name: ``adamw``; ``muon`` moves matrices by Muon and the rest by AdamW.
        learning_rate: peak, of AdamW.
        muon_learning_rate: peak, of Muon.
        weight_decay, betas, epsilon: of AdamW; Muon takes the same decay.
        clip_norm: gradients are scaled down to this norm; 0 leaves them.
        max_skipped: steps in a row whose loss or gradient is not finite before the run ends.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-4
    muon_learning_rate: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    epsilon: float = 1e-8
    clip_norm: float = 0.5
    max_skipped: int = 5

    def __post_init__(self) -> None:
        for name in ("learning_rate", "muon_learning_rate", "epsilon"):
            value = getattr(self, name)
            _require(f"optimizer.{name}", value, value > 0, "a number above 0")
        for name in ("weight_decay", "clip_norm"):
            value = getattr(self, name)
            _require(f"optimizer.{name}", value, value >= 0, "0 or more")
        pair = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _require("optimizer.betas", list(self.betas), pair, "two numbers from 0 to below 1")
        _require("optimizer.max_skipped", self.max_skipped, self.max_skipped >= 1, "1 or more")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How long, and how the learning rate goes.

    Attributes:
        epochs: passes over the data, where ``steps`` is 0.
        steps: of the whole run; 0 follows from ``epochs``.
        warmup: share of the run in which the rate rises linearly.
        shape: how it falls after that: ``cosine``, ``linear`` or not at all (``constant``).
        final: share of the peak that it ends at.
        follows: ``steps``, or ``time``: the run lasts as long as ``--time-limit`` says and the rate
            ends with it. The same numbers come out again under ``steps`` only.
    """

    epochs: int = 1
    steps: int = 0
    warmup: float = 0.04
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = 0.0
    follows: Literal["steps", "time"] = "steps"

    def __post_init__(self) -> None:
        _require("schedule.epochs", self.epochs, self.epochs >= 1, "1 or more")
        _require("schedule.steps", self.steps, self.steps >= 0, "0 or more")
        _require("schedule.warmup", self.warmup, 0 <= self.warmup <= 1, "0 to 1")
        _require("schedule.final", self.final, 0 <= self.final <= 1, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """Precision of the products; weights and optimizer are float32 always.

    Attributes:
        dtype: ``bfloat16`` or ``float32``.
        sharded: several processes share out weights, gradients and optimizer (FSDP) instead of
            having them whole each.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """What is written.

    Attributes:
        every: steps between checkpoints; one is written at the end in any case.
        keep: checkpoints that stay.
        file_megabytes: largest weight file of the export, in units of 10^6 bytes; 0 is no limit.
    """

    every: int = 500
    keep: int = 2
    file_megabytes: int = 0

    def __post_init__(self) -> None:
        _require("save.every", self.every, self.every >= 1, "1 or more")
        _require("save.keep", self.keep, self.keep >= 1, "1 or more")
        _require("save.file_megabytes", self.file_megabytes, self.file_megabytes >= 0, "0 or more")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run, resolved.

    Attributes:
        method: what is trained.
        seed: of first weights, order, anchors and noise.
        drafter: fields of the method's config (``layers.num_layers``) and their values.
        objective: settings of the method's loss.
    """

    method: str
    seed: int = 0
    drafter: Mapping[str, Value] = field(default_factory=dict)
    objective: Mapping[str, Value] = field(default_factory=dict)
    data: DataSettings = DataSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    compute: ComputeSettings = ComputeSettings()
    save: SaveSettings = SaveSettings()

    def drafter_changes(self) -> dict[str, str]:
        """``drafter`` as ``starting.fresh_config`` wants it."""
        return {name: as_text(value) for name, value in self.drafter.items()}


def recipe_names() -> list[str]:
    """Recipes that come with the package; those of a target as ``smollm2/eagle3``."""
    root = files("forespeak.train") / "recipes"
    found = []
    for entry in root.iterdir():
        inside = [entry] if entry.is_file() else list(entry.iterdir())
        prefix = "" if entry.is_file() else f"{entry.name}/"
        found += [prefix + i.name.removesuffix(".toml") for i in inside if i.name.endswith(".toml")]
    return sorted(found)


def read_recipe(name: str, changes: Mapping[str, str] | None = None) -> Recipe:
    """A recipe by path or name, with some values replaced.

    Args:
        name: of a TOML file, or one of :func:`recipe_names`, such as a method.
        changes: dotted keys and values as TOML or plain text: ``{"optimizer.name": "muon"}``.

    Raises:
        OptionError: no such recipe, a key that is not known, or a value that cannot be.
    """
    table = _read_table(name, ())
    for key, text in (changes or {}).items():
        _put(table, key.split("."), parse_value(text), key)
    return recipe_from(table, name)


def recipe_from(table: Mapping[str, object], origin: str) -> Recipe:
    """A recipe from parsed TOML.

    Raises:
        OptionError: see :func:`read_recipe`.
    """
    if "method" not in table:
        raise OptionError(f'Recipe {origin} names no method; such as method = "eagle3".')
    recipe = build(Recipe, table, "", origin)
    assert isinstance(recipe, Recipe)
    return recipe


def typed_settings(kind: type, values: Mapping[str, Value], section: str) -> Any:
    """A section whose fields another module knows, such as an objective's settings.

    Args:
        kind: dataclass to make.
        values: what the recipe says.
        section: its name, for messages.

    Raises:
        OptionError: a key that is not known, or a value of another kind.
    """
    return build(kind, values, section, "")


def as_table(recipe: Recipe) -> dict[str, Any]:
    """Every value of a recipe, defaults included, as plain data."""
    values = plain(asdict(recipe))
    assert isinstance(values, dict)
    return values


def as_toml(recipe: Recipe) -> str:
    """A recipe with all its values, as a file that reads back equal."""
    table = as_table(recipe)
    lines = [f"{k} = {write_value(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for section, values in table.items():
        if isinstance(values, dict):
            lines += ["", f"[{section}]"]
            lines += [f"{write_key(k)} = {write_value(v)}" for k, v in values.items()]
    return "\n".join(lines) + "\n"


def first_difference(one: Recipe, other: Recipe) -> str | None:
    """The dotted name of a value in which two recipes differ, None when they are equal."""
    mine, theirs = dict(leaves(as_table(one))), dict(leaves(as_table(other)))
    names = sorted(mine.keys() | theirs.keys())
    return next((n for n in names if mine.get(n) != theirs.get(n)), None)


def _read_table(name: str, below: tuple[str, ...]) -> dict[str, Any]:
    if name in below:
        raise OptionError(f"Recipe {name} extends itself; a recipe may extend another one only.")
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"Recipe {name} cannot be read ({error}); give a TOML file in UTF-8."
            ) from None
    elif name in recipe_names():
        root = files("forespeak.train") / "recipes"
        text = root.joinpath(*f"{name}.toml".split("/")).read_text(encoding="utf-8")
    else:
        raise OptionError(f"{unknown_choice('Recipe', name, recipe_names())} Or name a .toml file.")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"Recipe {name} is not TOML ({error}); correct that place.") from None
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise OptionError(f"Recipe {name}: extends is {base!r}; it must be a recipe's name.")
    beside = str(path.parent / base) if path.suffix == ".toml" and base.endswith(".toml") else base
    return _merged(_read_table(beside, (*below, name)), table)


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(base)
    for key, value in over.items():
        old = joined.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            joined[key] = _merged(old, value)
        else:
            joined[key] = value
    return joined


def _put(table: dict[str, Any], path: list[str], value: object, name: str) -> None:
    # The two free sections have dotted names of their own.
    place = [path[0], ".".join(path[1:])] if path[0] in ("drafter", "objective") else path
    if len(place) == 2 and place[1]:
        inner = table.setdefault(place[0], {})
        if not isinstance(inner, dict):
            raise OptionError(f"--set {name}: {place[0]} has nothing inside.")
        if place[0] in ("drafter", "objective"):
            inner = table[place[0]] = dict(leaves(inner))
        inner[place[1]] = value
    elif len(place) == 1:
        table[place[0]] = value
    else:
        raise OptionError(f"--set {name} is not SECTION.KEY=VALUE, such as optimizer.name=muon.")
