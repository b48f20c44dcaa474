"""Rules decide which nodes of a tree survive, given the target's laws.

Each is ``rule(tree, p, uniforms) -> Verdict`` with p [N, V], the target's laws after processors.
"""

from __future__ import annotations

from forespeak.spec.verify.greedy import follow, greedy
from forespeak.spec.verify.point import match, point_siblings
from forespeak.spec.verify.registry import RULES, Draft, Rule, Shape, fitting_rules, select_rule
from forespeak.spec.verify.rejection import block, rejection, siblings
from forespeak.spec.verify.typical import typical

__all__ = [
    "RULES",
    "Draft",
    "Rule",
    "Shape",
    "block",
    "fitting_rules",
    "follow",
    "greedy",
    "match",
    "point_siblings",
    "rejection",
    "select_rule",
    "siblings",
    "typical",
]
