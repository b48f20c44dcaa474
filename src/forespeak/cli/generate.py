"""``forespeak generate``: continue one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from forespeak.bench.compare import decode_speed
from forespeak.bench.prompts import decode, read_text
from forespeak.bench.report import number
from forespeak.cli import consoles
from forespeak.cli.controls import ControlOptions, SamplingOptions, sampling_params
from forespeak.cli.engine import check, open_llm, open_target
from forespeak.cli.options import (
    MethodOptions,
    OutputOptions,
    RawOptions,
    SettingOptions,
    TargetOptions,
)
from forespeak.drafters.shipped import with_shipped
from forespeak.errors import OptionError, PromptError
from forespeak.sampling import SamplingParams
from forespeak.types import Completion


def generate(
    prompt: Annotated[
        str | None, Argument(help="The prompt, or - to read it from standard input.")
    ] = None,
    *,
    file: Annotated[
        Path | None, Option("--file", help="Read the prompt from a UTF-8 text file.")
    ] = None,
    logprobs: Annotated[
        int | None,
        Option(help="Give the log-probabilities of each token and of the N best; with --json."),
    ] = SamplingParams.logprobs,
    logprobs_after_processors: Annotated[
        bool,
        Option(
            "--logprobs-after-processors",
            help="Log-probabilities after the controls, not those of the model.",
        ),
    ] = SamplingParams.logprobs_after_processors,
    target: TargetOptions,
    method: MethodOptions,
    settings: SettingOptions,
    sampling: SamplingOptions,
    controls: ControlOptions,
    raw: RawOptions,
    output: OutputOptions,
) -> None:
    """Continue a prompt; the text streams to standard output."""
    config = with_shipped(settings.config(method.method), target.target)
    check(config)
    if logprobs is not None and not output.json:
        raise OptionError(
            "--logprobs shows in the JSON object only; add --json or leave --logprobs out."
        )
    params = sampling_params(
        sampling,
        controls,
        logprobs=logprobs,
        logprobs_after_processors=logprobs_after_processors,
    )
    text = prompt_text(prompt, file)
    llm = open_llm(open_target(target), config)
    answer = llm.generate(
        text, params, raw=raw.raw, on_text=None if output.json else consoles.write
    )
    if output.json:
        consoles.write_json(record(answer))
    else:
        consoles.write("\n")
        consoles.say(summary(answer), style="dim")


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The prompt, wherever it stands; the newline that ends a file is not part of it."""
    if (prompt is None) == (file is None):
        given = "No prompt was given" if prompt is None else "A prompt and --file were both given"
        raise OptionError(f"{given}; give one of PROMPT, --file FILE, or - for standard input.")
    if file is not None:
        text = read_text(file).removesuffix("\n").removesuffix("\r")
    elif prompt == "-":
        text = decode(sys.stdin.buffer.read(), "Standard input")
        text = text.removesuffix("\n").removesuffix("\r")
    else:
        assert prompt is not None
        text = prompt
    if not text.strip():
        raise PromptError("The prompt is empty; give it at least one word.")
    return text


def record(answer: Completion) -> dict[str, Any]:
    """The keys that other tools read; ``logprobs`` only where they were asked for."""
    stats = answer.stats
    keys: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "num_rounds": stats.num_rounds,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_second": decode_speed(answer),
        "time_to_first_token_s": answer.time_to_first_token_s,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "other_s": stats.other_s,
    }
    if answer.logprobs is not None:
        keys["logprobs"] = [
            {
                "token": token.token,
                "logprob": token.logprob,
                "top": [{"token": best, "logprob": value} for best, value in token.top],
            }
            for token in answer.logprobs
        ]
    return keys


def summary(answer: Completion) -> str:
    """One line about an answer."""
    stats = answer.stats
    ended = "end of text" if answer.finish_reason == "stop" else "length limit"
    if answer.stop_reason is not None:
        ended = f"stop at {answer.stop_reason!r}"
    return (
        f"[{len(answer.token_ids)} tokens, {ended}; {number(decode_speed(answer), 1)} tokens/s, "
        f"first after {answer.time_to_first_token_s:.2f} s; acceptance length "
        f"{number(stats.acceptance_length, 2)} (bonus included), acceptance rate "
        f"{number(stats.acceptance_rate, 2)}]"
    )
