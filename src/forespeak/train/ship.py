"""Weight files of a bounded size: one drafter in several shards with an index.

model-00001-of-00003.safetensors ...   model.safetensors.index.json
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.formats.drafter_files import open_drafter_files
from forespeak.train.atomic import write_json_whole, write_whole

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
MEGABYTE = 10**6
_HEADER_BYTES = 64 * 1024  # of a shard, kept free for names and offsets


def split_weights(folder: Path, megabytes: int) -> list[Path]:
    """Split a drafter's weights into files of at most so many 10^6 bytes.

    The old file goes last, so that the folder is a whole drafter at every moment.

    Returns:
        The weight files, one or several.

    Raises:
        OptionError: a single tensor is larger than that.
        CheckpointError: the folder holds no drafter.
    """
    files = open_drafter_files(folder)
    tensors = {name: t.contiguous() for name, t in files.read(files.shapes).items()}
    before = {path for path in folder.glob("*.safetensors")}
    limit = megabytes * MEGABYTE
    if all(path.stat().st_size <= limit for path in before):
        return sorted(before)
    groups = _groups(tensors, limit - _HEADER_BYTES, megabytes)
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        _save(folder / name, {key: tensors[key] for key in group})
    places = {key: name for name, group in zip(names, groups, strict=True) for key in group}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json_whole(folder / INDEX, index)
    for path in before:
        if path.name not in names:
            path.unlink()
    return [folder / name for name in names]


def remove_shards(folder: Path) -> None:
    """Take away the shards of an older export, when a whole file has taken their place."""
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name):
            path.unlink()


def _groups(tensors: dict[str, Tensor], limit: int, megabytes: int) -> list[list[str]]:
    groups: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > limit:
            raise OptionError(
                f"{name} alone takes {size / 1e6:.1f} MB and save.file_megabytes is {megabytes}; "
                "raise it, or train a smaller drafter (a reduced draft vocabulary, a lower rank)."
            )
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    write_whole(path, lambda part: save_file(tensors, part, metadata={"format": "pt"}))
