"""What the enumeration tests run over: processors, ways to make trees, cuts, sizes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.spec.builders import (
    TreeShape,
    build_chain,
    build_ddtree,
    build_dynamic_tree,
    build_sampled_tree,
    build_static_tree,
)
from forespeak.spec.tree import CandidateTree, cut
from forespeak.spec.uniforms import Uniforms
from forespeak.spec.verify import Draft, Shape
from tests.spec.enumeration import ROOT, Path, Process, TableDrafter, draft_process, node_path

EXHAUSTIVE = bool(os.environ.get("FORESPEAK_EXHAUSTIVE"))


def identity(logits: Tensor, path: Path) -> Tensor:
    return logits


def temperature(logits: Tensor, path: Path) -> Tensor:
    return logits / 0.6


def top_k(logits: Tensor, path: Path) -> Tensor:
    keep = max(2, logits.shape[0] // 2)
    least = logits.topk(keep).values[-1]
    return logits.masked_fill(logits < least, float("-inf"))


def top_p(logits: Tensor, path: Path) -> Tensor:
    """Keeps the smallest set of best tokens whose mass reaches 0.8."""
    values, order = (logits / 1.3).sort(descending=True)
    before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
    values = values.masked_fill(before >= 0.8, float("-inf"))
    return torch.empty_like(values).scatter_(0, order, values)


def repetition(logits: Tensor, path: Path) -> Tensor:
    """Depends on the path, each node on its own (law 5); and forbids a repeat of the last token."""
    out = logits.clone()
    for token in set(path):
        out[token] -= 1.5
    if path:
        out[path[-1]] = float("-inf")
    return out


PROCESSORS: dict[str, Process] = {
    "identity": identity,
    "temperature": temperature,
    "top_k": top_k,
    "top_p": top_p,
    "repetition": repetition,
}

Make = Callable[[TableDrafter, Process, Uniforms, int], CandidateTree]
"""(drafter, processor of draft rows, draws, draft nodes) -> tree"""

SMALL_SHAPE = TreeShape(((0,), (1,), (0, 0)))
LARGE_SHAPE = TreeShape(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def _chain_sampled(
    drafter: TableDrafter, process: Process, draws: Uniforms, size: int
) -> CandidateTree:
    return build_chain(
        [ROOT], drafter.propose(), drafter.expand, [0], lengths=[size], draws=[draws],
        process=draft_process(process),
    )[0]  # fmt: skip


def _chain_sampled_confident(
    drafter: TableDrafter, process: Process, draws: Uniforms, size: int
) -> CandidateTree:
    return build_chain(
        [ROOT], drafter.propose(), drafter.expand, [0], lengths=[size], draws=[draws],
        process=draft_process(process), min_confidence=0.55,
    )[0]  # fmt: skip


def _block_sampled(
    drafter: TableDrafter, process: Process, draws: Uniforms, size: int
) -> CandidateTree:
    """All depths at once: q depends on the depth alone before processors."""
    return build_chain(
        [ROOT], drafter.propose_all(size), None, [0], lengths=[size], draws=[draws],
        process=draft_process(process),
    )[0]  # fmt: skip


def _chain_greedy(
    drafter: TableDrafter, process: Process, draws: Uniforms, size: int
) -> CandidateTree:
    return build_chain([ROOT], drafter.propose(), drafter.expand, [0], lengths=[size])[0]


def _tree_sampled(
    drafter: TableDrafter, process: Process, draws: Uniforms, size: int
) -> CandidateTree:
    return build_sampled_tree(
        [ROOT], drafter.propose(), drafter.expand, [0], draws=[draws],
        shape=SMALL_SHAPE if size == 3 else LARGE_SHAPE, process=draft_process(process),
    )[0]  # fmt: skip


def _tree_static(
    drafter: TableDrafter, process: Process, draws: Uniforms, size: int
) -> CandidateTree:
    return build_static_tree(
        [ROOT], drafter.propose_all(3), None, [0],
        shape=SMALL_SHAPE if size == 3 else LARGE_SHAPE,
    )[0]  # fmt: skip


def _tree_dynamic(
    drafter: TableDrafter, process: Process, draws: Uniforms, size: int
) -> CandidateTree:
    return build_dynamic_tree(
        [ROOT], drafter.propose(), drafter.expand, [0], budgets=[size], max_depth=3, top_k=2,
        process=draft_process(process),
    )[0]  # fmt: skip


def _ddtree(drafter: TableDrafter, process: Process, draws: Uniforms, size: int) -> CandidateTree:
    return build_ddtree([ROOT], drafter.propose_all(3), None, [0], budgets=[size])[0]


def _ddtree_conditional(
    drafter: TableDrafter, process: Process, draws: Uniforms, size: int
) -> CandidateTree:
    return build_ddtree(
        [ROOT], drafter.propose(), drafter.expand, [0], budgets=[size], max_depth=3,
        process=draft_process(process),
    )[0]  # fmt: skip


@dataclass(frozen=True)
class Maker:
    """A builder as the enumeration runs it."""

    make: Make
    draft: Draft
    shape: Shape


MAKERS: dict[str, Maker] = {
    "chain sampled": Maker(_chain_sampled, "sampled", "chain"),
    "chain sampled, stops unsure": Maker(_chain_sampled_confident, "sampled", "chain"),
    "chain sampled, all depths": Maker(_block_sampled, "sampled", "chain"),
    "tree sampled": Maker(_tree_sampled, "sampled", "tree"),
    "chain greedy": Maker(_chain_greedy, "point", "chain"),
    "static tree": Maker(_tree_static, "point", "tree"),
    "dynamic tree": Maker(_tree_dynamic, "point", "tree"),
    "ddtree": Maker(_ddtree, "point", "tree"),
    "ddtree conditional": Maker(_ddtree_conditional, "point", "tree"),
}


def coin(seed: int, words: Sequence[int]) -> float:
    """A number in [0, 1) that is a fixed function of the words: some confidence head's output."""
    text = repr((seed, tuple(words))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") / 2**56


def cut_by_ancestors(tree: CandidateTree, seed: int) -> CandidateTree:
    """Law 3 followed: a node stays by a number that knows its ancestors, not its own token."""
    keep = [
        coin(seed, [node, *node_path(tree, parent)]) > 0.35 if parent >= 0 else True
        for node, parent in enumerate(tree.parents)
    ]
    return cut(tree, keep)


def cut_by_earlier_siblings(tree: CandidateTree, seed: int) -> CandidateTree:
    """A node's answer also knows the siblings that were drawn before it."""
    keep = [True]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        before = [tree.tokens[at] for at in range(1, node) if tree.parents[at] == parent]
        keep.append(coin(seed, [node, *node_path(tree, parent), -1, *before]) > 0.35)
    return cut(tree, keep)


def cut_by_survival(tree: CandidateTree, seed: int) -> CandidateTree:
    """DSpark's scheduler with early stop: nodes are admitted in order while throughput grows.

    The survival of a node is a product of confidences, each of which knows the tokens before it.
    """
    speed = [1.0, 0.8, 0.72, 0.66, 0.55, 0.5, 0.46]
    survival, admitted, expected, best = {0: 1.0}, [True], 1.0, speed[0]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        confidence = coin(seed, [node, *node_path(tree, parent)])
        survival[node] = survival[parent] * confidence
        expected += survival[node]
        throughput = expected * speed[node]
        if throughput <= best:
            break
        best = throughput
        admitted.append(True)
    return cut(tree, admitted + [False] * (len(tree) - len(admitted)))


CUTS: dict[str, Callable[[CandidateTree, int], CandidateTree]] = {
    "whole": lambda tree, seed: tree,
    "cut by ancestors": cut_by_ancestors,
    "cut by earlier siblings": cut_by_earlier_siblings,
    "cut by survival": cut_by_survival,
}
