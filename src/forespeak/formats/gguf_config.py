"""What a GGUF file's metadata says of the model, in the field names of an HF config."""

from __future__ import annotations

import math
from typing import Any

from forespeak.errors import CheckpointError
from forespeak.formats.gguf_file import ROPE_FACTORS, GgufFile, read_tensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of ``general.architecture`` that can be read. Mistral files say llama."""

# Fields that change the arithmetic, with the values that leave it as the decoder has it.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}


def hf_values(file: GgufFile) -> dict[str, object]:
    """The fields of an HF config (transformers-5 layout) that describe the same model.

    Values are passed on as found: ``ModelConfig.from_hf`` checks their types.

    Raises:
        CheckpointError: another architecture, or a setting that the decoder does not have.
    """
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} holds a model of architecture {arch!r}; allowed in GGUF: "
            f"{', '.join(ARCHITECTURES)}. Use the model's HF folder or Hub id instead."
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{file.path} has no token_embd.weight; a whole language model is expected, and this "
            "may be a vocabulary or an adapter. Name the model's own file."
        )
    _refuse_what_we_lack(file)
    heads = _get(file, "attention.head_count")
    return {
        "model_type": arch,
        "vocab_size": embedding.shape[0],  # the metadata may leave out padding
        "hidden_size": _get(file, "embedding_length"),
        "intermediate_size": _get(file, "feed_forward_length"),
        "num_hidden_layers": _get(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _get(file, "attention.head_count_kv", heads),
        "head_dim": _get(file, "attention.key_length"),
        "rms_norm_eps": _get(file, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _get(file, "context_length"),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(file),
    }


def _get(file: GgufFile, key: str, default: Any = None) -> Any:
    """A field of the file's own architecture, by the part of its key after the architecture."""
    return file.metadata.get(f"{file.architecture}.{key}", default)


def _eos(file: GgufFile) -> list[object]:
    """End of sequence, of turn and of message: each of them ends an answer."""
    keys = ("eos", "eot", "eom")
    found = (file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys)
    return [token for token in found if token is not None]


def _refuse_what_we_lack(file: GgufFile) -> None:
    for key, neutral in _NEUTRAL.items():
        value = _get(file, key)
        if value is not None and value not in neutral:
            raise _unsupported(file, key, value, neutral)
    heads, width = _get(file, "attention.head_count"), _get(file, "embedding_length")
    head_dim = _get(file, "attention.key_length")
    if head_dim is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        head_dim = width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        value = _get(file, key, head_dim)
        if value != head_dim:
            raise _unsupported(file, key, value, (head_dim,))


def _unsupported(
    file: GgufFile, key: str, value: object, neutral: tuple[object, ...]
) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: {file.architecture}.{key} is {value!r}; the built-in decoder has only "
        f"{' or '.join(map(repr, neutral))}. Use the model's HF folder or another model."
    )


def _rope(file: GgufFile) -> dict[str, object]:
    rope: dict[str, object] = {
        "rope_type": "default",
        "rope_theta": _get(file, "rope.freq_base", 10000.0),
    }
    if ROPE_FACTORS in file.tensors:
        rope["frequency_factors"] = read_tensor(file, file.tensors[ROPE_FACTORS]).tolist()
    factor = _get(file, "rope.scaling.factor", _get(file, "rope.scale_linear", 0))
    # As in llama.cpp, a factor without a type means linear and a factor of 0 means none.
    kind = _get(file, "rope.scaling.type", "linear")
    attention = _get(
        file, "rope.scaling.attn_factor", _get(file, "rope.scaling.yarn_attn_factor", 1)
    )
    if kind == "yarn":
        return rope | _yarn(file, factor, attention)
    if attention != 1:
        raise _unsupported(file, "rope.scaling.attn_factor", attention, (1,))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return rope
    return rope | {"rope_type": kind, "factor": factor}


def _yarn(file: GgufFile, factor: object, attention: object) -> dict[str, object]:
    mix = _get(file, "rope.scaling.yarn_ext_factor", 1)
    if mix not in (1, -1):  # -1: not set
        raise _unsupported(file, "rope.scaling.yarn_ext_factor", mix, (1,))
    values: dict[str, object] = {"rope_type": "yarn", "factor": factor}
    for ours, theirs in (
        ("original_max_position_embeddings", "original_context_length"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        value = _get(file, f"rope.scaling.{theirs}")
        if value is not None:
            values[ours] = value
    is_scaled = isinstance(factor, int | float) and factor > 1
    if attention != 1 and is_scaled and isinstance(attention, int | float):
        assert isinstance(factor, int | float)
        # llama.cpp multiplies yarn's own factor; an HF config states the product.
        values["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    return values
