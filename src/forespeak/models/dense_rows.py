"""DenseRows: keys and values of many plain texts, one new token each, without a loop over rows.

The engine's forward takes any tree of any row and attends row by row. Where every row has one token
and nothing is ever taken back, as when training data are written, all rows go through one attention
over padded keys. What a row sees is the same.

    slot:  0 ....... lengths-1 | lengths ....... C-1
           tokens of the row   | garbage that no mask shows

R rows, C slots, n rows of a prefill, P tokens of its longest prompt, G query heads a KV head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.models.decoder import Decoder

_SLOTS = 64  # capacities and attended lengths are multiples: few shapes, aligned masks
_PREFILL_TOKENS = 16_384  # of one forward, padding counted


class DenseRows:
    """Keys and values of R rows of a decoder.

    Args:
        model: whose.
        num_rows: R.

    Attributes:
        lengths: [R] int64 on the device, tokens of each row.
    """

    def __init__(self, model: Decoder, num_rows: int) -> None:
        c = model.config
        self._model = model
        self._window = c.sliding_window
        self._windowed = model.windowed
        self._tables = model.rotations(_SLOTS)  # of positions
        shape = (num_rows, c.num_kv_heads, 0, c.head_dim)
        empty = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2)]
        self._keys = [empty[0]] * c.num_layers  # [R, kv, C, D] a layer
        self._values = [empty[1]] * c.num_layers
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=model.device)
        self._all = torch.arange(num_rows, device=model.device)

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for rows of so many tokens."""
        extra = -(-length // _SLOTS) * _SLOTS - self._keys[0].shape[2]
        if extra > 0:
            for kept in (self._keys, self._values):
                for layer, old in enumerate(kept):  # one by one, so that old ones go
                    kept[layer] = F.pad(old, (0, 0, 0, extra))

    @torch.inference_mode()
    def prefill(self, rows: list[int], prompts: list[list[int]]) -> None:
        """Begin rows with all tokens of their prompts; ``reserve`` must have made room.

        Args:
            rows: numbers.
            prompts: of each, one token at least.
        """
        order = sorted(range(len(rows)), key=lambda at: len(prompts[at]))
        while order:
            longest = len(prompts[order[-1]])
            count = max(1, _PREFILL_TOKENS // longest)
            self._prefill([(rows[at], prompts[at]) for at in order[-count:]])
            del order[-count:]

    def _prefill(self, begun: list[tuple[int, list[int]]]) -> None:
        device = self.lengths.device
        longest = max(len(prompt) for _, prompt in begun)
        padded = [prompt + [0] * (longest - len(prompt)) for _, prompt in begun]
        tokens = torch.tensor(padded, device=device)  # [n, P]
        rows = torch.tensor([row for row, _ in begun], device=device)
        positions = torch.arange(longest, device=device).expand(len(begun), -1)
        self._forward(tokens, positions, rows, longest)
        self.lengths[rows] = torch.tensor([len(prompt) for _, prompt in begun], device=device)

    @torch.inference_mode()
    def step(self, tokens: Tensor, longest: int) -> Tensor:
        """One more token of every row, at its length; lengths are the caller's to move.

        Args:
            tokens: [R].
            longest: at least every row's length.

        Returns:
            [R, H] states after the final norm.
        """
        return self._forward(tokens[:, None], self.lengths[:, None], self._all, longest + 1)[:, 0]

    def _forward(self, tokens: Tensor, positions: Tensor, rows: Tensor, used: int) -> Tensor:
        """[n, S] new tokens of some rows to [n, S, H]; ``used`` slots are looked at."""
        model = self._model
        count, width = tokens.shape
        used = min(-(-used // _SLOTS) * _SLOTS, self._keys[0].shape[2])
        if used > len(self._tables[0]):
            self._tables = model.rotations(used)
        cos, sin = (table[positions.flatten()] for table in self._tables)
        spans = [None, self._window] if any(self._windowed) else [None]
        masks = [self._seen(positions, used, span) for span in spans]

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            at = rows[:, None], slice(None), positions
            keys[at] = k.reshape(count, width, *k.shape[1:])
            values[at] = v.reshape(count, width, *v.shape[1:])
            mask = masks[1 if self._windowed[layer] else 0]
            if rows is self._all:
                held = keys[:, :, :used], values[:, :, :used]
            else:
                held = keys[rows, :, :used], values[rows, :, :used]
            return _attend(q.reshape(count, width, *q.shape[1:]), *held, mask)

        hidden = model.embed(tokens.flatten())
        normed, _ = model.through_layers(hidden, cos, sin, mix)
        return normed.view(count, width, -1)

    def _seen(self, positions: Tensor, used: int, window: int | None) -> Tensor:
        """[n, 1, S, used] bool."""
        slots = torch.arange(used, device=positions.device)
        seen = slots <= positions[..., None]
        if window is not None:
            seen &= slots > positions[..., None] - window
        return seen[:, None]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[n, S, heads, D] over [n, kv, C, D] to [n * S, heads * D]; mask [n, 1, S, C].

    The query heads of a KV head become queries of one head, so that nothing is repeated.
    """
    count, width, heads, dim = query.shape
    groups = heads // keys.shape[1]
    q = query.view(count, width, -1, groups, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = mask if groups == 1 else mask.repeat(1, 1, groups, 1)
    mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)  # [n, kv, G * S, D]
    parted = mixed.view(count, -1, groups, width, dim).permute(0, 3, 1, 2, 4)
    return parted.reshape(count * width, heads * dim)
