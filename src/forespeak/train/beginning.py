"""What a run begins with: a fresh drafter of the recipe's sizes, or one that is there already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.formats.drafters import check_fits, read_drafter
from forespeak.train.batches import TextSet
from forespeak.train.objective import Start, TargetView, drafter_config, trainable
from forespeak.train.provenance import digest_tensors
from forespeak.train.recipe import Recipe
from forespeak.train.target import TrainingTarget
from forespeak.train.vocabulary import choose_words, count_tokens
from forespeak.train.widening import widened


def fresh_start(recipe: Recipe, target: TrainingTarget, data: TextSet) -> tuple[Any, Start]:
    """A config and weights of the recipe's sizes.

    Raises:
        OptionError: a field that the config lacks, or a value that cannot be.
        DrafterError: the target lacks what the drafter would read.
    """
    config = drafter_config(recipe.method, target.config, recipe.drafter_changes())
    generator = torch.Generator().manual_seed(recipe.seed)
    return config, Start(generator, token_ids=_draft_vocabulary(config, target, data))


def start_from(
    folder: Path,
    recipe: Recipe,
    target: TrainingTarget,
    data: TextSet,
    view: TargetView,
    draft_vocab_size: int | None = None,
) -> tuple[Any, Start]:
    """A drafter's own config and weights, to go on from.

    Args:
        folder: of the drafter.
        recipe: whose method it must be.
        target, view: that it is for.
        data: whose words count where its vocabulary grows.
        draft_vocab_size: words that it is to have, more than it has; None leaves them.

    Raises:
        OptionError: the method makes a model of its own, or the drafter is another method's.
        CheckpointError: the drafter cannot be read.
        DrafterError: it does not fit the target.
    """
    if trainable(recipe.method).writes:
        raise OptionError(
            f"{recipe.method} writes a model of its own, which is no drafter to start from; leave "
            "--start-from out, or give that model as --target."
        )
    found = read_drafter(folder)
    if found.method != recipe.method:
        raise OptionError(
            f"{folder} is a drafter of method {found.method} and the recipe trains "
            f"{recipe.method}; take the recipe {found.method}, or another drafter."
        )
    config, size = found.config, target.config
    check_fits(found, hidden_size=size.hidden_size, vocab_size=size.vocab_size, context_length=1)
    config.check_target(size)
    if getattr(config, "temperatures", ()):  # of the weights as they were
        config = replace(config, temperatures=())
    tensors = {name: _trained(tensor) for name, tensor in found.tensors().items()}
    if draft_vocab_size is not None:
        counts = _counts(target, data)
        config, tensors = widened(config, tensors, counts, draft_vocab_size, view.head)
    return config, Start(torch.Generator().manual_seed(recipe.seed), tensors=tensors)


def digest_start(folder: Path | None, draft_vocab_size: int | None = None) -> str:
    """What tells one drafter to start from, and what it grows to, from another; empty for a fresh
    start."""
    if folder is None:
        return ""
    grown = "" if draft_vocab_size is None else f" with {draft_vocab_size} words"
    return digest_tensors(read_drafter(folder).tensors()) + grown


def _trained(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _draft_vocabulary(config: Any, target: TrainingTarget, data: TextSet) -> Tensor | None:
    """The words that the target writes most, and those that end a text."""
    size = getattr(config, "draft_vocab_size", None)  # a draft model has the target's
    if size is None or size == target.config.vocab_size:
        return None
    counts = _counts(target, data)
    return choose_words(counts, size, always=target.config.eos_token_ids).token_ids


def _counts(target: TrainingTarget, data: TextSet) -> Tensor:
    """[V] how often each word is to be predicted."""
    texts = [(data.texts[number], data.spans[number]) for number in data.trained]
    return count_tokens(texts, target.config.vocab_size)
