"""Logits processors: from a model's logits to the law that is drawn from, node by node.

The order, fixed and the same for target rows, draft rows, residual and bonus:

    1. masks        grammar, allowed tokens, bad words, minimum length
    2. logit bias
    3. penalties    repetition, then frequency and presence
    4. temperature
    5. min-p
    6. top-k
    7. top-p
    8. typical-p

Steps 1 to 7 are vLLM's order, so that a text made here can be compared with one made there.
typical-p, which vLLM does not have, comes last as in transformers. What can change the best token
(1 to 3) stands before the temperature; what follows is the limit of itself at temperature 0, where
the best token alone is left, so greedy decoding stops after step 3.

A node's history is prompt + committed output + its path, its own token included: the logits of a
node say what follows it. The root's token is committed output, so the root's path is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams
from forespeak.spec.best import best_tokens
from forespeak.spec.processors_counts import PenaltyCounts
from forespeak.spec.processors_filters import (
    NEGATIVE_INFINITY,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical_p,
    point_mass,
    temper,
)
from forespeak.spec.processors_words import BadWords
from forespeak.spec.tree import CandidateTree


def node_paths(tree: CandidateTree) -> list[tuple[int, ...]]:
    """Draft tokens from below the root to each node, its own included; the root's is empty."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


class LogitsPipeline:
    """The controls of one text, with what they must remember of it.

    Args:
        controls: what was asked.
        prompt_ids: the prompt; the repetition penalty looks at it.
        eos_ids: end-of-sequence ids of the model.
        vocab_size: V, width of the logits.
        bad_word_ids: token sequences of ``controls.bad_words`` (``processors_words``).

    Raises:
        OptionError: an id outside the vocabulary, or masks that leave no token at all.
    """

    def __init__(
        self,
        controls: SamplingParams,
        prompt_ids: Sequence[int] = (),
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        bad_word_ids: Iterable[Sequence[int]] = (),
    ) -> None:
        self._controls = controls
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._bad_words = BadWords(bad_word_ids)
        assert bool(controls.bad_words) <= self._bad_words.is_active, "bad words without ids"
        self._ends = sorted({*self._eos_ids, *controls.stop_token_ids})
        self._check_ids()
        self._forbidden = self._always_forbidden()
        self._bias_ids = torch.tensor(list(controls.logit_bias), dtype=torch.long)
        self._bias = torch.tensor(list(controls.logit_bias.values()), dtype=torch.float64)
        self._counts = PenaltyCounts(controls, prompt_ids)
        self._num_output = 0
        self._tail: list[int] = []  # newest output, as much as bad words look back

    @property
    def is_greedy(self) -> bool:
        """Whether the law is a point mass on the best token."""
        return self._controls.is_greedy

    @property
    def is_identity(self) -> bool:
        """Whether ``apply`` has nothing to do at any node, whatever the text becomes."""
        params = self._controls
        filters = (params.top_k, params.min_p, params.top_p - 1, params.typical_p - 1)
        shifts = self._forbidden is not None or len(self._bias_ids) or self._counts.is_active
        masks = self._bad_words.is_active or params.min_tokens or params.constraint is not None
        return not (shifts or masks) and (
            self.is_greedy or (params.temperature == 1 and not any(filters))
        )

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return self._num_output

    def advance(self, tokens: Sequence[int]) -> None:
        """Add tokens to the committed output: accepted ones and bonus, in order."""
        self._num_output += len(tokens)
        self._counts.advance(tokens)
        if self._bad_words.lookback:
            self._tail = [*self._tail, *tokens][-self._bad_words.lookback :]

    def apply(
        self,
        logits: Tensor,
        paths: Sequence[Sequence[int]],
        *,
        allowed: Tensor | None = None,
        drafted: bool = False,
    ) -> Tensor:
        """Logits after all processors. The argument is left as it is; without any work to do it
        is returned itself.

        Args:
            logits: [N, V] of target or drafter; computed in their dtype, below float32 in float32.
            paths: N paths, see ``node_paths``.
            allowed: [N, V] bool, what a grammar allows at each node; None allows all.
            drafted: rows of a drafter. It may know none of the tokens that are left; some token
                stands in for them then, and the target decides about it as about any other.

        Returns:
            [N, V]; greedy: after step 3. A row where nothing is left allows only end-of-sequence:
            controls that leave no token end the text.

        Raises:
            OptionError: such a row of the target, and the model has no end-of-sequence.
        """
        assert logits.shape == (len(paths), self._vocab_size), (logits.shape, len(paths))
        if not logits.dtype.is_floating_point or logits.element_size() < 4:
            logits = logits.float()
        logits = self._shift(logits, paths, allowed, drafted)
        return logits if self.is_greedy else self._filter(logits)

    def law(self, processed: Tensor) -> Tensor:
        """Next-token laws [N, V] of what ``apply`` returned."""
        return point_mass(processed) if self.is_greedy else processed.softmax(-1)

    def best(self, processed: Tensor) -> Tensor:
        """The best token of each row [N] of what ``apply`` returned; of equals the lowest id."""
        return best_tokens(processed)

    def _shift(
        self,
        logits: Tensor,
        paths: Sequence[Sequence[int]],
        allowed: Tensor | None,
        drafted: bool,
    ) -> Tensor:
        """Steps 1 to 3: what can change the best token."""
        cells = self._masked_cells(paths)
        has_masks = bool(cells[0]) or self._forbidden is not None or allowed is not None
        if not (has_masks or len(self._bias_ids) or self._counts.is_active):
            return logits
        if allowed is None:
            logits = logits.clone()
        else:
            logits = torch.where(allowed.to(logits.device), logits, NEGATIVE_INFINITY)
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden.to(logits.device), NEGATIVE_INFINITY)
        if cells[0]:
            logits[torch.tensor(cells[0]), torch.tensor(cells[1])] = NEGATIVE_INFINITY
        if has_masks:
            self._end_where_nothing_is_left_(logits, drafted)
        if len(self._bias_ids):
            bias = self._bias.to(logits).expand(len(logits), -1)  # [N, B]
            logits.index_add_(1, self._bias_ids.to(logits.device), bias)
        self._counts.apply_(logits, paths)
        return logits

    def _filter(self, logits: Tensor) -> Tensor:
        """Steps 4 to 8."""
        controls = self._controls
        logits = temper(logits, controls.temperature)
        if controls.min_p > 0:
            logits = keep_min_p(logits, controls.min_p)
        if controls.top_k > 0:
            logits = keep_top_k(logits, controls.top_k)
        if controls.top_p < 1:
            logits = keep_top_p(logits, controls.top_p)
        if controls.typical_p < 1:
            logits = keep_typical_p(logits, controls.typical_p)
        return logits

    def _masked_cells(self, paths: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Rows and tokens that the path forbids: minimum length and bad words."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, path in enumerate(paths):
            banned: list[int] = []
            if self._num_output + len(path) < self._controls.min_tokens:
                banned.extend(self._ends)
            if self._bad_words.lookback:
                banned.extend(self._bad_words.completing([*self._tail, *path]))
            rows.extend([row] * len(banned))
            tokens.extend(banned)
        return rows, tokens

    def _end_where_nothing_is_left_(self, logits: Tensor, drafted: bool) -> None:
        empty = logits.amax(-1) == NEGATIVE_INFINITY  # [N]
        if not bool(empty.any()):
            return
        if not self._eos_ids and not drafted:
            raise OptionError(
                "The controls forbid every token here and the model has no end-of-sequence token "
                "to end the text with; allow more tokens."
            )
        logits[empty, self._eos_ids[0] if self._eos_ids else 0] = 0

    def _always_forbidden(self) -> Tensor | None:
        """[V] bool of tokens that no path can write, None when there are none."""
        forbidden = torch.zeros(self._vocab_size, dtype=torch.bool)
        if self._controls.allowed_token_ids is not None:
            forbidden.fill_(True)
            forbidden[list(self._controls.allowed_token_ids)] = False
        forbidden[self._bad_words.single_ids] = True
        if not bool(forbidden.any()):
            return None
        at_start = forbidden.clone()
        if self._controls.min_tokens > 0:
            at_start[self._ends] = True
        if bool(at_start.all()):
            raise OptionError(
                "allowed_token_ids, bad_words and min_tokens together leave no first token; "
                "allowed: controls that leave at least one. Drop one of them."
            )
        return forbidden

    def _check_ids(self) -> None:
        controls = self._controls
        given = {
            "logit_bias": controls.logit_bias,
            "allowed_token_ids": controls.allowed_token_ids or (),
            "stop_token_ids": controls.stop_token_ids,
            "bad_words": self._bad_words.all_ids,
        }
        for name, ids in given.items():
            worst = max(ids, default=0)
            if worst >= self._vocab_size:
                raise OptionError(
                    f"{name} has token id {worst}; allowed: 0 to {self._vocab_size - 1}. Look the "
                    "id up in the model's tokenizer."
                )
        assert all(0 <= eos < self._vocab_size for eos in self._eos_ids), self._eos_ids
