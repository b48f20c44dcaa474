"""Static trees by name or from a file of paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from forespeak.errors import OptionError
from forespeak.spec.builders import TreeShape, fit_shape
from forespeak.types import SpeculationConfig

_MOST_NODES = 4096

# What a guess of each rank is assumed to be worth where nothing was measured for this drafter.
_TYPICAL_ACCURACIES = (0.6, 0.15, 0.06, 0.03)

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


class StaticShapes:
    """The fixed tree that settings ask for: a given shape, or the one that fits a node budget and
    depth, for ranks of typical accuracy. Read and fitted once, not in every round.

    Raises:
        OptionError: see :func:`read_shape`.
    """

    def __init__(self, settings: SpeculationConfig) -> None:
        self._settings = settings
        self._given = None if settings.tree_shape is None else read_shape(settings.tree_shape)
        self._found: dict[int, TreeShape] = {}
        depth = settings.tree_depth if self._given is None else self._given.depth
        assert depth is not None, "a static tree needs a depth or a shape"
        self.deepest = depth

    def within(self, limit: int) -> TreeShape:
        """The shape with no path longer than ``limit``, 1 or more."""
        limit = min(limit, self.deepest)
        if limit not in self._found:
            self._found[limit] = self._make(limit)
        return self._found[limit]

    def _make(self, limit: int) -> TreeShape:
        if self._given is not None:
            return TreeShape(tuple(path for path in self._given.paths if len(path) <= limit))
        top_k, budget = self._settings.tree_top_k, self._settings.node_budget
        assert top_k is not None and budget is not None, self._settings
        ranks = [_TYPICAL_ACCURACIES[min(r, 3)] * 0.5 ** max(0, r - 3) for r in range(top_k)]
        return fit_shape([ranks] * limit, budget)


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
