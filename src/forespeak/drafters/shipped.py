"""Drafters in folders by method's name, and those that come with forespeak for the embedded target.

A checkout has them in ``checkpoints/TARGET/METHOD``; the environment variable
``FORESPEAK_CHECKPOINTS`` names another folder of such folders.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from forespeak.drafters.naming import names_of
from forespeak.drafters.table import METHODS
from forespeak.errors import OptionError
from forespeak.types import SpeculationConfig

VARIABLE = "FORESPEAK_CHECKPOINTS"


def shipped_folder(target: str) -> Path | None:
    """Where drafters for a target lie, None where there are none.

    Args:
        target: its name, such as ``smollm2-135m``; a path or a Hub id has none.

    Raises:
        OptionError: the variable names no folder.
    """
    if target != Path(target).name or target in ("", ".", ".."):
        return None
    given = os.environ.get(VARIABLE)
    root = Path(given) if given else Path(__file__).parents[3] / "checkpoints"
    if given and not root.is_dir():
        raise OptionError(f"{VARIABLE} is {given!r}, which is no folder; correct it or unset it.")
    folder = root / target
    return folder if folder.is_dir() else None


def find_drafter(config: SpeculationConfig, folder: Path) -> SpeculationConfig:
    """A configuration with the drafter of its method that lies in a folder.

    It stays as it is where it has a drafter, needs none, or none of its method lies there. A method
    that reads another's weights takes those where it has none of its own name.
    """
    if config.drafter is not None:
        return config
    entries = [METHODS[name] for name in names_of(config.method) if name in METHODS]
    for entry in entries:
        for name in (entry.name, *entry.reads) if entry.info.trained else ():
            if (folder / name / "config.json").is_file():
                return replace(config, drafter=str(folder / name))
    return config


def with_shipped(config: SpeculationConfig, target: str) -> SpeculationConfig:
    """A configuration with the shipped drafter of its method for a target, where there is one."""
    folder = shipped_folder(target)
    named = isinstance(config.method, str)  # what else it may be is refused elsewhere
    return find_drafter(config, folder) if named and folder is not None else config
