"""Weights of an HF folder, one tensor at a time, so that a model never is in memory twice.

    folder/config.json
           model.safetensors                    one file, or
           model.safetensors.index.json         {"weight_map": {tensor name: shard file}}
           model-00001-of-00002.safetensors ...

Folders that have only ``pytorch_model.bin`` (or its sharded form) are read too, as data and never
as code.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forespeak.errors import CheckpointError

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_AGAIN = "Get the file again from where it came from."


def iter_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names as in HF checkpoints and tensors in the dtype they are stored in, on CPU.

    Tensors that hold no weights (rotary buffers of old Llama files) are left out.

    Raises:
        CheckpointError: no weights, or a file is missing, cut, corrupt or at odds with the index.
    """
    for path, expected in weight_files(folder).items():
        found: set[str] = set()
        for name, tensor in _iter_file(path):
            found.add(name)
            if not name.endswith(".rotary_emb.inv_freq"):
                yield name, tensor
        if expected is not None:
            _check_against_index(path, expected, found)


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files that hold a folder's weights, with the names that an index promises for each.

    Raises:
        CheckpointError: there are none, or the index is damaged or names a file that is not there.
    """
    for single, index in zip(SINGLE_FILES, INDEX_FILES, strict=True):
        if (folder / single).is_file():
            return {folder / single: None}
        if (folder / index).is_file():
            return _shards(folder / index)
    raise CheckpointError(
        f"{folder} has no weights; expected is one of {', '.join(SINGLE_FILES + INDEX_FILES)}. "
        "Put the model's files there or name another folder."
    )


def read_json_object(path: Path) -> dict[str, object]:
    """Parse a file that must hold one JSON object.

    Raises:
        CheckpointError: the file cannot be read, is not UTF-8 JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({_short(error)}); it is missing, cut or damaged. "
            f"{_AGAIN}"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}; an object is expected. {_AGAIN}"
        )
    return value


def _shards(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no weight_map; expected is an object of tensor names and files. {_AGAIN}"
        )
    shards: dict[Path, set[str] | None] = {}
    for name, file_name in weight_map.items():
        # A shard lies beside its index: a path that leads out of the folder is not followed.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index} puts {name!r} into {file_name!r}; a file name in the same folder is "
                f"expected. {_AGAIN}"
            )
        names = shards.setdefault(index.parent / file_name, set())
        assert names is not None
        names.add(name)
    for path in shards:
        if not path.is_file():
            raise CheckpointError(
                f"{index} names {path.name}, which is not in the folder; all shards must lie "
                "beside the index. Get the missing file from where the model came from."
            )
    return shards


def _check_against_index(path: Path, expected: set[str], found: set[str]) -> None:
    for names, problem in (
        (expected - found, "lacks {}, which the index puts there"),
        (found - expected, "has {}, which the index does not put there"),
    ):
        if names:
            raise CheckpointError(
                f"{path} {problem.format(min(names))}; index and files must be of the same "
                "download. Get the whole model again."
            )


def _iter_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.suffix == ".safetensors":
        return _iter_safetensors(path)
    return iter(read_torch_file(path).items())


def _iter_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        # Opening checks that the header is whole and that the file is as long as it says.
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({_short(error)}); it is cut or damaged. "
            f"{_AGAIN}"
        ) from None


WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that weights may be stored in."""


def check_weight(tensor: Tensor, name: str, origin: object) -> None:
    """Refuse a tensor that cannot be a weight.

    Args:
        name, origin: the tensor and the files it comes from, for the message.

    Raises:
        CheckpointError: it is not dense, of another dtype, or holds a value that is not finite.
    """
    if not is_plain(tensor) or tensor.dtype not in WEIGHT_DTYPES:
        kind = "" if is_plain(tensor) else f", {_unusual(tensor)}"
        raise CheckpointError(
            f"{origin} has {name} as {dtype_name(tensor.dtype)}{kind}; weights are dense tensors "
            f"of {', '.join(map(dtype_name, WEIGHT_DTYPES))}. Take a release that is not quantised."
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{origin} has a value in {name} that is not finite. Get the drafter again from where "
            "it came from."
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: Tensor) -> bool:
    """Its numbers lie in memory one by one: neither sparse nor quantised nor without storage."""
    return (
        tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and tensor.device.type != "meta"
    )


def _unusual(tensor: Tensor) -> str:
    if tensor.device.type == "meta":
        return "without values (a meta tensor)"
    if tensor.is_quantized:
        return "quantised"
    return "nested" if tensor.is_nested else "sparse"


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """A file of torch.save that holds a flat table of tensors; read as data, never as code.

    Raises:
        CheckpointError: it is cut, damaged, or holds anything else.
    """
    try:
        # weights_only refuses every pickle that would run code.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        pickle.UnpicklingError,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read as plain weights ({_short(error)}); it is cut, damaged, of the "
            "format before PyTorch 1.6, or holds code, which is never run. Use a safetensors "
            "version of the model."
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise CheckpointError(
            f"{path} does not hold a flat table of tensors, which is expected. Use a safetensors "
            "version of the model."
        )
    for name, tensor in loaded.items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"{path} has a tensor under {name!r:.80}; the names of tensors are text. Use a "
                "safetensors version of the model."
            )
        if not is_plain(tensor):
            raise CheckpointError(
                f"{path} has {name}, {_unusual(tensor)}; allowed are dense tensors. Use a "
                "safetensors version of the model."
            )
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _short(error: BaseException) -> str:
    """First line of a library's message, without its own advice."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160].rstrip(" .")
