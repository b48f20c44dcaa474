"""One process or several that train together.

The recipe says how many micro-batches a step has; the processes share them and add up their
gradients, so that the number of processes changes the time and not the result. They are started by
``accelerate launch`` or ``torchrun`` and joined by the package ``accelerate``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forespeak.errors import OptionError
from forespeak.train.objective import Batch, Loss, Objective


class Devices(Protocol):
    """The processes of a run.

    Attributes:
        rank: this process, from 0.
        count: of all.
        together: every process must run as many forwards as the others.
    """

    rank: int
    count: int
    together: bool

    def wrap(self, objective: Objective) -> None:
        """Before the first step, when the weights are those to begin with."""

    def unwrap(self, objective: Objective) -> None:
        """After the last step: the weights are whole in every process again."""

    def loss(self, objective: Objective, batch: Batch, generator: torch.Generator) -> Loss:
        """The objective's loss of a batch."""

    def whole(self, state: Any) -> Any:
        """What is to be saved, with all tensors whole. All processes call it."""

    def shards(self, state: Mapping[str, Any], parameters: list[Tensor]) -> Mapping[str, Any]:
        """An optimizer's state as it was saved, for the parameters as they are here."""

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by the sum over processes."""

    def add_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Each number's sum over processes."""

    def wait(self) -> None:
        """Until every process is here."""

    def close(self) -> None:
        """Part, when all is done; nothing else may be called afterwards."""


class _Whole:
    """What processes do whose weights are whole."""

    together = False

    def wrap(self, objective: Objective) -> None:
        """Nothing to do."""

    def unwrap(self, objective: Objective) -> None:
        """Nothing to do."""

    def loss(self, objective: Objective, batch: Batch, generator: torch.Generator) -> Loss:
        """The objective's own."""
        return objective.loss(batch, generator)

    def whole(self, state: Any) -> Any:
        """As it is."""
        return state

    def shards(self, state: Mapping[str, Any], parameters: list[Tensor]) -> Mapping[str, Any]:
        """As it is."""
        return state


class OneProcess(_Whole):
    """The usual case."""

    rank, count = 0, 1

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing to add."""

    def add_numbers(self, numbers: Sequence[float]) -> list[float]:
        """The numbers themselves."""
        return list(numbers)

    def wait(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nobody to part from."""


class SeveralProcesses(_Whole):
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

    def close(self) -> None:
        """Together: a process that goes while another one still talks to it would take it down."""
        self.wait()
        torch.distributed.destroy_process_group()


def alone_and_sharded() -> OptionError:
    """Why one process cannot share out its weights."""
    return OptionError(
        "compute.sharded is true and this is one process, which has nobody to share with; start "
        "several with `accelerate launch --num_processes N -m forespeak train ...`, or leave it "
        "out."
    )


def open_devices(device: torch.device, *, sharded: bool = False) -> tuple[Devices, torch.device]:
    """The processes of this run, and the device of this one.

    Args:
        device: that was asked for; several processes on ``cuda`` get one each.
        sharded: spread weights, gradients and optimizer over them (FSDP).

    Raises:
        OptionError: started as one of several and accelerate is not installed; or sharded and
            alone.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 and sharded:
        raise alone_and_sharded()
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
    if sharded:
        from forespeak.train.sharded import Sharded

        return Sharded(accelerator), accelerator.device
    return SeveralProcesses(accelerator), accelerator.device
