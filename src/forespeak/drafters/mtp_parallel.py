"""Parallel multi-token prediction: extra decoder layers beside the target's last one
(Gloeckle et al., arXiv 2404.19737).

The target is a trunk of L - 1 layers and a last layer, the first head. Each of the N further heads
is a decoder layer of its own on the same trunk states z [T, H], and all share the final norm and
the unembedding::

    z = trunk(x_0 .. x_t)                                    output of the target's layer L - 2
    law of x_{t+1}   = head(norm(target's last layer(z))_t)
    law of x_{t+1+i} = head(norm(heads[i - 1](z))_t)         i = 1 .. N

Heads attend over the z of all tokens before. When a round begins, the newest observed token is x_t
and the root is x_{t+1}, which the target has chosen; so heads[i - 1] is depth i of the round, and
one call gives all depths. The laws do not depend on the root or on one another.

Each head keeps keys and values of the observed tokens, and of these only: nothing of a tree goes
through the heads. Of all tokens but the newest a head computes keys and values alone, because its
outputs there would be laws of tokens that are known.

What differs from the paper: there the heads are trained with the trunk; here they may also be
trained beside a target that is left as it is. The paper writes the unembedding as one function; the
target's final norm is part of it. Which layer the heads read is said by ``trunk_layer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.drafters.layer_cache import LayerCache
from forespeak.drafters.sharing import SharedHead, map_of, open_checkpoint
from forespeak.drafters.starting import random_weights
from forespeak.drafters.table import MTP_PARALLEL
from forespeak.formats.drafter_files import Shape
from forespeak.formats.mtp_parallel import MtpParallelConfig, tensor_shapes
from forespeak.models.blocks import Attend, DecoderLayer, Rotation, blank, load_parameters
from forespeak.types import DenseLaws, Observation, Segment, SpeculationConfig

_CHUNK = 512  # tokens that go through the heads at a time
_FIRST_OUTPUT = 0.1  # what a fresh head adds to its input, relative to usual weights


class ParallelHeads(nn.Module):
    """The heads' layers. Parameters are NaN until they are loaded.

    Args:
        config: their sizes.
    """

    def __init__(self, config: MtpParallelConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(DecoderLayer(config.layer) for _ in range(config.num_heads))
        blank(self)

    def forward(self, trunk: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """All heads at all tokens.

        Args:
            trunk: [..., T, H] trunk states z.
            rotation: of the T positions.
            attend: head i is layer i of it.

        Returns:
            [..., T, N, H] states before the target's final norm.
        """
        outputs = [head(trunk, at, rotation, attend) for at, head in enumerate(self.heads)]
        return torch.stack(outputs, dim=-2)

    def newest(
        self, trunk: Tensor, ends: Tensor, count: int, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """The same at the last token of each of S segments, keys and values at all tokens.

        Args:
            trunk: [T, H] trunk states of the segments, one after another.
            ends: [S] int64, where the segments' last tokens stand in it.
            count: heads whose outputs are wanted, 1 to N; the others only take their keys.
            rotation: of the T positions.
            attend: as ``LayerCache.append_newest`` gives.

        Returns:
            [S, count, H].
        """
        last = rotation[0][ends], rotation[1][ends]
        outputs = []
        for at, module in enumerate(self.heads):
            head = cast(DecoderLayer, module)
            assert head.input_layernorm is not None
            normed = head.input_layernorm(trunk)
            keys, values = head.self_attn.keys_values(normed, rotation)
            if at >= count:
                attend(at, keys[:0], keys, values)
                continue
            queries = head.self_attn.queries(normed[ends], last)
            state = trunk[ends] + head.self_attn.o_proj(attend(at, queries, keys, values))
            outputs.append(state + head.mlp(head.post_attention_layernorm(state)))
        return torch.stack(outputs, dim=1)


@dataclass
class _Row:
    """Trunk states [n, H] of tokens that have not gone through the heads yet."""

    waiting: list[Tensor] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(states) for states in self.waiting)


class MtpParallelDrafter(Drafter):
    """Drafts with parallel heads.

    Args:
        heads: loaded, on the target's device and in the dtype they run in.
        target: whose norm and head they share.
        token_ids: [Vd] the draft vocabulary, None when it is the target's.
        num_rows: most rows at a time.
    """

    def __init__(
        self, heads: ParallelHeads, target: TargetParts, token_ids: Tensor | None, num_rows: int
    ) -> None:
        config = heads.config
        self.info = replace(
            MTP_PARALLEL.info, max_depth=config.num_heads, taps=(config.trunk_layer,)
        )
        self._heads, self._model = heads, target.model
        self._head = SharedHead(target, token_ids)
        self._dtype = target.drafting_dtype
        self._cache = LayerCache(
            config.stacked, num_rows, context_length=target.served_length,
            dtype=self._dtype, device=target.model.device,
        )  # fmt: skip
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int) -> None:
        assert row not in self._rows, row
        self._rows[row] = _Row()

    def release(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._cache.rows.release(row)

    @torch.inference_mode()
    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            assert observation.taps is not None, "the trunk state is a tap"
            row = self._rows[observation.row]
            row.waiting.append(observation.taps[:, 0].to(self._dtype))  # [n, H]
            while row.count > _CHUNK:
                self._run([observation.row], _CHUNK, 1)

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> DenseLaws:
        assert all(self._rows[row].count for row in rows), "propose needs an observation"
        states = self._run(rows, _CHUNK, min(depth, self._heads.config.num_heads))
        return DenseLaws(self._head(self._model.norm(states)), self._head.token_ids)

    def _run(self, rows: Sequence[int], most: int, count: int) -> Tensor:
        """Commit up to ``most`` waiting tokens of each row; [R, count, H] outputs at the last."""
        segments: list[Segment] = []
        taken: list[Tensor] = []
        positions: list[Tensor] = []
        for number in rows:
            row, start = self._rows[number], self._cache.rows.lengths[number]
            states = torch.cat(row.waiting)
            row.waiting = [states[most:]] if len(states) > most else []
            taken.append(states[:most])
            segments.append(Segment(number, len(taken[-1])))
            positions.append(torch.arange(start, start + len(taken[-1])))
        trunk, places = torch.cat(taken), torch.cat(positions)
        ends = torch.tensor([len(states) for states in taken]).cumsum(0) - 1
        outputs = self._heads.newest(
            trunk, ends.to(trunk.device), count, self._cache.rotation(places),
            self._cache.append_newest(segments, places),
        )  # fmt: skip
        for number in rows:
            self._cache.rows.commit_all(number)
        return outputs


def open_drafter(
    config: SpeculationConfig, target: TargetParts, num_rows: int
) -> MtpParallelDrafter:
    """The method's drafter; see ``loader.load_drafter``."""
    checkpoint = open_checkpoint(config, target, "forespeak.formats.mtp_parallel")
    checkpoint.config.check_target(target.model.config)
    tensors = checkpoint.tensors()
    token_ids = map_of(tensors)
    heads = ParallelHeads(checkpoint.config)
    load_parameters(heads, tensors, str(checkpoint.origin))
    target.prepare(heads)
    size = target.model.config.hidden_size
    target.model.norm(torch.zeros(1, size, device=target.model.device))  # refused now if it is
    return MtpParallelDrafter(heads, target, token_ids, num_rows)


def random_drafter(config: MtpParallelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of a fresh drafter: layers that add little to the trunk state yet, each its own."""

    def deviation(name: str, shape: Shape) -> float:
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        return float(shape[1] ** -0.5) * (_FIRST_OUTPUT if adds else 1.0)

    return random_weights(tensor_shapes(config), generator, deviation)
