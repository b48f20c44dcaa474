"""Where builders and rules get their randomness from.

Nothing in ``spec`` draws a random number itself. It asks a source two questions: "accept with this
probability?" and "which token of this law?". A source backed by a generator answers them in the
engine, a recorded list replays known draws, and a test can answer every question both ways, which
turns any rule into its exact output law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_BUFFERED = 32
_WORTH_A_KERNEL = 4096  # tokens; a sum of 49,152 in float64 takes torch 75 us, the kernel 25


class Uniforms(Protocol):
    """A source of decisions. Draft and verification need one each (law 8), one pair a row."""

    def accept(self, probability: float) -> bool:
        """True with this probability; 0 or less never, 1 or more always."""
        ...

    def choose(self, law: Tensor) -> int:
        """A token of a law. [V] not negative, with a positive sum; it need not be normalised."""
        ...


def invert(law: Tensor, uniform: float, *, compiled: bool = True) -> int:
    """The token at which the cumulative law passes ``uniform``, never one of probability zero.

    Args:
        law: [V] not negative, not all zero.
        uniform: in [0, 1).
        compiled: False takes the plain torch form.

    Sums run in float64 whatever the law's dtype: in float32 the tail of a large vocabulary is
    smaller than the rounding of the running sum and could never be drawn.
    """
    fits = law.device.type == "cpu" and law.dtype == torch.float32 and law.is_contiguous()
    if compiled and fits and law.shape[0] >= _WORTH_A_KERNEL:
        from forespeak.spec.draw_kernel import invert_row  # numba loads on first use

        found = int(invert_row(law.detach().numpy(), uniform))
        assert found >= 0, "a law without any mass"
        return found
    cumulative = law.cumsum(0, dtype=torch.float64)  # [V]
    threshold = uniform * float(cumulative[-1])
    assert threshold == threshold, "a law that is not a number"
    token = int(torch.searchsorted(cumulative, threshold, right=True))
    if token < law.shape[0] and law[token] > 0:
        return token
    # uniform * total rounded up to the total, or a parallel sum that is not quite monotone
    positive = law.nonzero()[:, 0]
    assert positive.numel(), "a law without any mass"
    at = int(torch.searchsorted(positive, token))
    return int(positive[min(at, positive.numel() - 1)])


class SeededUniforms:
    """Draws from a generator; the same generator state gives the same decisions."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._buffer: list[float] = []

    def next(self) -> float:
        """A float64 uniform in [0, 1). Drawn in small blocks: one call each would cost more."""
        if not self._buffer:
            block = torch.rand(
                _BUFFERED,
                generator=self._generator,
                dtype=torch.float64,
                device=self._generator.device,
            )
            self._buffer = block.tolist()[::-1]
        return self._buffer.pop()

    def accept(self, probability: float) -> bool:
        return self.next() < probability

    def choose(self, law: Tensor) -> int:
        return invert(law, self.next())


class RecordedUniforms:
    """Replays a list of uniforms, one a decision, in order.

    Raises:
        IndexError: from a decision when the list has run out.
    """

    def __init__(self, uniforms: Sequence[float]) -> None:
        self._uniforms = tuple(float(u) for u in uniforms)
        self.num_used = 0

    def next(self) -> float:
        """The next recorded uniform."""
        if self.num_used == len(self._uniforms):
            raise IndexError(
                f"all {self.num_used} recorded uniforms are used and one more decision is due; "
                "the recording belongs to another tree, rule or law"
            )
        self.num_used += 1
        return self._uniforms[self.num_used - 1]

    def accept(self, probability: float) -> bool:
        return self.next() < probability

    def choose(self, law: Tensor) -> int:
        return invert(law, self.next())
