"""From a method's name and settings to a drafter: the one place that knows which class is which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forespeak.drafters.base import Drafter
from forespeak.drafters.table import METHODS
from forespeak.errors import DrafterError, ModelError, OptionError, unknown_choice
from forespeak.models.base import TargetModel
from forespeak.models.loading import Checkpoint, load_checkpoint
from forespeak.models.opening import check_same_vocabulary, open_model, truncated
from forespeak.types import SpeculationConfig


@dataclass(frozen=True)
class TargetParts:
    """What a drafter may need of the target.

    Attributes:
        model: the target, loaded.
        checkpoint: where it came from; None for a model built in memory, which then takes only
            drafters that need no vocabulary.
        threads: CPU threads of an int8 forward.
    """

    model: TargetModel
    checkpoint: Checkpoint | None = None
    threads: int | None = None


def load_drafter(config: SpeculationConfig, target: TargetParts, *, num_rows: int = 1) -> Drafter:
    """The drafter of one method (not of a cascade).

    Args:
        config: every setting that the method takes is given (see ``table``).
        target: the model it drafts for.
        num_rows: rows it must serve at a time.

    Raises:
        OptionError: an unknown method, or a setting that is out of range.
        DrafterError: the drafter does not fit the target.
        ModelError: the drafter's model cannot be found or read.
    """
    if config.method not in _LOADERS:
        available = [name for name, entry in METHODS.items() if entry.available]
        raise OptionError(unknown_choice("Method", config.method, available))
    return _LOADERS[config.method](config, target, num_rows)


def _ngram(config: SpeculationConfig, target: TargetParts, num_rows: int) -> Drafter:
    from forespeak.drafters.ngram import NgramDrafter

    assert config.lookup_min is not None and config.lookup_max is not None
    return NgramDrafter(lookup_min=config.lookup_min, lookup_max=config.lookup_max)


def _draft_model(config: SpeculationConfig, target: TargetParts, num_rows: int) -> Drafter:
    from forespeak.drafters.draft_model import DraftModelDrafter

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


_LOADERS: Mapping[str, Callable[[SpeculationConfig, TargetParts, int], Drafter]] = {
    "ngram": _ngram,
    "draft_model": _draft_model,
}
