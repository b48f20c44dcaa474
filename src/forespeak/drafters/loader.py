"""From a method's name and settings to a drafter, through the function that the table names."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.drafters.table import METHODS
from forespeak.errors import OptionError, unknown_choice
from forespeak.types import SpeculationConfig


def load_drafter(config: SpeculationConfig, target: TargetParts, *, num_rows: int = 1) -> Drafter:
    """The drafter of one method (not of a cascade).

    Args:
        config: every setting that the method takes is given (see ``table``), but for those that
            follow from the drafter.
        target: the model it drafts for.
        num_rows: rows it must serve at a time.

    Raises:
        OptionError: an unknown method, or a setting that is out of range.
        DrafterError: the drafter does not fit the target.
        ModelError: the drafter's model cannot be found or read.
    """
    entry = METHODS.get(config.method)
    if entry is None or not entry.available or not entry.opens:
        available = [name for name, entry in METHODS.items() if entry.available and entry.opens]
        raise OptionError(unknown_choice("Method", config.method, available))
    if config.draft_dtype is not None:
        check_draft_dtype(config.draft_dtype, target)
        target = replace(target, draft_dtype=config.draft_dtype)
    drafter = named(entry.opens)(config, target, num_rows)
    assert isinstance(drafter, Drafter), entry.opens
    return drafter


def check_draft_dtype(name: str, target: TargetParts) -> None:
    """Refuse a precision that drafters cannot have beside a target.

    Raises:
        OptionError: int8 on an accelerator.
    """
    if name == "int8" and target.model.device.type != "cpu":
        raise OptionError(
            "draft_dtype is int8, which runs on a CPU, and the target is on "
            f"{target.model.device}; take float32 or bfloat16, or leave it out."
        )


def named(place: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
