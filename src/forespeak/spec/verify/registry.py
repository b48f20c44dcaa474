"""Which rules there are and which trees each can take: pure data, and the sentence of a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from forespeak.errors import OptionError, unknown_choice
from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.spec.verify.greedy import greedy
from forespeak.spec.verify.point import match, point_siblings
from forespeak.spec.verify.rejection import block, rejection, siblings
from forespeak.spec.verify.typical import typical
from forespeak.types import Verdict

Draft = Literal["point", "sampled"]
Shape = Literal["chain", "tree"]
Verify = Callable[[CandidateTree, Tensor, Uniforms], Verdict]


@dataclass(frozen=True)
class Rule:
    """One way to decide which nodes survive.

    Attributes:
        name: as on the command line.
        verify: (tree, p, uniforms) -> verdict.
        lossless: the output's law is the target's.
        drafts: how the tree's tokens may have come about: chosen (``point``) or drawn from q.
        shapes: ``chain`` or ``tree``; a rule for trees takes chains too.
        greedy: for temperature 0 only.
        chooses_last: ``choose`` is asked once, at the end; else once a visited node.
    """

    name: str
    verify: Verify
    drafts: tuple[Draft, ...]
    shapes: tuple[Shape, ...]
    lossless: bool = True
    greedy: bool = False
    chooses_last: bool = True


_ALL_RULES = (
    Rule("greedy", greedy, ("point", "sampled"), ("chain", "tree"), greedy=True),
    Rule("rejection", rejection, ("sampled",), ("chain",)),
    Rule("block", block, ("sampled",), ("chain",)),
    Rule("siblings", siblings, ("sampled",), ("chain", "tree")),
    Rule("match", match, ("point", "sampled"), ("chain", "tree"), chooses_last=False),
    Rule("point_siblings", point_siblings, ("point",), ("chain", "tree")),
    Rule("typical", typical, ("point", "sampled"), ("chain", "tree"), lossless=False),
)
RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ALL_RULES})


def fitting_rules(draft: Draft, shape: Shape) -> tuple[str, ...]:
    """Names of the sampling rules for such trees, the best lossless one first.

    Block verification comes before token-wise rejection because it never accepts less; ``match``
    comes first on point masses because it takes one draw a node.
    """
    order = ("block", "rejection", "siblings", "match", "point_siblings", "typical")
    if draft == "point":
        order = ("match", "point_siblings", "typical", "block", "rejection", "siblings")
    rules = (RULES[name] for name in order)
    return tuple(rule.name for rule in rules if draft in rule.drafts and shape in rule.shapes)


def select_rule(name: str | None, *, draft: Draft, shape: Shape, temperature: float) -> Rule:
    """The rule for a row, or a refusal.

    Args:
        name: what was asked for; None takes the best lossless rule.
        draft: whether draft tokens are chosen or drawn.
        shape: what the builder makes.
        temperature: of the request. At 0 every rule is the greedy walk, and that one is returned
            once ``name`` has passed the checks.

    Raises:
        OptionError: an unknown name, or a rule that cannot take such trees or such a request.
    """
    allowed = fitting_rules(draft, shape)
    if name is None:
        return RULES["greedy"] if temperature == 0 else RULES[allowed[0]]
    if name not in RULES:
        raise OptionError(unknown_choice("rule", name, RULES))
    if name == "greedy":
        if temperature != 0:
            raise OptionError(
                f"Rule 'greedy' at temperature {temperature} would not give the target's law; "
                f"allowed: {', '.join(allowed)}. Choose one of these or temperature 0."
            )
        return RULES["greedy"]
    if name not in allowed:
        kind = "drawn from the draft law" if draft == "sampled" else "chosen greedily"
        raise OptionError(
            f"Rule {name!r} cannot verify a {shape} whose draft tokens are {kind}; allowed: "
            f"{', '.join(allowed)}. Choose one of these, or another draft sampling or builder."
        )
    return RULES["greedy"] if temperature == 0 else RULES[name]
