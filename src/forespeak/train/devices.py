"""One process or several that train together.

The recipe says how many micro-batches a step has; the processes share them and add up their
gradients, so that the number of processes changes the time and not the result. They are started by
``accelerate launch`` or ``torchrun`` and joined by the package ``accelerate``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forespeak.errors import OptionError


class Devices(Protocol):
    """The processes of a run.

    Attributes:
        rank: this process, from 0.
        count: of all.
    """

    rank: int
    count: int

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by the sum over processes."""

    def add_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Each number's sum over processes."""

    def wait(self) -> None:
        """Until every process is here."""


class OneProcess:
    """The usual case."""

    rank, count = 0, 1

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing to add."""

    def add_numbers(self, numbers: Sequence[float]) -> list[float]:
        """The numbers themselves."""
        return list(numbers)

    def wait(self) -> None:
        """Nobody to wait for."""


class SeveralProcesses:
    """Joined by accelerate."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """One sum over all gradients laid end to end; one that a process lacks counts as zero."""
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
        )
        summed: Tensor = self._accelerator.reduce(flat, reduction="sum")
        start = 0
        for parameter in parameters:
            part = summed[start : start + parameter.numel()]
            parameter.grad = part.view_as(parameter).clone()
            start += parameter.numel()

    def add_numbers(self, numbers: Sequence[float]) -> list[float]:
        """In float64."""
        mine = torch.tensor(list(numbers), dtype=torch.float64, device=self._accelerator.device)
        summed: Tensor = self._accelerator.reduce(mine, reduction="sum")
        return [float(number) for number in summed.tolist()]

    def wait(self) -> None:
        """A barrier."""
        self._accelerator.wait_for_everyone()


def open_devices(device: torch.device) -> tuple[Devices, torch.device]:
    """The processes of this run, and the device of this one.

    Args:
        device: that was asked for; several processes on ``cuda`` get one each.

    Raises:
        OptionError: started as one of several and accelerate is not installed.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return OneProcess(), device
    try:
        from accelerate import Accelerator
    except ImportError:
        raise OptionError(
            f"This is one of {count} processes (WORLD_SIZE), and the package accelerate, which "
            "joins them, is not installed; install forespeak[train], or start one process."
        ) from None
    accelerator = Accelerator(cpu=device.type == "cpu")
    return SeveralProcesses(accelerator), accelerator.device
