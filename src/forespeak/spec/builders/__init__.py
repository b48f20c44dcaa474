"""Builders decide which nodes exist, given a drafter's laws.

Each takes the roots and laws of R rows and returns R candidate trees; a drafter that goes step by
step is asked for all rows of a level in one call.
"""

from __future__ import annotations

from forespeak.spec.builders.chain import build_chain
from forespeak.spec.builders.ddtree import build_ddtree, prepare
from forespeak.spec.builders.dynamic import build_dynamic_tree
from forespeak.spec.builders.source import DraftNode, DraftPath, DraftProcess, Expand, LawSource
from forespeak.spec.builders.static import (
    TreeShape,
    build_sampled_tree,
    build_static_tree,
    fit_shape,
)

__all__ = [
    "DraftNode",
    "DraftPath",
    "DraftProcess",
    "Expand",
    "LawSource",
    "TreeShape",
    "build_chain",
    "build_ddtree",
    "build_dynamic_tree",
    "build_sampled_tree",
    "build_static_tree",
    "fit_shape",
    "prepare",
]
