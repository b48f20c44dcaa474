"""``forespeak compare``: methods side by side over a prompt file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from forespeak.bench import report
from forespeak.bench.answers import AnswerLog
from forespeak.bench.compare import Case, Row, Runner, Watcher, num_cases, quick_speed
from forespeak.bench.compare import compare as run_comparison
from forespeak.bench.prompts import Prompt
from forespeak.cli import choice, consoles
from forespeak.cli.controls import ControlOptions, SamplingOptions, sampling_params
from forespeak.cli.engine import EngineRunner, check, open_llm, open_target, peak_memory_meter
from forespeak.cli.options import (
    OutputOptions,
    PromptOptions,
    RawOptions,
    SettingOptions,
    TargetOptions,
)
from forespeak.drafters.naming import names_of
from forespeak.errors import ForespeakError, OptionError
from forespeak.types import Completion, SamplingParams, SpeculationConfig

if TYPE_CHECKING:
    from forespeak.engine.llm import Target

_TRIED_PROMPTS, _TRIED_TOKENS = 6, 48  # of each candidate for the cascade


def compare(
    *,
    methods: Annotated[
        str,
        Option(
            help="Names joined with commas, each with a size or a builder if you like (eagle3:5, "
            "medusa:static_tree:16, ngram+mtp:1). all is every method that can run with what is at "
            "hand, and the fastest cascade of ngram and one of them. Plain decoding is always in "
            "it.",
        ),
    ] = choice.ALL,
    drafters: Annotated[
        Path | None,
        Option(
            help="Folder of drafters, each in a subfolder of its method's name; methods that find "
            "one there take it. Without it: the shipped ones.",
        ),
    ] = None,
    prompts: PromptOptions,
    target: TargetOptions,
    settings: SettingOptions,
    sampling: SamplingOptions,
    controls: ControlOptions,
    raw: RawOptions,
    record_: Annotated[
        Path | None,
        Option(
            "--record",
            help="JSON file to write with everything: quartiles, acceptance lengths by task, and "
            "what each answer took.",
        ),
    ] = None,
    output: OutputOptions,
) -> None:
    """Run methods side by side over a prompt file, plain decoding always among them."""
    if record_ is not None:
        check_record(record_)
    if raw.raw and prompts.all_turns:
        raise OptionError(
            "--raw and --all-turns exclude each other: a dialogue needs the chat template; "
            "leave one out."
        )
    params = sampling_params(sampling, controls)
    everything, named = choice.split_all(methods)
    names = choice.available() if everything else []
    further = [name for name in named if name not in names]
    configs = choice.configure([*names, *further], settings)
    if everything:
        configs = [only_for_any_model(config) for config in configs]
    configs = choice.find_drafters(configs, drafters, target.target)
    for config in configs:
        check(config, drafter=config.method in named)
    lenient, strict = configs[: len(names)], configs[len(names) :]
    chosen = prompts.read()
    model = open_target(target)
    runners = open_all(model, lenient, raw=raw.raw)
    if everything:
        found = cascade(model, runners, settings, chosen, params, raw=raw.raw)
        runners += [runner for runner in found if runner.method not in named]
    runners += [EngineRunner(open_llm(model, config), raw=raw.raw) for config in strict]
    made = circumstances(runners, model, prompts, params) if record_ is not None else {}
    total = num_cases(chosen, prompts.all_turns) * len(runners)
    with consoles.progress("Comparing", total) as bar:
        log = AnswerLog(chosen, BarWatcher(bar))
        rows = run_comparison(
            runners,
            chosen,
            params,
            all_turns=prompts.all_turns,
            peak_memory_mb=peak_memory_meter(model.device),
            watcher=log,
        )
    if record_ is not None:
        whole = {**record(rows, model), **log.record(rows)}
        write_record(record_, whole | made)
    show(rows, model, output)


def check_record(path: Path) -> None:
    """Refuse, before anything is measured, a file that cannot be written.

    Raises:
        OptionError: its folder is not there or cannot be written, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise OptionError(f"{path} lies in a folder that is not there; name another file.")
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name a file.")
    if path.exists() and not path.is_file():
        raise OptionError(f"{path} is no file but a device or a pipe; name a file.")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(f"{path} lies in a folder that cannot be written; name another file.")


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record, whole; an old one stays until then.

    Raises:
        OptionError: the disk is full, or refuses.
    """
    from forespeak.train.atomic import write_json_whole

    try:
        write_json_whole(path.resolve(), record)  # a link stays a link
    except OSError as error:
        raise OptionError(f"{path} cannot be written ({error.strerror}).") from None


def circumstances(
    runners: Sequence[EngineRunner], model: Target, prompts: PromptOptions, params: SamplingParams
) -> dict[str, Any]:
    """What must be known of a comparison to make it again."""
    from forespeak.train.provenance import digest_files, provenance

    settings: dict[str, dict[str, Any]] = {}
    for runner in runners:
        own = {name: value for name, value in vars(runner.speculation).items() if value is not None}
        files = weight_files(own.pop("drafter", None))
        if runner.drafter is not None:
            own["drafter"] = runner.drafter
        if files:
            own["drafter_sha256"] = digest_files(files)
        if "tree_shape" in own:
            own["tree_shape"] = Path(own["tree_shape"]).name
        settings[runner.method] = own
    file = prompts.prompts if prompts.prompts and prompts.prompts.is_file() else None
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "prompts": {
            "file": prompts.prompts.name if prompts.prompts else None,
            "sha256": digest_files([file]) if file else None,
            "stride": prompts.stride, "limit": prompts.limit, "all_turns": prompts.all_turns,
        },
        "settings": settings,
        "measured": provenance(model.model.device, threads=model.threads),
    }  # fmt: skip


def weight_files(drafter: str | None) -> list[Path]:
    """Of a drafter on this machine, in order; none of what lies elsewhere."""
    if drafter is None:
        return []
    path = Path(drafter)
    kinds = ("*.safetensors", "*.bin", "*.pt")
    return [path] if path.is_file() else sorted(file for kind in kinds for file in path.glob(kind))


def only_for_any_model(config: SpeculationConfig) -> SpeculationConfig:
    """With all methods, --drafter means the model of those that take any."""
    takes_any = choice.DRAFT_MODEL in names_of(config.method)
    return config if takes_any else replace(config, drafter=None)


def open_all(
    model: Target, configs: Sequence[SpeculationConfig], *, raw: bool
) -> list[EngineRunner]:
    """The target under every method that can run with what is at hand.

    A method that takes any smaller model and was given none takes the target's first layers; where
    the target cannot be cut, it is left out aloud. Methods that need a checkpoint and have none are
    left out in one sentence.
    """
    runners, without = [], []
    for config in configs:
        if choice.lacks_checkpoint(config) and not choice.lacks_drafter(config):
            without.append(config.method)
            continue
        if not choice.lacks_drafter(config):
            runners.append(EngineRunner(open_llm(model, config), raw=raw))
            continue
        try:
            config = stand_in(model, config)
            runners.append(EngineRunner(open_llm(model, config), raw=raw))
        except ForespeakError as error:
            consoles.say(f"{config.method} is left out: {error}")
    if without:
        consoles.say(
            f"Left out, because they need a drafter: {', '.join(without)}. Name a folder of "
            "drafters with --drafters.",
            style="dim",
        )
    return runners


def stand_in(model: Target, config: SpeculationConfig) -> SpeculationConfig:
    """An untrained cut of the target: shows that a draft model works, not how fast it can be.

    Nine tenths of the layers, one token at a time: less of an untrained model is hardly ever right,
    and more than one token of so large a one costs more than it brings (docs/log.md).
    """
    layers = max(1, model.model.config.num_layers * 9 // 10)
    length = config.num_speculative_tokens
    if length is None and config.builder in (None, "chain"):
        length = 1
    return replace(config, drafter=f"truncate:{layers}", num_speculative_tokens=length)


def cascade(
    model: Target,
    runners: Sequence[EngineRunner],
    settings: SettingOptions,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    raw: bool,
) -> list[EngineRunner]:
    """Prompt lookup before a method, the fastest such pair on a few short answers, if there is one.

    Each method is tried as it is and, where it makes chains, with chains of one token: behind
    look-up those often pay best, since few rows cost least. An untrained stand-in drafts one only.
    """
    drafting = [runner for runner in runners if runner.method not in (choice.PLAIN, choice.LOOKUP)]
    if not drafting:
        return []
    asked = [
        replace(
            choice.fitting_config(f"{choice.LOOKUP}+{runner.method}{size}", settings),
            drafter=runner.speculation.drafter,
        )
        for runner in drafting
        for size in _sizes(runner, settings)
    ]
    consoles.say(f"Trying {len(asked)} cascades on a few prompts.", style="dim")
    some = prompts[:: max(1, len(prompts) // _TRIED_PROMPTS)][:_TRIED_PROMPTS]
    best: EngineRunner | None = None
    fastest = -1.0
    with consoles.progress("Choosing a cascade", len(asked)) as bar:
        for config in asked:  # one after the other, so that one drafter more lies in memory
            tried = EngineRunner(open_llm(model, config), raw=raw)
            speed = quick_speed(tried, some, params, _TRIED_TOKENS)
            if speed > fastest:
                best, fastest = tried, speed
            bar.advance(config.method)
    return [best] if best is not None else []


def _sizes(runner: EngineRunner, settings: SettingOptions) -> tuple[str, ...]:
    """What may stand behind a method's name when it is tried in a cascade."""
    if runner.builder != "chain" or settings.num_speculative_tokens is not None:
        return ("",)
    stand_in = settings.drafter is None and runner.method == choice.DRAFT_MODEL
    if stand_in or runner.speculation.num_speculative_tokens == 1:
        return (":1",)
    return ("", ":1")


def show(rows: list[Row], model: Target, output: OutputOptions) -> None:
    """The rows as a table, or as the record that other tools read."""
    if output.json:
        consoles.write_json(record(rows, model))
        return
    title = f"{model.name}, {model.dtype_name} on {model.device}, {model.threads} threads"
    if (peak := rows[-1].peak_memory_mb) is not None:
        title += f", {peak:.0f} MB at most"
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
