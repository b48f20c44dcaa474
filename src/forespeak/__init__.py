"""forespeak: speculative decoding that changes the speed of a text and not the text.

Names are loaded when they are first used, so that ``import forespeak`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forespeak.engine.llm import LLM, load_target
    from forespeak.errors import (
        CheckpointError,
        DataError,
        DrafterError,
        ForespeakError,
        ModelError,
        OptionError,
        PromptError,
    )
    from forespeak.types import Completion, RoundStats, SamplingParams, SpeculationConfig

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "Completion",
    "DataError",
    "DrafterError",
    "ForespeakError",
    "ModelError",
    "OptionError",
    "PromptError",
    "RoundStats",
    "SamplingParams",
    "SpeculationConfig",
    "__version__",
    "load_target",
]

_HOME = {
    "LLM": "forespeak.engine.llm",
    "load_target": "forespeak.engine.llm",
    "CheckpointError": "forespeak.errors",
    "DataError": "forespeak.errors",
    "DrafterError": "forespeak.errors",
    "ForespeakError": "forespeak.errors",
    "ModelError": "forespeak.errors",
    "OptionError": "forespeak.errors",
    "PromptError": "forespeak.errors",
    "Completion": "forespeak.types",
    "RoundStats": "forespeak.types",
    "SamplingParams": "forespeak.types",
    "SpeculationConfig": "forespeak.types",
}


def __getattr__(name: str) -> object:
    """Import a public name's module when the name is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'forespeak' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
