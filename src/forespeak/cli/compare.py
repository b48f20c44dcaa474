"""``forespeak compare``: methods side by side over a prompt file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from forespeak.bench import report
from forespeak.bench.compare import Case, Row, Runner, Watcher, decode_speed, num_cases, warm_up
from forespeak.bench.compare import compare as run_comparison
from forespeak.bench.prompts import Prompt
from forespeak.cli import choice, consoles
from forespeak.cli.engine import EngineRunner, open_llm, open_target, peak_memory_meter
from forespeak.cli.options import (
    OutputOptions,
    PromptOptions,
    RawOptions,
    SamplingOptions,
    SettingOptions,
    TargetOptions,
)
from forespeak.errors import OptionError
from forespeak.types import Completion, SamplingParams

if TYPE_CHECKING:
    from forespeak.engine.llm import Target

ALL = "all"


def compare(
    *,
    methods: Annotated[
        str,
        Option(
            help="Names joined with commas, or all: every method that can run with what is at "
            "hand, and the cascade of ngram and the best of them. Plain decoding is always in it.",
        ),
    ] = ALL,
    prompts: PromptOptions,
    target: TargetOptions,
    settings: SettingOptions,
    sampling: SamplingOptions,
    raw: RawOptions,
    output: OutputOptions,
) -> None:
    """Run methods side by side over a prompt file, plain decoding always among them."""
    if raw.raw and prompts.all_turns:
        raise OptionError(
            "--raw and --all-turns exclude each other: a dialogue needs the chat template; "
            "leave one out."
        )
    params = sampling.params()
    names = choice.runnable(settings) if methods == ALL else choice.split_list(methods)
    configs = choice.configure(names, settings)
    chosen = prompts.read()
    model = open_target(target)
    runners = [EngineRunner(open_llm(model, config), raw=raw.raw) for config in configs]
    if methods == ALL:
        runners += cascade(model, runners, settings, chosen[0], params, raw=raw.raw)
    total = num_cases(chosen, prompts.all_turns) * len(runners)
    with consoles.progress("Comparing", total) as bar:
        rows = run_comparison(
            runners,
            chosen,
            params,
            all_turns=prompts.all_turns,
            peak_memory_mb=peak_memory_meter(model.device),
            watcher=BarWatcher(bar),
        )
    show(rows, model, output)


def cascade(
    model: Target,
    runners: list[EngineRunner],
    settings: SettingOptions,
    prompt: Prompt,
    params: SamplingParams,
    *,
    raw: bool,
) -> list[EngineRunner]:
    """Prompt lookup before the method that is the fastest on a short answer; empty if none is."""
    answers = warm_up(runners, prompt, params)  # once to allocate, once to measure
    answers = warm_up(runners, prompt, params)
    speeds = {
        runner.method: decode_speed(answer) or 0.0
        for runner, answer in zip(runners, answers, strict=True)
    }
    best = choice.best_of(list(speeds), speeds.__getitem__)
    if best is None or choice.LOOKUP not in speeds:
        return []
    config = choice.fitting_config(f"{choice.LOOKUP}+{best}", settings)
    return [EngineRunner(open_llm(model, config), raw=raw)]


def show(rows: list[Row], model: Target, output: OutputOptions) -> None:
    """The rows as a table, or as the record that other tools read."""
    if output.json:
        consoles.write_json(record(rows, model))
        return
    title = f"{model.name}, {model.dtype_name} on {model.device}, {model.threads} threads"
    console = consoles.out()
    console.print(report.table(rows, title=title, width=console.width))
    for line in report.notes(rows):
        consoles.say(line, style="dim")


def record(rows: list[Row], model: Target) -> dict[str, Any]:
    """The keys that other tools read."""
    return {
        "target": model.name,
        "dtype": model.dtype_name,
        "device": model.device,
        "threads": model.threads,
        "rows": [report.record(row) for row in rows],
    }


class BarWatcher(Watcher):
    """Moves a bar."""

    def __init__(self, bar: consoles.Bar) -> None:
        self._bar = bar

    def end(self, case: Case, runner: Runner, answer: Completion, plain: Completion) -> None:
        """One answer further."""
        self._bar.advance(f"{runner.method} {case.id}")
