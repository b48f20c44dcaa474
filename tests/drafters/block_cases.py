"""Block drafters of random weights for a tiny target, and features that anyone can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forespeak.drafters.base import TargetParts
from forespeak.drafters.dflash import DFlashDrafter, random_drafter
from forespeak.drafters.loader import load_drafter
from forespeak.formats.dflash import write
from forespeak.formats.dflash_config import DFlashConfig
from forespeak.models.base import TargetModel
from forespeak.types import Observation, SpeculationConfig
from tests.drafters.naive import Sizes
from tests.drafters.naive_block import Windows, block_states
from tests.tiny import tiny_config, tiny_decoder

TARGET = tiny_config(num_layers=5, max_position_embeddings=128)
V, H = TARGET.vocab_size, TARGET.hidden_size


def block_config(**changes: Any) -> DFlashConfig:
    """A config; those of ``layers`` are given as ``layers__name``."""
    inner = {k.removeprefix("layers__"): v for k, v in changes.items() if k.startswith("layers__")}
    outer = {k: v for k, v in changes.items() if not k.startswith("layers__")}
    base = DFlashConfig.for_target(TARGET)
    layers = replace(base.layers, **inner)
    defaults: dict[str, Any] = {
        "block_size": 5, "mask_token_id": 80, "target_layer_ids": (0, 2, 3), "layers": layers,
    }  # fmt: skip
    return replace(base, **(defaults | outer))


def random_tensors(config: DFlashConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights that are large enough to matter; gains are not one and biases not zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = random_drafter(config, generator)
    generator.manual_seed(seed)  # those of the block are the same with and without heads
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.2 * values
        elif name.endswith(".bias"):
            tensors[name] = 0.3 * values
        elif name == "markov_head.markov_w1.weight":
            tensors[name] = values
        else:
            tensors[name] = values / tensor.shape[1] ** 0.5
    return tensors


class Case:
    """A drafter in a folder, opened, beside the weights that it was written with.

    Attributes:
        config, weights: of the drafter.
        model: the target.
        drafter: opened for three rows.
    """

    def __init__(
        self,
        folder: Path,
        config: DFlashConfig,
        *,
        method: str = "dflash",
        copies: dict[str, Tensor] | None = None,
        model: TargetModel | None = None,
        seed: int = 0,
        threshold: float | None = None,
    ) -> None:
        self.config, self.weights = config, random_tensors(config, seed)
        self.copies = copies or {}
        write(folder, config, {**self.weights, **self.copies})
        self.model = model or tiny_decoder(TARGET)
        settings = SpeculationConfig(
            method=method, drafter=str(folder), confidence_threshold=threshold
        )
        drafter = load_drafter(settings, TargetParts(self.model), num_rows=3)
        assert isinstance(drafter, DFlashDrafter)
        self.drafter = drafter

    def taps(self, tokens: Sequence[int], start: int) -> Tensor:
        """[n, K, H] outputs of the tapped layers, by token and position."""
        found = []
        for at, token in enumerate(tokens):
            generator = torch.Generator().manual_seed(1000 * (start + at) + token)
            found.append(torch.randn(len(self.config.taps), H, generator=generator))
        return torch.stack(found)

    def observation(self, row: int, tokens: Sequence[int], start: int) -> Observation:
        taps = self.taps(tokens, start).to(self.model.device)
        hidden = torch.zeros(len(tokens), H)
        return Observation(row, tuple(tokens), hidden, taps if self.config.taps else None)

    def states(self, text: Sequence[int], root: int) -> Tensor:
        """[B, H] by the formulas."""
        c = self.config.layers
        sizes = Sizes(
            c.num_heads, c.num_kv_heads, c.head_dim, c.rope_parameters["rope_theta"],
            c.rms_norm_eps,
        )  # fmt: skip
        named = dict(zip(self.config.taps, self.taps(text, 0).unbind(1), strict=True))
        if -1 in self.config.target_layer_ids:
            named[-1] = self.model.embed(torch.tensor(text)).cpu().float()
        features = torch.cat([named[i] for i in self.config.target_layer_ids], 1)
        embed = self.copies.get("embed_tokens.weight")
        if embed is None:
            embed = self.model.embed(torch.arange(V)).cpu().float()
        ids = [root, *[self.config.mask_token_id] * (self.config.block_size - 1)]
        windows = None
        if c.sliding_window is not None:
            kind = "own" if not self.config.anchored_windows else "before"
            kind = "causal" if self.config.causal_windows else kind
            windows = Windows(kind, c.sliding_window, c.sliding_layers)
        return block_states(self.weights, sizes, features, embed[ids], windows)

    def head(self, states: Tensor) -> Tensor:
        """[..., Vd]"""
        head = self.copies.get("lm_head.weight")
        if head is None:
            head = self.model.head_rows(torch.arange(V)).cpu().float()
            if "d2t" in self.weights:
                head = head[torch.arange(len(self.weights["d2t"])) + self.weights["d2t"]]
        return states @ head.T

    @property
    def first(self) -> int:
        """The block row that gives depth 1."""
        return 0 if self.config.sample_from_anchor else 1
