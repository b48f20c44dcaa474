"""Sizes of Medusa heads, and the tensors that they have inside here.

K heads of B residual blocks, hidden size H, vocabulary V, draft vocabulary Vd (V when whole)::

    heads.{k}.blocks.{b}.weight [H, H]   .bias [H]
    heads.{k}.output.weight [Vd, H]      output "own"
    output.weight [Vd, H]                output "shared"; with "target" there is none
    d2t [Vd]                             reduced draft vocabulary only
"""

from __future__ import annotations

from dataclasses import dataclass

from forespeak.errors import OptionError, unknown_choice
from forespeak.formats.drafter_files import Shape
from forespeak.formats.drafters import D2T
from forespeak.formats.fields import MOST_PARTS
from forespeak.models.config import ModelConfig

OUTPUTS = ("own", "shared", "target")
"""What makes a head's logits: a matrix of its own, one for all heads, or the target's head."""


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Sizes of Medusa heads.

    Attributes:
        hidden_size: H of the target.
        vocab_size: V of the target; None where the checkpoint does not say.
        num_heads: K, draft tokens of a round.
        num_blocks: B, residual blocks of a head.
        bias: the blocks have a bias, as in the official code; in the paper they have none.
        output: one of ``OUTPUTS``.
        draft_vocab_size: Vd of a reduced draft vocabulary, None for the whole.
    """

    hidden_size: int
    vocab_size: int | None
    num_heads: int = 4
    num_blocks: int = 1
    bias: bool = True
    output: str = "target"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise OptionError(unknown_choice("Output of Medusa heads", self.output, OUTPUTS))
        for name in ("num_heads", "num_blocks"):
            if not 1 <= getattr(self, name) <= MOST_PARTS:
                raise OptionError(
                    f"{name} is {getattr(self, name)}; allowed: 1 or more, up to {MOST_PARTS}."
                )

    @property
    def max_positions(self) -> int | None:
        """The heads know no positions."""
        return None

    @property
    def context_values(self) -> int:
        """The heads keep no cache."""
        return 0

    def facts(self) -> dict[str, str]:
        """For people."""
        outputs = {
            "own": "a matrix of each head",
            "shared": "one matrix of all heads",
            "target": "the target's head",
        }
        facts = {
            "draft tokens a round": f"up to {self.num_heads}",
            "residual blocks a head": str(self.num_blocks),
            "logits": outputs[self.output],
            "reads": "the target's last hidden state, after the final norm",
        }
        if self.draft_vocab_size is not None:
            facts["draft vocabulary"] = f"{self.draft_vocab_size} tokens"
        return facts

    def check_target(self, target: ModelConfig) -> None:
        """Every target has what the heads read."""

    @property
    def output_size(self) -> int:
        """Vd: rows of a matrix of logits."""
        size = self.draft_vocab_size or self.vocab_size
        assert size is not None, "heads with matrices of their own say how many rows they have"
        return size

    @classmethod
    def for_target(cls, target: ModelConfig) -> MedusaConfig:
        """Four heads of one block that share the target's head: K * H * (H + 1) weights."""
        return cls(hidden_size=target.hidden_size, vocab_size=target.vocab_size)


def tensor_shapes(config: MedusaConfig) -> dict[str, Shape]:
    """Internal names and shapes of all parameters."""
    hidden, shapes = config.hidden_size, dict[str, Shape]()
    for head in range(config.num_heads):
        for block in range(config.num_blocks):
            shapes[f"heads.{head}.blocks.{block}.weight"] = (hidden, hidden)
            if config.bias:
                shapes[f"heads.{head}.blocks.{block}.bias"] = (hidden,)
        if config.output == "own":
            shapes[f"heads.{head}.output.weight"] = (config.output_size, hidden)
    if config.output == "shared":
        shapes["output.weight"] = (config.output_size, hidden)
    return shapes


def stored_shapes(config: MedusaConfig) -> dict[str, Shape]:
    """All that a checkpoint holds: the parameters, and the draft vocabulary where it is reduced."""
    size = config.draft_vocab_size
    return ({} if size is None else {D2T: (size,)}) | tensor_shapes(config)
