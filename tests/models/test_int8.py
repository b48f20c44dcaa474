"""Law 1 on CPU: in int8 a token's results do not depend, bit for bit, on what else is computed.

The reference is always plain decoding: one token a forward, alone in a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.errors import CheckpointError, OptionError
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import Decoder
from forespeak.models.int8_decoder import Int8Decoder
from forespeak.models.kernels.simd import BLOCK, has_int8_product
from forespeak.models.loading import load_checkpoint
from forespeak.types import TargetOutput
from tests.models.driver import Driver, chain, random_tree
from tests.tiny import random_tokens, random_weights, run, tiny_config, tiny_decoder, tiny_int8

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

_MOST_THREADS = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
_THREADS = [
    1,
    pytest.param(2, marks=pytest.mark.skipif(_MOST_THREADS < 2, reason="one thread only")),
]
_FAMILIES = {
    "llama": tiny_config(),
    "llama biases": tiny_config(attention_bias=True, output_bias=True, mlp_bias=True),
    "qwen2 tied": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen3": tiny_config("qwen3"),
    "qwen3 some windows": tiny_config(
        "qwen3", sliding_window=5, sliding_layers=(True, False, True)
    ),
    "mistral": tiny_config("mistral"),
    "mistral wide window": tiny_config("mistral", sliding_window=70),
    "yarn": tiny_config(rope="yarn"),
}
_HEADS = {
    f"{groups} heads of {dim} a key head": tiny_config(
        head_dim=dim, num_heads=2 * groups, num_kv_heads=2, num_layers=2
    )
    for dim in (16, 24, 64, 80, 128)
    for groups in (1, 2, 3, 4)
}
_CONFIGS = _FAMILIES | _HEADS
# Products go by 8 rows and then all that are left, small work by threads from 4 rows on.
_ALL_COUNTS = (*range(1, 18), 24, 31, 32, 33, 47, 48, 63, 64)
_SOME_COUNTS = (1, 2, 3, 5, 8, 15, 64)

each_config = pytest.mark.parametrize("name", _CONFIGS)


class Plain:
    """Plain decoding of one text after another; a text that begins as the last one did goes on."""

    def __init__(self, model: Int8Decoder, taps: Sequence[int] = ()) -> None:
        self._driver = Driver(model)
        self._taps = taps
        self._outs: list[TargetOutput] = []

    def outs(self, tokens: Sequence[int]) -> list[TargetOutput]:
        """What each token's own forward returned."""
        text = self._driver.rows[0].text
        same = 0
        while same < min(len(text), len(tokens)) and text[same] == tokens[same]:
            same += 1
        self._driver.truncate(0, same)
        del self._outs[same:]
        for token in tokens[same:]:
            self._outs.append(self._driver.forward({0: [(token, -1)]}, self._taps)[0])
            self._driver.commit(0, 0)
        return self._outs

    def cache(self) -> tuple[Tensor, Tensor]:
        return self._driver.cache.snapshot(0)


def _equal(found: TargetOutput, at: int, expected: TargetOutput) -> None:
    assert torch.equal(found.logits[at], expected.logits[0])
    assert torch.equal(found.hidden[at], expected.hidden[0])
    if expected.taps is not None:
        assert found.taps is not None and torch.equal(found.taps[at], expected.taps[0])


def _check(plain: Plain, driver: Driver, row: int, out: TargetOutput) -> None:
    """Each new node of a row against plain decoding of its path."""
    state = driver.rows[row]
    start = len(state.pending) - len(out.logits)
    checked = set()
    for leaf in state.leaves():
        path = state.path(leaf)
        expected = plain.outs(state.tokens_to(leaf))[-len(path) :]
        for node, alone in zip(path, expected, strict=True):
            if node >= start:
                checked.add(node)
                _equal(out, node - start, alone)
    assert checked == set(range(start, len(state.pending)))


def _check_cache(plain: Plain, driver: Driver, row: int) -> None:
    plain.outs(driver.rows[row].text)
    for found, expected in zip(driver.cache.snapshot(row), plain.cache(), strict=True):
        assert torch.equal(found, expected)


@each_config
def test_any_number_of_rows(name: str):
    """Chains of 1 to 64 tokens after a committed text, and prefill in chunks of every size."""
    config = _CONFIGS[name]
    model = tiny_int8(config)
    plain = Plain(model, taps=(1, 0))
    tokens = random_tokens(220)
    expected = list(plain.outs(tokens))
    for count in _ALL_COUNTS if name in _FAMILIES else _SOME_COUNTS:
        driver = Driver(model)
        driver.prefill(0, tokens[:150], chunk=count)
        out = driver.forward({0: chain(tokens[150 : 150 + count])}, taps=(1, 0))[0]
        for i in range(count):
            _equal(out, i, expected[150 + i])
        driver.commit(0, count - 1)
        _check_cache(plain, driver, 0)


@each_config
def test_trees_and_mixed_batches(name: str):
    """Rounds with a tree, a chunk of prefill, one token and a second tree; paths kept."""
    model = tiny_int8(_CONFIGS[name])
    plain = Plain(model, taps=(0,))
    driver = Driver(model, num_rows=4, capacity=8)
    driver.prefill(0, random_tokens(9, seed=0))
    driver.prefill(3, random_tokens(190, seed=3))
    for turn in range(3):
        new = {
            3: random_tree(11, turn, spread=4),
            1: chain(random_tokens(17, seed=turn)),
            0: random_tree(8, 10 + turn),
            2: chain([turn]),
        }
        for row, out in driver.forward(new, taps=(0,)).items():
            _check(plain, driver, row, out)
        for row, node in ((0, 7 - turn), (1, 16), (2, 0), (3, 10)):
            driver.commit(row, node)
            _check_cache(plain, driver, row)


@pytest.mark.parametrize("name", ["llama", "qwen3 some windows", "mistral"])
def test_steps_onto_pending_tokens(name: str):
    model = tiny_int8(_CONFIGS[name])
    plain = Plain(model)
    driver = Driver(model, num_rows=2)
    driver.prefill(1, random_tokens(58))
    for level in ([(5, -1)], [(7, 0), (8, 0), (9, 0)], [(9, 2), (10, 1), (11, 3)], [(12, 6)]):
        _check(plain, driver, 1, driver.forward({1: level})[1])
    driver.commit(1, 7)
    _check_cache(plain, driver, 1)
    driver.forward({1: [*chain([1, 2, 3]), (4, 2), (5, 2)]})
    driver.settle(1, 3)
    _check(plain, driver, 1, driver.forward({1: [(6, 0), (7, 1)]})[1])
    driver.commit(1, 3)
    _check_cache(plain, driver, 1)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_rows_that_were_used_before(name: str):
    """What an earlier text left in the slots, and growth, change nothing."""
    model = tiny_int8(_CONFIGS[name])
    plain = Plain(model)
    driver = Driver(model, num_rows=2, capacity=1)
    driver.prefill(0, random_tokens(150, seed=5))
    driver.forward({0: random_tree(20, 0)})
    driver.release(0)
    driver.prefill(0, random_tokens(20))
    driver.truncate(0, 11)
    _check(plain, driver, 0, driver.forward({0: random_tree(12, 1)})[0])
    driver.commit(0, 11)
    driver.prefill(1, random_tokens(200, seed=6))  # the cache grows under row 0
    _check_cache(plain, driver, 0)
    _check(plain, driver, 0, driver.forward({0: random_tree(12, 2)})[0])


def _outcome(model: Int8Decoder) -> list[Tensor]:
    """Everything that a prefill, a tree and a mixed forward give."""
    driver = Driver(model, num_rows=2)
    parts = [driver.prefill(0, random_tokens(70))]
    parts.append(driver.forward({0: random_tree(13, 0)}, taps=(0, 1))[0])
    driver.commit(0, 12)
    parts += driver.forward({1: chain([1, 2]), 0: random_tree(7, 1)}, taps=(1, 0)).values()
    taps = [part.taps for part in parts if part.taps is not None]
    assert len(taps) == 3
    return [p.logits for p in parts] + [p.hidden for p in parts] + taps


def _expect_same_bits(config: ModelConfig, **options: Any) -> None:
    expected = _outcome(tiny_int8(config, threads=1, portable=True))
    found = _outcome(tiny_int8(config, **options))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b), options


@pytest.mark.skipif(not has_int8_product(), reason="this CPU has no AVX-512 VNNI")
@each_config
def test_portable_arithmetic_has_the_same_bits(name: str):
    _expect_same_bits(_CONFIGS[name], threads=1, portable=False)


@pytest.mark.skipif(_MOST_THREADS < 2, reason="one thread only")
@pytest.mark.parametrize("portable", [None, True], ids=["chosen", "portable"])
@pytest.mark.parametrize("name", [*_FAMILIES, *list(_HEADS)[::3]])
def test_threads_change_no_bit(name: str, portable: bool | None):
    _expect_same_bits(_CONFIGS[name], threads=2, portable=portable)


@pytest.mark.parametrize("threads", _THREADS)
def test_head_of_drafters_is_the_targets_head(threads: int):
    """Also for rows that a drafter made: any shape, any number, the same bits."""
    model = tiny_int8(threads=threads)
    out = run(model, random_tokens(24))
    assert torch.equal(model.head(out.hidden), out.logits)
    assert torch.equal(model.head(out.hidden.view(2, 3, 4, -1))[1, 2, 3], out.logits[23])
    assert torch.equal(model.head(out.hidden[5]), out.logits[5])


def test_asked_logits_in_the_order_asked():
    model = tiny_int8()
    at = torch.tensor([19, 3, 3, 0])
    found = run(model, random_tokens(20), logits_at=at)
    assert torch.equal(found.logits, run(model, random_tokens(20)).logits[at])
    assert found.hidden.shape[0] == 20


def test_the_first_layers_are_a_model_of_their_own():
    config = _CONFIGS["qwen3 some windows"]
    short = replace(config, num_layers=2, sliding_layers=config.sliding_layers[:2])
    weights = random_weights(config)
    kept = {name: w for name, w in weights.items() if ".layers.2." not in name}
    model = tiny_int8(config)
    whole = run(model, random_tokens(30)).logits
    cut = run(model.truncated(2), random_tokens(30)).logits
    assert torch.equal(cut, run(Int8Decoder(short, kept.items()), random_tokens(30)).logits)
    assert torch.equal(whole, run(model, random_tokens(30)).logits)  # itself unchanged
    assert not torch.equal(whole, cut)


def _quantised_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The int8 product by its definition, in float64 around exact integers."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    steps = (weight / scale.where(scale > 0, 1)).round().double() * scale.double()
    wide = F.pad(x, (0, -x.shape[-1] % BLOCK))
    blocks = wide.view(*x.shape[:-1], -1, BLOCK)
    top = blocks.abs().amax(-1, keepdim=True)
    levels = (blocks * (127 / top).where(top > 0, 0)).round().double() * (top / 127).double()
    out = levels.flatten(-2)[..., : x.shape[-1]] @ steps.T
    result: Tensor = out if bias is None else out + bias.double()
    return result.float()


def _oracle(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The torch decoder with every product replaced by the int8 product's definition."""
    weights = random_weights(config)
    embedding = weights["model.embed_tokens.weight"]
    weights.setdefault("lm_head.weight", embedding)
    weights["model.embed_tokens.weight"] = embedding.half().float()  # as int8 stores it
    values = vars(config) | {"tie_word_embeddings": False}
    monkeypatch.setattr("forespeak.models.decoder.F.linear", _quantised_linear)
    return Decoder(ModelConfig(**values), weights.items(), plain_attention=True)


@each_config
def test_near_the_definition_written_in_torch(name: str, monkeypatch: pytest.MonkeyPatch):
    """Only rounding differs. Now and then it flips a step of int8, and later tokens see that."""
    config = _CONFIGS[name]
    tokens = random_tokens(40)
    found = run(tiny_int8(config), tokens, taps=(0,))
    unquantised = run(tiny_decoder(config), tokens)
    expected = run(_oracle(config, monkeypatch), tokens, taps=(0,))
    assert found.taps is not None and expected.taps is not None
    same_tokens = (found.taps - expected.taps).abs().amax((1, 2)) < 1e-5
    assert same_tokens.float().mean() >= 0.9
    error = (found.logits - expected.logits).abs()
    assert error.median() < 1e-5
    assert error.mean() < 0.25 * (found.logits - unquantised.logits).abs().mean()


def test_weights_that_are_not_finite_are_refused():
    config = tiny_config()
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        weights = random_weights(config)
        weights[name][3, 4] = float("nan")
        with pytest.raises(CheckpointError, match="not finite"):
            Int8Decoder(config, weights.items())


def test_more_threads_than_there_are():
    for threads in (0, -1, _MOST_THREADS + 1):
        with pytest.raises(OptionError, match=f"allowed: 1 to {_MOST_THREADS}"):
            tiny_int8(threads=threads)


def test_embeddings_too_large_for_half_precision():
    config = tiny_config()
    weights = random_weights(config)
    weights["model.embed_tokens.weight"][7, 0] = 1e6
    model = Int8Decoder(config, weights.items())
    assert torch.equal(model.embed(torch.tensor([7]))[0], weights["model.embed_tokens.weight"][7])
    assert torch.isfinite(run(model, [1, 7, 2]).logits).all()


@pytest.mark.slow
def test_the_real_target(smollm2_path: Path):
    """SmolLM2: several counts, a tree of 40 nodes beside another row, against plain decoding.

    Plain decoding goes on one thread, all else on all.
    """
    checkpoint = load_checkpoint(smollm2_path)
    assert checkpoint.config is not None
    model = Int8Decoder(checkpoint.config, checkpoint.weights())
    taps = (2, 14, 26)
    alone = copy.copy(model)
    alone.threads = 1
    plain = Plain(alone, taps)
    tokens = random_tokens(140, vocab_size=49_152)
    expected = list(plain.outs(tokens))
    driver = Driver(model, num_rows=2, capacity=128)
    driver.prefill(0, tokens[:76], chunk=37)
    for count in (1, 2, 5, 8, 33, 64):
        out = driver.forward({0: chain(tokens[76 : 76 + count])}, taps)[0]
        for i in range(count):
            _equal(out, i, expected[76 + i])
        driver.truncate(0, 76)
    tree = random_tree(40, 0, vocab_size=49_152, spread=6)
    new: dict[int, Any] = {1: chain(tokens[:3]), 0: tree}
    outs = driver.forward(new, taps)
    _check(plain, driver, 0, outs[0])
    driver.commit(0, 39)
    _check_cache(plain, driver, 0)
    for i in range(3):
        _equal(outs[1], i, expected[i])


def test_logits_depend_on_the_text():
    """The comparisons above would all pass for a model that ignores its input."""
    out = run(tiny_int8(), random_tokens(30)).logits
    assert len(np.unique(out.argmax(-1))) > 5
