"""ModelConfig: sizes and switches of a decoder. The only file that reads HF field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder of the Llama, Qwen2, Qwen3 or Mistral family.

    Attributes:
        model_type: HF ``model_type``.
        rope_parameters: transformers-5 layout, ``{"rope_type": ..., "rope_theta": ..., ...}``.
        attention_bias: bias on q, k and v. ``output_bias``: bias on o.
        qk_norm: RMSNorm on each head's q and k (Qwen3).
        sliding_window: tokens a layer sees at most (own token counted), None for all;
            ``sliding_layers[i]`` says whether layer i has the window.
        max_position_embeddings: tokens a row may hold, prompt and answer together.
        eos_token_ids: ids that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
