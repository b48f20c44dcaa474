"""Method names as a user writes them, checked against the method table before anything loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forespeak.cli.options import SettingOptions
from forespeak.drafters.naming import Part, check_part, names_of, parts_of
from forespeak.drafters.shipped import find_drafter, with_shipped
from forespeak.drafters.table import METHODS, MethodEntry, settings_under
from forespeak.errors import OptionError, unknown_choice
from forespeak.types import SpeculationConfig

ALL = "all"
PLAIN = "autoregressive"
LOOKUP = "ngram"
DRAFT_MODEL = "draft_model"


def check_method(method: str) -> tuple[MethodEntry, ...]:
    """The table's entries for a name or a cascade; refuses what is unknown or only planned."""
    entries = []
    for part in parts_of(method):
        if part.name not in METHODS:
            raise OptionError(unknown_choice("Method", part.name, available()))
        entry = METHODS[part.name]
        check_part(part, entry)
        if not entry.available:
            raise OptionError(
                f"Method {part.name!r} is planned and not in this version; allowed: "
                f"{', '.join(available())}. See `forespeak methods`."
            )
        entries.append(entry)
    return tuple(entries)


def available() -> list[str]:
    """Methods of this version, in the table's order."""
    return [name for name, entry in METHODS.items() if entry.available]


def split_all(text: str) -> tuple[bool, list[str]]:
    """Whether ``all`` stands in a list of names, and those beside it, checked.

    Without ``all`` plain decoding is at the front.
    """
    names = [name.strip() for name in text.split(",")]
    if ALL not in names:
        return False, split_list(text)
    others = [name for name in dict.fromkeys(names) if name not in (ALL, PLAIN, "")]
    for name in others:
        check_method(name)
    return True, others


def split_list(text: str) -> list[str]:
    """Names joined with commas, each checked; plain decoding is moved to the front."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise OptionError(
            f"--methods {text!r} names no method; give some of {', '.join(available())} "
            "joined with commas, or all."
        )
    for name in names:
        check_method(name)
    return [PLAIN, *(name for name in dict.fromkeys(names) if name != PLAIN)]


def configure(methods: Sequence[str], settings: SettingOptions) -> list[SpeculationConfig]:
    """One configuration a method; a setting goes to the methods that take it.

    Raises:
        OptionError: a setting that none of the methods takes.
    """
    takes = [settings_of(method, settings.builder) for method in methods]
    for name in settings.given():
        if not any(name in taken for taken in takes):
            flag = "--" + name.replace("_", "-")
            raise OptionError(
                f"{flag} has no effect on {', '.join(methods)}; leave it out or add a method "
                "that takes it, see `forespeak methods`."
            )
    return [fitting_config(method, settings) for method in methods]


def fitting_config(method: str, settings: SettingOptions) -> SpeculationConfig:
    """A method's configuration with those of the settings that it takes."""
    taken = settings_of(method, settings.builder)
    given = {name: value for name, value in vars(settings).items() if name in taken}
    return SettingOptions(**given).config(method)


def find_drafters(
    configs: Sequence[SpeculationConfig], folder: Path | None, target: str
) -> list[SpeculationConfig]:
    """Give each configuration that needs a drafter the one of its method in ``folder``, if any.

    Args:
        configs: of several methods.
        folder: None for that of the shipped drafters.
        target: its name.

    Raises:
        OptionError: there is no such folder.
    """
    if folder is None:
        return [with_shipped(config, target) for config in configs]
    if not folder.is_dir():
        raise OptionError(
            f"{folder} is no folder; --drafters names one that holds a drafter for each method, in "
            "a subfolder of the method's name."
        )
    return [find_drafter(config, folder) for config in configs]


def lacks_checkpoint(config: SpeculationConfig) -> bool:
    """Whether a method needs a drafter of its own and none is named."""
    entries = check_method(config.method)
    return config.drafter is None and any(entry.info.trained for entry in entries)


def lacks_drafter(config: SpeculationConfig) -> bool:
    """Whether a method that takes any smaller model was given none."""
    return DRAFT_MODEL in names_of(config.method) and config.drafter is None


def settings_of(method: str, builder: str | None = None) -> set[str]:
    """Names of the settings that a method or a cascade takes and does not say itself.

    Args:
        method: as it was written.
        builder: asked for of all methods that take it.
    """
    entries = check_method(method)
    parts = parts_of(method)
    names = {
        name
        for part, entry in zip(parts, entries, strict=True)
        for name in _taken(part, entry, builder)
    }
    if any(entry.info.trained for entry in entries):
        names.add("drafter")
    if any(entry.builders for entry in entries):
        names.add("rule")
    if any(entry.builders and not entry.info.point_mass for entry in entries):
        names.add("draft_sampling")
    if any(len(e.builders) > 1 and not p.builder for p, e in zip(parts, entries, strict=True)):
        names.add("builder")
    return names


def _taken(part: Part, entry: MethodEntry, builder: str | None) -> set[str]:
    """Sizes and switches of one method under the builder that it will have."""
    if not entry.builders:
        return set()
    asked = builder if builder in entry.builders else entry.builders[0]
    names = set(settings_under(entry, part.builder or asked))
    return names if part.size is None else names - {part.size_setting(entry, asked)}
