"""Rules decide which nodes of a tree survive, given the target's laws."""

from __future__ import annotations

from forespeak.spec.verify.greedy import follow, greedy

__all__ = ["follow", "greedy"]
