"""``forespeak train`` and ``forespeak features``: a drafter for a target, from its own answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from typer import Argument, Exit, Option

from forespeak.cli import consoles
from forespeak.cli.options import ModelOptions, OutputOptions
from forespeak.errors import OptionError

if TYPE_CHECKING:
    from forespeak.train.loop import Outcome, StepReport
    from forespeak.train.recipe import Recipe
    from forespeak.train.request import Request, Watchers
    from forespeak.train.session import Trained

T = TypeVar("T")

_SAY_EVERY_S = 30.0
_NOTHING_MADE, _INTERRUPTED = 1, 130  # exit codes: no drafter came out; stopped, as shells have it
_RUN = "Run"


def train(
    recipe: Annotated[
        str,
        Argument(
            help="A method, a recipe such as smollm2/eagle3, or a TOML file.", metavar="RECIPE"
        ),
    ],
    *,
    data: Annotated[
        list[Path] | None,
        Option(
            help="Folder of dialogues, from `forespeak data generate`; several times.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Folder of the drafter, new or empty.", rich_help_panel=_RUN),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="A value of the recipe, such as optimizer.learning_rate=1e-3 or "
            "drafter.num_heads=3; several times.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        Option(
            metavar="MINUTES",
            help="Stop after so long, loading counted, with a checkpoint and a drafter.",
            show_default="none",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Annotated[
        bool,
        Option("--resume", help="Go on with the run in --out, if one is there.",
               rich_help_panel=_RUN),
    ] = False,
    start_from: Annotated[
        Path | None,
        Option(
            help="Folder of a drafter of this method whose sizes and weights training goes on "
            "from, with fresh optimizer and schedule.",
            show_default="fresh weights",
            rich_help_panel=_RUN,
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        Option(
            min=1,
            help="Words that the drafter of --start-from is to have, more than it has: those that "
            "the data have most.",
            show_default="as it has",
            rich_help_panel=_RUN,
        ),
    ] = None,
    features: Annotated[
        Path | None,
        Option(
            help="Folder that keeps the target's features for several runs; filled as needed.",
            show_default="as the recipe says",
            rich_help_panel=_RUN,
        ),
    ] = None,
    show: Annotated[
        bool,
        Option("--show", help="Print the recipe as resolved, and do nothing else.",
               rich_help_panel=_RUN),
    ] = False,
    target: ModelOptions,
    output: OutputOptions,
) -> None:  # fmt: skip
    """Train a drafter for a target, on the target's own answers.

    A checkpoint is written now and then; a run that was stopped (Ctrl-C, a
    time limit) or killed goes on with --resume to the very same drafter.

    forespeak data generate --prompts train.jsonl --out answers

    forespeak train eagle3 --data answers --out my-eagle3 --show

    forespeak train eagle3 --data answers --out my-eagle3

    forespeak compare --methods eagle3 --drafter my-eagle3 --prompts eval.jsonl
    """
    from forespeak.train.recipe import as_table, as_toml, read_recipe

    resolved = read_recipe(recipe, _changes(set_))
    if show:
        if output.json:
            consoles.write_json(as_table(resolved))
        else:
            consoles.write(as_toml(resolved))
        return
    request = _request(resolved, data, out, target, features, resume, time_limit)
    begun = _start(start_from, set_)
    request = replace(request, start_from=begun, draft_vocab_size=draft_vocab_size)
    with consoles.waiting("Checking the recipe"):
        from forespeak.train.atomic import full_disk_said
        from forespeak.train.loop import stopping_signals
        from forespeak.train.request import check_request
        from forespeak.train.session import run_request

        check_request(request)
    with (
        stopping_signals() as stop,
        _watched(resolved.method) as watchers,
        full_disk_said(request.out),
    ):
        trained = run_request(request, watchers, stop)
    if output.json:
        consoles.write_json(_record(trained, request))
    else:
        consoles.say(_sentence(trained, request))
    if trained.ending == "signal":
        raise Exit(_INTERRUPTED)
    if trained.outcome is None or not trained.outcome.progress.step:
        raise Exit(_NOTHING_MADE)


def features(
    recipes: Annotated[
        list[str],
        Argument(help="Methods, recipes or TOML files that will share the features."),
    ],
    *,
    data: Annotated[list[Path] | None, Option(help="Folder of dialogues; several times.")] = None,
    out: Annotated[Path | None, Option(help="Folder to keep the features in.")] = None,
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="A value of every recipe; several times."),
    ] = None,
    target: ModelOptions,
    output: OutputOptions,
) -> None:
    """Run the target once over the dialogues and keep what several recipes read of it.

    What is there stays: a stopped run goes on, and new dialogues are added.

    forespeak features smollm2/eagle3 smollm2/dflash --data answers --out features

    forespeak train smollm2/eagle3 --data answers --features features --out my-eagle3
    """
    from forespeak.train.recipe import read_recipe

    read = {name: read_recipe(name, _changes(set_)) for name in recipes}
    folder = _given(out, "--out", "the folder to keep the features in")
    request = _request(next(iter(read.values())), data, folder, target, None, True, None)
    from forespeak.train.atomic import full_disk_said
    from forespeak.train.feature_cache import check_cache
    from forespeak.train.loop import stopping_signals
    from forespeak.train.request import objective_settings
    from forespeak.train.session import cache_features

    for recipe in read.values():
        objective_settings(recipe)
    with stopping_signals() as stop, _watched("features") as watchers, full_disk_said(folder):
        complete = cache_features(read, request, folder, watchers, stop)
    stopped = stop.wanted and not complete
    problems = check_cache(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if output.json:
        record = {"path": str(folder), "complete": complete, "bytes": size, "problems": problems}
        consoles.write_json(record)
    for problem in problems:
        consoles.say(f"forespeak: {problem}")
    if not output.json:
        state = "complete" if complete else "not complete; the same command goes on"
        consoles.say(f"{folder}: {size / 1e9:.2f} GB of features, {state}.")
    if stopped:
        raise Exit(_INTERRUPTED)


def _changes(given: Sequence[str] | None) -> dict[str, str]:
    changes = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise OptionError(
                f"--set {text!r} is not KEY=VALUE; such as --set optimizer.learning_rate=1e-3."
            )
        changes[name.strip()] = value.strip()
    return changes


def _start(folder: Path | None, given: Sequence[str] | None) -> Path | None:
    """The drafter to start from, whose sizes are its own."""
    changed = [name for name in _changes(given) if name.startswith("drafter.")]
    if folder is not None and changed:
        raise OptionError(
            f"--set {changed[0]} and --start-from exclude each other: the drafter in {folder} has "
            "its sizes already. Leave one out."
        )
    return folder


def _request(
    recipe: Recipe,
    data: Sequence[Path] | None,
    out: Path | None,
    target: ModelOptions,
    features: Path | None,
    resume: bool,
    time_limit: float | None,
) -> Request:
    from forespeak.train.request import Request

    return Request(
        recipe=recipe,
        data=_given(data or None, "--data", "a folder that `forespeak data generate` wrote"),
        out=_given(out, "--out", "the folder to write the drafter to"),
        features=features, resume=resume,
        time_limit_s=None if time_limit is None else 60 * time_limit, **asdict(target),
    )  # fmt: skip


def _given(value: T | None, option: str, what: str) -> T:
    if value is None:
        raise OptionError(f"{option} was not given; name {what}.")
    return value


@contextmanager
def _watched(what: str) -> Iterator[Watchers]:
    """A bar on a terminal, a line now and then elsewhere."""
    from forespeak.train.request import Watchers

    with consoles.filling(what) as fill:
        said = time.monotonic()

        def tell(done: int, total: int, line: str) -> None:
            nonlocal said
            fill(done, total, line)
            late = time.monotonic() - said > _SAY_EVERY_S or done == total
            if late and not consoles.is_watched():
                said = time.monotonic()
                consoles.say(f"{done}/{total} {line}")

        yield Watchers(
            note=consoles.say,
            on_texts=lambda done, total: tell(done, total, "texts have features"),
            on_step=_on_step(tell),
        )


def _on_step(tell: Callable[[int, int, str], None]) -> Callable[[StepReport], None]:
    def on_step(report: StepReport) -> None:
        line = f"loss {report.loss:.3f}, acceptance length {report.acceptance_length:.2f}"
        tell(report.step, report.num_steps, f"{line}{', skipped' if report.skipped else ''}")

    return on_step


def _record(trained: Trained, request: Request) -> dict[str, object]:
    record: dict[str, object] = {
        "method": request.recipe.method,
        "path": str(request.out),
        "num_parameters": trained.num_parameters,
        "files": [str(path) for path in trained.files],
        "picture": None if trained.picture is None else str(trained.picture),
        "ending": trained.ending,
    }
    if trained.outcome is not None:
        record |= {
            "progress": vars(trained.outcome.progress),
            "num_steps": trained.outcome.num_steps,
            "held_out": trained.outcome.held_out,
        }
    return record


def _sentence(trained: Trained, request: Request) -> str:
    outcome = trained.outcome
    if outcome is None or not outcome.progress.step:
        return f"{request.out}: {_NO_STEP[trained.ending]}"
    whole = request.recipe.schedule.follows == "time"  # whose end the limit is
    how = {
        "complete": "trained",
        "time": "trained for its time" if whole else "the time limit came; go on with --resume",
        "signal": "stopped; go on with --resume",
    }[outcome.ending]
    steps = f"{outcome.progress.step} of {outcome.num_steps}"
    if outcome.ending == "time" and whole:
        steps = f"{outcome.progress.step}"
    return (
        f"{request.out}: {how}. {trained.num_parameters / 1e6:.2f} million parameters after "
        f"{steps} steps and "
        f"{outcome.progress.seconds / 60:.1f} minutes{_measured(outcome)}. Try it: forespeak "
        f'generate "Hello" --method {request.recipe.method} --target {request.target} '
        f"--drafter {request.out}{_left_behind(request)}"
    )


_NO_STEP = {
    "complete": "there was nothing to do, and so there is no drafter.",
    "time": "the time limit ran out before the first step, so there is no drafter yet; go on with "
    "--resume and a longer --time-limit.",
    "signal": "stopped before the first step; go on with --resume.",
}


def _left_behind(request: Request) -> str:
    """Of features that only this run has use for."""
    folder = request.out / "features"
    if request.features is not None or not folder.is_dir():
        return ""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return (
        f"\n{folder} keeps {size / 1e9:.2f} GB of features for --resume; delete it when the "
        "drafter is done."
    )


def _measured(outcome: Outcome) -> str:
    if outcome.held_out is None:
        return ""
    return f"; acceptance length {outcome.held_out['acceptance_length']:.2f} on held-out texts"
