"""Fully sharded training (FSDP): each process keeps a part of weights, gradients and optimizer.

``fully_shard`` of PyTorch around the whole of an objective: the weights are gathered when a
micro-batch begins, gradients are summed and scattered when it ends. Parts of a network are used in
ways of their own (a head's weight, a step several times over), so the objective's loss is the one
forward there is. Every process must run every forward: one that has no micro-batch left runs
another one's and counts it nowhere.

What is saved is whole, so that a run may be taken up by any number of processes, sharded or not.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from forespeak.train.devices import SeveralProcesses
from forespeak.train.objective import Batch, Loss, Objective


class _LossModule(nn.Module):
    """An objective's loss as a forward; ``last`` is what else it said."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.network = objective.network
        self._objective = objective
        self.last: Loss | None = None

    def forward(self, batch: Batch, generator: torch.Generator) -> Tensor:
        loss = self._objective.loss(batch, generator)
        self.last = replace(loss, total=loss.total.detach())
        # Every weight is in the graph of every micro-batch, so that all processes sum the same.
        nothing = sum((p.sum() * 0 for p in self.network.parameters()), torch.zeros(()))
        return loss.total + nothing.to(loss.total.device)


class Sharded(SeveralProcesses):
    """Processes that share out the weights."""

    together = True

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator)
        self._mesh = init_device_mesh(accelerator.device.type, (self.count,))
        self._module: Any = None

    def wrap(self, objective: Objective) -> None:
        self._module = _LossModule(objective)
        fully_shard(self._module, mesh=self._mesh, reshard_after_forward=False)
        self._module.set_gradient_divide_factor(1.0)  # a sum, as without shards
        self._module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def unwrap(self, objective: Objective) -> None:
        self._module.reshard()  # the last forward may have left the weights gathered
        for module in objective.network.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                whole = nn.Parameter(_whole(parameter), parameter.requires_grad)
                setattr(module, name, whole)
        self._module = None

    def loss(self, objective: Objective, batch: Batch, generator: torch.Generator) -> Loss:
        if self._module is None:  # after the run
            return super().loss(objective, batch, generator)
        total = self._module(batch, generator)
        last: Loss = self._module.last
        return replace(last, total=total)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """They have been summed with the backward."""

    def whole(self, state: Any) -> Any:
        return _whole(state)

    def close(self) -> None:
        """Part, and let go of the group: what PyTorch remembers of meshes would keep its threads.

        A thread of gloo that is alive when the interpreter ends takes the process down with it.
        """
        getattr(self._mesh, "_pg_registry", {}).clear()
        gc.collect()  # modules that were sharded refer to themselves, and to the group
        super().close()

    def shards(self, state: Mapping[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
        kept = {
            number: {
                name: _like(value, parameters[number]) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        }
        return {**state, "state": kept}


def _whole(value: Any) -> Any:
    """Everything inside with its tensors gathered."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, Mapping):
        return {name: _whole(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return value.detach() if isinstance(value, nn.Parameter) else value


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
