"""Exact output laws by enumeration, in float64.

A builder and a rule ask their sources of randomness two questions (``Uniforms``). Here every
question is answered in every possible way, each answer with its probability, so that running both
gives the whole law of what a round emits. Nothing is estimated: agreement is to rounding.

    target = RandomTarget(vocab_size=6, seed=1)
    law = output_law(target, build, rule, length=4)      # build: Uniforms -> CandidateTree
    assert distance(law, target.joint(4)) < 1e-12

Any source of trees can stand behind ``build``: a builder over a table of draft laws (as
:class:`TableDrafter` here), or a real drafter over a tiny model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forespeak.spec.builders import DraftPath
from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.spec.verify import Rule
from forespeak.types import DenseLaws, Frontier

Law = NDArray[np.float64]
Path = tuple[int, ...]
Build = Callable[[Uniforms], CandidateTree]
Process = Callable[[Tensor, Path], Tensor]
"""(logits [V], path below the prompt) -> logits [V]"""
T = TypeVar("T")

ROOT = 0  # token of every root; no law depends on it


class Branch:
    """A source of decisions that follows a script and then takes the first possible answers.

    Args:
        script: answers to give first.
        named: tokens that ``choose`` answers one by one. All others are answered together by -1,
            which no tree holds; what a rule does with a token it cannot find is the same for all.
            None names every token.

    Attributes:
        probability: of the answers given so far.
        open: scripts of the answers that were not taken.
        rest: after the answer -1, the law of the token that it stands for.
    """

    def __init__(self, script: Sequence[int], named: list[int] | None) -> None:
        self._script, self._named = tuple(script), named
        self._given: list[int] = []
        self.probability = 1.0
        self.open: list[tuple[int, ...]] = []
        self.rest: Law | None = None

    def accept(self, probability: float) -> bool:
        probability = min(max(probability, 0.0), 1.0)
        return self._answer({1: probability, 0: 1.0 - probability}) == 1

    def choose(self, law: Tensor) -> int:
        assert self.rest is None, "the rule went on after a token that is in no tree"
        weights = law.numpy()
        weights = weights / weights.sum()
        if self._named is None:
            return self._answer(dict(enumerate(weights.tolist())))
        if not self._named:
            self.rest = weights
            return -1
        rest = weights.copy()
        rest[self._named] = 0.0
        left = float(rest.sum())
        options = {token: float(weights[token]) for token in self._named}
        token = self._answer({**options, -1: left})
        if token == -1:
            self.rest = rest / left
        return token

    def _answer(self, options: dict[int, float]) -> int:
        possible = [option for option, weight in options.items() if weight > 0]
        step = len(self._given)
        if step < len(self._script):
            answer = self._script[step]
        else:
            answer = possible[0]
            self.open += [(*self._given, other) for other in possible[1:]]
        self._given.append(answer)
        self.probability *= options[answer]
        return answer


def explore(
    run: Callable[[Uniforms], T], *, named: list[int] | None = None
) -> Iterator[tuple[float, T, Law | None]]:
    """Runs once for every way in which its questions can be answered.

    Yields:
        probability, what ``run`` returned, and where its last token was -1 the law of that token;
        see :class:`Branch` for ``named``.
    """
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        branch = Branch(scripts.pop(), named)
        result = run(branch)
        scripts += branch.open
        yield branch.probability, result, branch.rest


def explore_rule(
    rule: Rule, tree: CandidateTree, p: Tensor
) -> Iterator[tuple[float, tuple[int, ...], Law]]:
    """Everything that a rule can decide about a tree.

    Yields:
        probability, accepted nodes from the root on, law of the bonus [V].
    """
    named: list[int] = [] if rule.chooses_last else sorted(set(tree.tokens[1:]))
    for weight, verdict, rest in explore(partial(rule.verify, tree, p), named=named):
        assert (verdict.bonus == -1) == (rest is not None), verdict
        yield weight, verdict.path, np.eye(p.shape[1])[verdict.bonus] if rest is None else rest


@dataclass
class RandomTables:
    """Random logits for every path, the same for the same seed, shaped by a processor."""

    vocab_size: int
    seed: int
    scale: float = 2.0
    process: Process | None = None
    _logits: dict[Path, Tensor] = field(default_factory=dict)
    _laws: dict[Path, Tensor] = field(default_factory=dict)

    def logits(self, path: Path) -> Tensor:
        """Before the processor. [V] float64"""
        if path not in self._logits:
            entropy = np.random.SeedSequence([self.seed, *(token + 1 for token in path)])
            draws = np.random.default_rng(entropy).normal(size=self.vocab_size)
            self._logits[path] = torch.from_numpy(draws * self.scale)
        return self._logits[path]

    def law(self, path: Path) -> Tensor:
        """After the processor. [V] float64"""
        if path not in self._laws:
            logits = self.logits(path)
            processed = logits if self.process is None else self.process(logits, path)
            self._laws[path] = processed.softmax(-1)
        return self._laws[path]


@dataclass
class RandomTarget(RandomTables):
    """The target: knows the joint law of what plain decoding writes."""

    _joints: dict[tuple[Path, int], Law] = field(default_factory=dict)

    def joint(self, length: int, path: Path = ()) -> Law:
        """Law of the next ``length`` tokens after ``path``. [V] * length"""
        if length == 0:
            return np.ones(())
        if (path, length) not in self._joints:
            self._joints[path, length] = self.weighted(self.law(path).numpy(), length, path)
        return self._joints[path, length]

    def weighted(self, first: Law, length: int, path: Path) -> Law:
        """Law of ``length`` tokens after ``path`` when the first of them has another law."""
        if length == 1:
            return first
        shape = (self.vocab_size, *(1 for _ in range(length - 1)))
        return first.reshape(shape) * self._continued(length - 1, path)

    def _continued(self, length: int, path: Path) -> Law:
        key = (path, -length)
        if key not in self._joints:
            self._joints[key] = np.stack(
                [self.joint(length, (*path, token)) for token in range(self.vocab_size)]
            )
        return self._joints[key]


class TableDrafter:
    """Draft laws from tables behind the seam that builders use; one row, steps by ``expand``."""

    def __init__(self, tables: RandomTables) -> None:
        self.tables = tables
        self._paths: dict[int, Path] = {0: ()}

    def propose(self) -> DenseLaws:
        """[1, 1, V] below the root."""
        self._paths = {0: ()}
        return DenseLaws(self.tables.logits(())[None, None])

    def propose_all(self, depth: int) -> DenseLaws:
        """[1, depth, V] laws that depend on the depth alone: those of the path of zeros."""
        return DenseLaws(torch.stack([self.tables.logits((0,) * d) for d in range(depth)])[None])

    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        """[F, 1, V]; a node's parent must have been expanded before."""
        laws = []
        for frontier in frontiers:
            for number, token, parent in zip(
                frontier.nodes, frontier.tokens, frontier.parents, strict=True
            ):
                self._paths[number] = (*self._paths[parent], token)
                laws.append(self.tables.logits(self._paths[number]))
        return DenseLaws(torch.stack(laws)[:, None])


def draft_process(process: Process) -> Callable[[Tensor, Sequence[DraftPath]], Tensor]:
    """A processor of one law as builders take it; the root is left out of the path."""

    def batched(logits: Tensor, paths: Sequence[DraftPath]) -> Tensor:
        rows = zip(logits, paths, strict=True)
        return torch.stack([process(law, path.tokens[1:]) for law, path in rows])

    return batched


def node_path(tree: CandidateTree, node: int) -> Path:
    """Tokens from below the root to the node."""
    return tuple(tree.tokens[at] for at in tree.path_to(node)[1:])


def target_laws(target: RandomTables, tree: CandidateTree) -> Tensor:
    """p after each node, along its own path. [N, V]"""
    return torch.stack([target.law(node_path(tree, node)) for node in range(len(tree))])


def output_laws(
    target: RandomTarget, build: Build, rules: Sequence[Rule], length: int
) -> dict[str, Law]:
    """Law of the first ``length`` tokens when one round is verified and plain decoding follows.

    Args:
        build: makes (and cuts) one tree; every draw it asks for is enumerated, once for all rules.
        rules: every decision of each is enumerated.

    Returns:
        by the rules' names, [V] * length float64. A rule is exact where its law is
        ``target.joint(length)``.
    """
    laws = {rule.name: np.zeros((target.vocab_size,) * length) for rule in rules}
    for drawn, tree, _ in explore(build):
        p = target_laws(target, tree)
        for rule in rules:
            for decided, nodes, bonus in explore_rule(rule, tree, p):
                path = tuple(tree.tokens[node] for node in nodes[1:])
                _add(laws[rule.name], target, drawn * decided, path, bonus)
    return laws


def output_law(target: RandomTarget, build: Build, rule: Rule, length: int) -> Law:
    """:func:`output_laws` of one rule."""
    return output_laws(target, build, [rule], length)[rule.name]


def emissions(target: RandomTables, build: Build, rule: Rule) -> dict[Path, float]:
    """Law of what one round emits: accepted tokens and the bonus, as sequences."""
    law: dict[Path, float] = defaultdict(float)
    for drawn, tree, _ in explore(build):
        for decided, nodes, bonus in explore_rule(rule, tree, target_laws(target, tree)):
            path = tuple(tree.tokens[node] for node in nodes[1:])
            for token in np.flatnonzero(bonus).tolist():
                law[(*path, token)] += drawn * decided * float(bonus[token])
    return dict(law)


def _add(law: Law, target: RandomTarget, weight: float, path: Path, bonus: Law) -> None:
    if len(path) >= law.ndim:
        law[path[: law.ndim]] += weight
    else:
        law[path] += weight * target.weighted(bonus, law.ndim - len(path), path)


def distance(one: Law, other: Law) -> float:
    """Total variation."""
    return float(np.abs(one - other).sum() / 2)


def largest_difference(one: Law, other: Law) -> float:
    """Largest difference of two probabilities."""
    return float(np.abs(one - other).max())
