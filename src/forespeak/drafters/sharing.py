"""What drafters take from their target: the embedding, and the head whole or in part.

V target vocabulary, Vd draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.drafters.base import Product, TargetParts
from forespeak.errors import DrafterError, ModelError
from forespeak.formats.drafters import (
    D2T,
    T2D,
    DrafterCheckpoint,
    check_fits,
    draft_token_ids,
    is_known_drafter,
    read_drafter,
)
from forespeak.models.base import TargetModel
from forespeak.models.sources import resolve
from forespeak.types import SpeculationConfig

_ROWS = 8192  # of an embedding or head that are compared at a time


class Embedding:
    """The target's embedding, or the drafter's own where that is another one.

    Many releases store a copy of the target's. A copy is not kept twice.

    Args:
        target: whose embedding.
        own: [V, H] of the drafter's; None takes the target's.
    """

    def __init__(self, target: TargetParts, own: Tensor | None = None) -> None:
        self._model, self._dtype = target.model, target.drafting_dtype
        self._own: Tensor | None = None
        if own is not None and not _is_copy(own, self._model.embed):
            self._own = own.to(target.model.device, self._dtype)

    @property
    def is_shared(self) -> bool:
        """Whether it is the target's."""
        return self._own is None

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [...] to [..., H] in the drafting dtype."""
        if self._own is None:
            return self._model.embed(tokens).to(self._dtype)
        return F.embedding(tokens.to(self._own.device), self._own)


class SharedHead:
    """The target's head for a drafter's states.

    Args:
        target: whose head.
        token_ids: [Vd] the part of the vocabulary to draft over, None for all of it.
    """

    def __init__(self, target: TargetParts, token_ids: Tensor | None = None) -> None:
        self._model = target.model
        self.token_ids = None if token_ids is None else token_ids.to(target.model.device)
        self._dtype = target.drafting_dtype
        self._part: Product | None = None
        if token_ids is not None:
            self._part = target.product(target.model.head_rows(token_ids).contiguous())

    def __call__(self, states: Tensor) -> Tensor:
        """states [..., H] to logits [..., Vd] float32."""
        if self._part is None:
            return self._model.head(states)
        flat = states.reshape(-1, states.shape[-1]).to(self._dtype)
        logits = self._part(flat).float()
        return logits.view(*states.shape[:-1], logits.shape[-1])


class OwnHead:
    """A head of the drafter's own.

    Args:
        target: in whose drafting precision it runs.
        weight: [Vd, H].
        token_ids: [Vd] target ids, None when Vd is the target's vocabulary.
    """

    def __init__(
        self, target: TargetParts, weight: Tensor, token_ids: Tensor | None = None
    ) -> None:
        self._product, self._dtype = target.product(weight), target.drafting_dtype
        self.token_ids = None if token_ids is None else token_ids.to(target.model.device)

    def __call__(self, states: Tensor) -> Tensor:
        """states [..., H] to logits [..., Vd] float32."""
        flat = states.reshape(-1, states.shape[-1]).to(self._dtype)
        logits = self._product(flat).float()
        return logits.view(*states.shape[:-1], logits.shape[-1])


Head = SharedHead | OwnHead


def shared_or_own_head(target: TargetParts, own: Tensor | None, token_ids: Tensor | None) -> Head:
    """The target's head where the drafter has none or a copy of it, else the drafter's.

    Args:
        target: whose head.
        own: [Vd, H] of the drafter's, or [V, H] of which it reads Vd rows; None takes the target's.
        token_ids: [Vd] target ids, None when Vd is the target's vocabulary.
    """
    if own is not None and token_ids is not None and len(own) != len(token_ids):
        own = own[token_ids]
    if own is None or _is_copy_of_head(target.model, own, token_ids):
        return SharedHead(target, token_ids)
    return OwnHead(target, own, token_ids)


def _is_copy_of_head(model: TargetModel, own: Tensor, token_ids: Tensor | None) -> bool:
    """Equal in what the target keeps of its head: 8 bits of a row's largest value, or 16."""
    if own.shape[1] != model.config.hidden_size:
        return False
    if token_ids is None and own.shape[0] != model.config.vocab_size:
        return False
    step = 1 / 127 if model.dtype_name == "int8" else 2**-8
    for start in range(0, own.shape[0], _ROWS):
        part = own[start : start + _ROWS].float()
        rows = torch.arange(start, start + len(part)) if token_ids is None else token_ids
        try:
            theirs = model.head_rows(rows if token_ids is None else rows[start : start + _ROWS])
        except ModelError:  # a head that is no plain product has no rows to compare
            return False
        allowed = part.abs().amax(1, keepdim=True) * step
        if bool(((theirs.cpu().float() - part).abs() > allowed).any()):
            return False
    return True


def _is_copy(own: Tensor, theirs: Callable[[Tensor], Tensor]) -> bool:
    """Equal in 16 bits: a release may be stored in fewer than its target.

    Args:
        own: [V, H].
        theirs: the target's rows [n, H] of tokens [n].
    """
    for start in range(0, own.shape[0], _ROWS):
        tokens = torch.arange(start, min(start + _ROWS, own.shape[0]))
        rows = theirs(tokens).cpu().float()
        if own.shape[1] != rows.shape[1]:
            return False
        if not torch.allclose(own[tokens].float(), rows, rtol=2**-7, atol=1e-6):
            return False
    return True


def map_of(tensors: dict[str, Tensor]) -> Tensor | None:
    """[Vd] target ids of a checkpoint's draft vocabulary, None when it is the target's; takes the
    map out of ``tensors``."""
    offsets = tensors.pop(D2T, None)
    tensors.pop(T2D, None)
    # No offset at all is the whole vocabulary: a part of it would have been refused.
    return None if offsets is None or not bool(offsets.any()) else draft_token_ids(offsets)


def open_checkpoint(
    config: SpeculationConfig, target: TargetParts, *families: str
) -> DrafterCheckpoint:
    """Find and translate the drafter that a user named, and check that it is for this target.

    Args:
        config: ``drafter`` names it; None looks in the target's own folder, where some methods'
            modules lie.
        target: what it must fit.
        families: modules of the method's dialects, such as ``forespeak.formats.medusa``.

    Raises:
        ModelError: no such folder.
        CheckpointError: damaged, or of a layout that the method does not know.
        DrafterError: it is for another target or of another method, or none was named and the
            target carries none.
    """
    if config.drafter is not None:
        folder = resolve(config.drafter).path
    elif target.checkpoint is not None and target.checkpoint.path.is_dir():
        folder = target.checkpoint.path
    else:
        raise DrafterError(
            f"Method {config.method} needs a checkpoint, and the target comes from no folder that "
            "could carry one; name a folder with --drafter."
        )
    if config.drafter is None and not is_known_drafter(folder, modules=families):
        raise DrafterError(
            f"Method {config.method} was given no drafter, and the target {folder} carries none of "
            "its modules; name a folder with --drafter, or take a target that carries them."
        )
    if not is_known_drafter(folder, modules=families) and is_known_drafter(folder):
        other = read_drafter(folder).method
        raise DrafterError(
            f"The drafter {folder} is of method {other}, and method {config.method} was asked for. "
            f"Take --method {other}, or name a drafter of {config.method}."
        )
    checkpoint = read_drafter(folder, modules=families)
    model = target.model.config
    check_fits(
        checkpoint, hidden_size=model.hidden_size, vocab_size=model.vocab_size,
        context_length=target.served_length,
    )  # fmt: skip
    return replace(checkpoint, target_vocab_size=model.vocab_size)


def to_dtype(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights in the dtype that they run in; index tables stay as they are."""
    return {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
