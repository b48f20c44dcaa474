"""How a method is written: a name, or names joined with +, each with its own size and builder.

``eagle3:5`` is a chain of 5, ``medusa:static_tree:32`` a static tree of 32 nodes, ``ngram+mtp:1``
look-up and, where it finds nothing, a chain of 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forespeak.drafters.table import BUILDER_SETTINGS, MethodEntry
from forespeak.errors import OptionError, shown, unknown_choice

_BUILDER, _SIZE = re.compile(r"[A-Za-z][A-Za-z_-]*"), re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Part:
    """One method as it was written.

    Attributes:
        name: of the method, whether there is one or not.
        builder: that it asks for, None for its default.
        size: draft tokens of its chain or draft nodes of its tree, None for its default.
    """

    name: str
    builder: str | None = None
    size: int | None = None

    def size_setting(self, entry: MethodEntry, builder: str | None = None) -> str:
        """The setting that its size stands for, under the builder it asks for or this one."""
        asked = builder if builder in entry.builders else entry.builders[0]
        chosen = self.builder or asked
        return "num_speculative_tokens" if chosen == "chain" else "node_budget"


def parts_of(method: str) -> tuple[Part, ...]:
    """The methods of a cascade, or the one.

    Raises:
        OptionError: more than a builder and a number behind a name.
    """
    return tuple(_part(text) for text in method.split("+"))


def names_of(method: str) -> list[str]:
    """Their names alone.

    Raises:
        OptionError: see :func:`parts_of`.
    """
    return [part.name for part in parts_of(method)]


def check_part(part: Part, entry: MethodEntry) -> None:
    """Refuse what a method cannot be asked for.

    Raises:
        OptionError: a builder that it does not take, or a size where it drafts nothing.
    """
    if not entry.builders and (part.builder or part.size):
        raise OptionError(
            f"{part.name} drafts nothing, so nothing may stand behind its name; write {part.name}."
        )
    if part.builder is not None and part.builder not in entry.builders:
        known = part.builder in BUILDER_SETTINGS
        raise OptionError(
            f"Method {part.name} does not take builder {part.builder}; allowed: "
            f"{', '.join(entry.builders)}."
            if known
            else unknown_choice(f"Builder of {part.name}", part.builder, entry.builders)
            + " Or a size from 1 on."
        )


def _part(text: str) -> Part:
    name, *rest = text.split(":")
    builder = rest.pop(0) if rest and _BUILDER.fullmatch(rest[0]) else None
    size = rest.pop(0) if rest and _SIZE.fullmatch(rest[0]) else None
    if rest:
        raise OptionError(
            f"Method {shown(text, 60)} cannot be read; allowed: NAME, NAME:SIZE, NAME:BUILDER "
            "or NAME:BUILDER:SIZE with a size from 1 on, such as eagle3:5 or medusa:static_tree:32."
        )
    return Part(name, builder, None if size is None else int(size))
