"""TextState: one text being written, with everything that decides how it goes on.

The controls, what they remember of the text, the grammar, the stop conditions, two independent
sources of randomness (law 8) and the log-probabilities asked for. It is told what a round yielded
and knows nothing of models or drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.models.tokenizer import IncrementalDecoder, Tokenizer
from forespeak.sampling import SamplingParams
from forespeak.spec.grammar import GrammarTokenizer, TreeMasks, compile_grammar
from forespeak.spec.logprobs import token_logprobs
from forespeak.spec.processors import LogitsPipeline, node_paths
from forespeak.spec.processors_words import bad_word_sequences
from forespeak.spec.stopping import KeptBlock, Stopper
from forespeak.spec.tree import CandidateTree, cut
from forespeak.spec.uniforms import SeededUniforms
from forespeak.spec.verify import Rule, follow
from forespeak.types import TokenLogprob, Verdict

_STREAMS = 2  # draft and verification


class _Pieces:
    """Text of single tokens, for the stopper; empty where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer)

    def push(self, token_id: int) -> str:
        return "" if self._decoder is None else self._decoder.push((token_id,))

    def flush(self) -> str:
        return "" if self._decoder is None else self._decoder.flush()


@dataclass(frozen=True)
class Vocabulary:
    """What a text needs of the target's vocabulary.

    Attributes:
        size: V, width of the logits.
        eos_ids: end-of-sequence ids.
        tokenizer: None for models of bare token ids, which then take no controls of text.
        grammar: made when a grammar is asked for the first time, see ``grammar_tokenizer``.
    """

    size: int
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    grammar: GrammarTokenizer | None = None


@dataclass(frozen=True)
class Plan:
    """A tree as it goes to the target, and how its rows go back to the whole tree.

    Attributes:
        tree: all nodes, as the rule must see them.
        verified: those that the target runs; forbidden ones are left out.
        kept: node of ``tree`` for each node of ``verified``.
        masks: what a grammar allows at each node of ``tree``; None without one.
    """

    tree: CandidateTree
    verified: CandidateTree
    kept: tuple[int, ...]
    masks: TreeMasks | None = None

    @property
    def num_forbidden(self) -> int:
        """Proposals that the grammar forbids; they are not verified."""
        return len(self.tree) - len(self.verified)


class TextState:
    """One text.

    Args:
        params: what was asked.
        prompt_ids: the prompt.
        vocabulary: of the target.

    Raises:
        OptionError: parameters that this vocabulary cannot honour.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocabulary: Vocabulary
    ) -> None:
        self.params = params
        self._size = vocabulary.size
        _refuse_without_tokenizer(params, vocabulary)
        self._pipeline = LogitsPipeline(
            params, prompt_ids, eos_ids=vocabulary.eos_ids, vocab_size=vocabulary.size,
            bad_word_ids=_bad_words(params, vocabulary),
        )  # fmt: skip
        self._grammar = None
        if params.constraint is not None:
            assert vocabulary.grammar is not None
            self._grammar = compile_grammar(params, vocabulary.grammar).start()
        self._pieces = _Pieces(vocabulary.tokenizer)
        self._stopper = Stopper(params, eos_ids=vocabulary.eos_ids, decoder=self._pieces)
        self.draft_uniforms, self._uniforms = _streams(params.seed)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: KeptBlock | None = None

    @property
    def num_left(self) -> int:
        """Tokens that the length limit still allows."""
        return self._stopper.num_left

    @property
    def shapes_drafts(self) -> bool:
        """Whether controls change laws, so that draft rows must go through them too (law 5)."""
        return not self._pipeline.is_identity

    def draft_process(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Processors on draft rows; paths begin below the root. [F, V] -> [F, V]"""
        allowed = None
        if self._grammar is not None:
            masks = [self._grammar.mask_after(path) for path in paths]
            allowed = torch.stack(masks).to(logits.device)
        return self._pipeline.apply(logits, paths, allowed=allowed, drafted=True)

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end the text wherever they come."""
        return self._stopper.ending_ids

    def uniforms(self, count: int) -> list[float]:
        """The next draws of its own verification randomness: one a token of plain decoding."""
        return [self._uniforms.next() for _ in range(count)]

    def write(self, tokens: Sequence[int]) -> KeptBlock:
        """Append tokens that were chosen elsewhere by the same parameters, up to the end."""
        assert self.params.logprobs is None and self._grammar is None
        return self._settle(self._stopper.push(tokens), tokens)

    def plan(self, tree: CandidateTree) -> Plan:
        """Leave out what the grammar forbids."""
        if self._grammar is None:
            return Plan(tree, tree, tuple(range(len(tree))))
        masks = self._grammar.follow(tree)
        keep = [node not in masks.forbidden for node in range(len(tree))]
        kept = tuple(node for node in range(len(tree)) if keep[node])
        return Plan(tree, cut(tree, keep), kept, masks)

    def decide(self, plan: Plan, logits: Tensor, rule: Rule) -> Verdict:
        """Which nodes survive and what follows, by the target's raw logits of ``plan.verified``."""
        tree = plan.tree
        if plan.num_forbidden:
            full = logits.new_zeros((len(tree), logits.shape[1]))
            full[list(plan.kept)] = logits
            logits = full
        allowed = None if plan.masks is None else plan.masks.allowed.to(logits.device)
        processed = self._pipeline.apply(logits, node_paths(tree), allowed=allowed)
        if rule.greedy:
            return follow(tree, self._pipeline.best(processed).tolist())
        return rule.verify(tree, self._pipeline.law(processed), self._uniforms)

    def extend(self, plan: Plan, verdict: Verdict, logits: Tensor) -> KeptBlock:
        """Append what a round yielded, up to the end of the text.

        Args:
            plan: of this round.
            verdict: the rule's.
            logits: [n, V] raw, of ``plan.verified``.
        """
        tokens = [*(plan.tree.tokens[node] for node in verdict.path[1:]), verdict.bonus]
        block = self._stopper.push(tokens)
        if self.params.logprobs is not None:
            self._record(plan, verdict, logits, tokens[: block.num_kept])
        return self._settle(block, tokens)

    def _settle(self, block: KeptBlock, tokens: Sequence[int]) -> KeptBlock:
        """What follows from a block that the stopper has read."""
        tokens = tokens[: block.num_kept]
        self._pipeline.advance(tokens)
        if self._grammar is not None and block.finish_reason is None:
            for token in tokens:
                self._grammar.advance(token)
        self.token_ids += tokens
        if block.finish_reason is not None:
            if not isinstance(block.stop_reason, str):  # the text was not cut at a stop string
                block = KeptBlock(
                    block.num_kept, block.text + self._pieces.flush(), block.finish_reason,
                    block.stop_reason,
                )  # fmt: skip
            self.end = block
        return block

    def _record(self, plan: Plan, verdict: Verdict, logits: Tensor, tokens: Sequence[int]) -> None:
        place = {node: at for at, node in enumerate(plan.kept)}
        nodes = verdict.path[: len(tokens)]
        rows = logits[[place[node] for node in nodes]]
        if self.params.logprobs_after_processors:
            paths = node_paths(plan.tree)
            allowed = None if plan.masks is None else plan.masks.allowed[list(nodes)]
            rows = self._pipeline.apply(rows, [paths[node] for node in nodes], allowed=allowed)
        assert self.params.logprobs is not None
        self.logprobs += token_logprobs(rows, tokens, self.params.logprobs)


def _refuse_without_tokenizer(params: SamplingParams, vocabulary: Vocabulary) -> None:
    needs = [name for name in ("stop", "bad_words") if getattr(params, name)]
    needs += [params.constraint] if params.constraint is not None else []
    if vocabulary.tokenizer is None and vocabulary.grammar is None and needs:
        raise OptionError(
            f"{', '.join(needs)} was given and the model has no tokenizer, so texts mean nothing "
            "to it; leave it out, or put the tokenizer files beside the weights."
        )


def _bad_words(params: SamplingParams, vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    tokenizer = vocabulary.tokenizer
    if tokenizer is None:
        return ()
    return bad_word_sequences(
        params.bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False)
    )


def _streams(seed: int) -> tuple[SeededUniforms, SeededUniforms]:
    """Draft and verification randomness of a text, independent of each other (law 8)."""
    master = torch.Generator().manual_seed(seed)
    seeds = torch.randint(0, 2**62, (_STREAMS,), generator=master).tolist()
    draft, verify = (SeededUniforms(torch.Generator().manual_seed(s)) for s in seeds)
    return draft, verify
