"""Targets, texts and stored cases for the tests of objectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from forespeak.formats.drafters import DrafterCheckpoint, read_drafter
from forespeak.models.base import TargetModel
from forespeak.models.config import ModelConfig
from forespeak.train.objective import Batch, Objective, Start, TargetView, make_objective
from tests.drafters import golden
from tests.tiny import random_weights, run


def view_of(config: ModelConfig, weights: dict[str, Tensor]) -> TargetView:
    """What losses need, of a target's weights under HF names."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            layers.setdefault(int(number), {})[rest] = tensor
    embedding = weights["model.embed_tokens.weight"]
    return TargetView(
        config, embedding, weights.get("lm_head.weight", embedding), weights["model.norm.weight"],
        config.rms_norm_eps, layers,
    )  # fmt: skip


def tiny_view(config: ModelConfig, seed: int = 0) -> TargetView:
    return view_of(config, random_weights(config, seed))


def batch_of(
    model: TargetModel,
    texts: Sequence[Sequence[int]],
    supervised: Sequence[Sequence[bool]],
    taps: Sequence[int] = (),
) -> Batch:
    """Texts with the target's true states, padded with zeros."""
    size = max(map(len, texts))
    tokens = torch.zeros(len(texts), size, dtype=torch.long)
    mask = torch.zeros(len(texts), size, dtype=torch.bool)
    hidden = torch.zeros(len(texts), size, model.config.hidden_size)
    tapped = torch.zeros(len(texts), size, len(taps), model.config.hidden_size)
    for row, (text, wanted) in enumerate(zip(texts, supervised, strict=True)):
        output = run(model, list(text), taps=taps)
        tokens[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = torch.tensor(wanted)
        hidden[row, : len(text)] = output.hidden
        if output.taps is not None:
            tapped[row, : len(text)] = output.taps
    lengths = torch.tensor([len(text) for text in texts])
    return Batch(tokens, mask, lengths, hidden.clone(), tapped.clone() if taps else None)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- stored cases --------------------------------------------------------------------------------


def golden_view(case: golden.Case) -> TargetView:
    """The target that a case was trained for."""
    folder: Path = golden.GOLDEN.parent / case.facts["target"]
    config = golden.target_of(case).parts.model.config
    return view_of(config, load_file(folder / "model.safetensors"))


def golden_objective(
    case: golden.Case, settings: object
) -> tuple[Objective, TargetView, DrafterCheckpoint]:
    """A method's objective with the case's drafter."""
    checkpoint = read_drafter(golden.drafter_folder(case))
    view = golden_view(case)
    own = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in checkpoint.tensors().items()
        if not name.startswith("embed_tokens")
    }
    start = Start(seeded(), own)
    made = make_objective(checkpoint.method, checkpoint.config, view, settings, start)
    return made, view, checkpoint


def gradients(
    objective: Objective, batch: Batch
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """(total, parts, gradients by internal name) of a batch."""
    objective.network.zero_grad(set_to_none=True)
    loss = objective.loss(batch, seeded())
    loss.total.backward()
    found = {
        name: parameter.grad
        for name, parameter in objective.network.named_parameters()
        if parameter.grad is not None
    }
    return float(loss.total.detach()), dict(loss.parts), found
