"""Which drafter a method takes when none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from forespeak.drafters.shipped import VARIABLE, find_drafter, shipped_folder, with_shipped
from forespeak.types import SpeculationConfig


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Drafters of three methods for a target named ``small``."""
    for method in ("eagle3", "dflash", "medusa"):
        (tmp_path / "small" / method).mkdir(parents=True)
        (tmp_path / "small" / method / "config.json").write_text("{}")
    (tmp_path / "small" / "mtp").mkdir()  # not whole
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path / "small"


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("eagle3", "eagle3"),
        ("eagle3:5", "eagle3"),
        ("ngram+medusa:static_tree:8", "medusa"),
        ("eagle2", "eagle3"),  # reads its weights
        ("ddtree", "dflash"),
        ("medusa", "medusa"),
        ("ngram+eagle3", "eagle3"),
        ("dspark", None),
        ("mtp", None),
        ("ngram", None),
        ("autoregressive", None),
        ("no_such_method", None),
    ],
)
def test_found_by_the_methods_name(folder: Path, method: str, found: str | None):
    config = with_shipped(SpeculationConfig(method=method), "small")
    assert config.drafter == (None if found is None else str(folder / found))
    assert find_drafter(SpeculationConfig(method=method), folder) == config


def test_what_is_named_stays(folder: Path):
    named = SpeculationConfig(method="eagle3", drafter="mine")
    assert with_shipped(named, "small") == named


@pytest.mark.parametrize("target", ["other", "org/small", "./small", "", ".", ".."])
def test_targets_without_drafters(folder: Path, target: str):
    assert shipped_folder(target) is None
    config = SpeculationConfig(method="eagle3")
    assert with_shipped(config, target) == config


def test_the_checkouts_own_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    root = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m"
    assert shipped_folder("smollm2-135m") == (root if root.is_dir() else None)
