"""Draft model: a smaller causal language model of the same tokenizer (Leviathan et al., arXiv
2211.17192; Chen et al., 2302.01318).

The drafter keeps a cache of its own. A draft model needs nothing from the target but tokens, so
what it computed for draft tokens that were accepted stays valid and is committed, not recomputed::

    cache of a row:  observed ... | root, expanded nodes
                     committed    | pending, dropped or committed at the next observe

Tokens observed but not yet run (a prompt, or the last accepted token of a full acceptance, which
was never an input) wait until the next propose and share its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.drafters.pending import ancestor_mask
from forespeak.drafters.table import DRAFT_MODEL
from forespeak.errors import DrafterError, ModelError, OptionError
from forespeak.models.base import TargetModel
from forespeak.models.loading import load_checkpoint
from forespeak.models.opening import check_same_vocabulary, open_model, truncated
from forespeak.types import DenseLaws, Frontier, Observation, Segment, SpeculationConfig

_CHUNK = 512  # tokens of a prompt that go through the model at a time


@dataclass
class _Row:
    """What the cache of a row holds and lacks.

    ``numbers[i]`` is the builder's number of pending token i, ``tokens[i]`` the token and
    ``parents[i]`` the pending index of its parent (-1: the committed text).
    """

    unseen: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def depth(self, index: int) -> int:
        depth = 0
        while self.parents[index] >= 0:
            index, depth = self.parents[index], depth + 1
        return depth

    def clear(self) -> None:
        self.numbers, self.tokens, self.parents = [], [], []


class DraftModelDrafter(Drafter):
    """Drafts with another model.

    Args:
        model: the smaller model; same tokenizer as the target.
        target_vocab_size: V. A wider draft vocabulary is cut to it (the surplus is padding).
        num_rows: most rows at a time.
    """

    info = DRAFT_MODEL.info

    def __init__(self, model: TargetModel, *, target_vocab_size: int, num_rows: int = 1) -> None:
        self._model = model
        self._cache = model.new_cache(num_rows, _CHUNK)
        self._rows: dict[int, _Row] = {}
        width = min(model.config.vocab_size, target_vocab_size)
        self._width = width
        narrower = width < target_vocab_size
        self._token_ids = torch.arange(width, device=model.device) if narrower else None

    def admit(self, row: int) -> None:
        assert row not in self._rows, row
        self._rows[row] = _Row()

    def release(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._cache.release(row)

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            row = self._rows[observation.row]
            kept = _accepted(row, observation.tokens)
            self._cache.commit(observation.row, kept)
            row.unseen += observation.tokens[len(kept) :]
            row.clear()
            while len(row.unseen) > _CHUNK:
                self._run([(observation.row, row.unseen[:_CHUNK], None)], commit=True)
                del row.unseen[:_CHUNK]

    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> DenseLaws:
        items = []
        for number, root in zip(rows, roots, strict=True):
            row = self._rows[number]
            assert not row.tokens, "propose after propose without observe"
            items.append((number, [*row.unseen, root], None))
        logits = self._run(items, commit=False)
        for number, root in zip(rows, roots, strict=True):
            row = self._rows[number]
            if row.unseen:  # all but the root are verified text
                self._keep_all_but_root(number, len(row.unseen))
                row.unseen = []
            row.numbers, row.tokens, row.parents = [0], [root], [-1]
        return self._laws(logits)

    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        items = []
        for frontier in frontiers:
            row = self._rows[frontier.row]
            at = len(row.tokens)
            for number, token, parent in zip(
                frontier.nodes, frontier.tokens, frontier.parents, strict=True
            ):
                row.parents.append(row.numbers.index(parent))
                row.numbers.append(number)
                row.tokens.append(token)
            items.append((frontier.row, row.tokens[at:], ancestor_mask(row.parents, at)))
        return self._laws(self._run(items, commit=False, all_logits=True))

    def _keep_all_but_root(self, number: int, num_seen: int) -> None:
        """Commit the tokens before the root; the root stays pending."""
        self._cache.settle(number, num_seen)

    def _laws(self, logits: Tensor) -> DenseLaws:
        return DenseLaws(logits[:, None, : self._width], self._token_ids)

    def _run(
        self,
        items: Sequence[tuple[int, list[int], Tensor | None]],
        *,
        commit: bool,
        all_logits: bool = False,
    ) -> Tensor:
        """One forward over new tokens of some rows; logits of all of them or of each row's last."""
        tokens: list[int] = []
        positions: list[int] = []
        segments, ends = [], []
        for number, new, mask in items:
            segments.append(Segment(number, len(new), mask))
            positions += self._positions(number, len(new), mask)
            tokens += new
            ends.append(len(tokens) - 1)
        # The target's head may be wider, with padding ids that no tokenizer writes and that this
        # model has no embedding for; any other token is as good a guess there.
        ids = torch.tensor(tokens).clamp_max(self._model.config.vocab_size - 1)
        output = self._model.forward(
            ids, torch.tensor(positions), self._cache, segments,
            logits_at=None if all_logits else torch.tensor(ends),
        )  # fmt: skip
        if commit:
            for number, _, _ in items:
                self._cache.commit_all(number)
        return output.logits

    def _positions(self, number: int, n: int, mask: Tensor | None) -> list[int]:
        length, row = self._cache.lengths[number], self._rows[number]
        if mask is None:
            start = length + self._cache.pending[number]
            return list(range(start, start + n))
        first = len(row.tokens) - n
        return [length + row.depth(index) for index in range(first, len(row.tokens))]


def _accepted(row: _Row, tokens: Sequence[int]) -> list[int]:
    """Pending indices of the verified tokens that were run already: root, then child by child."""
    kept: list[int] = []
    for token in tokens:
        parent = kept[-1] if kept else -1
        match = next(
            (
                index
                for index, candidate in enumerate(row.tokens)
                if candidate == token and row.parents[index] == parent
            ),
            None,
        )
        if match is None:
            break
        kept.append(match)
    return kept


def open_drafter(
    config: SpeculationConfig, target: TargetParts, num_rows: int
) -> DraftModelDrafter:
    """The method's drafter; see ``loader.load_drafter``."""
    if config.drafter is None:
        raise OptionError(
            "Method draft_model needs a smaller model and none was given; name one with --drafter "
            "(folder, GGUF file or Hub id), or use --drafter truncate:N for the target's first N "
            "layers."
        )
    model = _open_draft_model(config.drafter, target)
    return DraftModelDrafter(
        model, target_vocab_size=target.model.config.vocab_size, num_rows=num_rows
    )


def _open_draft_model(name: str, target: TargetParts) -> TargetModel:
    if name.startswith("truncate:"):
        return truncated(target.model, name)
    checkpoint = load_checkpoint(name)
    if target.checkpoint is None:
        raise DrafterError(
            "The target was built in memory, so its vocabulary is not known; a draft model needs "
            "it. Load the target from a folder, or use truncate:N."
        )
    try:
        check_same_vocabulary(target.checkpoint, checkpoint)
    except ModelError as error:
        raise DrafterError(str(error)) from None
    dtype = target.model.dtype_name
    if checkpoint.family == "adapter" and dtype == "int8":
        dtype = "float32"
    return open_model(checkpoint, dtype=dtype, device=target.model.device, threads=target.threads)
