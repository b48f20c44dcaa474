"""Tables of TOML as typed dataclasses, and back.

A key that is not a field is refused with the nearest name; so is a value of another kind.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from forespeak.errors import OptionError, unknown_choice


def build(kind: type, table: Mapping[str, object], section: str = "", origin: str = "") -> Any:
    """A dataclass from a table.

    Args:
        kind: dataclass to make; its fields may be dataclasses, mappings, tuples and plain values.
        table: what was given; fields left out have their defaults.
        section, origin: where the table lies, for messages.

    Raises:
        OptionError: a key that is not known, or a value of another kind.
    """
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{section}.{key}" if section else key
        if key not in known:
            where = f"Key of recipe {origin}" if origin else "Setting"
            allowed = [f"{section}.{k}" if section else k for k in known]
            raise OptionError(unknown_choice(where, name, allowed))
        values[key] = _typed(hints[key], value, name, origin)
    return kind(**values)


def _typed(hint: Any, value: object, name: str, origin: str) -> Any:
    origin_type = get_origin(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise _wrong(name, value, f"a section [{name}]")
        return build(hint, value, name, origin)
    if (
        origin_type is not None
        and isinstance(origin_type, type)
        and issubclass(origin_type, Mapping)
    ):
        if not isinstance(value, Mapping):
            raise _wrong(name, value, f"a section [{name}]")
        return {key: frozen(inner) for key, inner in leaves(value)}
    if origin_type is Literal:
        if value not in get_args(hint):
            raise OptionError(unknown_choice(f"{name} =", str(value), map(str, get_args(hint))))
        return value
    if origin_type in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if value == "none" and len(kinds) < len(get_args(hint)):
            return None
        return _typed(kinds[0], value, name, origin)
    if origin_type is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(name, value, "a list, such as [1, 2]")
        return tuple(_typed(get_args(hint)[0], inner, name, origin) for inner in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kinds_of = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise _wrong(name, value, kinds_of.get(hint, "something else"))
    return value


def _wrong(name: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"{name} is {value!r}; it must be {allowed}.")


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all that is not a table."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def frozen(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(frozen(inner) for inner in value) if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Tuples as lists, inside tables too."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


def as_text(value: Any) -> str:
    """A value as a command line has it: ``1,2``, ``true``."""
    if isinstance(value, tuple):
        return ",".join(as_text(inner) for inner in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_value(text: str) -> object:
    """A value of TOML, or the text itself where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a plain word, which TOML would have in quotes


def write_value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, list):
        return f"[{', '.join(write_value(inner) for inner in value)}]"
    return repr(value)


def write_key(name: str) -> str:
    """A key as TOML; a dotted one is one key."""
    return f'"{name}"' if "." in name else name
