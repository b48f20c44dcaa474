"""The training seam: an objective turns a batch of answered texts into one number to make smaller.

    Batch --Objective.loss--> Loss(total, parts, acceptance_length)
    Objective.tensors, .config --family's write--> a drafter's folder

One method is one file of ``objectives/``; ``TRAINABLE`` names them. The loop, the optimizer and the
files know no method.

B texts, S tokens of the longest, H hidden size, K tapped layers, V vocabulary, Vd draft vocabulary,
D depths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from forespeak.drafters.loader import named
from forespeak.drafters.starting import fresh_config
from forespeak.errors import OptionError, unknown_choice
from forespeak.formats.drafters import D2T, FAMILIES
from forespeak.models.config import ModelConfig


@dataclass(frozen=True)
class Batch:
    """Texts answered by the target, padded on the right, with what the target made of them.

    Attributes:
        tokens: [B, S] int64, 0 in padding.
        supervised: [B, S] bool, the token is part of an answer and to be predicted; False in
            padding.
        lengths: [B] int64, tokens without padding.
        hidden: [B, S, H] the target's states after its final norm; None when not asked for.
        taps: [B, S, K, H] outputs of the objective's ``taps``, in that order; None without any.
    """

    tokens: Tensor
    supervised: Tensor
    lengths: Tensor
    hidden: Tensor | None = None
    taps: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """What a batch says.

    Attributes:
        total: scalar with gradient, a mean over ``weight`` rows.
        parts: of the total, for the log.
        acceptance_length: tokens a round would yield on these texts, bonus included: along each
            true text the chance that a draft token is accepted, multiplied from the root on.
        weight: what ``total`` is divided by. Batches are put together as the sum of total * weight
            over the sum of weight, so that two half batches are one whole. 0 when the batch has
            nothing to predict; its total is then 0.
    """

    total: Tensor
    parts: Mapping[str, float]
    acceptance_length: float
    weight: float = 1.0


@dataclass(frozen=True)
class TargetView:
    """The frozen parts of a target that losses need, on the training device.

    Attributes:
        config: the target's sizes.
        embedding, head: [V, H] float32 or bfloat16; the same tensor where they are tied.
        norm: [H] weight of the final norm; ``norm_eps`` its epsilon.
        layers: weights of some of its layers by 0-based number, under HF's names within a layer
            (``self_attn.q_proj.weight``), for drafters whose layers start from them.
    """

    config: ModelConfig
    embedding: Tensor
    head: Tensor
    norm: Tensor
    norm_eps: float
    layers: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.head.device


@dataclass(frozen=True)
class Start:
    """What training begins from.

    Attributes:
        generator: draws fresh weights, on the CPU.
        tensors: a drafter's weights under internal names, to go on from; None makes fresh ones.
        token_ids: [Vd] rising target ids of the draft vocabulary, on the CPU; needed where the
            config's vocabulary is reduced (``vocabulary.py`` counts them).
    """

    generator: torch.Generator
    tensors: Mapping[str, Tensor] | None = None
    token_ids: Tensor | None = None


class Objective(ABC):
    """One method's training.

    Attributes:
        network: the parameters to train, float32, on the target's device.
        config: the family's config, for its ``write``.
        taps: 0-based target layers whose outputs it reads, in the order of ``Batch.taps``.
        needs_hidden: it reads ``Batch.hidden``.
        token_ids: [Vd] target ids of the draft vocabulary, None for the whole.
        progress: share of the run that is done, 0 to 1; the loop sets it before each step, for
            weights that change on the way.
        rates: learning rates relative to the run's, of parameters whose names begin so.
    """

    network: nn.Module
    config: Any
    progress: float = 0.0
    rates: Mapping[str, float] = MappingProxyType({})
    taps: tuple[int, ...] = ()
    needs_hidden: bool = True
    token_ids: Tensor | None = None

    @abstractmethod
    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        """The batch's loss; to be called under autocast for bfloat16 products.

        Args:
            batch: on the network's device.
            generator: draws positions, anchors and noise; on the CPU.
        """

    def calibrate(self, batches: Iterable[tuple[Batch, torch.Generator]]) -> dict[str, Any]:
        """Settle in ``config`` what is measured when the weights are done, not learned with them.

        Args:
            batches: held-out texts and their randomness; not looked at where there is nothing to
                measure.

        Returns:
            What was found, for the drafter's provenance.
        """
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """The drafter under internal names, as the family's ``write`` takes it."""
        found = {name: tensor.detach() for name, tensor in self.network.state_dict().items()}
        if self.token_ids is not None:
            ids = self.token_ids.cpu()
            found[D2T] = ids - torch.arange(len(ids))
        return found


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """How one method is trained.

    Attributes:
        makes: ``module:function`` from (config, target, settings, start) to an objective.
        settings: ``module:class`` of its settings, a frozen dataclass whose fields all have
            defaults.
        starts: ``module:function`` from (the target's ModelConfig, changes as text) to the config
            of what is trained; empty takes ``starting.fresh_config``.
        writes: ``module:function`` that writes (folder, config, tensors); empty takes the family's
            ``write``.
    """

    makes: str
    settings: str
    starts: str = ""
    writes: str = ""


def _entry(module: str, settings: str, *, own_files: bool = False) -> Trainable:
    place = f"forespeak.train.objectives.{module}"
    own = {"starts": f"{place}:start_config", "writes": f"{place}:write"} if own_files else {}
    return Trainable(makes=f"{place}:make", settings=f"{place}:{settings}", **own)


TRAINABLE: Mapping[str, Trainable] = {
    "medusa": _entry("medusa", "MedusaTraining"),
    "mtp_parallel": _entry("mtp_parallel", "MtpParallelTraining"),
    "mtp": _entry("mtp", "MtpTraining"),
    "eagle": _entry("eagle", "EagleTraining"),
    "eagle3": _entry("eagle3", "Eagle3Training"),
    "dflash": _entry("dflash", "DFlashTraining"),
    "dspark": _entry("dspark", "DSparkTraining"),
    "medusa2": _entry("medusa2", "Medusa2Training", own_files=True),
    "mtp_parallel_joint": _entry("mtp_parallel_joint", "JointTraining", own_files=True),
    "draft_model": _entry("draft_model", "DraftModelTraining", own_files=True),
}
"""What is trained, by name."""


def trainable(method: str) -> Trainable:
    """How a method is trained.

    Raises:
        OptionError: it is not.
    """
    if method not in TRAINABLE:
        raise OptionError(unknown_choice("Method to train", method, list(TRAINABLE)))
    return TRAINABLE[method]


def settings_class(method: str) -> type[Any]:
    """The dataclass of a method's training settings; all its fields have defaults.

    Raises:
        OptionError: the method is not trained.
    """
    found: type[Any] = named(trainable(method).settings)
    return found


def drafter_config(method: str, target: ModelConfig, changes: Mapping[str, str]) -> Any:
    """The config of what is trained.

    Args:
        method: a name of ``TRAINABLE``.
        target: what it is for.
        changes: fields of the config (``layers.num_layers`` for one inside), values as text.

    Raises:
        OptionError: no such method or field, or a value of another kind.
    """
    starts = trainable(method).starts
    return named(starts)(target, changes) if starts else fresh_config(method, target, changes)


def write_drafter(method: str, folder: Path, config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write what was trained, in its canonical layout.

    Args:
        method: a name of ``TRAINABLE``.
        folder: is made.
        config, tensors: ``Objective.config`` and ``Objective.tensors()``, in any float dtype.
    """
    writes = trainable(method).writes or f"{FAMILIES[method]}:write"
    named(writes)(folder, config, tensors)


def make_objective(
    method: str, config: Any, target: TargetView, settings: Any, start: Start
) -> Objective:
    """A method's objective for a target.

    Args:
        method: a name of ``TRAINABLE``.
        config: the family's config of the drafter.
        target: what it is trained for.
        settings: of the method's :func:`settings_class`.
        start: its weights.

    Raises:
        OptionError: an unknown method, or settings and config that do not fit together.
        DrafterError: the drafter does not fit the target.
    """
    objective = named(trainable(method).makes)(config, target, settings, start)
    assert isinstance(objective, Objective), method
    return objective
