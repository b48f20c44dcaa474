"""The methods, as pure data: what each is, needs and defaults to. Importing this needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forespeak.types import DrafterInfo

Setting = str | int


def fitting_builders(info: DrafterInfo) -> tuple[str, ...]:
    """Builders that make sense for a drafter, its default first, from what it says of itself."""
    if info.point_mass:
        return ("chain",)
    if info.expansion == "forward":
        return ("chain", "dynamic_tree", "static_tree")
    return ("chain", "ddtree", "static_tree")


@dataclass(frozen=True, kw_only=True)
class MethodEntry:
    """One method.

    Attributes:
        name: on the command line.
        summary: one sentence for people.
        paper: where it comes from.
        info: what its drafter says of itself; a checkpoint may narrow it (taps, depth).
        needs: what a user must have, for people.
        defaults: its settings that are not None when left out, named as in SpeculationConfig.
        exact: its text is plain decoding's, token for token.
        available: in this version.
        builders: those it takes, the default first; empty for plain decoding.
    """

    name: str
    summary: str
    paper: str
    info: DrafterInfo
    needs: str
    defaults: Mapping[str, Setting] = field(default_factory=dict)
    exact: bool = True
    available: bool = False
    builders: tuple[str, ...] = ()


_CHECKPOINT = "a checkpoint trained for the target"


def _step(name: str, summary: str, paper: str, **entry: str) -> MethodEntry:
    """A planned method that drafts step by step from a checkpoint of its own."""
    info = DrafterInfo(method=name, expansion="forward")
    needs = entry.get("needs", _CHECKPOINT)
    return MethodEntry(
        name=name, summary=summary, paper=paper, info=info, needs=needs,
        builders=fitting_builders(info),
    )  # fmt: skip


def _at_once(name: str, summary: str, paper: str) -> MethodEntry:
    """A planned method that gives all its depths in one call."""
    info = DrafterInfo(method=name, expansion="none")
    return MethodEntry(
        name=name, summary=summary, paper=paper, info=info, needs=_CHECKPOINT,
        builders=fitting_builders(info),
    )  # fmt: skip


PLAIN = MethodEntry(
    name="autoregressive",
    summary="Plain decoding: one token a forward. What all others are compared with.",
    paper="",
    info=DrafterInfo(method="autoregressive", expansion="none", trained=False),
    needs="nothing",
    available=True,
)
NGRAM = MethodEntry(
    name="ngram",
    summary="Prompt lookup: where the last tokens stood before, what followed them is proposed.",
    paper="github.com/apoorvumang/prompt-lookup-decoding",
    info=DrafterInfo(method="ngram", expansion="none", point_mass=True, trained=False),
    needs="nothing",
    defaults={"num_speculative_tokens": 7, "lookup_min": 1, "lookup_max": 4},
    available=True,
    builders=("chain",),
)
_DRAFT_MODEL = DrafterInfo(method="draft_model", expansion="forward")
DRAFT_MODEL = MethodEntry(
    name="draft_model",
    summary="A smaller model of the same tokenizer drafts token by token.",
    paper="arXiv 2211.17192, 2302.01318",
    info=_DRAFT_MODEL,
    needs="a smaller model, or truncate:N for the target's first N layers",
    defaults={"num_speculative_tokens": 4, "node_budget": 16, "tree_depth": 4, "tree_top_k": 4},
    available=True,
    builders=fitting_builders(_DRAFT_MODEL),
)

_ALL = (
    PLAIN,
    NGRAM,
    DRAFT_MODEL,
    _at_once("medusa", "Extra heads on the last hidden state guess further tokens.",
             "arXiv 2401.10774"),
    _at_once("mtp_parallel", "Extra decoder layers, one for each further token, in parallel.",
             "arXiv 2404.19737"),
    _step("mtp", "Chained prediction modules, as DeepSeek-V3, GLM, MiMo and Qwen3-Next carry.",
          "arXiv 2412.19437", needs="a target that carries modules, or a trained one"),
    _step("eagle", "One decoder layer continues the target's features.", "arXiv 2401.15077"),
    _step("eagle2", "EAGLE's weights under a tree that follows the drafter's confidence.",
          "arXiv 2406.16858"),
    _step("eagle3", "One layer on fused low, middle and high features, trained on its own drafts.",
          "arXiv 2503.01840"),
    _at_once("dflash", "A small diffusion block fills all draft positions at once.",
             "arXiv 2602.06036"),
    _at_once("ddtree", "DFlash's marginals under a best-first tree.", "arXiv 2604.12989"),
    _at_once("dspark", "DFlash with a sequential head and a confidence head.",
             "arXiv 2607.05147"),
)  # fmt: skip
METHODS: Mapping[str, MethodEntry] = {entry.name: entry for entry in _ALL}
