"""Values that cross folders. Importing this file does not import torch.

Shape letters used in the whole package:
    R rows (sequences)   T tokens of one forward over all rows   N nodes of one tree, root included
    D draft depth        V vocabulary   H hidden size            K tapped layers
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from forespeak.sampling import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

Batching = Literal["auto", "rows", "lockstep"]
"""How texts are written many at a time: ``rows`` is the engine's continuous batching, ``lockstep``
the plain one whose decisions stay on the device; ``auto`` takes lockstep on CUDA."""

FinishReason = Literal["stop", "length"]
Expansion = Literal["none", "head", "forward"]


@dataclass(frozen=True, kw_only=True)
class DrafterInfo:
    """What a drafter says of itself, readable before any weight is loaded.

    Which builders fit is computed from this, never from a method's name.

    Attributes:
        method: the method's name on the command line.
        expansion: ``none`` when one call of ``propose`` gives all depths (n-gram, parallel heads);
            ``forward`` when each further depth takes a call of ``expand``; ``head`` when it does
            and the call runs a small head and no layers, so that it costs little.
        point_mass: the laws put all mass on one token, so there is nothing to branch on.
        max_depth: draft tokens a round can hold on one path; None when any number.
        taps: target layers whose outputs it reads: 0-based decoder layer ids, output of that layer
            before the final norm.
        needs_hidden: reads the target's final hidden state (after the final norm).
        trained: needs a checkpoint of its own.
    """

    method: str
    expansion: Expansion
    point_mass: bool = False
    max_depth: int | None = None
    taps: tuple[int, ...] = ()
    needs_hidden: bool = False
    trained: bool = True


@dataclass(frozen=True)
class Segment:
    """The new tokens of one cache row in a forward.

    Attributes:
        row: row of the KV cache.
        num_tokens: how many of the flattened tokens belong to it, n.
        mask: [n, m] bool, m = pending tokens of the row counting these; ``mask[i, j]`` says whether
            new token i sees pending token j. Committed tokens are always seen. None means causal.
    """

    row: int
    num_tokens: int
    mask: Tensor | None = None


@dataclass(frozen=True)
class TargetOutput:
    """What one forward of a target returns.

    Attributes:
        logits: [n, V] float32, one row for each asked token, in the order asked.
        hidden: [T, H] state that the head reads (after the final norm).
        taps: [T, K, H] outputs of the asked layers before the final norm, None when none asked.
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What a rule decided about one tree.

    Attributes:
        path: node indices from the root (0) to the last accepted node.
        bonus: the token that the target adds after that node.
    """

    path: tuple[int, ...]
    bonus: int

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, bonus not included."""
        return len(self.path) - 1


@dataclass
class RoundStats:
    """Sums over the rounds of one text. Times in seconds.

    ``num_tokens`` counts what the user got from decode rounds: accepted tokens plus bonus, cut at
    the end of the text; the token that prefill yields belongs to no round. ``draft_s`` is the time
    in the drafter, ``verify_s`` in the target's forward, ``other_s`` everything outside the two:
    tree building, decisions, commits, bookkeeping. ``num_drafted`` are the
    draft tokens that were verified; ``num_forbidden`` those that a grammar ruled out before.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_forbidden: int = 0
    num_accepted: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    round_lengths: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round yields, bonus included; None before the first round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed draft tokens, bonus not included; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def decode_s(self) -> float:
        """Seconds of all rounds, prefill not included."""
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True)
class TokenLogprob:
    """One written token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the best tokens, best first, of equals the lower id
            first; impossible tokens are left out.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """One finished text.

    Attributes:
        text: cut before a stop string, special tokens left out.
        token_ids: every token the user gets, end-of-sequence included.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence and
            the length limit.
        logprobs: one for each token, when asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: RoundStats
    time_to_first_token_s: float
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class DenseLaws:
    """Next-token laws of a drafter as logits.

    Attributes:
        logits: [F, D, Vd] float32. F frontier nodes (or rows); D depths at once, 1 for drafters
            that go step by step, whose laws for depth d > 1 need ``expand``.
        token_ids: [Vd] target id of each draft id, None when the vocabularies are the same.
        confidences: [F, D] the drafter's own estimate that a token drawn from the law will be
            accepted, given that those before it were; a function of the token's ancestors and never
            of the token itself (law 3). None where it makes none.
    """

    logits: Tensor
    token_ids: Tensor | None = None
    confidences: Tensor | None = None


@dataclass(frozen=True)
class PointLaws:
    """Laws with all mass on one token: for each row the tokens at depth 1, 2, ...; may be empty."""

    tokens: tuple[tuple[int, ...], ...]


Laws = DenseLaws | PointLaws


@dataclass(frozen=True)
class Frontier:
    """Tree nodes of one row whose children are wanted.

    Node numbers are the builder's: 0 is the root, a parent's number is smaller than its child's.
    Between two calls of ``propose`` a number means one node of that row.

    Attributes:
        row: the engine's row.
        nodes: their numbers.
        tokens: their tokens.
        parents: the numbers of their parents, each expanded before or 0.
    """

    row: int
    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True)
class Observation:
    """Tokens of one row that are in the target's cache now, with what the target made of them.

    Attributes:
        row: the engine's row.
        tokens: their ids, in order, following those observed before.
        hidden: [n, H] the target's final hidden states, after the final norm.
        taps: [n, K, H] outputs of the tapped layers; None when the drafter has no taps.
    """

    row: int
    tokens: tuple[int, ...]
    hidden: Tensor
    taps: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Which method drafts and how much. None means the method's own default (``methods``).

    Attributes:
        method: a name or several joined with ``+`` (a cascade: the first that has a proposal), each
            as NAME, NAME:SIZE, NAME:BUILDER or NAME:BUILDER:SIZE (see ``drafters.naming``).
        drafter: path, name or ``truncate:N`` of the drafter's model, where the method takes one.
        builder: ``chain``, ``static_tree``, ``dynamic_tree`` or ``ddtree``.
        num_speculative_tokens: draft tokens of a chain, bonus not counted.
        node_budget: draft nodes of a tree, root not counted.
        tree_depth: longest path of a tree, root not counted.
        tree_top_k: children considered below a node.
        tree_shape: a static tree by name (``eagle``) or a JSON file of its paths, such as
            [[0], [1], [0, 0]]: ranks of the children from the root down. It sets budget and depth.
        confidence_threshold: a chain ends before the first draft token whose estimated chance of
            acceptance is below this, for drafters that estimate it; 0 verifies all.
        recursion_state: what a chained module hands on: ``normed`` or ``raw``, the state after or
            before its last norm, where engines disagree.
        draft_dtype: in which a drafter's products run: ``float32``, ``bfloat16`` or ``int8``; None
            is as the target's.
        lookup_min, lookup_max: shortest and longest n-gram that prompt lookup matches.
        draft_sampling: ``greedy`` (the best draft tokens) or ``probabilistic`` (drawn from q).
        rule: which rule verifies at temperatures above 0; None takes the best lossless one.
    """

    method: str = "autoregressive"
    drafter: str | None = None
    builder: str | None = None
    num_speculative_tokens: int | None = None
    node_budget: int | None = None
    tree_depth: int | None = None
    tree_top_k: int | None = None
    tree_shape: str | None = None
    confidence_threshold: float | None = None
    recursion_state: str | None = None
    draft_dtype: str | None = None
    lookup_min: int | None = None
    lookup_max: int | None = None
    draft_sampling: str | None = None
    rule: str | None = None
