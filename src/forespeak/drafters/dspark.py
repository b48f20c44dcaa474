"""DSpark: DFlash's block with a sequential head and a confidence head (arXiv 2607.05147).

The block (see ``dflash``) runs once a round and gives h_k and U_k = head(h_k) for each depth k. The
law of depth k is corrected by the token before it, x_{k-1} (x_0 is the root), by a small head::

    e        = W1[x_{k-1}]                                                    [r]
    vanilla  b = W2 e
    gated    b = W2 (sigmoid(G [h_k ; e]) * e)
    rnn      g, c, o = J [s_{k-1} ; e ; h_k]    s_k = sigmoid(g) s_{k-1} + (1 - sigmoid(g)) tanh(c)
             b = W2 tanh(o)                     s_0 = 0
    law      softmax(U_k + b)
    chance of acceptance, given that the drafts before were   sigmoid(w [h_k ; e] / T_k)

So a law depends on its parent alone (with ``rnn`` on the path, through s), and so does the
estimate, never on the token drawn from the law: it may end a chain, and the text stays the target's
(law 3). The state s is kept for each node, so that the head works in trees, where the paper has
chains.

What differs from the official code: U of all depths comes out of one product; the estimate's two
halves are added instead of joined, the tokens' half once for the whole vocabulary; T_k, which the
code lacks, is read where a file gives it (the paper's sequential temperature scaling). Where the
block fills its own places (``sample_from_anchor`` false) depth k is row k, and the state of an rnn
head starts from what it makes of row 0, as in the speculators package.

R rows, F nodes of a call, D depths, H hidden size, r rank, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forespeak.drafters.base import TargetParts
from forespeak.drafters.dflash import (
    BlockParts,
    DFlashDrafter,
    DFlashNetwork,
    block_info,
    block_parts,
    open_block_checkpoint,
    plain_drafter,
)
from forespeak.drafters.dflash import random_drafter as random_drafter
from forespeak.errors import DrafterError
from forespeak.formats.dflash_config import DFlashConfig
from forespeak.formats.drafters import DrafterCheckpoint
from forespeak.models.blocks import Linear, blank, load_parameters
from forespeak.models.decoder import linear
from forespeak.types import DenseLaws, DrafterInfo, Frontier, SpeculationConfig

# --- network --------------------------------------------------------------------------------------


class MarkovHead(nn.Module):
    """The sequential head.

    Args:
        config: rank above 0, and the type.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind, self.rank = config.markov_head_type, rank
        unset = torch.empty(config.vocab_size, rank)  # nn.Embedding would draw random numbers
        self.markov_w1 = nn.Embedding(config.vocab_size, rank, _weight=unset)
        self.markov_w2 = Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = Linear(2 * rank + hidden, 3 * rank)

    def step(
        self, embedded: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What goes into W2 [..., r], and the state after it [..., r] (rnn alone has one).

        Args:
            embedded: e [..., r] of the tokens before.
            hidden: h [..., H] of the depth.
            state: [..., r] of the parents.
        """
        if self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1)))
            return gate * embedded, None
        assert state is not None
        joined = self.joint_proj(torch.cat([state, embedded, hidden], -1))
        gate, candidate, out = joined.chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Corrections [..., B, Vd] of whole blocks, the tokens before each row given.

        Args:
            previous: [..., B] int64.
            hidden: [..., B, H].
        """
        bias: Tensor = self.markov_w2(self.inner(previous, hidden))
        return bias

    def inner(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """What goes into W2 [..., B, r]; see :meth:`forward`."""
        embedded: Tensor = self.markov_w1(previous)
        if self.kind != "rnn":
            return self.step(embedded, hidden, None)[0]
        state: Tensor | None = embedded.new_zeros(embedded[..., 0, :].shape)
        steps = []
        for row in range(previous.shape[-1]):
            out, state = self.step(embedded[..., row, :], hidden[..., row, :], state)
            steps.append(out)
        return torch.stack(steps, -2)


class ConfidenceHead(nn.Module):
    """Logits of the chance of acceptance."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank = config.markov_rank if config.confidence_with_markov else 0
        self.proj = Linear(config.hidden_size + rank, 1, bias=config.confidence_bias)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[...] of states [..., H] and, where it reads them, e [..., r] of the tokens before."""
        inputs = hidden if embedded is None else torch.cat([hidden, embedded], -1)
        logits: Tensor = self.proj(inputs)
        return logits.squeeze(-1)


class DSparkNetwork(DFlashNetwork):
    """The block and its heads; ``forward`` is the block's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        blank(self)

    def correct(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Laws' logits [..., B, Vd] of U [..., B, Vd], h [..., B, H] and the tokens before."""
        if self.markov_head is None:
            return logits
        corrected: Tensor = logits + self.markov_head(previous, hidden)
        return corrected

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """[..., B], not calibrated; None without that head."""
        if self.confidence_head is None:
            return None
        embedded = None
        if self.config.confidence_with_markov:
            assert self.markov_head is not None
            embedded = self.markov_head.markov_w1(previous)
        logits: Tensor = self.confidence_head(hidden, embedded)
        return logits


# --- drafter --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Round:
    """What the block gave to R rows at once: h [R, D, H], U [R, D, Vd], and the estimates' half
    [R, D] that the tokens do not change."""

    hidden: Tensor
    logits: Tensor
    estimates: Tensor | None


@dataclass
class _Row:
    """A row's place in a round; depths of its expanded nodes, and the states [r] after them."""

    round: _Round
    slot: int
    depths: dict[int, int] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)


class DSparkDrafter(DFlashDrafter):
    """Drafts a block at a time and corrects its laws node by node.

    Args:
        info: ``head`` as expansion where there is a sequential head, else ``none``.
        network: loaded; its weights are copied.
        target, parts, num_rows: as for :class:`DFlashDrafter`.
    """

    def __init__(
        self,
        info: DrafterInfo,
        network: DSparkNetwork,
        target: TargetParts,
        parts: BlockParts,
        num_rows: int,
    ) -> None:
        super().__init__(
            info, network, target, embedding=parts.embedding, head=parts.head, num_rows=num_rows
        )
        self._rounds: dict[int, _Row] = {}
        self._markov = network.markov_head
        if self._markov is not None:
            self._markov.to(self._device, self._dtype).requires_grad_(False)
        self._estimates_h: Tensor | None = None  # [1, H]
        self._estimates_e: Tensor | None = None  # [V]
        self._bias: Tensor | None = None  # [1]
        if network.confidence_head is not None:
            self._split_estimates(network.confidence_head)
        given = self._config.temperatures or (1.0,) * self._config.max_depth
        self._temperatures = torch.tensor(given, device=self._device)

    def _split_estimates(self, head: ConfidenceHead) -> None:
        """Into the half that reads h, and the other half's number for every token."""
        weight = head.proj.weight.detach().to(self._device, self._dtype)
        hidden = self._config.hidden_size
        self._estimates_h = weight[:, :hidden]
        if head.proj.bias is not None:
            self._bias = head.proj.bias.detach().to(self._device, self._dtype)
        if self._markov is not None and self._config.confidence_with_markov:
            self._estimates_e = (self._markov.markov_w1.weight @ weight[0, hidden:]).float()

    def release(self, row: int) -> None:
        super().release(row)
        self._rounds.pop(row, None)

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> DenseLaws:
        markov, shift = self._markov, 0 if self._config.sample_from_anchor else 1
        lead = shift if markov is not None and markov.kind == "rnn" else 0  # row 0 starts its state
        states = self._states(rows, roots, shift - lead, shift + depth)
        hidden = states[:, lead:]  # [R, D, H]
        logits, estimates = self._head(hidden), None
        if self._estimates_h is not None:
            estimates = F.linear(hidden, self._estimates_h, self._bias)[..., 0].float()  # [R, D]
        if markov is None:
            chances = None
            if estimates is not None:
                chances = torch.sigmoid(estimates / self._temperatures[: hidden.shape[1]])
            return DenseLaws(logits, self._head.token_ids, chances)
        batch = _Round(hidden, logits, estimates)
        for slot, row in enumerate(rows):
            self._rounds[row] = _Row(batch, slot)
        tokens = torch.tensor(roots, device=self._device)
        before = None
        if markov.kind == "rnn":
            before = hidden.new_zeros(len(rows), markov.rank)
            if lead:
                _, before = markov.step(self._embed(tokens), states[:, 0], before)
        return self._laws(tokens, [(row, 0) for row in rows], 0, before)

    @torch.inference_mode()
    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        tokens: list[int] = []
        nodes: list[tuple[int, int]] = []
        parents: list[tuple[int, int]] = []
        for frontier in frontiers:
            tokens += frontier.tokens
            nodes += [(frontier.row, node) for node in frontier.nodes]
            parents += [(frontier.row, parent) for parent in frontier.parents]
        row, parent = parents[0]
        depth = self._rounds[row].depths[parent] + 1
        states = None
        if self._markov is not None and self._markov.kind == "rnn":
            states = torch.stack([self._rounds[row].states[parent] for row, parent in parents])
        return self._laws(torch.tensor(tokens, device=self._device), nodes, depth, states)

    def _laws(
        self, tokens: Tensor, nodes: Sequence[tuple[int, int]], depth: int, states: Tensor | None
    ) -> DenseLaws:
        """Laws below F nodes of one depth.

        Args:
            tokens: [F] theirs.
            nodes: row and number of each.
            depth: theirs, 0 for roots.
            states: [F, r] after their parents.
        """
        assert self._markov is not None
        known = [self._rounds[row] for row, _ in nodes]
        inner, after = self._markov.step(
            self._embed(tokens), _picked([row.round.hidden for row in known], known, depth), states
        )
        base = _picked([row.round.logits for row in known], known, depth)  # [F, Vd]
        logits = base + linear(inner, self._markov.markov_w2.weight)
        for at, (row, (_, number)) in enumerate(zip(known, nodes, strict=True)):
            row.depths[number] = depth
            if after is not None:
                row.states[number] = after[at]
        chances = self._chances(known, tokens, depth)
        return DenseLaws(logits[:, None].float(), self._head.token_ids, chances)

    def _chances(self, known: Sequence[_Row], tokens: Tensor, depth: int) -> Tensor | None:
        """[F, 1] of the draft tokens below nodes, of F of which tokens [F] are given."""
        halves = [row.round.estimates for row in known if row.round.estimates is not None]
        if not halves:
            return None
        estimates = _picked(halves, known, depth)
        if self._estimates_e is not None:
            estimates = estimates + self._estimates_e[tokens]
        return torch.sigmoid(estimates / self._temperatures[depth])[:, None]

    def _embed(self, tokens: Tensor) -> Tensor:
        """e [F, r]"""
        assert self._markov is not None
        return F.embedding(tokens, self._markov.markov_w1.weight)


def _picked(parts: Sequence[Tensor], rows: Sequence[_Row], depth: int) -> Tensor:
    """[F, ...] of each node's row at a depth, from what rounds hold for all rows: [R, D, ...]."""
    first = parts[0]
    if len(parts) == 1 or all(row is rows[0] for row in rows):  # one row: nothing to copy
        return first[rows[0].slot, depth].expand(len(parts), *first.shape[2:])
    if all(part is first for part in parts):
        return first[[row.slot for row in rows], depth]
    return torch.stack([part[row.slot, depth] for part, row in zip(parts, rows, strict=True)])


# --- opening --------------------------------------------------------------------------------------


def open_drafter(config: SpeculationConfig, target: TargetParts, num_rows: int) -> DFlashDrafter:
    """The method's drafter; a DFlash checkpoint is one without heads.

    Raises:
        DrafterError: a confidence threshold was asked for and there is no confidence head.
    """
    checkpoint = open_block_checkpoint(config, target)
    if config.confidence_threshold and not checkpoint.config.confidence_head:
        raise DrafterError(
            f"confidence_threshold is {config.confidence_threshold} and the drafter "
            f"{checkpoint.origin} has no confidence head; allowed: 0. Leave it out or choose a "
            "drafter with such a head."
        )
    return _drafter(config.method, checkpoint, target, num_rows)


def open_either(config: SpeculationConfig, target: TargetParts, num_rows: int) -> DFlashDrafter:
    """For trees: marginals of a DFlash drafter, or conditional laws of a DSpark one."""
    return _drafter(config.method, open_block_checkpoint(config, target), target, num_rows)


def _drafter(
    method: str, checkpoint: DrafterCheckpoint, target: TargetParts, num_rows: int
) -> DFlashDrafter:
    config: DFlashConfig = checkpoint.config
    if not config.has_heads:
        return plain_drafter(method, checkpoint, target, num_rows)
    network, parts = DSparkNetwork(config), block_parts(checkpoint, target)
    load_parameters(network, parts.tensors, str(checkpoint.origin))
    info = block_info(method, config)
    if config.markov_rank:
        info = replace(info, expansion="head")
    return DSparkDrafter(info, network, target, parts, num_rows)
