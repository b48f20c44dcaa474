"""What every builder asks a drafter for: the laws below some nodes, whichever way they come.

R rows, F nodes asked at once, D depths, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from forespeak.errors import DrafterError, OptionError
from forespeak.spec.builders.top import top_log_probs
from forespeak.types import DenseLaws, Frontier, Laws, PointLaws

Expand = Callable[[Sequence[Frontier]], DenseLaws]


@dataclass(frozen=True)
class DraftNode:
    """A node whose children are wanted.

    Attributes:
        slot: which of the R rows, counted from 0.
        number: what the drafter calls it; 0 is the root, see :class:`Frontier`.
        parent: number of its parent; -1 for the root.
        path: tokens from the root to the node, both included.
    """

    slot: int
    number: int
    parent: int
    path: tuple[int, ...]

    @property
    def depth(self) -> int:
        """0 for the root."""
        return len(self.path) - 1

    def child(self, number: int, token: int) -> DraftNode:
        """The node below that holds ``token``."""
        return DraftNode(self.slot, number, self.number, (*self.path, token))


@dataclass(frozen=True)
class DraftPath:
    """Where a draft law stands: the engine's row and the tokens from its root down (law 5)."""

    row: int
    tokens: tuple[int, ...]


DraftProcess = Callable[[Tensor, Sequence[DraftPath]], Tensor]
"""Logits processors for draft rows: ([F, V] logits, F paths) -> [F, V] logits."""


def _check_numbers(logits: Tensor) -> None:
    """Refuse laws that are no laws: a token drawn from one would bias the text, or be kept unseen.

    One pass of a sum, which NaN and inf do not leave; impossible tokens (-inf) do no harm.

    Raises:
        DrafterError: a logit is NaN or +inf.
    """
    total = float(logits.sum())
    if total != total or total == float("inf"):
        raise DrafterError(
            "The drafter gave logits that are no numbers (NaN or infinite); its weights are "
            "damaged or overflow in this precision. Look at it with `forespeak inspect`, or get it "
            "again."
        )


class LawSource:
    """Laws below the nodes of R rows, from a drafter that gives all depths or goes step by step.

    Args:
        roots: R newest tokens.
        laws: what ``propose`` gave: [R, D, Vd].
        expand: the drafter's ``expand``; None when ``laws`` holds all depths. With it, ``laws``
            is read at depth 1 only.
        rows: the engine's numbers of the R rows.
        process: logits processors. They and sampled laws live in the target's vocabulary.
        vocab_size: V, needed where the draft vocabulary is a reduced one and laws are wanted in
            the target's.
    """

    def __init__(
        self,
        roots: Sequence[int],
        laws: Laws,
        expand: Expand | None,
        rows: Sequence[int],
        *,
        process: DraftProcess | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if isinstance(laws, PointLaws):
            raise OptionError(
                "The drafter proposes single tokens and no laws; allowed for it: the greedy chain. "
                "Choose the chain builder without draft sampling, processors or a confidence."
            )
        assert laws.logits.ndim == 3, laws.logits.shape
        _check_numbers(laws.logits)
        assert len(roots) == len(rows) == laws.logits.shape[0], (roots, rows, laws.logits.shape)
        self.roots = [DraftNode(slot, 0, -1, (int(token),)) for slot, token in enumerate(roots)]
        self.max_depth = laws.logits.shape[1] if expand is None else None
        self._laws, self._expand, self._rows = laws, expand, tuple(rows)
        self._process, self._vocab_size = process, vocab_size
        self._last: tuple[tuple[DraftNode, ...], Tensor | None] = ((), None)

    @property
    def token_ids(self) -> Tensor | None:
        """[Vd] target ids of the columns of :meth:`logits`, None when they are target ids."""
        return None if self._process else self._laws.token_ids

    @property
    def all_depths(self) -> Tensor | None:
        """[R, D, Vd] when laws do not depend on the path and nothing processes them, else None."""
        independent = self._expand is None and self._process is None
        return self._laws.logits if independent else None

    def logits(self, nodes: Sequence[DraftNode]) -> Tensor:
        """Laws of the tokens below ``nodes``, one call of the drafter for all of them.

        Args:
            nodes: F nodes of one depth, those of a row next to each other.

        Returns:
            [F, V] with processors, else [F, Vd]; float32 or wider.
        """
        assert nodes and len({node.depth for node in nodes}) == 1, nodes
        logits = self._raw(nodes)  # [F, Vd]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._process is None:
            return logits
        paths = [DraftPath(self._rows[node.slot], node.path) for node in nodes]
        return self._process(self._widen(logits, float("-inf")), paths)

    def top(
        self, nodes: Sequence[DraftNode], top_k: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The K best tokens below each node and their log-probabilities under its whole law.

        Best first, ties to the lower draft id: F lists of target ids, F lists of logs. Laws that do
        not depend on the path are searched once a row.
        """
        asked, places = list(nodes), list(range(len(nodes)))
        if self.all_depths is not None:
            first = {node.slot: node for node in reversed(nodes)}
            asked = list(first.values())
            place = {slot: at for at, slot in enumerate(first)}
            places = [place[node.slot] for node in nodes]
        indices, log_probs = top_log_probs(self.logits(asked), top_k)  # [F, K] each
        token_ids = self.token_ids
        ids = (indices if token_ids is None else token_ids[indices]).tolist()
        logs = log_probs.tolist()
        return [ids[at] for at in places], [logs[at] for at in places]

    def laws(self, nodes: Sequence[DraftNode]) -> Tensor:
        """Like :meth:`logits`, as probabilities over the target's vocabulary: [F, V]."""
        law = self.logits(nodes).softmax(-1)
        return law if self._process else self._widen(law, 0.0)

    def confidences(self, nodes: Sequence[DraftNode]) -> Tensor:
        """[F] the drafter's own estimates that a token below each node will be accepted.

        To be asked right after the laws of the same nodes; they come from the same call.

        Raises:
            OptionError: the drafter makes no such estimates.
        """
        asked, estimates = self._last
        assert asked == tuple(nodes), "estimates of other nodes than the last ones"
        if estimates is None:
            raise OptionError(
                "A confidence threshold was given and this drafter has no confidence head; leave "
                "the threshold out or choose a drafter with one."
            )
        return estimates

    def _raw(self, nodes: Sequence[DraftNode]) -> Tensor:
        depth = nodes[0].depth
        if depth == 0 or self._expand is None:
            slots = [node.slot for node in nodes]
            given = self._laws.confidences
            self._last = (tuple(nodes), None if given is None else given[slots, depth])
            return self._laws.logits[slots, depth]  # [F, Vd]
        frontiers = []
        for slot, group in groupby(nodes, lambda node: node.slot):
            members = list(group)
            frontiers.append(
                Frontier(
                    self._rows[slot],
                    tuple(node.number for node in members),
                    tuple(node.path[-1] for node in members),
                    tuple(node.parent for node in members),
                )
            )
        laws = self._expand(frontiers)
        assert laws.logits.shape[:2] == (len(nodes), 1), (laws.logits.shape, len(nodes))
        _check_numbers(laws.logits)
        given = laws.confidences
        self._last = (tuple(nodes), None if given is None else given[:, 0])
        return laws.logits[:, 0]

    def _widen(self, values: Tensor, outside: float) -> Tensor:
        """From the draft's vocabulary to the target's. [F, Vd] -> [F, V]"""
        token_ids = self._laws.token_ids
        if token_ids is None:
            return values
        assert self._vocab_size is not None, "a reduced draft vocabulary needs vocab_size here"
        wide = values.new_full((values.shape[0], self._vocab_size), outside)
        return wide.index_copy_(1, token_ids, values)
