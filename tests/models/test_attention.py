"""What each token sees, in both forms, against the definition; and attention itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forespeak.models.attention import attend, build_plan, dense_mask
from forespeak.models.kernels.layout import Plan
from forespeak.models.kv_cache import KVCache
from forespeak.types import Segment

_WINDOWED = np.array([0, 1], np.int64)


def _parents(draw: st.DrawFn, before: int, count: int) -> list[int]:
    return [draw(st.integers(-1, before + i - 1)) for i in range(count)]


class _Forest:
    """One row with committed tokens and two forwards' worth of pending ones."""

    def __init__(self, length: int, parents: list[int], num_new: int) -> None:
        self.length, self.parents, self.num_new = length, parents, num_new
        self.positions: list[int] = []
        for parent in parents:
            self.positions.append(length if parent < 0 else self.positions[parent] + 1)
        self.cache = KVCache(1, 2, 1, 2, 8)
        self.cache.lengths[1] = length
        old = len(parents) - num_new
        if old:
            self.cache.append([Segment(1, old)], self.positions[:old])
        mask = torch.zeros((len(parents), len(parents)), dtype=torch.bool)
        for node in range(len(parents)):
            mask[node, self.ancestors(node)] = True
        self.segment = Segment(1, num_new, mask[old:])
        self.cache.append([self.segment], self.positions[old:])

    def ancestors(self, node: int) -> list[int]:
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return sorted(found)

    def visible(self, node: int, window: int | None) -> list[int]:
        """Slots in order, by the definition: committed and ancestors, near enough in position."""
        slots = list(range(self.length)) + [self.length + a for a in self.ancestors(node)]
        positions = list(range(self.length)) + [self.positions[a] for a in self.ancestors(node)]
        own = self.positions[node]
        return [
            s for s, p in zip(slots, positions, strict=True) if window is None or own - p < window
        ]


@st.composite
def _forests(draw: st.DrawFn) -> _Forest:
    old, new = draw(st.integers(0, 6)), draw(st.integers(1, 8))
    parents = _parents(draw, 0, old + new)
    return _Forest(draw(st.integers(0, 12)), parents, new)


def _listed(plan: Plan, kind: int, token: int) -> list[int]:
    """The slots that a token sees, in the order in which the kernel goes through them."""
    part = slice(plan.extra_at[kind, token], plan.extra_at[kind, token + 1])
    return [*range(plan.first[kind, token], plan.last[kind, token]), *plan.extra[kind, part]]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(forest=_forests(), window=st.integers(1, 15))
def test_plan_and_mask_show_the_same_slots(forest: _Forest, window: int):
    plan = build_plan(forest.cache, [forest.segment], window, _WINDOWED)
    old = len(forest.parents) - forest.num_new
    for kind, span in enumerate((None, window)):
        mask = dense_mask(forest.cache, forest.segment, span, torch.device("cpu"))
        for i in range(forest.num_new):
            expected = forest.visible(old + i, span)
            assert _listed(plan, kind, i) == expected
            assert mask[i].nonzero().flatten().tolist() == expected
            assert (plan.row[i], plan.slot[i]) == (1, forest.length + old + i)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(length=st.integers(0, 12), count=st.integers(1, 12), window=st.integers(1, 15))
def test_no_mask_means_causal(length: int, count: int, window: int):
    chain = _Forest(length, list(range(-1, count - 1)), count)
    causal = Segment(1, count)
    with_mask = build_plan(chain.cache, [chain.segment], window, _WINDOWED)
    without = build_plan(chain.cache, [causal], window, _WINDOWED)
    for kind in (0, 1):
        for i in range(count):
            assert _listed(with_mask, kind, i) == _listed(without, kind, i)
    for span in (None, window):
        masks = [
            dense_mask(chain.cache, s, span, torch.device("cpu")) for s in (chain.segment, causal)
        ]
        assert torch.equal(*masks)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (4, 2), (6, 6)])
@pytest.mark.parametrize("dim", [16, 24, 80])
def test_library_attention_is_plain_attention(
    shape: tuple[int, int], dim: int, device: torch.device
):
    heads, kv_heads = shape
    generator = torch.Generator().manual_seed(dim)
    query = torch.randn((5, heads, dim), generator=generator)
    keys, values = (torch.randn((kv_heads, 9, dim), generator=generator) for _ in "kv")
    mask = torch.rand((5, 9), generator=generator) < 0.5
    mask[:, 0] = True
    inputs = [t.to(device) for t in (query, keys, values, mask)]
    fast = attend(*inputs).cpu()
    plain = attend(*inputs, plain=True).cpu()
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=0)
    by_hand = _one_head(query[3, heads - 1], keys[-1], values[-1], mask[3])
    torch.testing.assert_close(plain[3, heads - 1].double(), by_hand, atol=1e-5, rtol=0)


def _one_head(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Softmax attention of one query over the keys that it sees, in float64."""
    seen = mask.nonzero().flatten()
    scores = keys[seen].double() @ query.double() / query.shape[0] ** 0.5
    weights = (scores - scores.max()).exp()
    mixed: torch.Tensor = (weights / weights.sum()) @ values[seen].double()
    return mixed
