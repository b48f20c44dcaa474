"""``kernel``: Numba's ``njit`` with a cache on disk that knows all of a kernel's source.

Numba keeps compiled code until the file that holds the function changes. Our kernels are compiled
together from several files, so a change in one of them would leave old machine code in use. Here
the stamp of every cached kernel is a digest of all files that kernels are made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit


@cache
def source_digest(folder: Path = Path(__file__).parent) -> str:
    """Digest of the kernels' source files, all of this folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compile on first use and keep the machine code for the next start.

    ``options`` are those of ``numba.njit`` without ``cache``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(cache=True, **options)(function)
        # No public door: a locator class would have to be registered for the whole process.
        dispatcher._cache._cache_file._source_stamp = source_digest()
        return dispatcher

    return decorate
