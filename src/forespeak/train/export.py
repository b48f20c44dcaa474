"""A trained drafter as a folder that the engine opens: weights, config, model card, provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forespeak.models.tokenizer import Tokenizer
from forespeak.train.card import write_records
from forespeak.train.loop import Outcome
from forespeak.train.objective import Objective, trainable, write_drafter
from forespeak.train.recipe import Recipe, as_table
from forespeak.train.ship import remove_shards, split_weights


@dataclass(frozen=True)
class DataFigures:
    """What a drafter was trained on.

    Attributes:
        folder: the data's name.
        trained, held_out, too_short: texts.
        refused: dialogues whose answers could not be placed.
        supervised: tokens to predict, of the texts trained on.
        digest: of all texts.
    """

    folder: str
    trained: int
    held_out: int
    too_short: int
    refused: int
    supervised: int
    digest: str


def export(
    folder: Path,
    objective: Objective,
    recipe: Recipe,
    target: str,
    precision: str,
    outcome: Outcome,
    data: DataFigures,
    provenance: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
) -> list[Path]:
    """Write a drafter in bfloat16.

    Args:
        folder: its own; what else lies there stays.
        objective: whose weights.
        recipe: that made it.
        target, precision: the model, and how it ran while features were made.
        outcome: how the run ended.
        data: what it was trained on.
        provenance: see ``provenance.provenance``.
        tokenizer: the target's, which goes with a model of its own.

    Returns:
        The weight files.

    Raises:
        OptionError: a tensor is larger than the recipe's largest file.
        OSError: the disk is full.
    """
    tensors = {name: _stored(tensor) for name, tensor in objective.tensors().items()}
    write_drafter(recipe.method, folder, objective.config, tensors)
    if tokenizer is not None and trainable(recipe.method).writes:
        tokenizer.save(folder)  # a model of its own, not a part of its target
    remove_shards(folder)
    files = [path for path in folder.glob("*.safetensors")]
    if recipe.save.file_megabytes:
        files = split_weights(folder, recipe.save.file_megabytes)
    count = sum(tensor.numel() for tensor in objective.network.state_dict().values())
    size = sum(path.stat().st_size for path in files)
    record = {
        "target": target, "precision": precision, "data": vars(data), "ending": outcome.ending,
        "progress": vars(outcome.progress), "num_steps": outcome.num_steps,
        "held_out": outcome.held_out, "recipe": as_table(recipe), "num_parameters": count,
        "num_bytes": size, **provenance,
    }  # fmt: skip
    write_records(folder, record)
    return files


def _stored(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.bfloat16) if tensor.is_floating_point() else tensor.cpu()
