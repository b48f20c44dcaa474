"""Options that several commands share, declared once as a dataclass.

A field is an option: its name gives the flag, its default the default, its ``Annotated`` typer
declaration the help. A command takes the dataclass; ``takes_groups`` shows typer the flat list::

    @takes_groups
    def generate(prompt: ..., *, target: TargetOptions, output: OutputOptions) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose dataclass parameters are spread into one option for each field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            groups[name] = hint
            flat.extend(_options(hint))
        else:
            flat.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def spread(**values: Any) -> None:
        filled = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **filled)

    signature = inspect.Signature(flat)
    spread.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    spread.__annotations__ = {option.name: option.annotation for option in flat}
    return spread


def _options(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        assert field.default is not MISSING, f"{group.__name__}.{field.name} needs a default"
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
