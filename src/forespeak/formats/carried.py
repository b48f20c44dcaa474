"""Tensors of drafters that lie in a target's own files, beside its weights.

::

    medusa_head.{head}.{block}.linear.weight ...     Medusa-2
    model.mtp_layers.{module}. ...                   MiMo
    mtp. ...                                         Qwen3-Next and later
    model.layers.{num_layers + module}. ...          DeepSeek-V3, GLM: told from a layer of the
                                                     target by the eh_proj that each of them has

The target does not read them; the drafter's own dialect does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_CARRIED = re.compile(
    r"medusa_head\.\d{1,4}\.\d{1,4}\.(linear\.weight|linear\.bias|weight)"
    r"|model\.mtp_layers\.\d{1,4}\..+"
    r"|mtp\..+"
)
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\..+")
_JOINS = "eh_proj.weight"


def foreign_tensors(names: Iterable[str], num_layers: int) -> list[str]:
    """Of tensors that a target has no place for, those that belong to no drafter either.

    Args:
        names: as in the files.
        num_layers: decoder layers of the target.

    Returns:
        The names that are neither, in the order given.
    """
    listed = list(names)
    known = set(listed)

    def carried(name: str) -> bool:
        if _CARRIED.fullmatch(name):
            return True
        layer = _LAYER.fullmatch(name)
        if layer is None or int(layer[1]) < num_layers:
            return False
        return f"model.layers.{int(layer[1])}.{_JOINS}" in known

    return [name for name in listed if not carried(name)]
