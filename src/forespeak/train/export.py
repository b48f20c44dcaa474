"""A trained drafter as a folder that the engine opens: weights, config, model card, provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forespeak.models.tokenizer import Tokenizer
from forespeak.train.atomic import write_json_whole, write_whole
from forespeak.train.loop import Outcome
from forespeak.train.objective import Objective, trainable, write_drafter
from forespeak.train.recipe import Recipe, as_table, as_toml
from forespeak.train.ship import remove_shards, split_weights

PROVENANCE, CARD = "provenance.json", "README.md"


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
    record = {
        "target": target, "precision": precision, "data": vars(data), "ending": outcome.ending,
        "progress": vars(outcome.progress), "num_steps": outcome.num_steps,
        "held_out": outcome.held_out, "recipe": as_table(recipe), **provenance,
    }  # fmt: skip
    write_json_whole(folder / PROVENANCE, record)
    count = sum(tensor.numel() for tensor in objective.network.state_dict().values())
    size = sum(path.stat().st_size for path in files)
    card = model_card(recipe, target, precision, outcome, data, provenance, count, size)
    write_whole(folder / CARD, lambda part: _put(part, card))
    return files


def model_card(
    recipe: Recipe,
    target: str,
    precision: str,
    outcome: Outcome,
    data: DataFigures,
    provenance: Mapping[str, Any],
    num_parameters: int,
    num_bytes: int,
) -> str:
    """The text of README.md."""
    progress, versions = outcome.progress, provenance.get("versions", {})
    lines = [
        f"# {recipe.method} drafter for {target}",
        "",
        f"Proposes tokens that {target} verifies: the text is the target's own, sooner.",
        "",
        f"    forespeak generate --target {target} --method {recipe.method} --drafter .",
        "",
        "| | |",
        "| --- | --- |",
        f"| parameters | {num_parameters / 1e6:.2f} million, {num_bytes / 1e6:.1f} MB, bfloat16 |",
        f"| target while training | {target} in {precision} |",
        f"| data | {data.trained} dialogues of {data.folder}, {data.supervised} tokens to predict; "
        f"{data.held_out} more held out |",
        f"| steps | {progress.step} of {outcome.num_steps} ({_ending(outcome)}) |",
        f"| tokens seen | {progress.tokens / 1e6:.2f} million |",
        f"| time | {progress.seconds / 60:.1f} minutes on {provenance.get('machine', 'unknown')} |",
        f"| code | forespeak {versions.get('forespeak', '?')}, commit "
        f"{provenance.get('commit') or 'unknown'} |",
    ]
    if outcome.held_out is not None:
        lines.append(
            f"| held-out texts | loss {outcome.held_out['loss']:.3f}, acceptance length "
            f"{outcome.held_out['acceptance_length']:.2f} under teacher forcing, bonus included |"
        )
    lines += _calibration_lines(provenance.get("calibration"))
    if progress.skipped:
        lines.append(f"| skipped steps | {progress.skipped}, not finite |")
    lines += [
        "",
        "The acceptance length under teacher forcing is measured along the held-out texts "
        "themselves; `forespeak compare` measures what decoding gives.",
        "",
        "## Recipe",
        "",
        "```toml",
        as_toml(recipe).rstrip(),
        "```",
        "",
        f"Command: `{provenance.get('command', '')}`",
        "",
        f"All of it in {PROVENANCE}.",
    ]
    return "\n".join(lines) + "\n"


def _ending(outcome: Outcome) -> str:
    return {
        "complete": "the whole run", "time": "the time limit came first", "signal": "stopped",
    }[outcome.ending]  # fmt: skip


def _calibration_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What the temperatures of the confidences bring, in percent."""
    if found is None:
        return []
    before, after = ([f"{100 * e:.1f}" for e in found[f"ece_{n}"]] for n in ("before", "after"))
    how = "greedy" if found["greedy"] else "temperature 1"
    return [
        f"| calibration error of the confidences, depth by depth | before: {', '.join(before)} %; "
        f"after: {', '.join(after)} % ({how}, {found['num_blocks']} blocks) |"
    ]


def _stored(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.bfloat16) if tensor.is_floating_point() else tensor.cpu()


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
