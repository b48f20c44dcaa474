"""What the rest of the package knows of a target model: one forward, one cache.

Two implementations: our own decoder (``decoder.py``) and the adapter around any other causal
language model of transformers (``adapter.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forespeak.errors import ModelError, OptionError
from forespeak.models.config import ModelConfig
from forespeak.types import Segment, TargetOutput


class Cache(ABC):
    """Keys and values of R rows, each of its own length.

    A row holds ``lengths[row]`` committed tokens and, after a forward, ``pending[row]`` more that
    wait for a verdict. Slot = position for committed tokens::

        row:   0 ............ lengths-1 | lengths ........ lengths+pending-1
               committed (all visible)  | pending (seen through Segment.mask)

    ``forward`` appends to pending; ``commit`` keeps a path of it and drops the rest.
    """

    lengths: list[int]
    pending: list[int]

    @abstractmethod
    def commit(self, row: int, kept: Sequence[int]) -> None:
        """Make pending tokens ``kept`` (ascending indices into pending) committed; drop the rest.

        The gather goes through a temporary, because source and destination overlap (law 6).
        """

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Drop pending tokens and all committed ones from ``length`` on."""

    @abstractmethod
    def release(self, row: int) -> None:
        """Empty a row for the next user."""

    def settle(self, row: int, count: int) -> None:
        """Make the first ``count`` pending tokens committed and leave the others pending."""
        assert 0 <= count <= self.pending[row], (count, self.pending[row])
        self.lengths[row] += count
        self.pending[row] -= count

    def commit_all(self, row: int) -> None:
        """Commit every pending token, as after a chunk of prefill."""
        self.commit(row, range(self.pending[row]))


class TargetModel(ABC):
    """A causal language model that the engine can drive.

    Attributes:
        config: sizes and identity.
        device: where forwards run.
        dtype_name: ``float32``, ``bfloat16`` or ``int8``.
    """

    config: ModelConfig
    device: torch.device
    dtype_name: str

    @abstractmethod
    def new_cache(self, num_rows: int, capacity: int) -> Cache:
        """A cache of ``num_rows`` empty rows; it grows past ``capacity`` tokens a row by itself."""

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,  # [T] int64, the segments' tokens one after another
        positions: Tensor,  # [T] int64
        cache: Cache,
        segments: Sequence[Segment],
        *,
        logits_at: Tensor | None = None,  # [n] int64 indices into T; None means all
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """One forward over the new tokens of some rows; appends them to the cache as pending.

        A token sees all committed tokens of its row and those pending ones that its segment's mask
        shows. Rows do not see each other. A row appears in at most one segment.
        """

    def truncated(self, num_layers: int) -> TargetModel:
        """The model of the first layers with this one's own norm and head, weights shared.

        Raises:
            ModelError: this kind of model cannot be cut.
        """
        raise ModelError(
            f"A {self.config.model_type} model cannot be cut to its first layers; allowed: the "
            "built-in families. Name a smaller model as the drafter."
        )

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings, [..., H] in the compute dtype, for drafters that share them."""

    @abstractmethod
    def norm(self, states: Tensor) -> Tensor:
        """The final norm on states [..., H] before it, such as taps, for drafters that share it.

        Raises:
            ModelError: this kind of model has none that could be told apart.
        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] float32 of final hidden states [..., H], for drafters that share it."""

    @abstractmethod
    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the head's weight for some tokens [n], for drafters that draft over a part
        of the vocabulary.

        Raises:
            ModelError: this kind of model has no plain head.
        """


def first_layers_config(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The config of the model of the first layers.

    Raises:
        OptionError: not between 1 and the number of layers less one.
    """
    if not 1 <= num_layers < config.num_layers:
        raise OptionError(
            f"The first {num_layers} layers were asked for; allowed: 1 to {config.num_layers - 1} "
            f"of the target's {config.num_layers}."
        )
    kept = config.sliding_layers[:num_layers]
    return replace(config, num_layers=num_layers, sliding_layers=kept)
