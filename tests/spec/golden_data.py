"""Stored reference cases: where they are and how they are read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from forespeak.spec.builders import TreeShape

GOLDEN = Path(
    os.environ.get("FORESPEAK_GOLDEN")
    or Path(__file__).parents[2].parent / "shared" / "golden" / "open"
)


@dataclass(frozen=True)
class Case:
    """One folder: its ``case.json`` and its tensors."""

    name: str
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def keys(self, prefix: str, part: str) -> list[str]:
        """Names such as ``gen0`` of the groups ``<prefix><number>.<part>``."""
        return sorted(
            name.removesuffix(f".{part}")
            for name in self.tensors
            if name.startswith(prefix) and name.endswith(f".{part}")
        )


def cases(*methods: str, having: str | None = None) -> list[Any]:
    """Parameters: every case of the methods, with ``having`` only those that store that tensor.

    A missing folder skips and says so. No case in a folder that exists fails: a test that
    compares nothing must not look like one that passed.
    """
    if not GOLDEN.is_dir():
        reason = f"no reference data at {GOLDEN}; name it with FORESPEAK_GOLDEN"
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]
    folders = [path for method in methods for path in sorted((GOLDEN / method).glob("case_*"))]
    if having is not None:
        stored = (json.loads((path / "case.json").read_text())["tensors"] for path in folders)
        folders = [path for path, names in zip(folders, stored, strict=True) if having in names]
    if not folders:
        return [pytest.param(None, id="none found")]
    return [pytest.param(path, id=f"{path.parent.name}-{path.name}") for path in folders]


def load(folder: Path | None) -> Case:
    """Reads a parameter of :func:`cases`."""
    assert folder is not None, f"{GOLDEN} exists and holds no case for this test"
    facts = json.loads((folder / "case.json").read_text())
    return Case(
        f"{folder.parent.name}/{folder.name}", facts, load_file(folder / "tensors.safetensors")
    )


def rows(tensor: Tensor) -> list[list[int]]:
    """Rows of ids without their padding of -1. [n, m] -> n lists"""
    return [[value for value in row if value >= 0] for row in tensor.tolist()]


def static_shape(case: Case) -> TreeShape:
    """The static shape, whose own order must be the stored one."""
    paths = rows(case.tensors["tree.sorted_choices"])
    shape = TreeShape(tuple(tuple(path) for path in reversed(paths)))
    assert [list(path) for path in shape.paths] == paths
    return shape


def shape_parents(shape: TreeShape) -> tuple[int, ...]:
    index = {(): 0} | {path: at for at, path in enumerate(shape.paths, start=1)}
    return (-1, *(index[path[:-1]] for path in shape.paths))
