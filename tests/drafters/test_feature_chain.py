"""Chains of modules on features: what the caches say, against every law computed from nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forespeak.drafters import feature_chain
from forespeak.drafters.feature_chain import ChainNetwork, FeatureChain, LayersModule
from forespeak.drafters.layer_cache import LayerCache
from forespeak.models.blocks import Attend, DecoderLayer, Rotation, load_parameters
from forespeak.models.config import ModelConfig
from forespeak.types import DrafterInfo, Observation
from tests.drafters.feature_rounds import FeatureRounds, Law
from tests.drafters.naive import Sizes, decoder_layer
from tests.tiny import tiny_config

V, H = 31, 24
INFO = DrafterInfo(method="chain", expansion="forward", needs_hidden=True)
COUNTS = [1, 2, 3]


def _config(window: int | None = None) -> ModelConfig:
    return tiny_config(
        vocab_size=V, hidden_size=H, intermediate_size=20, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=8, sliding_window=window,
        sliding_layers=(True,) if window else (),
    )  # fmt: skip


class _Network(ChainNetwork):
    """Doubles features on the way in, halves what goes on, and has a head for each module."""

    token_ids = None

    def __init__(self, num_modules: int) -> None:
        torch.manual_seed(num_modules)
        self.embedding, self.features = torch.randn(V, H), torch.randn(V, H)
        self.heads = torch.randn(num_modules, V, H) / H**0.5

    def feature(self, token: int, position: int) -> Tensor:
        return self.features[token] * (1 + 0.1 * position)

    def observe(self, row: int, tokens: Sequence[int], start: int) -> Observation:
        states = [self.feature(token, start + i) for i, token in enumerate(tokens)]
        return Observation(row, tuple(tokens), torch.stack(states))

    def enter(self, observation: Observation) -> Tensor:
        return observation.hidden * 2

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.embedding[tokens] + 0.01 * positions[:, None]

    def hand_on(self, outputs: Tensor, module: int) -> Tensor:
        return outputs * (0.5 + module)

    def logits(self, outputs: Tensor, module: int) -> Tensor:
        logits: Tensor = outputs @ self.heads[module].T
        return logits


class _Made:
    """A chain of M modules, one layer each on embedding plus state, and its twin."""

    def __init__(self, num_modules: int, *, num_rows: int = 1, window: int | None = None) -> None:
        self.network, self.count = _Network(num_modules), num_modules
        config = _config(window)
        self.sizes = Sizes(4, 2, 8, window=window)
        self.weights, modules = [], []
        for number in range(num_modules):
            layer = DecoderLayer(config)
            weights = {
                name: torch.randn(p.shape) / p.shape[-1] ** 0.5 + ("norm" in name)
                for name, p in layer.named_parameters()
            }
            load_parameters(layer, weights, "the test")
            self.weights.append(weights)
            cache = LayerCache(
                config, num_rows, context_length=512, dtype=torch.float32,
                device=torch.device("cpu"), first_position=number,
            )  # fmt: skip
            modules.append(LayersModule(_forward(layer), cache))
        self.drafter = FeatureChain(INFO, self.network, modules)

    def law(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """The law below a path from the formulas: every module over everything it has seen."""
        net, n = self.network, len(text) - 1
        # For each module what it ran: (token, state, position).
        states = [2 * net.feature(token, i) for i, token in enumerate(text[:-1])]
        seen: list[list[tuple[int, Tensor, int]]] = []
        ends = []
        for m in range(self.count):
            pairs = [(text[i + m + 1], states[i], i + m) for i in range(max(0, n - m))]
            seen.append(pairs)
            outputs = self._run(m, pairs)
            ends.append(outputs)
            states = [x * (0.5 + m) for x in outputs]
        out, module = ends[0][-1], 0
        for depth, token in enumerate(path, start=1):
            state = out * (0.5 + module)
            module = depth % self.count
            seen[module].append((token, state, n - 1 + depth))
            out = self._run(module, seen[module])[-1]
        logits: Tensor = net.heads[module] @ out
        return logits

    def _run(self, m: int, pairs: Sequence[tuple[int, Tensor, int]]) -> list[Tensor]:
        if not pairs:
            return []
        rows = [self.network.embedding[t] + 0.01 * p + state for t, state, p in pairs]
        positions = [p for _, _, p in pairs]
        return list(decoder_layer(torch.stack(rows), self.weights[m], positions, self.sizes))

    def check(self, laws: Sequence[Law]) -> None:
        assert laws
        for law in laws:
            expected = self.law(law.text, law.path)
            torch.testing.assert_close(law.logits, expected, atol=2e-4, rtol=1e-4)


def _forward(layer: DecoderLayer) -> feature_chain.LayersForward:
    def forward(embedded: Tensor, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        out: Tensor = layer(embedded + states, 0, rotation, attend)
        return out

    return forward


@pytest.mark.parametrize("count", COUNTS)
def test_a_chain_against_the_formulas(count: int) -> None:
    made = _Made(count)
    rounds = FeatureRounds(made.drafter, made.network.observe, random.Random(count), V)
    rounds.start(0, 7)
    for _ in range(4):
        rounds.round(depth=4, width=1)
    made.check(rounds.laws)


@pytest.mark.parametrize("count", COUNTS)
def test_trees_of_several_rows(count: int) -> None:
    """Rows of other lengths in one call, each with a tree of its own."""
    made = _Made(count, num_rows=3)
    rounds = FeatureRounds(made.drafter, made.network.observe, random.Random(count), V)
    for row, length in ((2, 1), (0, 5), (1, 3)):
        rounds.start(row, length)
    for depth in (3, 1, 4):
        rounds.round(depth, width=3)
    assert len({len(law.text) for law in rounds.laws}) > 5
    made.check(rounds.laws)


@pytest.mark.parametrize("count", COUNTS)
def test_a_row_admitted_again(count: int) -> None:
    made = _Made(count, num_rows=2)
    rounds = FeatureRounds(made.drafter, made.network.observe, random.Random(5), V)
    rounds.start(0, 6)
    rounds.start(1, 2)
    rounds.round(depth=3, width=2)
    rounds.stop(0)
    rounds.round(depth=2, width=2)
    rounds.start(0, 3)
    rounds.round(depth=3, width=2)
    made.check(rounds.laws)


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_released_amid_a_round(count: int) -> None:
    made = _Made(count)
    rounds = FeatureRounds(made.drafter, made.network.observe, random.Random(5), V)
    rounds.start(0, 6)
    rounds._propose()
    rounds._expand(1, 2)
    rounds.stop(0)
    rounds.laws.clear()
    rounds.start(0, 4)
    rounds.round(depth=3, width=2)
    made.check(rounds.laws)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_chunks_change_nothing(count: int, chunk: int | None, monkeypatch: object) -> None:
    """Chunks of a prompt, and chunks in which waiting pairs go through a module."""
    assert isinstance(monkeypatch, pytest.MonkeyPatch)
    monkeypatch.setattr(feature_chain, "_CHUNK", 3)
    made = _Made(count)
    rounds = FeatureRounds(made.drafter, made.network.observe, random.Random(8), V, chunk)
    rounds.start(0, 17)
    rounds.round(depth=3, width=2)
    rounds.round(depth=1, width=2)
    rounds.round(depth=3, width=1)
    made.check(rounds.laws)


@pytest.mark.parametrize("count", [1, 2])
def test_windows_count_positions(count: int) -> None:
    made = _Made(count, window=4)
    rounds = FeatureRounds(made.drafter, made.network.observe, random.Random(9), V)
    rounds.start(0, 9)
    for _ in range(2):
        rounds.round(depth=4, width=2)
    made.check(rounds.laws)


def test_observations_without_drafts() -> None:
    """Verified tokens may come while nobody asks, as in a cascade; they are all seen later."""
    made = _Made(2)
    rounds = FeatureRounds(made.drafter, made.network.observe, random.Random(3), V)
    rounds.start(0, 3)
    rounds.round(depth=2, width=2)
    for _ in range(3):
        rounds.rows[0].paths = {0: ()}
        rounds._accept()
    rounds.round(depth=2, width=2)
    made.check(rounds.laws)


def test_nothing_asked_of_later_modules_in_between() -> None:
    made = _Made(3)
    rounds = FeatureRounds(made.drafter, made.network.observe, random.Random(4), V)
    rounds.start(0, 1)
    for depth in (0, 0, 1, 0, 2, 5):
        rounds.round(depth, width=2)
    made.check(rounds.laws)
