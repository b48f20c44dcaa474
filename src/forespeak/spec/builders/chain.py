"""The chain: one draft token below the other, chosen greedily or drawn from q."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.spec import tree
from forespeak.spec.best import best_tokens
from forespeak.spec.builders.source import DraftNode, DraftProcess, Expand, LawSource
from forespeak.spec.tree import CandidateTree
from forespeak.spec.uniforms import Uniforms
from forespeak.types import Laws, PointLaws


def build_chain(
    roots: Sequence[int],
    laws: Laws,
    expand: Expand | None,
    rows: Sequence[int],
    *,
    lengths: Sequence[int],
    draws: Sequence[Uniforms] | None = None,
    process: DraftProcess | None = None,
    min_confidence: float = 0.0,
    min_acceptance: float = 0.0,
    vocab_size: int | None = None,
) -> list[CandidateTree]:
    """One chain a row, all rows advanced together.

    Args:
        roots, laws, expand, rows, process, vocab_size: see :class:`LawSource`. ``laws`` may also
            be :class:`PointLaws`, taken as they are, without any of the options below.
        lengths: R numbers, the most draft tokens a row may get; a drafter with fewer depths or
            fewer tokens gives shorter chains, also empty ones.
        draws: R sources of draft randomness; tokens are then drawn and the trees keep q, in the
            dtype that they were drawn in. None takes the best token (ties: lowest id), which is a
            point mass: the trees have no q.
        min_confidence: a chain ends before a token whose law gives no token this much. The law is
            a function of the token's ancestors; the token itself is never looked at (law 3).
        min_acceptance: a chain ends before a token whose chance of acceptance, as the drafter
            estimates it, is less than this; 0 for drafters that estimate none.

    Raises:
        OptionError: point laws with an option that they cannot honour.
    """
    assert len(lengths) == len(roots), (lengths, roots)
    if isinstance(laws, PointLaws):
        if draws is not None or process is not None or min_confidence > 0 or min_acceptance > 0:
            raise OptionError(
                "The drafter proposes single tokens and no laws, so draft sampling, draft "
                "processors and a least confidence cannot be honoured; leave them out."
            )
        return [
            tree.chain(root, tokens[: max(length, 0)])
            for root, tokens, length in zip(roots, laws.tokens, lengths, strict=True)
        ]
    source = LawSource(roots, laws, expand, rows, process=process, vocab_size=vocab_size)
    most = source.max_depth
    allowed = [length if most is None else min(length, most) for length in lengths]
    least = _Least(min_confidence, min_acceptance)
    if draws is None and least.is_nothing and source.all_depths is not None:
        return _best_of_all_depths(roots, source.all_depths, source.token_ids, allowed)
    if draws is None:
        return _grow_greedy(source, allowed, least)
    return _grow_sampled(source, allowed, least, draws)


@dataclass(frozen=True)
class _Least:
    """What a law must promise for its token to be drafted."""

    confidence: float
    acceptance: float

    @property
    def is_nothing(self) -> bool:
        return self.confidence <= 0 and self.acceptance <= 0

    def met(self, source: LawSource, nodes: Sequence[DraftNode], logits: Tensor) -> list[bool]:
        """For each of F nodes, right after its law [F, V] was asked for."""
        enough = torch.ones(len(nodes), dtype=torch.bool)
        if self.confidence > 0:
            enough &= (logits.softmax(-1).amax(-1) >= self.confidence).cpu()
        if self.acceptance > 0:
            enough &= (source.confidences(nodes) >= self.acceptance).cpu()
        answers: list[bool] = enough.tolist()
        return answers


def _best_of_all_depths(
    roots: Sequence[int], logits: Tensor, token_ids: Tensor | None, allowed: Sequence[int]
) -> list[CandidateTree]:
    best = best_tokens(logits)  # [R, D]
    tokens = (best if token_ids is None else token_ids[best]).tolist()
    return [
        tree.chain(root, row[: max(length, 0)])
        for root, row, length in zip(roots, tokens, allowed, strict=True)
    ]


def _grow_greedy(source: LawSource, allowed: Sequence[int], least: _Least) -> list[CandidateTree]:
    ends = list(source.roots)
    active = [node for node in ends if allowed[node.slot] > 0]
    while active:
        logits = source.logits(active)  # [F, V or Vd]
        best = best_tokens(logits)
        token_ids = source.token_ids
        tokens = (best if token_ids is None else token_ids[best]).tolist()
        enough = None if least.is_nothing else least.met(source, active, logits)
        grown = [
            node.child(node.number + 1, token)
            for at, (node, token) in enumerate(zip(active, tokens, strict=True))
            if enough is None or enough[at]
        ]
        active = _advance(ends, grown, allowed)
    return [tree.chain(node.path[0], node.path[1:]) for node in ends]


def _grow_sampled(
    source: LawSource,
    allowed: Sequence[int],
    least: _Least,
    draws: Sequence[Uniforms],
) -> list[CandidateTree]:
    ends = list(source.roots)
    kept: list[list[Tensor]] = [[] for _ in ends]
    active = [node for node in ends if allowed[node.slot] > 0]
    while active:
        laws = source.laws(active)  # [F, V]
        enough = [True] * len(active)
        if not least.is_nothing:
            enough = least.met(source, active, laws.log())
        grown = []
        for node, q, drafted in zip(active, laws, enough, strict=True):
            if drafted:
                kept[node.slot].append(q)
                grown.append(node.child(node.number + 1, draws[node.slot].choose(q)))
        active = _advance(ends, grown, allowed)
    return [
        tree.chain(
            node.path[0], node.path[1:], torch.stack([torch.zeros_like(q[0]), *q]) if q else None
        )
        for node, q in zip(ends, kept, strict=True)
    ]


def _advance(
    ends: list[DraftNode], grown: Sequence[DraftNode], allowed: Sequence[int]
) -> list[DraftNode]:
    """Notes the new ends of the chains and returns those that may grow further."""
    for node in grown:
        ends[node.slot] = node
    return [node for node in grown if node.depth < allowed[node.slot]]
