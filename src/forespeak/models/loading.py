"""From a name to everything that a model is built of: config, weights, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from forespeak.errors import CheckpointError
from forespeak.formats.carried import foreign_tensors
from forespeak.formats.gguf_config import hf_values
from forespeak.formats.gguf_file import GgufFile, iter_gguf_weights, read_gguf
from forespeak.formats.weights import iter_weights, read_json_object, weight_files
from forespeak.models.config import OUR_FAMILIES, ModelConfig, weight_shapes
from forespeak.models.sources import Source, models_home, resolve
from forespeak.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, read as far as its config.

    Attributes:
        family: ``decoder`` for our own decoder; ``adapter`` for any other folder, which
            transformers must load from ``path``.
        path: the folder or the GGUF file.
        config: None for the adapter, which has a config of its own.
        weights: starts a new pass over the weights: HF names, each exactly once, in the shapes of
            ``weight_shapes``, in the dtype they are stored in. ``lm_head.weight`` is left out when
            the head is tied, tensors of a drafter that the target carries are passed over. Raises
            CheckpointError when a tensor is missing, unknown or of another shape, or when the file
            is damaged.
        tokenizer: None when the model comes without one.
        description: name and origin, for people.
    """

    family: Literal["decoder", "adapter"]
    path: Path
    config: ModelConfig | None
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    tokenizer: Tokenizer | None
    description: str


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Resolve a target's name (see ``sources.resolve``) and read its config and tokenizer.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
        CheckpointError: its files are damaged or ask for something that is not supported.
    """
    found = resolve(str(source))
    return _from_gguf(found) if found.kind == "gguf" else _from_folder(found)


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The config in a GGUF file's metadata.

    Raises:
        CheckpointError: see ``hf_values`` and ``ModelConfig.from_hf``.
    """
    config = ModelConfig.from_hf(hf_values(file), origin=str(file.path))
    # An HF Llama has biases on all four projections or on none; a file may have them on some.
    return replace(config, output_bias="blk.0.attn_output.bias" in file.tensors)


def config_from_folder(folder: Path) -> ModelConfig | None:
    """The config of an HF folder, None when its architecture is not the built-in decoder's.

    Raises:
        CheckpointError: no config.json, or a damaged or impossible one.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json; a folder in Hugging Face format is expected. Name the "
            "folder that holds config.json and the weights, or a .gguf file."
        )
    values = read_json_object(path)
    family = values.get("model_type")
    if isinstance(family, str) and family not in OUR_FAMILIES:
        return None
    config = ModelConfig.from_hf(values, origin=str(path))
    generation = folder / "generation_config.json"
    if generation.is_file():
        stops = read_json_object(generation).get("eos_token_id")
        if stops is not None:
            # What transformers' generate stops at; chat models list more ids here.
            with_stops = values | {"eos_token_id": stops}
            return ModelConfig.from_hf(with_stops, origin=str(generation))
    return config


def _from_folder(source: Source) -> Checkpoint:
    config = config_from_folder(source.path)
    if config is not None:
        weight_files(source.path)  # a folder without weights is refused before anything is built
    return Checkpoint(
        family="adapter" if config is None else "decoder",
        path=source.path,
        config=config,
        weights=lambda: _checked(iter_weights(source.path), config, source.path),
        tokenizer=Tokenizer.from_folder(source.path),
        description=f"{source.name} ({source.path})" if _differs(source) else source.name,
    )


def _from_gguf(source: Source) -> Checkpoint:
    file = read_gguf(source.path)
    config = config_from_gguf(file)
    return Checkpoint(
        family="decoder",
        path=source.path,
        config=config,
        weights=lambda: _checked(iter_gguf_weights(file), config, source.path),
        tokenizer=Tokenizer.from_gguf(file, models_home() / "tokenizers"),
        description=f"{source.name} ({source.path.name})" if _differs(source) else source.name,
    )


def _differs(source: Source) -> bool:
    return source.name != str(source.path)


def _checked(
    weights: Iterator[tuple[str, Tensor]], config: ModelConfig | None, path: Path
) -> Iterator[tuple[str, Tensor]]:
    """Pass on the tensors that the config asks for; refuse what is neither one of them nor of a
    drafter that the target carries."""
    assert config is not None, "the adapter loads its own weights"
    missing = weight_shapes(config)
    beyond: list[str] = []
    for name, tensor in weights:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # some files store the tied head again; transformers ignores it too
        expected = missing.pop(name, None)
        if expected is None:
            beyond.append(name)
            continue
        if tuple(tensor.shape) != expected:
            raise _misfit(
                path, f"has {name} of shape {tuple(tensor.shape)}; by its config it is {expected}"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise _misfit(path, f"has {name} in {tensor.dtype}; float32 to 16-bit are allowed")
        yield name, tensor
    for name in foreign_tensors(beyond, config.num_layers):
        raise _misfit(path, f"has a tensor {name}, which its config has no place for")
    if missing:
        raise _misfit(path, f"lacks the tensor {next(iter(missing))}")


def _misfit(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {what}; config and weights must belong together. Get the whole model again."
    )
