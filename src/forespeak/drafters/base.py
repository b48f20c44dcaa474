"""The drafter seam: a drafter gives next-token laws. It builds no tree and accepts nothing.

A round, seen from a drafter that serves several rows at once:

    propose(rows, roots)      laws of depth 1 (or of all depths at once) below each row's root
    expand(frontiers)         laws below further nodes; only where ``info.expansion`` is not none
    observe(observations)     root and accepted tokens with the target's true features (law 7)

``observe`` is also how a prompt arrives, chunk by chunk, before the first ``propose``. What was
expanded in a round and not observed at its end is forgotten.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forespeak.models.base import TargetModel
from forespeak.models.loading import Checkpoint
from forespeak.models.packed import PackedLinear
from forespeak.types import DenseLaws, DrafterInfo, Frontier, Laws, Observation

Product = Callable[[Tensor], Tensor]
"""x [n, inputs] to [n, outputs], a ``PackedLinear`` or an ``Int8Product``."""


@dataclass(frozen=True)
class TargetParts:
    """What a drafter may need of the target.

    Attributes:
        model: the target, loaded.
        checkpoint: where it came from; None for a model built in memory, which then takes only
            drafters that need no vocabulary.
        threads: CPU threads of an int8 forward.
        context_length: tokens that prompt and answer may have together; None is the model's limit.
        draft_dtype: in which drafters' products run; None is as the target's.
    """

    model: TargetModel
    checkpoint: Checkpoint | None = None
    threads: int | None = None
    context_length: int | None = None
    draft_dtype: str | None = None

    @property
    def served_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.context_length or self.model.config.max_position_embeddings

    @property
    def drafting_dtype(self) -> torch.dtype:
        """Of a drafter's states and caches: float32 where its products are int8."""
        name = self.draft_dtype or self.model.dtype_name
        return torch.bfloat16 if name == "bfloat16" else torch.float32

    @property
    def drafts_in_int8(self) -> bool:
        """Whether drafters' products are int8."""
        return (self.draft_dtype or self.model.dtype_name) == "int8"

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """A drafter's product with a fixed weight [outputs, inputs], in the drafting precision."""
        if self.drafts_in_int8:
            from forespeak.models.int8_product import Int8Product  # numba loads on first use

            return Int8Product(weight, bias, threads=self.threads or os.cpu_count() or 1)
        device, dtype = self.model.device, self.drafting_dtype
        moved = None if bias is None else bias.detach().to(device, dtype)
        return PackedLinear(weight.detach().to(device, dtype), moved)

    def prepare(self, network: nn.Module, *, kept: tuple[str, ...] = ()) -> None:
        """Put a drafter's network where and in which precision it drafts.

        Args:
            network: with its weights.
            kept: names of products whose weights the drafter reads.
        """
        network.to(device=self.model.device, dtype=self.drafting_dtype).requires_grad_(False)
        if self.drafts_in_int8:
            from forespeak.models.int8_product import quantize_products

            quantize_products(network, self.threads or os.cpu_count() or 1, kept=kept)


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
