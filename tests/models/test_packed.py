"""PackedLinear: the library's product whatever the sizes, on weights it keeps for itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from forespeak.models import packed
from forespeak.models.packed import PackedLinear


@pytest.mark.parametrize("outputs", [1, 83])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_products(
    outputs: int, rows: int, bias: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(packed, "_can_pack", lambda: False)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, 40, generator=generator)
    added = torch.randn(outputs, generator=generator) if bias else None
    x = torch.randn(rows, 80, generator=generator)[:, ::2]
    expected = F.linear(x, weight, added)
    product = PackedLinear(weight.clone(), added)
    with torch.inference_mode():
        found = product(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        product = PackedLinear(torch.ones(5, 4))
    assert torch.equal(product(torch.ones(2, 4)), torch.full((2, 5), 4.0))


def test_other_types_and_devices(device: torch.device) -> None:
    weight = torch.ones(5, 4, dtype=torch.bfloat16, device=device)
    x = torch.ones(3, 4, dtype=torch.bfloat16, device=device)
    assert torch.equal(PackedLinear(weight)(x), torch.full((3, 5), 4.0).to(x))
    single = PackedLinear(weight.float())(x.float())
    assert torch.equal(single, torch.full((3, 5), 4.0, device=device))
