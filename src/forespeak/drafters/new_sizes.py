"""Sizes of a new drafter that cannot be, refused before anything is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from forespeak.errors import OptionError
from forespeak.models.config import ModelConfig

_MOST_LAYERS, _MOST_WIDTH, _MOST_TOKENS = 1024, 2**20, 2**31 - 1
_SIZES = {
    "vocab_size": _MOST_TOKENS, "hidden_size": _MOST_WIDTH, "intermediate_size": _MOST_WIDTH,
    "num_layers": _MOST_LAYERS, "num_heads": _MOST_WIDTH, "num_kv_heads": _MOST_WIDTH,
    "head_dim": _MOST_WIDTH, "max_position_embeddings": _MOST_TOKENS,
    "sliding_window": _MOST_TOKENS, "markov_rank": _MOST_WIDTH,
}  # fmt: skip


def check_sizes(config: Any, target: ModelConfig) -> None:
    """Refuse sizes that no drafter of this target can have.

    Args:
        config: of a method's family.
        target: what the drafter is for.

    Raises:
        OptionError: naming the setting.
        DrafterError: the target lacks what it would read.
    """
    for name, value in _settings(config, ""):
        check_number(name, value)
    for name, layers in _layers_in(config):
        _check_layers(name, layers)
        _same(f"{name}.vocab_size", layers.vocab_size, target.vocab_size)
    _same("vocab_size", config.vocab_size, target.vocab_size)
    _same("hidden_size", config.hidden_size, target.hidden_size)
    size = config.draft_vocab_size
    if size is not None and not 0 < size < target.vocab_size:
        raise OptionError(
            f"draft_vocab_size is {size}; allowed: 1 to {target.vocab_size - 1}, fewer than "
            "the target's tokens. Leave it out for the whole vocabulary."
        )
    config.check_target(target)


def check_number(name: str, value: object) -> None:
    """Refuse a setting's value that is out of any range.

    Raises:
        OptionError: naming the setting and what is allowed.
    """
    if isinstance(value, float) and not 1e-18 <= value <= 1e18:
        given = "not a number" if math.isnan(value) else str(value)
        raise OptionError(f"{name} is {given}; allowed: a number above 0, such as 1e-6.")
    short = name.rpartition(".")[2]
    most = _SIZES.get(short)
    least = 0 if short == "markov_rank" else 1
    if most is not None and isinstance(value, int) and not least <= value <= most:
        raise OptionError(f"{name} is {value}; allowed: {least} to {most}.")


def _settings(config: Any, prefix: str) -> Iterator[tuple[str, object]]:
    """All fields by the names that settings have, with those inside."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _settings(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _layers_in(config: Any) -> Iterator[tuple[str, ModelConfig]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, ModelConfig):
            yield field.name, value


def _check_layers(name: str, layers: ModelConfig) -> None:
    if layers.num_heads % layers.num_kv_heads:
        raise OptionError(
            f"{name}.num_heads is {layers.num_heads} and {name}.num_kv_heads is "
            f"{layers.num_kv_heads}; the first must be a multiple of the second."
        )
    if layers.head_dim % 2:
        raise OptionError(
            f"{name}.head_dim is {layers.head_dim}; it must be even, because rotary embedding "
            "turns pairs."
        )
    if layers.sliding_layers and len(layers.sliding_layers) != layers.num_layers:
        raise OptionError(
            f"{name}.sliding_layers has {len(layers.sliding_layers)} entries and "
            f"{name}.num_layers is {layers.num_layers}; allowed: true or false for each layer."
        )


def _same(name: str, given: int | None, wanted: int) -> None:
    if given is not None and given != wanted:
        raise OptionError(
            f"{name} of the drafter is {given} and the target's is {wanted}; the two must be "
            "equal. Leave this setting out, or name the target that the drafter is for."
        )
