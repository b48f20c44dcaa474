"""Machine code on disk is used only as long as none of the kernels' files has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forespeak.kernels import cache
from forespeak.models.kernels import fused
from forespeak.spec.builders import heap_kernel, scan_kernel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.py").write_text("a = 1\n")
    (tmp_path / "two.py").write_text("b = 2\n")
    return tmp_path


def digest(folder: Path) -> str:
    return cache.source_digest.__wrapped__(folder)


def test_digest_changes_with_any_file_and_not_without(folder: Path) -> None:
    before = digest(folder)
    assert digest(folder) == before
    (folder / "two.py").write_text("b = 3\n")
    changed = digest(folder)
    (folder / "two.py").write_text("b = 2\n")
    assert changed != before == digest(folder)
    (folder / "three.py").write_text("")
    assert digest(folder) != before


@pytest.mark.parametrize(
    "kernel",
    [
        fused.run_layers,
        fused.multiply,
        fused.quantize_tiles,
        scan_kernel.scan_rows,
        heap_kernel.best_first,
    ],
)
def test_every_cached_kernel_carries_the_digest(kernel: Any) -> None:
    folder = Path(kernel.py_func.__code__.co_filename).parent
    assert kernel._cache._cache_file._source_stamp == cache.source_digest(folder)


def test_digest_knows_the_primitives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(folder)
    primitives = folder / "primitives"
    primitives.mkdir()
    (primitives / "vector.py").write_text("")
    monkeypatch.setattr(cache, "_HERE", primitives)
    assert digest(folder) != before
