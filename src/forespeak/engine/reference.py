"""The oracle: plain greedy decoding of one sequence, as slowly and obviously as it can be written.

No tree, no drafter, no chunks: the whole text goes through the model again for every token, and the
best token is appended. Everything faster is compared with this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forespeak.models.base import TargetModel
from forespeak.types import Segment


def decode_greedy(
    model: TargetModel, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()
) -> list[int]:
    """The continuation of a prompt, end-of-sequence token included.

    Args:
        model: the target.
        prompt_ids: at least one token.
        max_new_tokens: most tokens returned.
        eos_ids: tokens that end the text.
    """
    text = list(prompt_ids)
    for _ in range(max_new_tokens):
        text.append(int(next_logits(model, text).argmax()))
        if text[-1] in eos_ids:
            break
    return text[len(prompt_ids) :]


def next_logits(model: TargetModel, text: Sequence[int]) -> torch.Tensor:
    """Logits [V] of the token after ``text``, from a forward over all of it."""
    cache = model.new_cache(1, len(text))
    output = model.forward(
        torch.tensor(text), torch.arange(len(text)), cache, [Segment(0, len(text))],
        logits_at=torch.tensor([len(text) - 1]),
    )  # fmt: skip
    return output.logits[0]
