"""Prediction modules as their releases store them, and every law of theirs from the formulas.

Names, orders and conventions are written down here anew and shared with nothing in the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forespeak.formats.layer_fields import layer_fields
from forespeak.types import Observation
from tests.drafters.feature_rounds import Law
from tests.drafters.naive import Sizes, below, decoder_layer, rms
from tests.tiny import random_weights, tiny_config

Block = Callable[[Tensor, Sequence[int]], Tensor]
"""(states [T, H], positions) -> raw outputs [T, H] of one causal layer."""


@dataclass(frozen=True)
class Layout:
    """Where the five parts of module m lie, and what a release's code does with them."""

    embed_norm: str
    state_norm: str
    joint: str
    last_norm: str
    block: str
    state_first: bool
    normed: bool
    zeros: bool
    first: int = 0  # the number of module 0 in the names

    def place(self, template: str, module: int) -> str:
        return template.format(self.first + module)


MIMO = Layout(
    "model.mtp_layers.{}.token_layernorm.weight", "model.mtp_layers.{}.hidden_layernorm.weight",
    "model.mtp_layers.{}.input_proj.weight", "model.mtp_layers.{}.final_layernorm.weight",
    "model.mtp_layers.{}.", state_first=True, normed=True, zeros=True,
)  # fmt: skip
SPECULATORS = Layout(
    "mtp_layers.{}.token_layernorm.weight", "mtp_layers.{}.hidden_layernorm.weight",
    "mtp_layers.{}.input_proj.weight", "mtp_layers.{}.final_layernorm.weight",
    "mtp_layers.{}.", state_first=False, normed=True, zeros=False,
)  # fmt: skip
NEXTN = Layout(
    "model.layers.{}.enorm.weight", "model.layers.{}.hnorm.weight",
    "model.layers.{}.eh_proj.weight", "model.layers.{}.shared_head.norm.weight",
    "model.layers.{}.", state_first=False, normed=False, zeros=True, first=3,
)  # fmt: skip
QWEN = Layout(
    "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight",
    "mtp.norm.weight", "mtp.layers.{}.", state_first=False, normed=True, zeros=False,
)  # fmt: skip
LAYOUTS = {"mimo": MIMO, "speculators mtp": SPECULATORS, "nextn": NEXTN, "qwen": QWEN}


def random_modules(
    layout: Layout, family: str = "llama", count: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """Tensors of modules with a plain layer of a family, by the names of the release."""
    layer = tiny_config(family, num_layers=1)
    hidden, tensors = layer.hidden_size, dict[str, Tensor]()
    generator = torch.Generator().manual_seed(100 + seed)
    for module in range(count):
        for template in (layout.embed_norm, layout.state_norm, layout.last_norm):
            gain = 1 + 0.2 * torch.randn(hidden, generator=generator)
            tensors[layout.place(template, module)] = gain
        joint = torch.randn((hidden, 2 * hidden), generator=generator) / hidden**0.5
        tensors[layout.place(layout.joint, module)] = joint
        for name, tensor in random_weights(layer, 50 + seed + module).items():
            if name.startswith("model.layers.0."):
                inner = name.removeprefix("model.layers.0.")
                tensors[layout.place(layout.block, module) + inner] = tensor
    return tensors


def write_folder(folder: Path, values: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def config_of(layout: Layout, family: str, count: int, model_type: str | None = None) -> dict:
    """A config as the release has it."""
    values = layer_fields(tiny_config(family)) | {"model_type": model_type or family}
    if layout is not SPECULATORS:
        return values | {"num_nextn_predict_layers": count}
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "mtp", "verifier": {"name_or_path": "here"}},
        "transformer_layer_config": values,
        "num_nextn_predict_layers": count,
    }


def plain_block(
    layout: Layout, tensors: Mapping[str, Tensor], module: int, window: int | None = None
) -> Block:
    """The layer of a module, spelled out."""
    sizes = Sizes(4, 2, 16, window=window)
    weights = below(tensors, layout.place(layout.block, module))
    return lambda x, positions: decoder_layer(x, weights, positions, sizes)


@dataclass
class Formulas:
    """A target and its modules.

    Attributes:
        layout: names and conventions.
        tensors: the modules'.
        embedding, head: [V, H] the target's.
        blocks: one a module.
        eps: of the norms.
        offset: what is added to the weights of the norms.
    """

    layout: Layout
    tensors: Mapping[str, Tensor]
    embedding: Tensor
    head: Tensor
    blocks: Sequence[Block]
    normed: bool
    zeros: bool
    eps: float = 1e-5
    offset: float = 0.0
    features: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.features = torch.randn(self.embedding.shape, generator=generator)

    def feature(self, token: int, position: int) -> Tensor:
        return self.features[token] * (1 + 0.1 * position)

    def observe(self, row: int, tokens: Sequence[int], start: int) -> Observation:
        states = [self.feature(token, start + i) for i, token in enumerate(tokens)]
        return Observation(row, tuple(tokens), torch.stack(states))

    def law(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Logits below ``path`` after ``text`` (root included), nothing kept from before."""
        root = len(text) - 1
        states = [self.feature(token, i) for i, token in enumerate(text[:-1])]
        seen: list[list[tuple[int, Tensor, int]]] = []
        newest: Tensor | None = None
        for module in range(len(self.blocks)):
            # s_i goes with the token module + 1 places later, at position i + module.
            pairs = [
                (text[i + module + 1], states[i], i + module) for i in range(max(0, root - module))
            ]
            seen.append(pairs)
            outputs = self._run(module, pairs)
            if module == 0:
                newest = outputs[-1]
            states = [self._next(y, module) for y in outputs]
        assert newest is not None
        module = 0
        for depth, token in enumerate(path, start=1):
            state = self._next(newest, module)
            module = depth % len(self.blocks)
            seen[module].append((token, state, root - 1 + depth))
            newest = self._run(module, seen[module])[-1]
        return self.head @ self._norm(newest, self.layout.last_norm, module)

    def check(self, laws: Sequence[Law], columns: Tensor | None = None) -> None:
        assert laws
        for law in laws:
            expected = self.law(law.text, law.path)
            if columns is not None:
                expected = expected[columns]
            torch.testing.assert_close(law.logits.cpu(), expected, atol=3e-4, rtol=1e-4)

    def _next(self, output: Tensor, module: int) -> Tensor:
        return self._norm(output, self.layout.last_norm, module) if self.normed else output

    def _norm(self, x: Tensor, template: str, module: int) -> Tensor:
        gain = self.tensors[self.layout.place(template, module)] + self.offset
        return rms(x, gain, self.eps)

    def _run(self, module: int, pairs: Sequence[tuple[int, Tensor, int]]) -> list[Tensor]:
        joint = self.tensors[self.layout.place(self.layout.joint, module)]
        rows = []
        for token, state, position in pairs:
            embedded = self.embedding[token]
            if self.zeros and position == 0:
                embedded = torch.zeros_like(embedded)
            e = self._norm(embedded, self.layout.embed_norm, module)
            h = self._norm(state, self.layout.state_norm, module)
            rows.append(joint @ torch.cat([h, e] if self.layout.state_first else [e, h]))
        if not rows:
            return []
        return list(self.blocks[module](torch.stack(rows), [p for _, _, p in pairs]))
