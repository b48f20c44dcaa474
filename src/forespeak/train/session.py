"""A training run from a command's words: target, data, recipe and folder to a drafter on disk."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forespeak.errors import DataError, OptionError
from forespeak.train.atomic import only_writer, remove_parts
from forespeak.train.batches import Collator, Order, TextSet, select_texts
from forespeak.train.beginning import digest_start, fresh_start, start_from
from forespeak.train.card import beginning
from forespeak.train.checkpoints import Identity, check_same_run
from forespeak.train.devices import Devices, open_devices
from forespeak.train.export import DataFigures, export
from forespeak.train.feature_cache import CachedFeatures, CachePlan, plan_cache, write_cache
from forespeak.train.features import FeatureSource, LiveFeatures, Needs
from forespeak.train.loop import Ending, Job, Outcome, Stop, held_out_batches, train
from forespeak.train.objective import Objective, make_objective
from forespeak.train.provenance import digest_samples, digest_target, provenance
from forespeak.train.recipe import Recipe
from forespeak.train.rendered import read_rendered
from forespeak.train.request import Request, Watchers, check_request, objective_settings
from forespeak.train.step_log import plot_log
from forespeak.train.target import TrainingTarget, open_training_target, target_view

_HELD_OUT_BATCHES = 16  # measured at a time, at most


@dataclass(frozen=True)
class Trained:
    """A drafter.

    Attributes:
        outcome: what training gave, None when the run ended before.
        ending: why the run ended.
        files: its weights; empty when the run ended before training began.
        num_parameters: of the network.
        picture: the plot of the log, where it was drawn.
    """

    outcome: Outcome | None
    ending: Ending
    files: list[Path]
    num_parameters: int
    picture: Path | None


@dataclass(frozen=True)
class Session:
    """A run's parts, before it knows where its features come from."""

    target: TrainingTarget
    devices: Devices
    data: TextSet
    figures: DataFigures
    objective: Objective


def open_session(request: Request, watchers: Watchers) -> Session:
    """Load what a request names.

    Raises:
        OptionError, DataError, ModelError: see the parts.
    """
    target, devices = _opened(request)
    data, figures = _data(request, target, watchers)
    objective = _objective(
        request.recipe, target, data, request.start_from, request.draft_vocab_size
    )
    return Session(target, devices, data, figures, objective)


def run_request(
    request: Request, watchers: Watchers | None = None, stop: Stop | None = None
) -> Trained:
    """Train, and write the drafter.

    Raises:
        OptionError, DataError, ModelError, TrainingError: see the parts.
        OSError: the disk is full; what was saved before stays good.
    """
    limit = request.time_limit_s
    deadline = None if limit is None else time.monotonic() + limit
    if request.start_from is not None:  # its sizes are its own
        request = replace(request, recipe=replace(request.recipe, drafter={}))
    check_request(request)
    watchers, stop = watchers or Watchers(), stop or Stop()
    first = os.environ.get("RANK", "0") == "0"  # of several processes one writes
    with only_writer(request.out) if first else nullcontext():
        return _run(request, watchers, stop, deadline)


def _run(request: Request, watchers: Watchers, stop: Stop, deadline: float | None) -> Trained:
    opened = open_session(request, watchers)
    devices = opened.devices
    trained = _train(request, opened, watchers, stop, deadline)
    del opened  # the processes part for good only when no weights refer to their group
    devices.close()
    return trained


def _train(
    request: Request, opened: Session, watchers: Watchers, stop: Stop, deadline: float | None
) -> Trained:
    recipe = request.recipe
    target, devices, objective = opened.target, opened.devices, opened.objective
    data, figures = opened.data, opened.figures
    needs = Needs(objective.taps, objective.needs_hidden)
    count = sum(parameter.numel() for parameter in objective.network.parameters())
    watchers.note(
        f"{recipe.method}: {count / 1e6:.2f} million parameters; {figures.trained} texts with "
        f"{figures.supervised} tokens to predict, {figures.held_out} held out."
    )
    if not data.held_out:
        watchers.note(_nothing_held_out(recipe, objective))
    identity = _identity(request, target, figures)
    check_same_run(request.out, recipe, identity)  # before features are made for nothing
    source = _source(request, target, data, needs, watchers, devices, _stopper(stop, deadline))
    if source is None:
        stopped = devices.add_numbers([float(stop.wanted)])[0]
        return Trained(None, "signal" if stopped else "time", [], count, None)
    job = _job(request, target, data, identity, objective, source, devices)
    outcome = train(job, deadline=deadline, on_step=watchers.on_step, stop=stop)
    if devices.rank or not outcome.progress.step:
        return Trained(outcome, outcome.ending, [], count, None)
    remove_parts(request.out)  # of a process that was killed here
    measured = objective.calibrate(held_out_batches(job))
    if measured.get("calibration"):
        measured["calibration"]["texts"] = "the held-out texts"
    files = export(
        request.out, objective, recipe, target.name, target.model.dtype_name, outcome, figures,
        {**job.provenance, **measured}, target.tokenizer,
    )  # fmt: skip
    return Trained(outcome, outcome.ending, files, count, _picture(request.out, watchers))


def cache_features(
    recipes: Mapping[str, Recipe],
    request: Request,
    folder: Path,
    watchers: Watchers,
    stop: Stop | None = None,
) -> bool:
    """Write the features that some recipes need together.

    Args:
        recipes: by name; all must have the same ``data.max_length``.
        request: target and data.
        folder: of the cache.
        watchers: told of the size before it starts, and of progress.
        stop: asked after every shard.

    Returns:
        Whether all are there.

    Raises:
        OptionError, DataError, ModelError: see the parts.
    """
    lengths = {name: recipe.data.max_length for name, recipe in recipes.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise OptionError(
            f"Recipes that share features cut texts to one length; data.max_length is {shown}. "
            "Give all the same with --set data.max_length=N."
        )
    target, _ = _opened(request)
    data, _ = _data(request, target, watchers)
    wanted = [_objective(recipe, target, data) for recipe in recipes.values()]
    needs = Needs(
        tuple(sorted({tap for objective in wanted for tap in objective.taps})),
        any(objective.needs_hidden for objective in wanted),
    )
    stopper = _stopper(stop or Stop(), None)
    return _fill_cache(folder, target, data, needs, watchers, stopper)


def _opened(request: Request) -> tuple[TrainingTarget, Devices]:
    target = open_training_target(
        request.target, dtype=request.dtype, device=request.device, threads=request.threads
    )
    devices, device = open_devices(target.device, sharded=request.recipe.compute.sharded)
    return replace(target, device=device), devices


def _data(
    request: Request, target: TrainingTarget, watchers: Watchers
) -> tuple[TextSet, DataFigures]:
    if target.tokenizer is None:
        raise DataError(
            f"{target.name} has no tokenizer, which dialogues are rendered with; put the tokenizer "
            "files beside the weights."
        )
    samples, refused = [], Counter[str]()
    for folder in request.data:
        read = read_rendered(folder, target.tokenizer)
        samples += read.samples
        refused += read.refused
    for reason, count in refused.items():
        watchers.note(
            f"Left out, of {len(samples) + refused.total()} dialogues: {count} ({reason})."
        )
    data = select_texts(samples, request.recipe.data, request.recipe.seed)
    supervised = sum(end - begin for n in data.trained for begin, end in data.spans[n])
    figures = DataFigures(
        ", ".join(folder.name for folder in request.data), len(data.trained), len(data.held_out),
        data.too_short, refused.total(), supervised, digest_samples(samples),
    )  # fmt: skip
    return data, figures


def _objective(
    recipe: Recipe,
    target: TrainingTarget,
    data: TextSet,
    folder: Path | None = None,
    draft_vocab_size: int | None = None,
) -> Objective:
    dtype = torch.bfloat16 if recipe.compute.dtype == "bfloat16" else torch.float32
    view = target_view(target, dtype=dtype)
    if folder is None:
        config, start = fresh_start(recipe, target, data)
    else:
        config, start = start_from(folder, recipe, target, data, view, draft_vocab_size)
    return make_objective(recipe.method, config, view, objective_settings(recipe), start)


def _source(
    request: Request,
    target: TrainingTarget,
    data: TextSet,
    needs: Needs,
    watchers: Watchers,
    devices: Devices,
    stopper: Callable[[], bool],
) -> FeatureSource | None:
    """Where features come from; None when the run was stopped while they were written."""
    if not needs.taps and not needs.hidden:
        return LiveFeatures(target.model, data.texts, needs)
    if request.recipe.data.features == "live" and request.features is None:
        return LiveFeatures(target.model, data.texts, needs)
    folder = request.features or request.out / "features"
    whole = True
    if devices.rank == 0:
        whole = _fill_cache(folder, target, data, needs, watchers, stopper)
    if devices.add_numbers([float(not whole)])[0]:
        return None
    return CachedFeatures(folder, target.model, data.texts, needs)


def _fill_cache(
    folder: Path,
    target: TrainingTarget,
    data: TextSet,
    needs: Needs,
    watchers: Watchers,
    stopper: Callable[[], bool],
) -> bool:
    plan: CachePlan = plan_cache(folder, target.model, data.texts, needs)
    if plan.done < plan.total:
        watchers.note(
            f"Features of {plan.total - plan.done} texts go to {folder}: "
            f"{plan.num_bytes / 1e9:.2f} GB, {plan.bytes_per_token} bytes a token."
        )
    if plan.done == plan.total:
        return True
    with only_writer(folder):
        return write_cache(
            folder, target.model, data.texts, needs, target=target.name,
            on_texts=watchers.on_texts, should_stop=stopper,
        )  # fmt: skip


def _stopper(stop: Stop, deadline: float | None) -> Callable[[], bool]:
    return lambda: stop.wanted or (deadline is not None and time.monotonic() > deadline)


def _picture(out: Path, watchers: Watchers) -> Path | None:
    """The plot, which a drafter does without."""
    try:
        return plot_log(out)
    except OSError as error:
        watchers.note(f"The log could not be drawn ({error.strerror}); the drafter is whole.")
        return None


def _nothing_held_out(recipe: Recipe, objective: Objective) -> str:
    lost = "nothing is measured on texts that are not trained on"
    if getattr(objective.config, "confidence_head", False):
        lost += ", and the confidences are not calibrated (`forespeak calibrate` does it later)"
    return (
        f"data.held_out is {recipe.data.held_out:g} and holds out no text, so {lost}. Raise it, "
        "such as by --set data.held_out=0.2, or give more dialogues."
    )


def _identity(request: Request, target: TrainingTarget, figures: DataFigures) -> Identity:
    start = digest_start(request.start_from, request.draft_vocab_size)
    weights = digest_target(request.target)
    return Identity(target.name, target.model.dtype_name, figures.digest, start, weights)


def _job(
    request: Request,
    target: TrainingTarget,
    data: TextSet,
    identity: Identity,
    objective: Objective,
    source: FeatureSource,
    devices: Devices,
) -> Job:
    recipe = request.recipe
    lengths = [len(text) for text in data.texts]
    order = Order(data.trained, lengths, recipe.batch, recipe.seed)
    held_out: list[tuple[int, ...]] = []
    if data.held_out:
        aside = Order(data.held_out, lengths, replace(recipe.batch, micro_batches=1), recipe.seed)
        steps = min(aside.num_steps(1), _HELD_OUT_BATCHES)
        held_out = [aside.step(step)[0] for step in range(steps)]
    origin = {} if request.start_from is None else {"start_from": beginning(request.start_from)}
    return Job(
        recipe=recipe, objective=objective, order=order,
        collator=Collator(data, source, target.device), held_out=held_out, out=request.out,
        identity=identity,
        provenance=provenance(target.device) | origin, device=target.device, devices=devices,
    )  # fmt: skip
