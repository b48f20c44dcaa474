"""``kernel``: Numba's ``njit`` with a cache on disk that knows all of a kernel's source.

Numba keeps compiled code until the file that holds the function changes. Our kernels are compiled
together from several files, so a change in one of them would leave old machine code in use. Here
the stamp of every cached kernel is a digest of the folder that holds it and of this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

_HERE = Path(__file__).parent


@cache
def source_digest(folder: Path) -> str:
    """Digest of the source that kernels in ``folder`` are made of."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *_HERE.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compile on first use and keep the machine code for the next start.

    ``options`` are those of ``numba.njit`` without ``cache``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(cache=True, **options)(function)
        digest = source_digest(Path(function.__code__.co_filename).parent)
        # No public door: a locator class would have to be registered for the whole process.
        dispatcher._cache._cache_file._source_stamp = digest
        return dispatcher

    return decorate
