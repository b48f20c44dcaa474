"""The files of a drafter: its config, and its tensors by name without reading them all.

    folder/config.json
           model.safetensors | model.safetensors.index.json and shards | pytorch_model.bin | ...

Pickled files are read as data and never as code.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forespeak.errors import CheckpointError
from forespeak.formats.weights import (
    INDEX_FILES,
    SINGLE_FILES,
    read_json_object,
    read_torch_file,
    weight_files,
)

HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Names that releases of heads alone use instead of the usual ones."""

EXPORTED = "nextn_layer_parameters.safetensors"
"""SGLang's export of prediction modules; the index of the whole model is copied beside it."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DrafterFiles:
    """A folder whose config was read and whose tensors are known by name, shape and dtype.

    Attributes:
        folder: where it lies.
        config: the content of config.json.
        shapes, dtypes: of every tensor.
    """

    folder: Path
    config: Mapping[str, object]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    _places: Mapping[str, Path]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some tensors, in the dtype they are stored in, on CPU.

        Raises:
            CheckpointError: a file is cut or damaged.
        """
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self._places[name], []).append(name)
        found: dict[str, Tensor] = {}
        for path, inside in wanted.items():
            if path.suffix == ".safetensors":
                found |= _read_safetensors(path, inside)
            else:
                tensors = read_torch_file(path)
                found |= {name: tensors[name] for name in inside}
        return found

    def rows(self, name: str) -> int:
        """Length of a tensor's first axis.

        Raises:
            CheckpointError: it is a single number without axes.
        """
        shape = self.shapes[name]
        if not shape:
            raise CheckpointError(
                f"{self.folder} has {name} as a single number; it must be a list or a matrix. Get "
                "the drafter again from where it came from."
            )
        return shape[0]

    def with_prefix(self, prefix: str) -> list[str]:
        """Names that begin so, in order."""
        return sorted(name for name in self.shapes if name.startswith(prefix))


def open_drafter_files(folder: Path) -> DrafterFiles:
    """Read a drafter's config and the names of its tensors.

    Raises:
        CheckpointError: no config, no weights, or a file that is cut or damaged.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json; a drafter's folder holds one beside its weights. Name "
            "that folder."
        )
    config = read_json_object(config_path)
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, torch.dtype] = {}
    places: dict[str, Path] = {}
    for path in _weight_paths(folder):
        for name, shape, dtype in _describe(path):
            shapes[name], dtypes[name], places[name] = shape, dtype, path
    return DrafterFiles(folder, config, shapes, dtypes, places)


def write_drafter_files(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    *,
    file_name: str = "model.safetensors",
) -> None:
    """Write a drafter so that a reader sees the old files or the new ones, never half of one.

    The config comes last: a folder without it is no drafter yet.

    Args:
        folder: made where it is missing.
        config: becomes config.json.
        tensors: by the names that they get in the file.
        file_name: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
        weights, settings = Path(part) / file_name, Path(part) / "config.json"
        save_file(whole, weights, metadata={"format": "pt"})
        settings.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(weights, folder / file_name)
        os.replace(settings, folder / "config.json")


def _weight_paths(folder: Path) -> list[Path]:
    if (folder / EXPORTED).is_file():
        return [folder / EXPORTED]
    usual = any((folder / name).is_file() for name in SINGLE_FILES + INDEX_FILES)
    if not usual:
        for name in HEAD_FILES:
            if (folder / name).is_file():
                return [folder / name]
    return list(weight_files(folder))


def _describe(path: Path) -> list[tuple[str, Shape, torch.dtype]]:
    if path.suffix != ".safetensors":
        tensors = read_torch_file(path)
        return [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            found = []
            for name in file.keys():
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype(), torch.quint8)
                found.append((name, tuple(part.get_shape()), dtype))
            return found
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from None


def _read_safetensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    short = str(error).strip().splitlines()[0][:160].rstrip(" .") if str(error) else "unreadable"
    return CheckpointError(
        f"{path} is not a whole safetensors file ({short}); it is cut or damaged. Get the file "
        "again from where it came from."
    )


# A dtype that is not here is of few bits, and quint8 stands for all of those.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
