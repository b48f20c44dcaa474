"""The chunked losses against the same written out, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forespeak.train import losses, losses_reference
from forespeak.train.losses import Mix, Rows, TargetLaw

MIXES = {
    "hard": Mix(hard=1.0),
    "soft": Mix(soft=1.0),
    "kl": Mix(kl=0.7),
    "l1": Mix(l1=1.0),
    "all": Mix(hard=0.1, soft=0.3, kl=0.2, l1=0.9),
}


def problem(seed: int = 0, count: int = 45) -> tuple[list[Tensor], Rows]:
    """Two products, shared laws, a word outside the vocabulary, a row without weight."""
    g = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(count, 6, generator=g),
        torch.randn(17, 6, generator=g),
        torch.randn(count, 3, generator=g),
        torch.randn(17, 3, generator=g),
    ]
    states = torch.randn(20, 6, generator=g)
    index = torch.randint(20, (count,), generator=g).sort().values
    labels = torch.randint(17, (count,), generator=g)
    weights = torch.rand(count, generator=g)
    labels[3], weights[3] = -1, 0.0
    return leaves, Rows(weights, labels, TargetLaw(states, torch.randn(17, 6, generator=g), index))


def measured(module: object, rows: Rows, mix: Mix, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [leaf.clone().requires_grad_(True) for leaf in leaves]
    products = [(leaves[0], leaves[1]), (leaves[2], leaves[3])]
    total, numbers = module.law_loss(products, rows, mix)  # type: ignore[attr-defined]
    (3.0 * total).backward()
    return total.detach(), numbers, *[leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", MIXES)
def test_fast_is_plain_in_value_and_gradient(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses, "_CHUNK_NUMBERS", {"cpu": 1})  # chunks of 32 rows
    leaves, rows = problem()
    fast = measured(losses, rows, MIXES[name], leaves)
    plain = measured(losses_reference, rows, MIXES[name], leaves)
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5, equal_nan=True)


def test_without_a_law_only_labels_count():
    leaves, rows = problem()
    bare = Rows(rows.weights, rows.labels)
    fast = measured(losses, bare, MIXES["hard"], leaves)
    plain = measured(losses_reference, bare, MIXES["hard"], leaves)
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5, equal_nan=True)


def test_frozen_weights_get_no_gradient():
    leaves, rows = problem()
    states = leaves[0].requires_grad_(True)
    total, numbers = losses.law_loss([(states, leaves[1])], rows, Mix(kl=1.0))
    total.backward()
    assert states.grad is not None and not numbers.requires_grad and leaves[1].grad is None


def test_bfloat16_under_autocast_is_near():
    leaves, rows = problem()
    exact = measured(losses, rows, MIXES["all"], leaves)
    with torch.autocast("cpu", torch.bfloat16):
        near = measured(losses, rows, MIXES["all"], leaves)
    assert abs(float(near[0] - exact[0])) < 0.02 * float(exact[0])
    assert near[2].dtype == torch.float32
    torch.testing.assert_close(near[2], exact[2], atol=0.1, rtol=0.1)


def test_smooth_l1_and_chances_are_their_formulas():
    g = torch.Generator().manual_seed(1)
    a, b = 2 * torch.randn(9, 7, generator=g), torch.randn(9, 7, generator=g)
    logits, chances = torch.randn(9, generator=g), torch.rand(9, generator=g)
    for name, first, second in (("smooth_l1", a, b), ("chance_loss", logits, chances)):
        found = []
        for module in (losses, losses_reference):
            leaf = first.clone().requires_grad_(True)
            value = getattr(module, name)(leaf, second)
            value.sum().backward()
            found.append((value.detach(), leaf.grad))
        torch.testing.assert_close(found[0], found[1])


def test_no_rows_are_no_loss():
    leaves, rows = problem()
    law = rows.law
    assert law is not None
    none = Rows(rows.weights[:0], rows.labels[:0], TargetLaw(law.states, law.head, law.index[:0]))
    states = leaves[0][:0].requires_grad_(True)
    total, numbers = losses.law_loss([(states, leaves[1])], none, Mix(kl=1.0))
    total.backward()
    assert float(total.detach()) == 0 and numbers.shape == (0, 6)
