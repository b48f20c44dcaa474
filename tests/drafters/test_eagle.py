"""EAGLE drafters against the formulas: every law of random rounds, computed from nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forespeak.drafters.feature_chain import FeatureChain
from forespeak.formats.eagle import EagleConfig
from forespeak.formats.eagle3_config import Eagle3Config
from forespeak.models.config import ModelConfig
from forespeak.types import Observation
from tests.drafters.eagle_cases import TARGET, H, V, opened, stored
from tests.drafters.feature_rounds import FeatureRounds
from tests.drafters.naive import (
    Sizes,
    attention,
    below,
    decoder_layer,
    mlp,
    product,
    rms,
)
from tests.tiny import random_weights


@dataclass
class Twin:
    """A drafter spelled out: what it makes of a text and a path of draft tokens."""

    weights: dict[str, Tensor]
    sizes: Sizes
    step: Callable[[Tensor, Tensor, list[int]], Tensor]  # embedded, states, positions
    enter: Callable[[int, int], Tensor]  # token, position
    hand_on: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    embedding: Tensor

    def law(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        states = [self.enter(token, at) for at, token in enumerate(text[:-1])]
        tokens, positions = list(text[1:]), list(range(len(text) - 1))
        while True:
            embedded = self.embedding[tokens]
            out = self.step(embedded, torch.stack(states), positions)[-1]
            drafted = len(tokens) - (len(text) - 1)
            if drafted == len(path):
                return self.logits(out)
            tokens.append(path[drafted])
            positions.append(len(text) - 1 + drafted)
            states.append(self.hand_on(out))


def sizes_of(layers: ModelConfig) -> Sizes:
    return Sizes(
        layers.num_heads, layers.num_kv_heads, layers.head_dim, eps=layers.rms_norm_eps,
        window=layers.sliding_window,
    )  # fmt: skip


def head_rows(tensors: dict[str, Tensor]) -> Tensor:
    """The target's head over the draft's vocabulary."""
    head = random_weights(TARGET)["lm_head.weight"]
    if "d2t" in tensors:
        return head[torch.arange(len(tensors["d2t"])) + tensors["d2t"]]
    return head


def feature_tables(count: int, width: int) -> Tensor:
    return torch.randn(count, V, width, generator=torch.Generator().manual_seed(9))


def observer(tables: Tensor, *, taps: bool) -> Callable[[int, Sequence[int], int], Observation]:
    """Features [K, V, width] of tokens, growing with the position."""

    def observe(row: int, tokens: Sequence[int], start: int) -> Observation:
        scale = 1 + 0.1 * torch.arange(start, start + len(tokens))[:, None, None]
        states = tables[:, list(tokens)].transpose(0, 1) * scale  # [n, K, width]
        if taps:
            return Observation(row, tuple(tokens), torch.full((len(tokens), 1), 1e9), states)
        return Observation(row, tuple(tokens), states[:, 0])

    return observe


def eagle_twin(config: EagleConfig, tensors: dict[str, Tensor], tables: Tensor) -> Twin:
    sizes, head = sizes_of(config.layers), head_rows(tensors)

    def step(embedded: Tensor, states: Tensor, positions: list[int]) -> Tensor:
        x = product(torch.cat([embedded, states], -1), tensors, "fc")
        for layer in range(config.layers.num_layers):
            x = decoder_layer(x, below(tensors, f"layers.{layer}."), positions, sizes)
        return x

    return Twin(
        tensors, sizes, step, lambda token, at: tables[0, token] * (1 + 0.1 * at), lambda x: x,
        lambda x: head @ x, random_weights(TARGET)["model.embed_tokens.weight"],
    )  # fmt: skip


def eagle3_twin(config: Eagle3Config, tensors: dict[str, Tensor], tables: Tensor) -> Twin:
    sizes = sizes_of(config.layers)
    target_embedding = random_weights(TARGET)["model.embed_tokens.weight"]
    first = below(tensors, "layers.0.")
    head = tensors["lm_head.weight"] if config.own_head else head_rows(tensors)

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, tensors[f"{name}.weight"], sizes.eps)

    def enter(token: int, at: int) -> Tensor:
        parts = [table[token] * (1 + 0.1 * at) for table in tables]
        if config.target_layer_ids and config.target_layer_ids[0] == -1:
            parts.insert(0, target_embedding[token])
        if config.fc_norm:
            parts = [norm(part, f"fc_norm.{k}") for k, part in enumerate(parts)]
        features = torch.cat(parts)
        if config.norm_before_fc:
            features = norm(features, "input_norm")
        return product(features, tensors, "fc")

    def step(embedded: Tensor, states: Tensor, positions: list[int]) -> Tensor:
        normed = norm(states, "layers.0.hidden_norm")
        pair = torch.cat([norm(embedded, "layers.0.input_layernorm"), normed], -1)
        base = normed if config.norm_before_residual else states
        x = base + attention(pair, below(first, "self_attn."), positions, sizes)
        x = x + mlp(norm(x, "layers.0.post_attention_layernorm"), below(first, "mlp."))
        for layer in range(1, config.layers.num_layers):
            x = decoder_layer(x, below(tensors, f"layers.{layer}."), positions, sizes)
        return x

    return Twin(
        tensors, sizes, step, enter, lambda x: norm(x, "norm") if config.norm_output else x,
        lambda x: head @ norm(x, "norm"),
        tensors["embed_tokens.weight"] if config.own_embedding else target_embedding,
    )  # fmt: skip


def check(drafter: FeatureChain, twin: Twin, tables: Tensor, seed: int) -> None:
    """Random rounds of three rows; every law from the formulas."""
    taps = not drafter.info.needs_hidden
    rounds = FeatureRounds(drafter, observer(tables, taps=taps), random.Random(seed), V, chunk=4)
    for row, length in ((0, 9), (2, 1), (1, 4)):
        rounds.start(row, length)
    for depth in (3, 0):
        rounds.round(depth, width=2)
    rounds.stop(0)
    rounds.start(0, 3)
    rounds.round(2, width=3)
    assert len(rounds.laws) > 20
    for law in rounds.laws:
        expected = twin.law(law.text, law.path)
        torch.testing.assert_close(law.logits, expected, atol=3e-4, rtol=1e-4)


EAGLE_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"fc_bias": False},
    "two layers": {"layers": {"num_layers": 2}},
    "biases as Qwen2's": {"layers": {"attention_bias": True}},
    "reduced vocabulary": {"draft_vocab_size": 30},
}


def changed(config: Any, changes: dict[str, Any]) -> Any:
    layers = replace(config.layers, **changes.get("layers", {}))
    return replace(config, **{k: v for k, v in changes.items() if k != "layers"}, layers=layers)


@pytest.mark.parametrize("name", EAGLE_CASES)
def test_eagle_against_the_formulas(name, tmp_path):
    config = changed(replace(EagleConfig.for_target(TARGET), fc_bias=True), EAGLE_CASES[name])
    tensors = stored(tmp_path, config)
    tables = feature_tables(1, H)
    drafter = opened(tmp_path, "eagle", num_rows=3)
    check(drafter, eagle_twin(config, tensors, tables), tables, seed=len(name))


EAGLE3_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced vocabulary": {"draft_vocab_size": 30},
    "target's head": {"own_head": False},
    "target's head in part": {"own_head": False, "draft_vocab_size": 30},
    "speculators' norms": {"norm_before_residual": True, "norm_before_fc": True,
                           "norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "the embedding among two": {"num_features": 2, "target_layer_ids": (-1, 3)},
    "one feature": {"num_features": 1, "target_layer_ids": (5,)},
    "layers by default": {"target_layer_ids": None},
    "two layers": {"layers": {"num_layers": 2}},
    "a window": {"layers": {"sliding_window": 5, "sliding_layers": (True,)}},
    "norms of q and k": {"layers": {"model_type": "qwen3", "qk_norm": True}},
    "narrower than its target": {
        "target_hidden_size": H, "layers": {"hidden_size": 16, "head_dim": 4},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE3_CASES)
def test_eagle3_against_the_formulas(name, tmp_path):
    config = changed(Eagle3Config.for_target(TARGET), EAGLE3_CASES[name])
    tensors = stored(tmp_path, config)
    drafter = opened(tmp_path, "eagle3", num_rows=3)
    ids = config.target_layer_ids or (1, 3, 4)
    assert drafter.info.taps == tuple(i for i in ids if i >= 0)
    tables = feature_tables(len(drafter.info.taps), H)
    check(drafter, eagle3_twin(config, tensors, tables), tables, seed=len(name))
