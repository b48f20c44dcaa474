"""The option groups. Defaults come from the dataclasses that the engine takes; none is typed twice.

A new control is one field here and one in the dataclass that it fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from forespeak.bench.prompts import Prompt, read_prompts
from forespeak.errors import OptionError, unknown_choice
from forespeak.types import SpeculationConfig

DEFAULT_TARGET = "smollm2-135m"
DTYPES = ("auto", "float32", "bfloat16", "int8")
DEVICES = ("auto", "cpu", "cuda")

_TARGET = "Target"
_METHOD = "Method"
_TEXT = "Text"
_PROMPTS = "Prompts"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, in which precision, where."""

    target: Annotated[
        str,
        Option(
            help="Name, folder, GGUF file or Hub id ORG/NAME of the model.", rich_help_panel=_TARGET
        ),
    ] = DEFAULT_TARGET
    dtype: Annotated[
        str,
        Option(
            help=f"One of {', '.join(DTYPES)}; auto is int8 on cpu and bfloat16 on cuda.",
            rich_help_panel=_TARGET,
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option(
            help=f"One of {', '.join(DEVICES)}; cuda:N for one of several.", rich_help_panel=_TARGET
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Option(
            min=1,
            help="CPU threads of a forward.",
            show_default="all cores",
            rich_help_panel=_TARGET,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(unknown_choice("Precision", self.dtype, DTYPES))
        if self.device.partition(":")[0] not in DEVICES:
            raise OptionError(unknown_choice("Device", self.device, DEVICES))


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ModelOptions):
    """The same, and how long its texts may get."""

    context_length: Annotated[
        int | None,
        Option(
            min=2,
            help="Tokens that prompt and answer may have together.",
            show_default="the model's limit",
            rich_help_panel=_TARGET,
        ),
    ] = None


_OWN_DEFAULT = "per method"


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """How much a method drafts; left out, the method's own default holds."""

    drafter: Annotated[
        str | None,
        Option(
            help="The drafter: folder or Hub id of a checkpoint; for draft_model any model, or "
            "truncate:N for the target's first N layers. Left out: the one that is shipped for the "
            "target, if any.",
            show_default=_OWN_DEFAULT,
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.drafter
    builder: Annotated[
        str | None,
        Option(
            help="chain, static_tree, dynamic_tree or ddtree, where the method takes several.",
            show_default=_OWN_DEFAULT,
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.builder
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Draft tokens of a chain, bonus not counted.",
            show_default=_OWN_DEFAULT,
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.num_speculative_tokens
    node_budget: Annotated[
        int | None,
        Option(
            min=1,
            help="Draft nodes of a tree, root not counted.",
            show_default=_OWN_DEFAULT,
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.node_budget
    tree_depth: Annotated[
        int | None,
        Option(
            min=1,
            help="Longest path of a tree, root not counted.",
            show_default=_OWN_DEFAULT,
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.tree_depth
    tree_top_k: Annotated[
        int | None,
        Option(
            min=1,
            help="Children considered below a node.",
            show_default=_OWN_DEFAULT,
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.tree_top_k
    tree_shape: Annotated[
        str | None,
        Option(
            help="Static tree: eagle, or a JSON file of paths such as [[0], [1], [0, 0]].",
            show_default="fitted to the node budget",
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.tree_shape
    confidence_threshold: Annotated[
        float | None,
        Option(
            min=0.0,
            help="From 0 to below 1: end a chain before a draft token whose estimated chance of "
            "acceptance is less (drafters with a confidence head).",
            show_default="0, verify all",
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.confidence_threshold
    recursion_state: Annotated[
        str | None,
        Option(
            help="What a chained module hands on: normed or raw, the state after or before its "
            "last norm.",
            show_default="as the family was trained",
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.recursion_state
    draft_dtype: Annotated[
        str | None,
        Option(
            help="In which a drafter's products run: float32, bfloat16 or int8 (on a CPU).",
            show_default="as the target's",
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.draft_dtype
    lookup_min: Annotated[
        int | None,
        Option(
            min=1,
            help="Shortest n-gram that prompt lookup matches.",
            show_default=_OWN_DEFAULT,
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.lookup_min
    lookup_max: Annotated[
        int | None,
        Option(
            min=1,
            help="Longest n-gram that prompt lookup matches.",
            show_default=_OWN_DEFAULT,
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.lookup_max
    draft_sampling: Annotated[
        str | None,
        Option(
            help="greedy takes the drafter's best tokens, probabilistic draws them.",
            show_default="greedy",
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.draft_sampling
    rule: Annotated[
        str | None,
        Option(
            help="Rule that verifies at temperatures above 0: match, point_siblings (for the best "
            "draft tokens), rejection, block, siblings (for drawn ones), or typical, which changes "
            "the law.",
            show_default="the best lossless one",
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.rule

    def given(self) -> dict[str, str | int | float]:
        """The settings that were given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def config(self, method: str) -> SpeculationConfig:
        """These settings for one method."""
        return SpeculationConfig(method=method, **vars(self))


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The one method of ``generate`` and ``chat``."""

    method: Annotated[
        str,
        Option(
            help="A name of `forespeak methods`, or several joined with + (a cascade), each with a "
            "size or a builder if you like: eagle3:5, medusa:static_tree:32, ngram+mtp:1.",
            rich_help_panel=_METHOD,
        ),
    ] = SpeculationConfig.method


@dataclass(frozen=True, kw_only=True)
class RawOptions:
    """Whether prompts go through the chat template."""

    raw: Annotated[
        bool,
        Option(
            "--raw",
            help="Continue the prompt as it stands, without the model's chat template.",
            rich_help_panel=_TEXT,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Which prompts of a file."""

    prompts: Annotated[
        Path | None,
        Option(
            help='Prompt file: one JSON object a line, {"id", "task", "turns": [...]}.',
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    limit: Annotated[
        int | None,
        Option(min=1, help="So many prompts at most.", rich_help_panel=_PROMPTS),
    ] = None
    stride: Annotated[
        int,
        Option(min=1, help="Take every Nth prompt, from the first on.", rich_help_panel=_PROMPTS),
    ] = 1
    all_turns: Annotated[
        bool,
        Option(
            "--all-turns",
            help="Answer all user turns as a dialogue, each a prompt of its own; "
            "without it the first turn only.",
            rich_help_panel=_PROMPTS,
        ),
    ] = False

    def read(self) -> list[Prompt]:
        """The chosen prompts."""
        if self.prompts is None:
            raise OptionError("No prompts were given; name a prompt file with --prompts FILE.")
        return read_prompts(self.prompts, limit=self.limit, stride=self.stride)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """For whom the output is."""

    json: Annotated[
        bool,
        Option("--json", help="Make the last line of stdout one JSON object."),
    ] = False
