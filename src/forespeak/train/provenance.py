"""Where a drafter came from: command, code, versions, data, machine."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forespeak.models.sources import resolve
from forespeak.train.dialogues import Sample

_PIECES, _PIECE_BYTES = 256, 4096  # of a weight file
_PACKAGES = ("forespeak", "torch", "transformers", "numpy", "numba", "accelerate")


def provenance(device: torch.device, threads: int | None = None) -> dict[str, Any]:
    """What is known of this process.

    Args:
        device: where it computes.
        threads: of a CPU; None for PyTorch's, which are not those of the int8 kernels.
    """
    return {
        "command": shlex.join(["forespeak", *map(_public, sys.argv[1:])]),
        "commit": _commit(),
        "versions": {"python": platform.python_version()} | _versions(),
        "machine": _machine(device, threads),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _public(word: str) -> str:
    """An argument without the folders of this machine."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if Path(value).is_absolute() else word


def digest_files(files: Sequence[Path]) -> str:
    """sha256 over the contents of files, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def digest_target(name: str) -> str:
    """sha256 over pieces of a target's weight files, evenly taken; empty where there are none.

    Enough to tell weights that were trained on from those before, of models of any size.

    Args:
        name: as a user gives it, of a model that is on this machine.
    """
    path = resolve(name).path
    kinds = ("*.safetensors", "*.bin")
    files = [path] if path.is_file() else sorted(f for kind in kinds for f in path.glob(kind))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for piece in range(_PIECES):
                stream.seek(size * piece // _PIECES)
                digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest() if files else ""


def digest_samples(samples: Sequence[Sample]) -> str:
    """sha256 over the token ids and spans of every sample."""
    digest = hashlib.sha256()
    for sample in samples:
        spans = [place for span in sample.spans for place in span]
        numbers = [len(sample.token_ids), *sample.token_ids, len(spans), *spans]
        digest.update(np.asarray(numbers, np.int64).tobytes())
    return digest.hexdigest()


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} ".encode())
        digest.update(tensor.double().numpy().tobytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the code, with a plus sign where files differ from it; None outside git."""
    folder = Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git(folder, "status", "--porcelain", "--", str(folder.parent)) else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _machine(device: torch.device, threads: int | None) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {threads or torch.get_num_threads()} threads"
