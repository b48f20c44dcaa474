"""The methods, as pure data: what each is, needs and defaults to. Importing this needs no torch.

A package of somebody else's adds a method through the entry-point group ``forespeak.methods``, each
entry leading to a :class:`MethodEntry` (``docs/add-a-drafter.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from forespeak.types import DrafterInfo

Setting = str | int | float

_GROUP = "forespeak.methods"


def fitting_builders(info: DrafterInfo) -> tuple[str, ...]:
    """Builders that make sense for a drafter, its default first, from what it says of itself."""
    if info.point_mass:
        return ("chain",)
    if info.expansion == "forward":  # a best-first search would cost a forward a level as well
        return ("chain", "dynamic_tree", "static_tree")
    if info.expansion == "head":
        return ("chain", "ddtree", "dynamic_tree", "static_tree")
    return ("chain", "ddtree", "static_tree")


BUILDER_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "chain": ("num_speculative_tokens",),
    "static_tree": ("node_budget", "tree_depth", "tree_top_k", "tree_shape"),
    "dynamic_tree": ("node_budget", "tree_depth", "tree_top_k"),
    "ddtree": ("node_budget", "tree_depth"),
}
"""Settings of each builder, named as in SpeculationConfig."""
_CHAIN_ONLY = ("confidence_threshold",)


@dataclass(frozen=True, kw_only=True)
class MethodEntry:
    """One method.

    Attributes:
        name: on the command line.
        summary: one sentence for people.
        paper: where it comes from.
        info: what its drafter says of itself; a checkpoint may narrow it (taps, depth).
        needs: what a user must have, for people.
        opens: ``module:function`` that makes its drafter from (settings, target, rows); see
            ``loader.load_drafter``. Empty for plain decoding.
        starts: ``module:function`` that makes a drafter of random weights for a target, for
            ``forespeak init``; empty where there is nothing to train.
        reads: methods whose checkpoints it reads; its own name where left empty.
        carried: a target's own folder may hold its modules, so that no drafter need be named.
        settings: those it takes besides its builder's, named as in SpeculationConfig.
        defaults: its settings that are not None when left out, named as in SpeculationConfig. What
            is left None takes as much as the drafter has.
        on_cpu: defaults that are others on a CPU, where each further row of a forward costs.
        exact: its text is plain decoding's, token for token.
        available: in this version.
        builders: those it takes, the default first; empty for plain decoding.
    """

    name: str
    summary: str
    paper: str
    info: DrafterInfo
    needs: str
    opens: str = ""
    starts: str = ""
    reads: tuple[str, ...] = ()
    carried: bool = False
    settings: tuple[str, ...] = ()
    defaults: Mapping[str, Setting] = field(default_factory=dict)
    on_cpu: Mapping[str, Setting] = field(default_factory=dict)
    exact: bool = True
    available: bool = True
    builders: tuple[str, ...] = ()


def settings_under(entry: MethodEntry, builder: str) -> tuple[str, ...]:
    """Sizes and switches that a method takes under one of its builders."""
    own = (name for name in entry.settings if name not in _CHAIN_ONLY or builder == "chain")
    return (*BUILDER_SETTINGS[builder], *own)


_CHECKPOINT = "a checkpoint trained for the target"
_DTYPE = ("draft_dtype",)
_TREE = {"node_budget": 16, "tree_top_k": 4}
_PUBLISHED_TREE = {"node_budget": 59, "tree_depth": 6, "tree_top_k": 10}

PLAIN = MethodEntry(
    name="autoregressive",
    summary="Plain decoding: one token a forward. What all others are compared with.",
    paper="",
    info=DrafterInfo(method="autoregressive", expansion="none", trained=False),
    needs="nothing",
)
NGRAM = MethodEntry(
    name="ngram",
    summary="Prompt lookup: where the last tokens stood before, what followed them is proposed.",
    paper="github.com/apoorvumang/prompt-lookup-decoding",
    info=DrafterInfo(method="ngram", expansion="none", point_mass=True, trained=False),
    needs="nothing",
    opens="forespeak.drafters.ngram:open_drafter",
    settings=("lookup_min", "lookup_max"),
    defaults={"num_speculative_tokens": 7, "lookup_min": 1, "lookup_max": 4},
    builders=("chain",),
)
_DRAFT_MODEL = DrafterInfo(method="draft_model", expansion="forward")
DRAFT_MODEL = MethodEntry(
    name="draft_model",
    summary="A smaller model of the same tokenizer drafts token by token.",
    paper="arXiv 2211.17192, 2302.01318",
    info=_DRAFT_MODEL,
    needs="a smaller model, or truncate:N for the target's first N layers",
    opens="forespeak.drafters.draft_model:open_drafter",
    defaults={"num_speculative_tokens": 4, "tree_depth": 4, **_TREE},
    builders=fitting_builders(_DRAFT_MODEL),
)
MEDUSA = MethodEntry(
    name="medusa",
    summary="Extra heads on the last hidden state guess further tokens.",
    paper="arXiv 2401.10774",
    info=DrafterInfo(method="medusa", expansion="none", needs_hidden=True),
    needs=f"{_CHECKPOINT}, or a Medusa-2 model as target",
    opens="forespeak.drafters.medusa:open_drafter",
    starts="forespeak.drafters.medusa:random_drafter",
    carried=True,
    settings=_DTYPE,
    defaults=_TREE,
    builders=("chain", "ddtree", "static_tree"),
)
MTP_PARALLEL = MethodEntry(
    name="mtp_parallel",
    summary="Extra decoder layers, one for each further token, in parallel.",
    paper="arXiv 2404.19737",
    info=DrafterInfo(method="mtp_parallel", expansion="none"),
    needs=_CHECKPOINT,
    opens="forespeak.drafters.mtp_parallel:open_drafter",
    starts="forespeak.drafters.mtp_parallel:random_drafter",
    settings=_DTYPE,
    defaults=_TREE,
    builders=("chain", "ddtree", "static_tree"),
)
MTP = MethodEntry(
    name="mtp",
    summary="Chained prediction modules, as DeepSeek-V3, GLM, MiMo and Qwen3-Next carry.",
    paper="arXiv 2412.19437",
    info=DrafterInfo(method="mtp", expansion="forward", needs_hidden=True),
    needs="a target that carries modules, or a trained one",
    opens="forespeak.drafters.mtp:open_drafter",
    starts="forespeak.drafters.mtp:random_drafter",
    carried=True,
    settings=("recursion_state", *_DTYPE),
    defaults={"num_speculative_tokens": 3, "tree_depth": 3, **_TREE},
    builders=("chain", "dynamic_tree", "static_tree"),
)
EAGLE = MethodEntry(
    name="eagle",
    summary="One decoder layer continues the target's features.",
    paper="arXiv 2401.15077",
    info=DrafterInfo(method="eagle", expansion="forward", needs_hidden=True),
    needs=_CHECKPOINT,
    opens="forespeak.drafters.eagle:open_drafter",
    starts="forespeak.drafters.eagle:random_drafter",
    settings=_DTYPE,
    defaults={"num_speculative_tokens": 4, "tree_depth": 4, **_TREE},
    builders=("chain", "static_tree", "dynamic_tree"),
)
EAGLE2 = MethodEntry(
    name="eagle2",
    summary="EAGLE's weights, 1 or 3, under a tree that follows the drafter's confidence.",
    paper="arXiv 2406.16858",
    info=DrafterInfo(method="eagle2", expansion="forward", needs_hidden=True),
    needs="an EAGLE or EAGLE-3 checkpoint trained for the target",
    opens="forespeak.drafters.eagle:open_either",
    reads=("eagle3", "eagle"),
    settings=_DTYPE,
    defaults=_PUBLISHED_TREE,
    on_cpu={"tree_depth": 4, **_TREE},
    builders=("dynamic_tree",),
)
EAGLE3 = MethodEntry(
    name="eagle3",
    summary="One layer on fused low, middle and high features, trained on its own drafts.",
    paper="arXiv 2503.01840",
    info=DrafterInfo(method="eagle3", expansion="forward"),
    needs=_CHECKPOINT,
    opens="forespeak.drafters.eagle3:open_drafter",
    starts="forespeak.drafters.eagle3:random_drafter",
    settings=_DTYPE,
    defaults={"num_speculative_tokens": 4, "tree_depth": 4, **_TREE},
    builders=("chain", "dynamic_tree", "static_tree"),
)
DFLASH = MethodEntry(
    name="dflash",
    summary="A small diffusion block fills all draft positions at once.",
    paper="arXiv 2602.06036",
    info=DrafterInfo(method="dflash", expansion="none"),
    needs=_CHECKPOINT,
    opens="forespeak.drafters.dflash:open_drafter",
    starts="forespeak.drafters.dflash:random_drafter",
    settings=_DTYPE,
    defaults=_TREE,
    builders=("chain", "ddtree", "static_tree"),
)
DDTREE = MethodEntry(
    name="ddtree",
    summary="The marginals of DFlash (or DSpark's conditional laws) under a best-first tree.",
    paper="arXiv 2604.12989",
    info=DrafterInfo(method="ddtree", expansion="none"),
    needs="a DFlash or DSpark checkpoint trained for the target",
    opens="forespeak.drafters.dspark:open_either",
    reads=("dflash", "dspark"),
    settings=_DTYPE,
    defaults={"node_budget": 16},
    builders=("ddtree",),
)
DSPARK = MethodEntry(
    name="dspark",
    summary="DFlash with a sequential head and a confidence head.",
    paper="arXiv 2607.05147",
    info=DrafterInfo(method="dspark", expansion="head"),
    needs=_CHECKPOINT,
    opens="forespeak.drafters.dspark:open_drafter",
    starts="forespeak.drafters.dspark:random_drafter",
    settings=("confidence_threshold", *_DTYPE),
    defaults={"confidence_threshold": 0.0, **_TREE},
    builders=("chain", "ddtree", "dynamic_tree", "static_tree"),
)

_BUILT_IN = (
    *(PLAIN, NGRAM, DRAFT_MODEL, MEDUSA, MTP_PARALLEL, MTP),
    *(EAGLE, EAGLE2, EAGLE3, DFLASH, DDTREE, DSPARK),
)


def _plugins(taken: Sequence[str]) -> list[MethodEntry]:
    found: list[MethodEntry] = []
    for point in entry_points(group=_GROUP):
        entry = point.load()
        assert isinstance(entry, MethodEntry), f"{point.value} is no MethodEntry"
        assert entry.name not in taken, f"{point.value} takes the name {entry.name} again"
        found.append(entry)
    return found


METHODS: Mapping[str, MethodEntry] = {
    entry.name: entry for entry in (*_BUILT_IN, *_plugins([entry.name for entry in _BUILT_IN]))
}
