"""The drafter seam: a drafter gives next-token laws. It builds no tree and accepts nothing.

A round, seen from a drafter that serves several rows at once:

    propose(rows, roots)      laws of depth 1 (or of all depths at once) below each row's root
    expand(frontiers)         laws below further nodes; only where ``info.expansion`` is not none
    observe(observations)     root and accepted tokens with the target's true features (law 7)

``observe`` is also how a prompt arrives, chunk by chunk, before the first ``propose``. What was
expanded in a round and not observed at its end is forgotten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forespeak.models.base import TargetModel
from forespeak.models.loading import Checkpoint
from forespeak.types import DenseLaws, DrafterInfo, Frontier, Laws, Observation


@dataclass(frozen=True)
class TargetParts:
    """What a drafter may need of the target.

    Attributes:
        model: the target, loaded.
        checkpoint: where it came from; None for a model built in memory, which then takes only
            drafters that need no vocabulary.
        threads: CPU threads of an int8 forward.
        context_length: tokens that prompt and answer may have together; None is the model's limit.
    """

    model: TargetModel
    checkpoint: Checkpoint | None = None
    threads: int | None = None
    context_length: int | None = None

    @property
    def served_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.context_length or self.model.config.max_position_embeddings

    @property
    def drafting_dtype(self) -> torch.dtype:
        """In which a drafter's own layers run: float32 beside an int8 target."""
        return torch.bfloat16 if self.model.dtype_name == "bfloat16" else torch.float32


class Drafter(ABC):
    """Source of next-token laws for the rows of one engine."""

    info: DrafterInfo

    @abstractmethod
    def admit(self, row: int) -> None:
        """Start a row with nothing observed. The row must not be in use."""

    @abstractmethod
    def observe(self, observations: Sequence[Observation]) -> None:
        """Take verified tokens; they follow those observed before in their row."""

    @abstractmethod
    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> Laws:
        """Laws below each row's root.

        Args:
            rows: R rows that have observed at least one token.
            roots: their newest tokens, not observed yet.
            depth: draft tokens that will be asked for on one path at most, 1 or more; a hint for
                drafters that give all depths at once, which may give fewer or more.

        Returns:
            Laws of the R rows in the same order.
        """

    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        """Laws below the given nodes, in the order of frontiers and of nodes within them. D is 1.

        All nodes of a call lie at one depth.

        Only where ``info.expansion`` is ``"forward"`` or ``"head"``.
        """
        raise NotImplementedError(f"{self.info.method} gives all its laws in propose")

    @abstractmethod
    def release(self, row: int) -> None:
        """Forget a row."""
