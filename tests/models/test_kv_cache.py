"""Cache rows and trees, in float32: each node has the logits of its path's plain forward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forespeak.models.base import TargetModel
from forespeak.models.kv_cache import KVCache
from forespeak.types import Segment, TargetOutput
from tests.models.driver import Driver, Node, chain, random_tree
from tests.tiny import random_tokens, run, tiny_config, tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")

_CONFIGS = {
    "full": tiny_config(),
    "window": tiny_config("mistral"),
    "both": tiny_config("qwen2", sliding_window=5, sliding_layers=(True, False, True)),
}
_TOLERANCE = 1e-4

each_config = pytest.mark.parametrize("kind", _CONFIGS)
exhaustive = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the device never changes
)


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=_TOLERANCE, rtol=0)


def _check_nodes(driver: Driver, row: int, out: TargetOutput) -> None:
    """Every new node against the plain forward of the path it ends; leaves cover the others."""
    state = driver.rows[row]
    start = len(state.pending) - len(out.logits)
    checked = set()
    for leaf in state.leaves():
        path = state.path(leaf)
        plain = run(driver.model, state.tokens_to(leaf))
        for place, node in enumerate(path):
            if node >= start:
                checked.add(node)
                _close(out.logits[node - start], plain.logits[len(state.text) + place])
                _close(out.hidden[node - start], plain.hidden[len(state.text) + place])
    assert checked == set(range(start, len(state.pending)))


def _check_cache(driver: Driver, row: int) -> None:
    """What the row holds equals what its text, computed from nothing, would have put there."""
    text = driver.rows[row].text
    assert driver.cache.lengths[row] == len(text)
    if not text:
        return
    fresh = Driver(driver.model)
    fresh.prefill(0, text)
    for found, expected in zip(driver.cache.snapshot(row), fresh.cache.snapshot(0), strict=True):
        _close(found, expected)


@st.composite
def _nodes(draw: st.DrawFn, before: int) -> list[Node]:
    """One to seven nodes, each below any earlier pending one or below the committed text."""
    count = draw(st.integers(1, 7))
    return [(draw(st.integers(0, 82)), draw(st.integers(-1, before + i - 1))) for i in range(count)]


@each_config
@exhaustive
@given(data=st.data())
def test_any_rounds(kind: str, data: st.DataObject, device: torch.device):
    """Rounds of one or two forwards over random forests in several rows, random paths kept."""
    driver = Driver(tiny_decoder(_CONFIGS[kind], device=device), num_rows=3)
    for row, length in enumerate(data.draw(st.lists(st.integers(0, 12), min_size=3, max_size=3))):
        if length:
            driver.prefill(row, random_tokens(length, seed=row))
    for _ in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.integers(1, 2))):
            chosen = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
            new = {row: data.draw(_nodes(len(driver.rows[row].pending))) for row in chosen}
            for row, out in driver.forward(new).items():
                _check_nodes(driver, row, out)
        for row in range(3):
            last = len(driver.rows[row].pending) - 1
            driver.commit(row, data.draw(st.integers(-1, last)))
            _check_cache(driver, row)


@each_config
def test_steps_onto_pending_tokens(kind: str, device: torch.device):
    """As a drafter goes level by level: each forward adds nodes below pending ones."""
    driver = Driver(tiny_decoder(_CONFIGS[kind], device=device), num_rows=2)
    driver.prefill(1, random_tokens(9))
    levels: list[list[Node]] = [
        [(5, -1)],
        [(7, 0), (8, 0)],
        [(9, 2), (10, 1), (11, 1)],
        [(12, 4), (13, 3)],
    ]
    for level in levels:
        _check_nodes(driver, 1, driver.forward({1: level})[1])
    assert driver.cache.pending[1] == 8
    driver.commit(1, 6)
    assert driver.rows[1].text[9:] == [5, 7, 10, 12]
    _check_cache(driver, 1)


@each_config
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_chunked_prefill_is_prefill(kind: str, chunk: int, device: torch.device):
    model = tiny_decoder(_CONFIGS[kind], device=device)
    tokens = random_tokens(70)
    driver = Driver(model)
    out = driver.prefill(0, tokens, chunk)
    whole = run(model, tokens)
    _close(out.logits, whole.logits)
    _close(out.hidden, whole.hidden)
    _check_cache(driver, 0)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 6, 7, 8, 9, 20])
def test_trees_across_the_window_edge(length: int, device: torch.device):
    """Depths such that the window reaches into, up to, and past the committed text."""
    driver = Driver(tiny_decoder(tiny_config("mistral", sliding_window=5), device=device))
    driver.prefill(0, random_tokens(length))
    nodes = [(3, -1), (4, 0), (5, 0), (6, 1), (7, 2), (8, 3), (9, 4), (1, 5), (2, 7), (3, 8)]
    _check_nodes(driver, 0, driver.forward({0: nodes})[0])
    driver.commit(0, 9)
    _check_cache(driver, 0)
    _check_nodes(driver, 0, driver.forward({0: random_tree(6, 1)})[0])


def test_mask_that_is_causal_equals_none(device: torch.device):
    model = tiny_decoder(device=device)
    driver = Driver(model)
    driver.prefill(0, random_tokens(5))
    forked = driver.forward({0: [*chain([4, 5, 6]), (7, -1)]})[0].logits[:3]
    driver.truncate(0, 5)
    _close(forked, driver.forward({0: chain([4, 5, 6])})[0].logits)


def test_truncate(device: torch.device):
    driver = Driver(tiny_decoder(device=device), num_rows=2)
    driver.prefill(0, random_tokens(12))
    driver.prefill(1, random_tokens(5, seed=1))
    driver.forward({0: random_tree(4, 0)})
    driver.truncate(0, 7)
    assert driver.cache.lengths == [7, 5]
    assert driver.cache.pending == [0, 0]
    for row in (0, 1):
        _check_cache(driver, row)
        _check_nodes(driver, row, driver.forward({row: random_tree(5, row)})[row])


def test_a_released_row_starts_empty(device: torch.device):
    driver = Driver(tiny_decoder(device=device), num_rows=2)
    driver.prefill(0, random_tokens(30))
    driver.prefill(1, random_tokens(6, seed=1))
    driver.release(0)
    assert driver.cache.lengths[0] == 0
    for row, nodes in ((0, random_tree(5, 0)), (1, random_tree(5, 1))):
        _check_nodes(driver, row, driver.forward({row: nodes})[row])
        driver.commit(row, 4)
        _check_cache(driver, row)


def test_settled_tokens_stay_while_others_wait(device: torch.device):
    driver = Driver(tiny_decoder(_CONFIGS["both"], device=device), num_rows=2)
    driver.prefill(1, random_tokens(8))
    driver.forward({1: [*chain([1, 2, 3]), (4, 2), (5, 2)]})
    driver.settle(1, 3)
    assert (driver.cache.lengths[1], driver.cache.pending[1]) == (11, 2)
    _check_cache(driver, 1)
    _check_nodes(driver, 1, driver.forward({1: [(6, 0), (7, 1)]})[1])
    driver.commit(1, 3)
    assert driver.rows[1].text[8:] == [1, 2, 3, 5, 7]
    _check_cache(driver, 1)


@pytest.mark.parametrize("tiled", [False, True])
def test_growth_keeps_what_is_there(tiled: bool, device: torch.device):
    """Layout by layout, against a plain list of what was written."""
    cache = KVCache(2, 3, 2, 24, 1, tiled_keys=tiled, device=device)
    assert cache.capacity == 64
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn((2, 2, 200, 24), generator=generator).to(device) for _ in "kv")
    for start, stop in ((0, 60), (60, 130), (130, 200)):
        _write(cache, 1, keys[:, :, start:stop], values[:, :, start:stop])
        cache.commit_all(1)
    assert cache.capacity % 64 == 0 and cache.capacity >= 200
    found = cache.snapshot(1)
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)


@pytest.mark.parametrize("tiled", [False, True])
@exhaustive
@given(
    length=st.integers(0, 70),
    kept=st.lists(st.integers(0, 69), unique=True, max_size=40).map(sorted),
)
def test_commit_is_a_gather(tiled: bool, length: int, kept: list[int], device: torch.device):
    """Source and destination overlap, across key tiles too."""
    cache = KVCache(2, 2, 1, 4, 8, tiled_keys=tiled, device=device)
    generator = torch.Generator().manual_seed(length)
    keys, values = (torch.randn((2, 1, 140, 4), generator=generator).to(device) for _ in "kv")
    for row in (0, 1):
        if length:
            _write(cache, row, keys[:, :, :length], values[:, :, :length])
            cache.commit_all(row)
        _write(cache, row, keys[:, :, length : length + 70], values[:, :, length : length + 70])
    cache.commit(1, kept)
    expected = [*range(length), *(length + k for k in kept)]
    found = cache.snapshot(1)
    assert torch.equal(found[0], keys[:, :, expected])
    assert torch.equal(found[1], values[:, :, expected])
    cache.commit_all(0)  # the other row was not touched
    assert torch.equal(cache.snapshot(0)[0], keys[:, :, : length + 70])


def _write(cache: KVCache, row: int, keys: Tensor, values: Tensor) -> None:
    """Appends keys and values [L, kv, n, D] one slot at a time, as the layout says."""
    n, start = keys.shape[2], cache.used(row)
    cache.append([Segment(row, n)], list(range(start, start + n)))
    for i in range(n):
        slot = start + i
        if cache.tiled_keys:
            cache.keys[:, row, :, slot // 64, :, slot % 64] = keys[:, :, i]
        else:
            cache.keys[:, row, :, slot] = keys[:, :, i]
        cache.values[:, row, :, slot, : values.shape[-1]] = values[:, :, i]


def test_a_path_out_of_order_is_a_mistake(device: torch.device):
    driver = Driver(tiny_decoder(device=device))
    driver.forward({0: chain([1, 2, 3])})
    for kept in ([1, 0], [0, 0], [0, 3], [-1, 0]):
        with pytest.raises(AssertionError):
            driver.cache.commit(0, kept)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_rows_of_different_lengths(family: str, device: torch.device):
    """One forward: a decode step, a chunk of prefill and a tree, each in its own row."""
    model: TargetModel = tiny_decoder(tiny_config(family), device=device)
    driver = Driver(model, num_rows=4)
    for row, length in ((0, 3), (2, 90), (3, 17)):
        driver.prefill(row, random_tokens(length, seed=row))
    new = {3: chain([5]), 1: chain(random_tokens(33, seed=9)), 0: random_tree(12, 4)}
    for row, out in driver.forward(new).items():
        _check_nodes(driver, row, out)
        driver.commit(row, len(driver.rows[row].pending) - 1)
    for row in range(4):
        _check_cache(driver, row)


def test_inside_and_outside_of_inference_mode(device: torch.device):
    """Forwards run inside it and commits may not: torch refuses mixed writes to some tensors."""
    model = tiny_decoder(device=device)
    with torch.inference_mode():
        driver = Driver(model, capacity=1)
    driver.prefill(0, random_tokens(70))
    driver.forward({0: random_tree(5, 0)})
    driver.commit(0, 4)
    with torch.inference_mode():
        driver.forward({0: random_tree(5, 1)})
        driver.commit(0, 4)
        _check_cache(driver, 0)
