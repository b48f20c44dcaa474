"""Medusa: extra heads on the target's last hidden state (arXiv 2401.10774).

Head k of K (from 0) reads the state h of the newest observed token, after the target's final norm,
and gives the law of the token k + 2 places after it. The target's own head has given the root, one
place after it, so head k is depth k + 1 of the round::

    x_0 = h [H]
    x_b = x_{b-1} + silu(W_b x_{b-1} + c_b)          b = 1 .. B, one block in all releases
    law = softmax(U x_B)                             U [Vd, H]

All heads read the same h, so one call gives all depths, and the law of a depth does not depend on
the draft tokens before it. Medusa-1 trains the heads alone, Medusa-2 with the target.

U is a matrix of each head, one of all heads, or the target's head (``output`` of the config).

What differs from the paper and the official code: the paper has no bias c and the code has; the
code takes B blocks that share weights where here each has its own (files of the code are read as
what they hold). The paper starts from W = 0 and U = the target's head, which makes every head say
what the target would say of the root's place; ``random_drafter`` starts from small W instead, so
that the heads of a fresh drafter differ from one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.drafters.sharing import Head, OwnHead, SharedHead, map_of, open_checkpoint
from forespeak.drafters.table import MEDUSA
from forespeak.formats.medusa import MedusaConfig, tensor_shapes
from forespeak.models.blocks import Linear, blank, load_parameters
from forespeak.types import DenseLaws, Observation, SpeculationConfig

_FIRST_WEIGHT = 0.1  # deviation of W times sqrt(H) in a fresh drafter: near the identity


class MedusaHead(nn.Module):
    """The residual blocks of one head, and its matrix of logits where it has its own."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            Linear(size, size, bias=config.bias) for _ in range(config.num_blocks)
        )
        own = config.output == "own"
        self.output = Linear(size, config.output_size, bias=False) if own else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., H]"""
        for block in self.blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """All heads. Parameters are NaN until they are loaded.

    Args:
        config: their sizes.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))
        shared = config.output == "shared"
        self.output = Linear(config.hidden_size, config.output_size, bias=False) if shared else None
        blank(self)

    def forward(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """What the matrices of logits read.

        Args:
            hidden: [..., H] the target's states after its final norm.
            count: heads to run, from the first; None runs all.

        Returns:
            [..., K, H].
        """
        return torch.stack([head(hidden) for head in self.heads[:count]], dim=-2)

    def output_weights(self) -> list[Tensor]:
        """[Vd, H] of each head or one for all; none where the target's head serves."""
        if self.output is not None:
            return [self.output.weight]
        heads = [cast(MedusaHead, head) for head in self.heads]
        return [head.output.weight for head in heads if head.output is not None]


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads.

    Args:
        heads: loaded, on the target's device and in the dtype they run in.
        outputs: makes logits: one of each head, or one of all.
        dtype: of the states that heads read.
    """

    def __init__(self, heads: MedusaHeads, outputs: Sequence[Head], dtype: torch.dtype) -> None:
        self.info = replace(MEDUSA.info, max_depth=heads.config.num_heads)
        assert len(outputs) in (1, heads.config.num_heads), len(outputs)
        self._heads, self._outputs = heads, tuple(outputs)
        self._dtype = dtype
        self._states: dict[int, Tensor | None] = {}  # [H] of the newest token of each row

    def admit(self, row: int) -> None:
        assert row not in self._states, row
        self._states[row] = None

    def release(self, row: int) -> None:
        self._states.pop(row, None)

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            assert observation.row in self._states, observation.row
            # A copy, or the whole round's states would live as long as this one.
            self._states[observation.row] = observation.hidden[-1].to(self._dtype, copy=True)

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> DenseLaws:
        found = [self._states[row] for row in rows]
        known = [state for state in found if state is not None]
        assert len(known) == len(rows), "propose needs an observation"
        states = self._heads(torch.stack(known), depth)  # [R, min(depth, K), H]
        if len(self._outputs) == 1:
            logits = self._outputs[0](states)
        else:
            parts = zip(self._outputs, states.unbind(1), strict=False)
            logits = torch.stack([output(state) for output, state in parts], dim=1)
        return DenseLaws(logits, self._outputs[0].token_ids)


def open_drafter(config: SpeculationConfig, target: TargetParts, num_rows: int) -> MedusaDrafter:
    """The method's drafter; see ``loader.load_drafter``.

    Without a named drafter the target's own folder is searched: a Medusa-2 model carries its heads.
    """
    checkpoint = open_checkpoint(config, target, "forespeak.formats.medusa")
    tensors = checkpoint.tensors()
    token_ids = map_of(tensors)
    heads = MedusaHeads(checkpoint.config)
    load_parameters(heads, tensors, str(checkpoint.origin))
    target.prepare(heads, kept=("output",))
    weights = heads.output_weights()
    outputs: list[Head] = [OwnHead(target, weight, token_ids) for weight in weights]
    outputs = outputs or [SharedHead(target, token_ids)]
    return MedusaDrafter(heads, outputs, target.drafting_dtype)


def random_drafter(config: MedusaConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of a fresh drafter: near the identity, biases zero.

    W is small and not zero as in the paper, because heads that are all the target's head draft one
    token again and again.
    """
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith(".bias"):
            tensors[name] = torch.zeros(shape)
        else:
            deviation = config.hidden_size**-0.5
            if "output" not in name:
                deviation *= _FIRST_WEIGHT
            tensors[name] = torch.randn(shape, generator=generator) * deviation
    return tensors
