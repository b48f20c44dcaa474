"""What a user asks of training, and what is refused before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forespeak.errors import OptionError
from forespeak.train.card import beginning
from forespeak.train.checkpoints import list_checkpoints
from forespeak.train.devices import alone_and_sharded
from forespeak.train.loop import StepReport
from forespeak.train.objective import settings_class, trainable
from forespeak.train.recipe import Recipe
from forespeak.train.typed_tables import build


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for.

    Attributes:
        recipe: what to train, and how.
        target, dtype, device, threads: the model, in which precision and where it runs.
        data: folders of dialogues, in order.
        out: folder of the run and the drafter.
        features: folder of the cache; None puts it into ``out``.
        resume: go on with the run in ``out``; without one, begin it.
        start_from: folder of a drafter whose sizes and weights training goes on from; the recipe's
            ``drafter`` section then has no say.
        draft_vocab_size: words that the drafter of ``start_from`` is to have, more than it has.
        time_limit_s: seconds from the start of the command; None takes as long as it takes.
    """

    recipe: Recipe
    target: str
    data: Sequence[Path]
    out: Path
    features: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    resume: bool = False
    start_from: Path | None = None
    draft_vocab_size: int | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True)
class Watchers:
    """Who is told what.

    Attributes:
        note: a sentence now and then.
        on_texts: texts whose features are cached, of all.
        on_step: every step.
    """

    note: Callable[[str], None] = lambda line: None
    on_texts: Callable[[int, int], None] = lambda done, total: None
    on_step: Callable[[StepReport], None] = lambda report: None


def check_request(request: Request) -> None:
    """Refuse, before anything is loaded, what cannot be.

    Raises:
        OptionError: the recipe's method or settings, the time limit or the folder.
    """
    objective_settings(request.recipe)
    recipe = request.recipe
    if request.time_limit_s is not None and not request.time_limit_s > 0:
        raise OptionError(
            f"The time limit is {request.time_limit_s / 60:g} minutes; allowed: above 0."
        )
    if recipe.schedule.follows == "time" and request.time_limit_s is None:
        raise OptionError(
            'schedule.follows is "time" and no time limit was given; add --time-limit MINUTES, or '
            'take schedule.follows = "steps".'
        )
    if recipe.compute.sharded and recipe.optimizer.name == "muon":
        raise OptionError(
            'compute.sharded and optimizer.name = "muon" exclude each other: Muon needs every '
            "matrix whole. Leave one out."
        )
    if recipe.compute.sharded and os.environ.get("WORLD_SIZE", "1") == "1":
        raise alone_and_sharded()
    out = request.out
    if request.draft_vocab_size is not None and request.start_from is None:
        raise OptionError(
            "--draft-vocab-size has no effect without --start-from; a fresh drafter takes "
            "--set drafter.draft_vocab_size=N."
        )
    if request.features is not None and request.features.resolve() == out.resolve():
        raise OptionError(
            f"--features and --out are both {out}; features and a drafter lie in folders of their "
            "own. Name another one."
        )
    if request.start_from is not None and request.start_from.resolve() == out.resolve():
        raise OptionError(
            f"--start-from and --out are both {out}, which would be overwritten by its own "
            "successor; name a new folder with --out."
        )
    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file; name a folder.")
    if request.start_from is not None:
        beginning(request.start_from)  # damaged records are said now and not after the training
    if os.environ.get("RANK", "0") != "0":
        return  # the first of several processes looks, before it writes
    started = bool(list_checkpoints(out))
    if request.resume and not started and (out / "config.json").exists():
        raise OptionError(
            f"{out} holds a model and no checkpoint of a run that could go on, and would be "
            "written over; name a new folder with --out. To train a drafter further: --start-from."
        )
    if not request.resume and out.is_dir() and any(out.iterdir()):
        what = "a run" if started else "other files"
        raise OptionError(
            f"{out} holds {what} already; go on with it by --resume, or name a new folder."
        )


def objective_settings(recipe: Recipe) -> Any:
    """The settings of a recipe's method, typed.

    Raises:
        OptionError: a method that is not trained, or a setting that it does not have.
    """
    trainable(recipe.method)
    return build(settings_class(recipe.method), recipe.objective, "objective")
