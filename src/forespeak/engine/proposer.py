"""Proposer: a drafter under a builder, with its settings; a cascade is several of them in order.

N nodes, V vocabulary, R rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from forespeak.drafters.base import Drafter
from forespeak.engine.shapes import StaticShapes
from forespeak.errors import OptionError, unknown_choice
from forespeak.spec import builders
from forespeak.spec.builders import DraftProcess
from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.types import DenseLaws, Frontier, Laws, Observation, SpeculationConfig

Trees = list[CandidateTree]


@dataclass(frozen=True)
class DraftRequest:
    """What is asked of a proposer for R rows.

    Attributes:
        rows: engine rows.
        roots: their newest tokens.
        limits: draft tokens that a path may have at most, per row (what is left of the text).
        draws: sources of draft randomness; None chooses the best tokens.
        process: logits processors for draft rows; None where nothing is to be done.
    """

    rows: Sequence[int]
    roots: Sequence[int]
    limits: Sequence[int]
    draws: Sequence[Uniforms] | None = None
    process: DraftProcess | None = None


class Proposing(Protocol):
    """What the engine asks of a method."""

    def admit(self, row: int) -> None: ...

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def propose(self, request: DraftRequest) -> list[CandidateTree]: ...

    def release(self, row: int) -> None: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def drafter_s(self) -> float:
        """Seconds spent in drafters so far, tree building not included."""


class Proposer:
    """One drafter under one builder.

    Args:
        drafter: gives the laws.
        builder: ``chain``, ``static_tree``, ``dynamic_tree`` or ``ddtree``, one that fits.
        settings: sizes; those that the builder needs are given.
        vocab_size: V of the target.
    """

    def __init__(
        self, drafter: Drafter, builder: str, settings: SpeculationConfig, *, vocab_size: int
    ) -> None:
        if builder not in BUILDERS:
            raise OptionError(unknown_choice("Builder", builder, BUILDERS))
        self._drafter = drafter
        self._timed = _Timed(drafter)
        self._deepest = settings.tree_depth
        self._builder: _Build
        if builder == "static_tree":
            shapes = StaticShapes(settings)
            self._builder, self._deepest = partial(_static, shapes), shapes.deepest
        else:
            self._builder = _BUILDERS[builder]
        self._settings = settings
        self._vocab_size = vocab_size
        self.builder = builder

    @property
    def taps(self) -> tuple[int, ...]:
        return self._drafter.info.taps

    def admit(self, row: int) -> None:
        self._drafter.admit(row)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._timed.observe(observations)

    def release(self, row: int) -> None:
        self._drafter.release(row)

    @property
    def drafter_s(self) -> float:
        return self._timed.seconds

    def propose(self, request: DraftRequest) -> list[CandidateTree]:
        """A tree for each row; root only where the drafter has nothing or the limit is 0."""
        if max(request.limits) < 1:
            return [_root_alone(root) for root in request.roots]
        if self._drafter.info.point_mass:  # nothing to draw and nothing to process
            request = DraftRequest(request.rows, request.roots, request.limits)
        if self.builder == "chain":  # its lengths are each row's own
            return self._build(request)
        # The best tree of a smaller depth is no part of that of a larger one: rows that have less
        # left than a whole tree are built apart, so that each gets the tree it would have alone.
        deepest = _given(self._deepest)
        groups: dict[int, list[int]] = {}
        for slot, limit in enumerate(request.limits):
            groups.setdefault(min(limit, deepest), []).append(slot)
        trees: dict[int, CandidateTree] = {}
        for depth, slots in groups.items():
            part = _part(request, slots)
            built = self._build(part) if depth > 0 else [_root_alone(root) for root in part.roots]
            trees |= dict(zip(slots, built, strict=True))
        return [trees[slot] for slot in range(len(request.rows))]

    def _build(self, request: DraftRequest) -> Trees:
        return self._builder(self._timed, self._settings, request, self._vocab_size)


class Cascade:
    """Several proposers: a row takes the tree of the first that has a proposal for it."""

    def __init__(self, members: Sequence[Proposer]) -> None:
        self._members = tuple(members)
        taps = sorted({tap for member in members for tap in member.taps})
        self._taps = tuple(taps)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps

    @property
    def drafter_s(self) -> float:
        return sum(member.drafter_s for member in self._members)

    def admit(self, row: int) -> None:
        for member in self._members:
            member.admit(row)

    def observe(self, observations: Sequence[Observation]) -> None:
        for member in self._members:
            member.observe([_with_taps(o, self._taps, member.taps) for o in observations])

    def release(self, row: int) -> None:
        for member in self._members:
            member.release(row)

    def propose(self, request: DraftRequest) -> list[CandidateTree]:
        left = list(range(len(request.rows)))
        found: dict[int, CandidateTree] = {}
        for member in self._members:
            if not left:
                break
            for slot, tree in zip(left, member.propose(_part(request, left)), strict=True):
                found[slot] = tree
            left = [slot for slot in left if not found[slot].num_drafted]
        return [found[slot] for slot in range(len(request.rows))]


def _root_alone(root: int) -> CandidateTree:
    return CandidateTree((root,), (-1,))


def _part(request: DraftRequest, slots: Sequence[int]) -> DraftRequest:
    return DraftRequest(
        [request.rows[s] for s in slots],
        [request.roots[s] for s in slots],
        [request.limits[s] for s in slots],
        None if request.draws is None else [request.draws[s] for s in slots],
        request.process,
    )


def _with_taps(
    observation: Observation, all_taps: tuple[int, ...], wanted: tuple[int, ...]
) -> Observation:
    """The observation with only the taps that one member reads, in its order."""
    if observation.taps is None or wanted == all_taps:
        return observation
    picked = observation.taps[:, [all_taps.index(tap) for tap in wanted]] if wanted else None
    return Observation(observation.row, observation.tokens, observation.hidden, picked)


def _chain(drafter: _Timed, settings: SpeculationConfig, request: DraftRequest, size: int) -> Trees:
    most = _given(settings.num_speculative_tokens)
    lengths = [min(most, limit) for limit in request.limits]
    laws = drafter.propose(request, max(lengths))
    return builders.build_chain(
        request.roots, laws, drafter.expand, request.rows, lengths=lengths, draws=request.draws,
        process=request.process, min_acceptance=settings.confidence_threshold or 0.0,
        vocab_size=size,
    )  # fmt: skip


def _dynamic(
    drafter: _Timed, settings: SpeculationConfig, request: DraftRequest, size: int
) -> Trees:
    depth, budgets = _tree_sizes(settings, request)
    laws = drafter.propose(request, depth)
    return builders.build_dynamic_tree(
        request.roots, laws, drafter.expand, request.rows, budgets=budgets, max_depth=depth,
        top_k=_given(settings.tree_top_k), process=request.process, vocab_size=size,
    )  # fmt: skip


def _ddtree(
    drafter: _Timed, settings: SpeculationConfig, request: DraftRequest, size: int
) -> Trees:
    depth, budgets = _tree_sizes(settings, request)
    laws = drafter.propose(request, depth)
    return builders.build_ddtree(
        request.roots, laws, drafter.expand, request.rows, budgets=budgets, max_depth=depth,
        process=request.process, vocab_size=size,
    )  # fmt: skip


def _tree_sizes(settings: SpeculationConfig, request: DraftRequest) -> tuple[int, list[int]]:
    """Depth of the trees and node budgets of the rows, all of which have as much left."""
    depth = min(_given(settings.tree_depth), max(request.limits))
    return depth, [_given(settings.node_budget)] * len(request.rows)


def _static(
    shapes: StaticShapes,
    drafter: _Timed,
    settings: SpeculationConfig,
    request: DraftRequest,
    size: int,
) -> Trees:
    shape = shapes.within(max(request.limits))
    laws = drafter.propose(request, shape.depth)
    if request.draws is not None:
        return builders.build_sampled_tree(
            request.roots, laws, drafter.expand, request.rows, shape=shape, draws=request.draws,
            process=request.process, vocab_size=size,
        )  # fmt: skip
    return builders.build_static_tree(
        request.roots, laws, drafter.expand, request.rows, shape=shape, process=request.process,
        vocab_size=size,
    )  # fmt: skip


class _Timed:
    """A drafter whose time is counted."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.seconds = 0.0
        self.expand = self._expand if drafter.info.expansion != "none" else None

    def propose(self, request: DraftRequest, depth: int) -> Laws:
        with self._counted():
            return self._drafter.propose(request.rows, request.roots, depth)

    def _expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        with self._counted():
            return self._drafter.expand(frontiers)

    def observe(self, observations: Sequence[Observation]) -> None:
        with self._counted():
            self._drafter.observe(observations)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def _given(value: int | None) -> int:
    assert value is not None, "a setting that the builder needs was not resolved"
    return value


_Build = Callable[[_Timed, SpeculationConfig, DraftRequest, int], Trees]
_BUILDERS: dict[str, _Build] = {
    "chain": _chain, "dynamic_tree": _dynamic, "ddtree": _ddtree,
}  # fmt: skip
BUILDERS = (*_BUILDERS, "static_tree")
