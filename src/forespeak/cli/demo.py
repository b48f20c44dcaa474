"""``forespeak demo``: real prompts, plain decoding beside every method that works."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

from typer import Option

from forespeak.bench.compare import Row, compare
from forespeak.bench.prompts import Prompt, read_prompts
from forespeak.cli import choice, consoles
from forespeak.cli.compare import open_all, show
from forespeak.cli.engine import open_target, peak_memory_meter
from forespeak.cli.options import OutputOptions, SettingOptions, TargetOptions
from forespeak.cli.race import Race, open_race
from forespeak.types import SamplingParams


def demo(
    *,
    target: TargetOptions,
    drafters: Annotated[
        Path | None,
        Option(
            help="Folder of drafters, each in a subfolder of its method's name. Without it: the "
            "shipped ones."
        ),
    ] = None,
    max_new_tokens: Annotated[int, Option(help="Tokens of an answer at most, 1 or more.")] = 96,
    output: OutputOptions,
) -> None:
    """Race plain decoding against every method on four prompts; the texts are the same."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    configs = choice.configure(choice.available(), SettingOptions())
    configs = choice.find_drafters(configs, drafters, target.target)
    chosen = prompts()
    model = open_target(target)
    runners = open_all(model, configs, raw=False)
    consoles.say(
        f"{model.description}. Each of {len(chosen)} prompts goes through {len(runners)} methods, "
        "one after the other."
    )
    with Race() if output.json else open_race(runners) as race:
        rows = compare(
            runners,
            chosen,
            params,
            peak_memory_mb=peak_memory_meter(model.device),
            watcher=race,
        )
    show(rows, model, output)
    if (why := explanation(rows, model.device)) is not None:
        consoles.say(why)
    consoles.say(verdict(rows), style="bold")


def verdict(rows: Sequence[Row]) -> str:
    """The demo's last sentence."""
    num_others = sum(len(row.first_differences) for row in rows)
    if num_others == 0:
        return "Every text is plain decoding's, token for token."
    return (
        f"{num_others} texts differ from plain decoding's; in float32 and bfloat16 rounding does "
        "that where two words are almost equally likely, in int8 on cpu nothing should."
    )


def explanation(rows: Sequence[Row], device: str) -> str | None:
    """Why methods that need fewer rounds are slower here, where some are."""
    slower = [
        row for row in rows if (row.speedup or 1.0) < 1.0 and (row.acceptance_length or 0) > 1
    ]
    if device != "cpu" or not slower:
        return None
    who = "One method needs" if len(slower) == 1 else f"{len(slower)} methods need"
    said = (
        f"{who} fewer rounds than plain decoding and more time all the same: "
        "to a CPU each further token of a forward costs, and so does the drafter. On a GPU both "
        "are nearly free, and there the acceptance length is what counts."
    )
    trained = [row for row in slower if row.drafter and not row.drafter.startswith("truncate:")]
    chains = [row for row in trained if row.builder == "chain"]
    if chains:
        cheapest = min(chains, key=lambda row: row.draft_ms or 0.0)
        said += f" Here short drafts pay, such as --method ngram+{cheapest.method}:1."
    return said


def prompts() -> list[Prompt]:
    """The four prompts that come with the package."""
    with as_file(files("forespeak.cli") / "demo_prompts.jsonl") as path:
        return read_prompts(path)
