"""A drafter that continues the target's states, unrolled over its own drafts.

``drafters/feature_chain.py`` says what pairs are. In training all starts of all texts go at once::

    pass over verified text     pairs (state at t, x_{t+1}) of all t, causal; keeps keys and values
    step k = 1, 2, ...          at each start t the pair (own state of step k - 1, x_{t+k+1}) at
                                position t + k sees the verified pairs up to t and its own steps

So what a step sees is what a draft sees when the chain has followed the true text. Gradients flow
from each step into those before. With one step this is plain teacher forcing.

B texts, S tokens, N starts of a text, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.models.blocks import Attend, Rotation
from forespeak.models.config import ModelConfig
from forespeak.train.attention import CausalAttention, DraftAttention, Rotations
from forespeak.train.rows import ahead

Step = Callable[[Tensor, Tensor, Rotation, Attend], Tensor]
"""(embedded [..., H], states [..., H], rotation, attend) -> outputs [..., H]."""


class Unroll:
    """Runs one module over verified text and then over its own drafts.

    Args:
        layers: sizes, windows and rotary settings of the module's layers.
        embedding: [V, H] the target's.
        step: the module.
        hand_on: outputs to the states of the next step.
    """

    def __init__(
        self,
        layers: ModelConfig,
        embedding: Tensor,
        step: Step,
        hand_on: Callable[[Tensor], Tensor],
    ) -> None:
        self._layers, self._embedding = layers, embedding
        self._step, self._hand_on = step, hand_on
        self._rotations = Rotations(layers, embedding.device)

    def __call__(self, tokens: Tensor, states: Tensor, starts: Tensor, num_steps: int) -> Tensor:
        """Outputs of all steps.

        Args:
            tokens: [B, S].
            states: [B, S, H] what verified pairs enter with.
            starts: [B, N].
            num_steps: D.

        Returns:
            [B, N, D, H].
        """
        causal = CausalAttention(self._layers)
        positions = torch.arange(tokens.shape[1])
        outputs = self._step(
            self._embed(ahead(tokens, 1)), states, self._rotations(positions), causal
        )
        texts = torch.arange(len(tokens), device=tokens.device)[:, None]
        newest = outputs[texts, starts]  # [B, N, H]
        found = [newest]
        drafts = DraftAttention(self._layers, causal.kept, starts)
        for step in range(1, num_steps):
            places = starts + step
            after = tokens[texts, (places + 1).clamp(max=tokens.shape[1] - 1)]
            newest = self._step(
                self._embed(after), self._hand_on(newest), self._rotations(places),
                drafts.step(places),
            )  # fmt: skip
            found.append(newest)
        return torch.stack(found, 2)

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding).float()
