"""Static trees by name or from a file of paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from forespeak.errors import OptionError
from forespeak.spec.builders import TreeShape

_MOST_NODES = 4096

# EAGLE-1's hand-made tree of 25 nodes (arXiv 2401.15077, figure 7 and the released code).
_EAGLE = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
NAMED_SHAPES: Mapping[str, TreeShape] = {"eagle": TreeShape(_EAGLE)}


def read_shape(name: str) -> TreeShape:
    """The shape of a name, or in a JSON file: a list of paths, each a list of ranks.

    Raises:
        OptionError: no such name or file, or a file of something else.
    """
    if name in NAMED_SHAPES:
        return NAMED_SHAPES[name]
    allowed = f"{', '.join(NAMED_SHAPES)}, or a JSON file of paths such as [[0], [1], [0, 0]]"
    try:
        value = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise OptionError(
            f"Tree shape {name!r} is no known name and cannot be read as JSON; allowed: {allowed}."
        ) from None
    if not _is_paths(value):
        raise OptionError(
            f"Tree shape {name!r} is not a list of paths; allowed: {allowed}, at most "
            f"{_MOST_NODES} of them with ranks from 0 to 255."
        )
    return TreeShape(tuple(tuple(path) for path in value))


def _is_paths(value: object) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= _MOST_NODES
        and all(
            isinstance(path, list)
            and all(isinstance(r, int) and not isinstance(r, bool) and 0 <= r < 256 for r in path)
            for path in value
        )
    )
