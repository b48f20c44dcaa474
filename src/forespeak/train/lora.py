"""Low-rank changes of a frozen model's products (LoRA, arXiv 2106.09685).

    y = W x + b + (alpha / rank) B A x        A [rank, inputs], B [outputs, rank], B starts at 0

Only A and B are trained. Dropout on the change, which recipes for large models have at 0.05, is
left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forespeak.train.losses import Product
from forespeak.train.network import DecoderNetwork

_A, _B = "lora_a", "lora_b"


class LoraLinear(nn.Module):
    """A frozen product and its change.

    Args:
        frozen: the product; its weights are shared.
        rank, alpha: see the top of the file.
        generator: draws A.
    """

    def __init__(
        self, frozen: nn.Linear, rank: int, alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.weight, self.bias = frozen.weight, frozen.bias
        outputs, inputs = frozen.weight.shape
        drawn = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        self.lora_a = nn.Parameter(drawn.to(frozen.weight))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank).to(frozen.weight))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] to [..., outputs]."""
        change = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return F.linear(x, self.weight, self.bias) + self.scale * change


def add_lora(
    network: DecoderNetwork, *, rank: int, alpha: float, generator: torch.Generator
) -> None:
    """Freezes a model and puts a change beside each product of its layers and its own head.

    A head that is tied to the embedding stays as it is.
    """
    network.requires_grad_(False)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank, alpha, generator))


def head_products(network: DecoderNetwork, states: Tensor, *, fixed: bool = False) -> list[Product]:
    """Products that make the logits of states [..., H], for ``losses.law_loss``.

    Args:
        network: with or without changes.
        states: what the head reads.
        fixed: without gradient by the head.
    """
    head = network.lm_head
    if not isinstance(head, LoraLinear):
        return [(states, network.head.detach() if fixed else network.head)]
    first, second = head.lora_a, head.lora_b
    if fixed:
        first, second = first.detach(), second.detach()  # type: ignore[assignment]
    return [(states, head.weight), (head.scale * (states @ first.T), second)]


def merged(network: DecoderNetwork) -> dict[str, Tensor]:
    """The model's weights under HF names with all changes added to them."""
    found = {
        name: tensor.detach()
        for name, tensor in network.state_dict().items()
        if not name.endswith((f".{_A}", f".{_B}"))
    }
    for name, module in network.named_modules():
        if isinstance(module, LoraLinear):
            change = module.lora_b.detach() @ module.lora_a.detach()
            found[f"{name}.weight"] = found[f"{name}.weight"] + module.scale * change
    return found
