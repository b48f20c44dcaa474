"""Checkpoints of a few kilobytes, written the way other programs write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from forespeak.models.config import ModelConfig, weight_shapes

TINY_HF = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

TINY = ModelConfig.from_hf(TINY_HF)

_FROM_HF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Values that bfloat16 holds exactly, so that 16-bit files can be compared bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-64, 64, shape, generator=generator).float() / 32
        for name, shape in weight_shapes(config).items()
    }


def write_folder(folder: Path, values: dict[str, object], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, values: dict[str, object], weights: dict[str, Tensor]) -> Path:
    """Two shards and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    names = list(weights)
    shards = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file_name, inside in shards.items():
        save_file({name: weights[name] for name in inside}, folder / file_name)
    weight_map = {name: file_name for file_name, inside in shards.items() for name in inside}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def gguf_name(hf_name: str) -> str:
    stem, suffix = hf_name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_FROM_HF[inner]}.{suffix}"
    return f"{_FROM_HF[stem]}.{suffix}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to the q and k rows of llama-type files."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_writer(path: Path, config: ModelConfig, arch: str) -> gguf.GGUFWriter:
    """A writer that has the fields of a config."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, Tensor],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A whole model; matrices in ``kind``, vectors in float32."""
    arch = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf_writer(path, config, arch)
    for name, tensor in weights.items():
        values = tensor.numpy()
        if arch == "llama" and "q_proj" in name:
            values = interleaved(values, config.num_heads)
        if arch == "llama" and "k_proj" in name:
            values = interleaved(values, config.num_kv_heads)
        matrix_kind = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(values, matrix_kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=matrix_kind)
    finish(writer)
    return path


@contextmanager
def changed_byte(path: Path, place: int, mask: int) -> Iterator[None]:
    """Flip bits of one byte of a file, and flip them back at the end."""

    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ mask]))

    flip()
    yield
    flip()
