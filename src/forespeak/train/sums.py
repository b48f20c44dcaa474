"""Sums over the micro-batches of a step."""

from __future__ import annotations

from forespeak.train.objective import Loss


class Sums:
    """Sums of loss, weight, acceptance length and parts over micro-batches, each times weight."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.sums = [0.0, 0.0, 0.0]

    def add(self, loss: Loss) -> None:
        if not self.names:
            self.names = tuple(loss.parts)
            self.sums += [0.0] * len(self.names)
        if loss.weight <= 0:
            return
        values = [float(loss.total.detach()), 1.0, loss.acceptance_length]
        values += [loss.parts[name] for name in self.names]
        for place, value in enumerate(values):
            self.sums[place] += value * loss.weight
