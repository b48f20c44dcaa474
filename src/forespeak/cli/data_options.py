"""Options of ``forespeak data generate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from forespeak.cli.options import TargetOptions
from forespeak.errors import OptionError
from forespeak.types import Batching

if TYPE_CHECKING:
    from forespeak.train.endpoint import EndpointSettings
    from forespeak.train.talks import Limits

_PROMPTS = "Prompts"
_ANSWERS = "Answers"
_ENDPOINT = "Endpoint"


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Where prompts come from and which stay out."""

    prompts: Annotated[
        list[Path] | None,
        Option(
            help='Prompt file: one JSON object a line, {"id", "turns": [...]}; several times.',
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    dataset: Annotated[
        str | None,
        Option(
            help="Data set of the Hub, ORG/NAME; needs the package datasets.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    dataset_split: Annotated[
        str, Option(help="Split of the data set.", rich_help_panel=_PROMPTS)
    ] = "train"
    self_written: Annotated[
        int | None,
        Option(
            min=1,
            metavar="N",
            help="Let the target write N prompts, from the opening of a user turn.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    min_written_tokens: Annotated[
        int,
        Option(min=1, help="Shorter self-written prompts are left out.", rich_help_panel=_PROMPTS),
    ] = 4
    max_written_tokens: Annotated[
        int, Option(min=1, help="Longer ones, too.", rich_help_panel=_PROMPTS)
    ] = 256
    exclude: Annotated[
        list[Path] | None,
        Option(
            help="Prompt file of an evaluation: its prompts, and those that share 13 words in a "
            "row with one, stay out; several times.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    limit: Annotated[
        int | None, Option(min=1, help="So many prompts at most.", rich_help_panel=_PROMPTS)
    ] = None

    def check(self) -> None:
        """Refuse what cannot go together.

        Raises:
            OptionError: no source, several, or options without effect.
        """
        given = {
            "--prompts": self.prompts, "--dataset": self.dataset,
            "--self-written": self.self_written,
        }  # fmt: skip
        names = [name for name, value in given.items() if value]
        if len(names) != 1:
            raise OptionError(
                f"{' and '.join(names) or 'No prompts'} were given; allowed: one of --prompts "
                "FILE, --dataset ORG/NAME, --self-written N."
            )
        default = SourceOptions
        if self.dataset is None and self.dataset_split != default.dataset_split:
            raise OptionError("--dataset-split has no effect without --dataset; leave it out.")
        bounds = (self.min_written_tokens, self.max_written_tokens)
        if self.self_written is None and bounds != (
            default.min_written_tokens, default.max_written_tokens,
        ):  # fmt: skip
            raise OptionError(
                "--min-written-tokens and --max-written-tokens have no effect without "
                "--self-written; leave them out."
            )
        if bounds[0] > bounds[1]:
            raise OptionError(
                f"--min-written-tokens is {bounds[0]} and --max-written-tokens {bounds[1]}; "
                "allowed: the first up to the second."
            )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How prompts are answered."""

    temperature: Annotated[
        float, Option(min=0.0, help="Of the sampled answers.", rich_help_panel=_ANSWERS)
    ] = 1.0
    greedy_share: Annotated[
        float,
        Option(
            min=0.0,
            max=1.0,
            help="Share of the dialogues that is answered greedily, at temperature 0.",
            rich_help_panel=_ANSWERS,
        ),
    ] = 0.5
    seed: Annotated[
        int,
        Option(
            min=0,
            help="Seed of all draws; each dialogue's follows from it and the prompt's id.",
            rich_help_panel=_ANSWERS,
        ),
    ] = 0
    max_new_tokens: Annotated[
        int, Option(min=2, help="Tokens of an answer at most.", rich_help_panel=_ANSWERS)
    ] = 512
    max_prompt_tokens: Annotated[
        int,
        Option(
            min=1,
            help="Prompts with more tokens, template and earlier turns counted, are left out.",
            rich_help_panel=_ANSWERS,
        ),
    ] = 1024
    max_tokens_total: Annotated[
        int | None,
        Option(
            min=1,
            help="Stop when the answers have so many tokens.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None
    rows: Annotated[
        int | None,
        Option(
            min=1,
            help="Texts written at a time.",
            show_default="48, lockstep 512",
            rich_help_panel=_ANSWERS,
        ),
    ] = None
    batching: Annotated[
        Batching,
        Option(
            help="rows: the engine's continuous batching. lockstep: a step for all texts, decided "
            "on the device; many times as fast on a GPU. auto: lockstep on cuda.",
            rich_help_panel=_ANSWERS,
        ),
    ] = "auto"
    time_limit: Annotated[
        float | None,
        Option(
            metavar="MINUTES",
            help="Stop after so long and keep what is answered; the same command goes on.",
            show_default="none",
            rich_help_panel=_ANSWERS,
        ),
    ] = None

    def deadline(self, begun: float, *, share: float = 1.0) -> float | None:
        """When ``share`` of the time limit is over, on the clock of ``begun``.

        Raises:
            OptionError: a time limit that is none.
        """
        if self.time_limit is None:
            return None
        if not self.time_limit > 0:
            raise OptionError(f"The time limit is {self.time_limit:g} minutes; allowed: above 0.")
        return begun + 60 * share * self.time_limit

    def limits(self, context: int) -> Limits:
        """How long things get for a target with such a context."""
        from forespeak.train.talks import Limits

        return Limits(self.max_new_tokens, self.max_prompt_tokens, context)


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """A server that answers in our engine's place."""

    endpoint: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="OpenAI-compatible server of the same target, such as http://localhost:8000/v1; "
            "--target then gives tokenizer and template alone.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(help="The target's name at the endpoint.", rich_help_panel=_ENDPOINT),
    ] = None
    in_flight: Annotated[
        int | None,
        Option(min=1, help="Requests at a time.", show_default="64", rich_help_panel=_ENDPOINT),
    ] = None
    api_key_variable: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Environment variable that holds the endpoint's key.",
            show_default="no key is sent",
            rich_help_panel=_ENDPOINT,
        ),
    ] = None

    def check(self, source: SourceOptions, answers: AnswerOptions, target: TargetOptions) -> None:
        """Refuse what has no effect.

        Raises:
            OptionError: options of the endpoint without one, or of our engine beside it.
        """
        if self.endpoint is None:
            given = ("model", "in_flight", "api_key_variable")
            idle = [name for name in given if getattr(self, name) is not None]
            if idle:
                raise OptionError(
                    f"--{idle[0].replace('_', '-')} has no effect without --endpoint URL; leave it "
                    "out or name one."
                )
            return
        if self.model is None:
            raise OptionError(
                "--endpoint needs --model NAME, the target's name there (GET /v1/models lists it)."
            )
        if source.self_written is not None:
            raise OptionError(
                "--self-written and --endpoint exclude each other: the opening of a user turn can "
                "be continued by our own engine alone. Give prompts, or leave --endpoint out."
            )
        idle = [name for name in ("dtype", "device", "threads")
                if getattr(target, name) != getattr(TargetOptions, name)]  # fmt: skip
        idle += ["rows"] if answers.rows is not None else []
        idle += ["batching"] if answers.batching != AnswerOptions.batching else []
        if idle:
            raise OptionError(
                f"--{idle[0]} has no effect beside --endpoint, which runs the target; leave it out."
            )

    def settings(self) -> EndpointSettings:
        """Where and how to ask."""
        from forespeak.train.endpoint import EndpointSettings

        assert self.endpoint is not None and self.model is not None
        return EndpointSettings(
            self.endpoint, self.model, self.in_flight or 64,
            api_key_variable=self.api_key_variable,
        )  # fmt: skip
