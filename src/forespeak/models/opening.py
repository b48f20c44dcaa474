"""From a checkpoint to a model that runs: which class, in which precision, on which device."""

from __future__ import annotations

import torch

from forespeak.errors import ModelError, OptionError, unknown_choice
from forespeak.models.base import TargetModel
from forespeak.models.loading import Checkpoint

DTYPES = ("float32", "bfloat16", "int8")


def pick_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` as a device that is there.

    Raises:
        OptionError: no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise OptionError(unknown_choice("Device", name, ("auto", "cpu", "cuda")))
    if kind == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            "Device cuda was asked for and torch sees none; allowed here: cpu. Use --device cpu, "
            "or install a CUDA build of torch on a machine with a GPU."
        )
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise OptionError(
            f"Device {name} was asked for; allowed: cuda:0 to cuda:{torch.cuda.device_count() - 1}."
        )
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, family: str) -> str:
    """A precision by name; ``auto`` is the fastest exact one of the device and kind of model.

    Raises:
        OptionError: unknown, or not possible there.
    """
    int8_fits = device.type == "cpu" and family == "decoder"
    if name == "auto":
        if device.type == "cuda":
            return "bfloat16"
        return "int8" if int8_fits else "float32"
    if name not in DTYPES:
        raise OptionError(unknown_choice("Precision", name, ("auto", *DTYPES)))
    if name == "int8" and not int8_fits:
        why = "runs on the CPU" if family == "decoder" else "is for the built-in families"
        raise OptionError(
            f"Precision int8 {why}; allowed here: float32, bfloat16. Choose one of these."
        )
    return name


def open_model(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: torch.device,
    threads: int | None = None,
    context_length: int | None = None,
) -> TargetModel:
    """Read the weights and build the model.

    Args:
        checkpoint: what to load.
        dtype: one of ``DTYPES``.
        device: where it runs.
        threads: CPU threads of an int8 forward; other precisions follow torch's own setting.
        context_length: tokens a row may hold; None takes the model's own limit.

    Raises:
        CheckpointError: the weights are damaged or do not fit the config.
        OptionError: a setting that this model cannot have.
    """
    if checkpoint.family == "adapter" or checkpoint.config is None:
        from forespeak.models.adapter import load_adapter

        return load_adapter(
            checkpoint.path, dtype=dtype, device=device, context_length=context_length
        )
    limit = checkpoint.config.max_position_embeddings
    if context_length is not None and context_length < 1:
        raise OptionError(f"context_length is {context_length}; allowed: 1 or more.")
    if dtype == "int8":
        from forespeak.models.int8_decoder import Int8Decoder

        return Int8Decoder(
            checkpoint.config, checkpoint.weights(), threads=threads, context_length=context_length
        )
    from forespeak.models.decoder import Decoder

    assert limit > 0
    return Decoder(
        checkpoint.config, checkpoint.weights(), dtype=getattr(torch, dtype), device=device,
        context_length=context_length,
    )  # fmt: skip


def truncated(model: TargetModel, text: str) -> TargetModel:
    """The model that ``truncate:N`` means.

    Raises:
        OptionError: N is not a number of layers that the model has to give.
        ModelError: this kind of model cannot be cut.
    """
    number = text.removeprefix("truncate:")
    half = max(1, model.config.num_layers // 2)
    if not number.isdigit():
        raise OptionError(
            f"Drafter {text!r} has no number of layers; allowed: truncate:N with N from 1 to "
            f"{model.config.num_layers - 1}, such as truncate:{half}."
        )
    return model.truncated(int(number))


def check_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Refuse a draft model whose token ids mean other tokens than the target's.

    Raises:
        ModelError: the vocabularies differ in content.
    """
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        missing = target if ours is None else draft
        raise ModelError(
            f"{missing.description} has no tokenizer, so its vocabulary cannot be compared; a "
            "draft model needs the target's. Put the tokenizer files beside the weights."
        )
    if ours.vocabulary_digest() == theirs.vocabulary_digest():
        return
    mine, other = ours.vocab(), theirs.vocab()
    tokens = mine.keys() | other.keys()
    differing = sum(mine.get(token) != other.get(token) for token in tokens)
    raise ModelError(
        f"The draft model {draft.description} has another vocabulary than the target "
        f"{target.description}: {differing} of {len(tokens)} tokens have another id or none. "
        "A draft model must have the target's tokenizer; choose one of the same family."
    )
