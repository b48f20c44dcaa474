"""What the rest of the package reads of a transformers config, and rotary embeddings held still."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from forespeak.errors import ModelError, OptionError
from forespeak.models.config import ModelConfig

_NO_LIMIT = 1 << 20  # for the few architectures that name none
_BY_LENGTH = ("dynamic", "longrope")  # rotary kinds whose frequencies follow the text's length


def stated(config: Any, name: str) -> Any:
    """A field of a transformers config, None when it has none or another one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # how transformers answers for a field that differs between layers
        return None


def model_config(text: Any, generation: Any, limit: int) -> ModelConfig:
    """Sizes and identity of an adapted model.

    True of every architecture: ``model_type, vocab_size, hidden_size, num_layers,
    max_position_embeddings, bos_token_id, eos_token_ids``. The other fields describe our own
    decoder; here they hold what the config says where it says it, and otherwise 0 (sizes) or the
    default. Nothing may build a decoder from them.

    Args:
        text: the config of the language model part.
        generation: transformers' generation config, whose stop tokens count first.
        limit: tokens a row may hold.
    """
    stops = stated(generation, "eos_token_id")
    if stops is None:
        stops = stated(text, "eos_token_id")
    num_heads = _size(text, "num_attention_heads")
    head_dim = _size(text, "head_dim") or text.hidden_size // max(1, num_heads)
    return ModelConfig(
        model_type=text.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=_size(text, "intermediate_size"),
        num_layers=text.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=_size(text, "num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=0.0,
        max_position_embeddings=limit,
        rope_parameters={},
        tie_word_embeddings=bool(stated(text, "tie_word_embeddings")),
        bos_token_id=stated(text, "bos_token_id"),
        eos_token_ids=_ids(stops),
    )


def _size(text: Any, name: str) -> int:
    """A size, 0 when the config has none or one for each layer."""
    value = stated(text, name)
    return value if isinstance(value, int) else 0


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(dict.fromkeys(value))


def context_limit(text: Any, asked: int | None) -> int:
    """Tokens a row may hold.

    The limit is the config's; with longrope it is the original length unless more is asked for,
    because the longer length has other frequencies for all texts, short ones included.

    Raises:
        OptionError: less than 1 or more than the model has.
    """
    longest = _size(text, "max_position_embeddings") or _NO_LIMIT
    if asked is None:
        rope = stated(text, "rope_parameters") or {}
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and isinstance(original, int):
            return min(longest, original)
        return longest
    if not 1 <= asked <= longest:
        raise OptionError(
            f"context_length is {asked}; this model allows 1 to {longest}. Choose one of these."
        )
    return asked


@torch.inference_mode(False)  # buffers made in that mode could not be changed outside it
def pin_rope(model: nn.Module, limit: int) -> None:
    """Fix rotary frequencies that would change with the text's length.

    transformers picks them anew in each forward by the largest position in it, so that a token's
    logits would depend on what else is verified beside it. They are set as for the last position
    that a row may reach and marked as constant.

    Raises:
        ModelError: they go on changing, because the architecture picks them in a way of its own.
    """
    for module in model.modules():
        rope: Any = module
        kind = getattr(rope, "rope_type", None)
        if isinstance(kind, str) and _follows_length(kind):
            _rotary(rope, [limit - 1], None)
            rope.rope_type = "default"
            _check_constant(rope, limit, None)
        elif isinstance(kind, dict):
            following = [name for name, one in kind.items() if _follows_length(one)]
            for layer_type in following:
                _rotary(rope, [limit - 1], layer_type)
            rope.rope_type = kind | dict.fromkeys(following, "default")
            for layer_type in following:
                _check_constant(rope, limit, layer_type)


def _follows_length(kind: object) -> bool:
    return isinstance(kind, str) and any(name in kind for name in _BY_LENGTH)


def _rotary(module: nn.Module, positions: list[int], layer_type: str | None) -> tuple[Tensor, ...]:
    """What the module gives for some positions, [1, n, ...] each; dynamic kinds adapt to them."""
    device = next(module.buffers()).device
    call: dict[str, Any] = {"position_ids": torch.tensor([positions], device=device)}
    if layer_type is not None:
        call["layer_type"] = layer_type
    given: Tensor | tuple[Tensor, ...] = module(torch.zeros((1, 1, 1), device=device), **call)
    return given if isinstance(given, tuple) else (given,)


def _check_constant(module: nn.Module, limit: int, layer_type: str | None) -> None:
    """The first position must look the same beside the next one and beside the last one."""
    near = _rotary(module, [0, min(1, limit - 1)], layer_type)
    far = _rotary(module, [0, limit - 1], layer_type)
    if not all(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(near, far, strict=True)):
        raise ModelError(
            f"The rotary embedding of this model ({type(module).__name__}) changes with the text's "
            f"length up to {limit} tokens, so that a token's logits would depend on what is "
            "verified beside it. Leave context_length out, or give the length before the change."
        )
