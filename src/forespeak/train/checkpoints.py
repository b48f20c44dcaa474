"""Where a run stands, on disk: written whole or not at all, and taken up to the same numbers.

    OUT/checkpoints/step-0001000/state.pt        network and optimizer, float32
                                 progress.json   the step, the recipe, where it all came from

Checkpoints are read as data and never as code.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forespeak.errors import CheckpointError, OptionError, TrainingError
from forespeak.formats.weights import read_json_object
from forespeak.train.atomic import fill_folder, remove_parts, write_json_whole
from forespeak.train.recipe import Recipe, as_table, first_difference, recipe_from
from forespeak.train.typed_tables import build

FORMAT, VERSION = "forespeak training", 1


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps done; the order of the data and all randomness follow from it.
        seconds: of training so far.
        tokens: predicted so far.
        skipped: steps whose loss or gradient was not finite.
        skipped_in_a_row: of these, the latest without a good one between.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Identity:
    """What a run must still be when it is taken up again.

    Attributes:
        target, precision: the model, and how it ran.
        data: digest of the texts.
        start: digest of the drafter that it went on from, empty for a fresh one.
        weights: digest of the target's weights, empty where it is not known; the target's name may
            then not change.
    """

    target: str
    precision: str
    data: str
    start: str = ""
    weights: str = ""


def save_checkpoint(
    out: Path,
    progress: Progress,
    state: Mapping[str, Any],
    recipe: Recipe,
    identity: Identity,
    provenance: Mapping[str, Any],
) -> None:
    """Write a checkpoint, then remove the oldest ones.

    Raises:
        OSError: the disk is full; those before are untouched.
    """
    folder = _folder(out, progress.step)
    if folder.exists():
        return  # of the very same step, so the same numbers

    def fill(part: Path) -> None:
        torch.save(dict(state), part / "state.pt")
        write_json_whole(
            part / "progress.json",
            {
                "format": FORMAT, "version": VERSION, "progress": asdict(progress),
                "recipe": as_table(recipe), "identity": asdict(identity),
                "provenance": dict(provenance),
            },
        )  # fmt: skip

    fill_folder(folder, fill)
    for old in list_checkpoints(out)[: -recipe.save.keep]:
        shutil.rmtree(old, ignore_errors=True)


def list_checkpoints(out: Path) -> list[Path]:
    """Whole checkpoints, the oldest first."""
    return sorted(path for path in (out / "checkpoints").glob("step-*") if path.is_dir())


def load_checkpoint(
    out: Path, recipe: Recipe, identity: Identity, device: torch.device
) -> tuple[Progress, dict[str, Any]] | None:
    """The newest checkpoint of a run, None when there is none yet.

    What a killed process left half-written is cleared away.

    Args:
        out: the run's folder.
        recipe, identity: of the run now; only ``save`` may have changed.
        device: where tensors go.

    Raises:
        TrainingError: the run was another one.
        CheckpointError: the checkpoint is damaged.
    """
    remove_parts(out / "checkpoints")
    progress = check_same_run(out, recipe, identity)
    if progress is None:
        return None
    folder = list_checkpoints(out)[-1]
    with damage_said(folder):
        return progress, torch.load(folder / "state.pt", map_location=device, weights_only=True)


def check_same_run(out: Path, recipe: Recipe, identity: Identity) -> Progress | None:
    """Whether a run can be taken up, without its weights: before anything costly is done.

    Args:
        out, recipe, identity: see :func:`load_checkpoint`.

    Returns:
        How far it is, None when there is no checkpoint yet.

    Raises:
        TrainingError, CheckpointError: see :func:`load_checkpoint`.
    """
    found = list_checkpoints(out)
    if not found:
        return None
    folder = found[-1]
    with damage_said(folder):
        values = read_json_object(folder / "progress.json")
        if values["format"] != FORMAT or values["version"] != VERSION:
            raise ValueError(f"format {values['format']!r}, version {values['version']!r}")
        progress: Progress = build(Progress, values["progress"])  # type: ignore[arg-type]
        before = build(Identity, values["identity"])  # type: ignore[arg-type]
        kept = recipe_from(values["recipe"], str(folder))  # type: ignore[arg-type]
    _check_same(folder, kept, recipe, before, identity)
    return progress


@contextmanager
def damage_said(folder: Path) -> Iterator[None]:
    """What goes wrong with a damaged checkpoint, as one sentence.

    Raises:
        CheckpointError: in place of what reading it or taking its values up raised.
    """
    try:
        yield
    except (
        OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError,
        pickle.UnpicklingError, OptionError, CheckpointError,
    ) as error:  # fmt: skip
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(
            f"{folder} is no whole checkpoint of this version ({reason}); delete that folder to go "
            "on from the one before, or start again in another folder."
        ) from None


def _check_same(
    folder: Path, kept: Recipe, recipe: Recipe, before: Identity, identity: Identity
) -> None:
    if kept.method == recipe.method and before.start != identity.start:
        raise TrainingError(
            f"{folder} is of a run that began from another drafter or with another size of its "
            "vocabulary; give the same --start-from and --draft-vocab-size (or none, if there was "
            "none), or start in another folder."
        )
    # What is saved, how often, and by whom the weights are held may change.
    compute = replace(kept.compute, sharded=recipe.compute.sharded)
    different = first_difference(replace(kept, save=recipe.save, compute=compute), recipe)
    if kept.method != recipe.method:
        different = f"method, {kept.method}"
    if different is not None:
        raise TrainingError(
            f"{folder} is of a run with another {different}; a run goes on with the same recipe "
            "only (but for its save section). Start in another folder, or put the value back."
        )
    known = bool(before.weights and identity.weights)
    if known and before.weights != identity.weights:
        raise TrainingError(
            f"{folder} is of a run for a target with other weights than {identity.target} has now; "
            "put them back, or start in another folder."
        )
    for name, then, now in (
        ("target", before.target, before.target if known else identity.target),
        ("precision of the target", before.precision, identity.precision),
    ):
        if then != now:
            raise TrainingError(
                f"{folder} is of a run with another {name} ({then}; now {now}); a run goes on with "
                "the same one only. Start in another folder."
            )
    # Of a digest, nothing that could be shown would help.
    if before.data != identity.data:
        raise TrainingError(
            f"{folder} is of a run with other dialogues than those of --data; give the same "
            "folders, unchanged and in the same order, or start in another folder."
        )


def _folder(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:07d}"
