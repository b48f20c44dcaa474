"""The controls over a text: what it may look like and how it is drawn. Defaults: SamplingParams."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from forespeak.bench.prompts import read_text
from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams

_TEXT = "Text"
_CONTROLS = "Controls"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How long a text gets and how it is drawn."""

    max_new_tokens: Annotated[
        int, Option(help="Tokens of an answer at most, 1 or more.", rich_help_panel=_TEXT)
    ] = SamplingParams.max_new_tokens
    min_tokens: Annotated[
        int,
        Option(
            help="Tokens before the text may end; a grammar may end it sooner.",
            rich_help_panel=_TEXT,
        ),
    ] = SamplingParams.min_tokens
    temperature: Annotated[
        float, Option(help="0 takes the best token always.", rich_help_panel=_TEXT)
    ] = SamplingParams.temperature
    seed: Annotated[int, Option(help="Seed of all draws.", rich_help_panel=_TEXT)] = (
        SamplingParams.seed
    )


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """What a text may look like. Options that say so can be given several times."""

    top_k: Annotated[
        int, Option(help="Only the K best tokens; 0 is off.", rich_help_panel=_CONTROLS)
    ] = SamplingParams.top_k
    top_p: Annotated[
        float,
        Option(help="Only the best tokens of this mass; 1 is off.", rich_help_panel=_CONTROLS),
    ] = SamplingParams.top_p
    min_p: Annotated[
        float,
        Option(
            help="Only tokens this many times as likely as the best; 0 is off.",
            rich_help_panel=_CONTROLS,
        ),
    ] = SamplingParams.min_p
    typical_p: Annotated[
        float,
        Option(
            help="Only tokens of average surprise, of this mass; 1 is off.",
            rich_help_panel=_CONTROLS,
        ),
    ] = SamplingParams.typical_p
    repetition_penalty: Annotated[
        float,
        Option(
            help="Divides the logits of tokens seen in prompt or text; 1 is off.",
            rich_help_panel=_CONTROLS,
        ),
    ] = SamplingParams.repetition_penalty
    presence_penalty: Annotated[
        float,
        Option(
            help="Subtracted from tokens that stand in the text; 0 is off.",
            rich_help_panel=_CONTROLS,
        ),
    ] = SamplingParams.presence_penalty
    frequency_penalty: Annotated[
        float,
        Option(
            help="Subtracted for each time a token stands in the text; 0 is off.",
            rich_help_panel=_CONTROLS,
        ),
    ] = SamplingParams.frequency_penalty
    logit_bias: Annotated[
        list[str] | None,
        Option(
            metavar="ID=V",
            help="Add V to the logit of token ID; several times.",
            rich_help_panel=_CONTROLS,
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        Option(help="A text that may not be written; several times.", rich_help_panel=_CONTROLS),
    ] = None
    allowed_token_id: Annotated[
        list[int] | None,
        Option(
            help="A token that may be written, no other than those given; several times.",
            rich_help_panel=_CONTROLS,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        Option(help="A text that ends the answer; several times.", rich_help_panel=_CONTROLS),
    ] = None
    include_stop_str: Annotated[
        bool,
        Option(
            "--include-stop-str",
            help="Leave what ended the answer in the text.",
            rich_help_panel=_CONTROLS,
        ),
    ] = SamplingParams.include_stop_str
    stop_token_id: Annotated[
        list[int] | None,
        Option(help="A token that ends the answer; several times.", rich_help_panel=_CONTROLS),
    ] = None
    ignore_eos: Annotated[
        bool,
        Option(
            "--ignore-eos",
            help="Take the end-of-sequence token like any other.",
            rich_help_panel=_CONTROLS,
        ),
    ] = SamplingParams.ignore_eos
    json_schema: Annotated[
        Path | None,
        Option(metavar="FILE", help="JSON schema that the text obeys.", rich_help_panel=_CONTROLS),
    ] = None
    json_object: Annotated[
        bool,
        Option("--json-object", help="The text is some JSON object.", rich_help_panel=_CONTROLS),
    ] = SamplingParams.json_object
    regex: Annotated[
        str | None,
        Option(help="Regular expression that the text matches.", rich_help_panel=_CONTROLS),
    ] = SamplingParams.regex
    grammar: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Grammar, in Lark notation, that the text is derived from.",
            rich_help_panel=_CONTROLS,
        ),
    ] = None


def sampling_params(
    sampling: SamplingOptions,
    controls: ControlOptions,
    *,
    logprobs: int | None = None,
    logprobs_after_processors: bool = False,
) -> SamplingParams:
    """The options as the engine takes them.

    Raises:
        OptionError: a value out of range, or two that exclude each other.
        PromptError: a file that cannot be read.
    """
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        top_k=controls.top_k,
        top_p=controls.top_p,
        min_p=controls.min_p,
        typical_p=controls.typical_p,
        repetition_penalty=controls.repetition_penalty,
        presence_penalty=controls.presence_penalty,
        frequency_penalty=controls.frequency_penalty,
        logit_bias=_biases(controls.logit_bias or []),
        bad_words=tuple(controls.bad_words or ()),
        allowed_token_ids=(
            None if controls.allowed_token_id is None else tuple(controls.allowed_token_id)
        ),
        stop=tuple(controls.stop or ()),
        include_stop_str=controls.include_stop_str,
        stop_token_ids=tuple(controls.stop_token_id or ()),
        ignore_eos=controls.ignore_eos,
        logprobs=logprobs,
        logprobs_after_processors=logprobs_after_processors,
        json_object=controls.json_object,
        json_schema=None if controls.json_schema is None else read_text(controls.json_schema),
        regex=controls.regex,
        grammar=None if controls.grammar is None else read_text(controls.grammar),
    )


def _biases(given: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            token_id, bias = int(token), float(value)
        except ValueError:
            raise OptionError(
                f"--logit-bias {text!r} is not ID=V; allowed: a token id and a number, such as "
                "--logit-bias 42=-3.5."
            ) from None
        if token_id in biases:
            raise OptionError(
                f"--logit-bias names token {token_id} twice; give each token one bias."
            )
        biases[token_id] = bias
    return biases
