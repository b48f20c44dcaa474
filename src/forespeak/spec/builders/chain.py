"""The chain: one draft token below the other, chosen greedily or drawn from q."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.spec import tree
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

    Raises:
        OptionError: point laws with an option that they cannot honour.
    """
    assert len(lengths) == len(roots), (lengths, roots)
    if isinstance(laws, PointLaws):
        if draws is not None or process is not None or min_confidence > 0:
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
    if draws is None and min_confidence <= 0 and source.all_depths is not None:
        return _best_of_all_depths(roots, source.all_depths, source.token_ids, allowed)
    if draws is None:
        return _grow_greedy(source, allowed, min_confidence)
    return _grow_sampled(source, allowed, min_confidence, draws)


def _best_of_all_depths(
    roots: Sequence[int], logits: Tensor, token_ids: Tensor | None, allowed: Sequence[int]
) -> list[CandidateTree]:
    best = logits.argmax(-1)  # [R, D]
    tokens = (best if token_ids is None else token_ids[best]).tolist()
    return [
        tree.chain(root, row[: max(length, 0)])
        for root, row, length in zip(roots, tokens, allowed, strict=True)
    ]


def _grow_greedy(
    source: LawSource, allowed: Sequence[int], min_confidence: float
) -> list[CandidateTree]:
    ends = list(source.roots)
    active = [node for node in ends if allowed[node.slot] > 0]
    while active:
        logits = source.logits(active)  # [F, V or Vd]
        best = logits.argmax(-1)
        token_ids = source.token_ids
        tokens = (best if token_ids is None else token_ids[best]).tolist()
        confident = _confident(logits.softmax(-1), min_confidence) if min_confidence > 0 else None
        grown = [
            node.child(node.number + 1, token)
            for at, (node, token) in enumerate(zip(active, tokens, strict=True))
            if confident is None or confident[at]
        ]
        active = _advance(ends, grown, allowed)
    return [tree.chain(node.path[0], node.path[1:]) for node in ends]


def _grow_sampled(
    source: LawSource,
    allowed: Sequence[int],
    min_confidence: float,
    draws: Sequence[Uniforms],
) -> list[CandidateTree]:
    ends = list(source.roots)
    kept: list[list[Tensor]] = [[] for _ in ends]
    active = [node for node in ends if allowed[node.slot] > 0]
    while active:
        laws = source.laws(active)  # [F, V]
        confident = _confident(laws, min_confidence)
        grown = []
        for node, q, enough in zip(active, laws, confident, strict=True):
            if enough:
                kept[node.slot].append(q)
                grown.append(node.child(node.number + 1, draws[node.slot].choose(q)))
        active = _advance(ends, grown, allowed)
    return [
        tree.chain(
            node.path[0], node.path[1:], torch.stack([torch.zeros_like(q[0]), *q]) if q else None
        )
        for node, q in zip(ends, kept, strict=True)
    ]


def _confident(laws: Tensor, least: float) -> list[bool]:
    """Which laws have a token of at least this probability. [F, V] -> F"""
    answers: list[bool] = (laws.amax(-1) >= least).tolist()
    return answers


def _advance(
    ends: list[DraftNode], grown: Sequence[DraftNode], allowed: Sequence[int]
) -> list[DraftNode]:
    """Notes the new ends of the chains and returns those that may grow further."""
    for node in grown:
        ends[node.slot] = node
    return [node for node in grown if node.depth < allowed[node.slot]]
