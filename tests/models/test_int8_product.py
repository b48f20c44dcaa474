"""A drafter's product in int8: the target's arithmetic, on shapes of any size."""

from __future__ import annotations

import pytest
import torch

from forespeak.models.blocks import MLP, DecoderLayer, Linear
from forespeak.models.int8_product import Int8Product, quantize_products
from forespeak.models.quantize import quantize_channels
from tests.tiny import tiny_config


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Both quantised as ``quantize.py`` says, in float64."""
    q, scale = quantize_channels(weight)
    width = -(-x.shape[1] // 32) * 32
    rows = torch.nn.functional.pad(x, (0, width - x.shape[1])).view(len(x), -1, 32).double()
    steps = rows.abs().amax(-1, keepdim=True) / 127
    rounded = (rows / torch.where(steps > 0, steps, 1.0)).round() * steps
    return rounded.flatten(1)[:, : x.shape[1]] @ (q.double() * scale.double()[:, None]).T


@pytest.mark.parametrize("portable", [None, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 7), (3, 64, 83), (17, 33, 128)])
def test_is_the_quantised_product(rows: int, inputs: int, outputs: int, portable: bool | None):
    x, weight = drawn(rows, inputs), drawn(outputs, inputs, seed=1)
    product = Int8Product(weight, threads=1, portable=portable)
    found = product(x)
    assert found.shape == (rows, outputs) and found.dtype == torch.float32
    # Halves may be rounded to either side in float32 and float64.
    torch.testing.assert_close(found.double(), expected(x, weight), rtol=0.02, atol=0.02)
    exact = x @ weight.T
    assert float((found - exact).norm() / exact.norm()) < 0.02


def test_rows_do_not_depend_on_each_other():
    product = Int8Product(drawn(50, 70, seed=1), drawn(50, seed=2), threads=2)
    x = drawn(9, 70)
    together = product(x)
    for row in range(9):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


def test_the_bias_is_added():
    weight, bias = drawn(20, 40, seed=1), drawn(20, seed=2)
    x = drawn(4, 40)
    plain, with_bias = Int8Product(weight, threads=1)(x), Int8Product(weight, bias, threads=1)(x)
    assert torch.equal(with_bias, plain + bias)


@torch.no_grad()
def test_a_network_with_its_products_replaced():
    config = tiny_config("qwen2", attention_bias=True)
    layer = DecoderLayer(config)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number) * 0.1)
    mlp, x = layer.mlp, drawn(2, 5, config.hidden_size)
    before = mlp(x)
    quantize_products(layer, 1, kept=("down_proj",))
    assert isinstance(layer.mlp.down_proj, Linear)
    kinds = [type(m).__name__ for m in (layer.self_attn.q_proj, layer.mlp.gate_proj)]
    assert kinds == ["_Int8Linear", "_Int8Linear"]
    after = mlp(x)
    assert after.shape == before.shape and not torch.equal(after, before)
    assert float((after - before).norm() / before.norm()) < 0.05


def test_a_network_of_nothing_but_norms_stays():
    network = torch.nn.Sequential(torch.nn.LayerNorm(3))
    quantize_products(network, 1)
    assert isinstance(network[0], torch.nn.LayerNorm)
    assert MLP(tiny_config()).down_proj.weight.shape[0] == tiny_config().hidden_size
