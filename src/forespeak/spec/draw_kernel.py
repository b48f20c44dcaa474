"""The inverse of a cumulative law without the law's running sum. CPU; importing loads numba.

Blocks are summed first, in float64, then the one block that holds the answer is walked. The sums
are those of ``uniforms.invert`` in another order: equal to a few units in the last place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forespeak.kernels.cache import kernel

_BLOCK = 256  # a square root of usual vocabularies: half the work each


@kernel(nogil=True)
def invert_row(law: NDArray[np.float32], uniform: float) -> int:
    """See ``uniforms.invert``; -1 for a law without any mass. [V] -> token"""
    size = law.shape[0]
    num_blocks = (size + _BLOCK - 1) // _BLOCK
    sums = np.empty(num_blocks, np.float64)
    total = 0.0
    for number in range(num_blocks):
        sums[number] = _sum(law, number * _BLOCK, min((number + 1) * _BLOCK, size))
        total += sums[number]
    threshold = uniform * total
    before = 0.0
    last = -1  # block with mass that was walked past last
    for number in range(num_blocks):
        if sums[number] > 0:
            if before + sums[number] > threshold:
                return int(_walk(law, number * _BLOCK, size, before, threshold))
            last = number
        before += sums[number]
    # uniform * total rounded up to the total
    return -1 if last < 0 else int(_walk(law, last * _BLOCK, size, 0.0, np.inf))


@kernel(nogil=True)
def _sum(law: NDArray[np.float32], begin: int, end: int) -> float:
    """Four sums side by side: one alone waits for itself."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = begin + (end - begin) // 4 * 4
    for at in range(begin, whole, 4):
        a += np.float64(law[at])
        b += np.float64(law[at + 1])
        c += np.float64(law[at + 2])
        d += np.float64(law[at + 3])
    for at in range(whole, end):
        a += np.float64(law[at])
    return (a + b) + (c + d)


@kernel(nogil=True)
def _walk(law: NDArray[np.float32], begin: int, size: int, before: float, threshold: float) -> int:
    """The token of a block at which the running sum passes the threshold; where rounding keeps it
    from doing so, the block's last that is possible."""
    possible = -1
    for at in range(begin, min(begin + _BLOCK, size)):
        if law[at] > 0:
            before += np.float64(law[at])
            possible = at
            if before > threshold:
                break
    return possible
