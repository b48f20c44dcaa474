"""A target, and EAGLE drafters of random weights for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forespeak.drafters.base import TargetParts
from forespeak.drafters.feature_chain import FeatureChain
from forespeak.drafters.loader import load_drafter
from forespeak.formats import eagle as eagle_format
from forespeak.formats import eagle3 as eagle3_format
from forespeak.formats.eagle import EagleConfig
from forespeak.formats.eagle3_config import Eagle3Config
from forespeak.types import SpeculationConfig
from tests.tiny import tiny_config, tiny_decoder

TARGET = tiny_config(num_layers=8, hidden_size=24, num_heads=4, head_dim=8, eos_token_ids=())
V, H = TARGET.vocab_size, TARGET.hidden_size
Config = EagleConfig | Eagle3Config


def drafter_weights(shapes: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights with norms that are not one and biases that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name == "d2t":
            ids = torch.randperm(V, generator=generator)[: shape[0]].sort().values
            made[name] = ids - torch.arange(shape[0])
        elif name.endswith(".bias"):
            made[name] = 0.3 * values
        elif len(shape) == 1:
            made[name] = 1 + 0.2 * values
        else:
            made[name] = values / shape[1] ** 0.5
    return made


def stored(folder: Path, config: Config, seed: int = 0) -> dict[str, Tensor]:
    """A drafter written to a folder; its tensors."""
    family: Any = eagle_format if isinstance(config, EagleConfig) else eagle3_format
    tensors = drafter_weights(family.tensor_shapes(config), seed)
    family.write(folder, config, tensors)
    return tensors


def opened(folder: Path, method: str, *, num_rows: int = 1, **parts: Any) -> FeatureChain:
    target = TargetParts(parts.pop("model", None) or tiny_decoder(TARGET), **parts)
    config = SpeculationConfig(method=method, drafter=str(folder))
    drafter = load_drafter(config, target, num_rows=num_rows)
    assert isinstance(drafter, FeatureChain)
    return drafter
