"""What the new tokens of one row see in each kind of layer, in the form transformers takes.

A model whose config has ``layer_types`` takes a mapping from layer type to mask; any other takes
one mask for all layers. Index map of one mask, n new tokens, m = pending before them + n::

    slot:   0 .......... length-1 | length ........... length+m-1
            committed: all seen   | pending: seen through the segment's mask [n, m]

In a layer with a window a token at position p sees positions above p - window; in a chunked layer
it sees those of its own chunk. Both go by position and not by slot, because the tokens of a tree
stand at other slots than positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forespeak.models.adapter_cache import TransformersCache
from forespeak.models.adapter_config import stated
from forespeak.types import Segment

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = (FULL, SLIDING, CHUNKED)
"""Layer types whose cache can be cut back to any earlier token."""


@dataclass(frozen=True)
class MaskRules:
    """How a model's layers restrict what a token sees.

    Attributes:
        kinds: the layer types that occur.
        as_mapping: the model takes a mapping from layer type to mask; else one mask, of the only
            kind.
        window, chunk: sizes of the sliding and chunked kinds.
    """

    kinds: tuple[str, ...]
    as_mapping: bool
    window: int | None = None
    chunk: int | None = None

    @classmethod
    def from_text_config(cls, config: Any) -> MaskRules:
        """The rule by which transformers' own ``generate`` prepares masks."""
        window = stated(config, "sliding_window")
        chunk = stated(config, "attention_chunk_size")
        types = stated(config, "layer_types")
        if types is not None:
            return cls(tuple(sorted(set(types))), True, window, chunk)
        kind = SLIDING if window is not None else CHUNKED if chunk is not None else FULL
        return cls((kind,), False, window, chunk)


def segment_masks(
    rules: MaskRules,
    cache: TransformersCache,
    segment: Segment,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | Mapping[str, Tensor]:
    """The ``attention_mask`` of one row's forward, to be called after ``cache.append``.

    Masks are added to the scores, [1, 1, n, used]: eager attention can do nothing else, and the
    library kernels take that form too.
    """
    seen = _seen(cache, segment)  # [n, used]
    row, n = segment.row, segment.num_tokens
    pending = torch.tensor(cache.pending_positions[row])
    keys = torch.cat([torch.arange(cache.lengths[row]), pending])[None]  # [1, used]
    own = pending[-n:, None]  # [n, 1]
    masks = {
        kind: _additive(_restricted(rules, kind, seen, keys, own), dtype, device)
        for kind in rules.kinds
    }
    return masks if rules.as_mapping else masks[rules.kinds[0]]


def _seen(cache: TransformersCache, segment: Segment) -> Tensor:
    """[n, used] bool, windows left aside."""
    row, n = segment.row, segment.num_tokens
    length, m = cache.lengths[row], cache.pending[row]
    pending = segment.mask
    if pending is None:
        pending = torch.ones((n, m), dtype=torch.bool).tril(m - n)
    assert pending.shape == (n, m), (pending.shape, n, m)
    return torch.cat([torch.ones((n, length), dtype=torch.bool), pending.cpu()], dim=1)


def _restricted(rules: MaskRules, kind: str, seen: Tensor, keys: Tensor, own: Tensor) -> Tensor:
    if kind == SLIDING:
        assert rules.window is not None
        return seen & (keys > own - rules.window)
    if kind == CHUNKED:
        assert rules.chunk is not None
        return seen & (keys // rules.chunk == own // rules.chunk)
    return seen


def _additive(seen: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=dtype)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None].to(device)
