"""Self-test of an adapted model: is a tree forward the same as plain forwards of its paths?

It is what speculation needs of a model, tried on a dozen tokens, so that an architecture of which
nobody has thought (positions read elsewhere, masks rebuilt, states kept outside the cache) is
refused at load and never decodes wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forespeak.errors import ModelError
from forespeak.models.adapter_cache import TransformersCache
from forespeak.models.adapter_model import TransformersModel
from forespeak.types import Segment

ALLOWED_GAP = 1e-3
"""Largest difference of logits in float32."""

ALLOWED_SHARE = 0.25
"""In bfloat16, where rounding alone moves logits: root mean square difference over their spread."""

# The tree: root 0, its children 1 and 2, below them 3 and 4; the path taken is 0, 2, 4.
_PARENTS = (-1, 0, 0, 1, 2)
_DEPTHS = (0, 1, 1, 2, 2)
_PATH = (0, 2, 4)
_OTHER_PATH = (0, 1, 3)
_PREFIX = 4

# What code that was given a mask, a position or a cache that it cannot use may raise.
_MISUSE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@torch.inference_mode()
def check_tree_forward(model: TransformersModel, name: str) -> None:
    """Prefill, a tree, a commit and one token more, each compared with plain forwards.

    Args:
        name: the model, for messages.

    Raises:
        ModelError: the model is not causal, takes no tree, or its cache cannot be cut back.
    """
    try:
        _check(model, name)
    except ModelError:
        raise
    except _MISUSE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise _refusal(
            model, name, f"does not take a tree of tokens through transformers ({reason})"
        ) from error


def _check(model: TransformersModel, name: str) -> None:
    tokens = _tokens(model)
    prefix, tree, last = tokens[:_PREFIX], tokens[_PREFIX:-1], tokens[-1:]
    taken = torch.cat([prefix, tree[list(_PATH)], last])
    plain = _plain(model, taken)
    if _gap(model, _plain(model, taken[:_PREFIX]), plain[:_PREFIX]):
        raise _refusal(model, name, "is not causal: later tokens change what earlier ones give")
    cache = model.new_cache(1, 0)
    ours = _tree_run(model, cache, prefix, tree, last)
    other = torch.cat([prefix, tree[list(_OTHER_PATH)]])
    expected = torch.cat([plain, _plain(model, other)[-1:]])
    if gap := _gap(model, ours, expected):
        raise _refusal(
            model,
            name,
            f"gives other logits for a tree of tokens than for its paths one by one ({gap})",
        )
    if {layer.num_slots for layer in cache.layers(0)} != {cache.used(0)}:
        raise _refusal(model, name, "does not keep its keys and values in the cache it is given")


def _tree_run(
    model: TransformersModel, cache: TransformersCache, prefix: Tensor, tree: Tensor, last: Tensor
) -> Tensor:
    """Logits of prefix, taken path, last token, and of the end of the path not taken."""
    first = model.forward(prefix, torch.arange(_PREFIX), cache, [Segment(0, _PREFIX)])
    cache.commit_all(0)
    positions = torch.tensor(_DEPTHS) + _PREFIX
    second = model.forward(tree, positions, cache, [Segment(0, len(tree), _tree_mask())])
    cache.commit(0, _PATH)
    third = model.forward(last, torch.tensor([cache.lengths[0]]), cache, [Segment(0, 1)])
    path = second.logits[list(_PATH)]
    return torch.cat([first.logits, path, third.logits, second.logits[_OTHER_PATH[-1]][None]])


def _tree_mask() -> Tensor:
    mask = torch.eye(len(_PARENTS), dtype=torch.bool)
    for node, parent in enumerate(_PARENTS):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def _tokens(model: TransformersModel) -> Tensor:
    """Prefix, tree and one more; all different where the vocabulary allows it."""
    count = _PREFIX + len(_PARENTS) + 1
    step = max(1, model.config.vocab_size // (count + 1))
    return torch.arange(1, count + 1) * step % model.config.vocab_size


def _plain(model: TransformersModel, tokens: Tensor) -> Tensor:
    """Logits [n, V] of transformers' own forward, without cache, mask or positions of ours."""
    output = model.language_model(input_ids=tokens[None].to(model.device), use_cache=False)
    logits: Tensor = output.logits
    return logits[0].float()


def _gap(model: TransformersModel, ours: Tensor, plain: Tensor) -> str | None:
    """How far two sets of logits are apart, None when that is allowed."""
    largest = (ours - plain).abs().max().item()
    if model.dtype == torch.float32:
        allowed = largest <= ALLOWED_GAP
    else:
        distance = (ours - plain).pow(2).mean().sqrt().item()
        allowed = distance <= ALLOWED_SHARE * plain.std().item()
    return None if allowed else f"they differ by {largest:.3g}"


def _refusal(model: TransformersModel, name: str, what: str) -> ModelError:
    return ModelError(
        f"{name}: the architecture {model.config.model_type} {what}; speculative decoding would "
        "change its text. Choose a model whose layers are plain attention."
    )
