"""Files of EAGLE drafters as their own programs write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forespeak.errors import CheckpointError
from forespeak.formats.drafters import DrafterCheckpoint, read_drafter
from forespeak.formats.eagle import EagleConfig
from forespeak.models.config import ModelConfig
from tests.tiny import tiny_config

H, V, VD, INNER, HEADS, KV, D = 24, 40, 12, 30, 4, 2, 8
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": H, "initializer_range": 0.02, "intermediate_size": INNER,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": D, "num_hidden_layers": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_theta": 5000.0, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True, "vocab_size": V,
}  # fmt: skip
IDS = torch.tensor([0, 1, 4, 7, 8, 9, 15, 20, 21, 30, 38, 39])
D2T = IDS - torch.arange(VD)
T2D = torch.zeros(V, dtype=torch.bool).index_fill(0, IDS, True)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def block(prefix: str, columns: int = H, *, norms: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """A layer's tensors; q, k and v read so many columns."""
    shapes = {
        "self_attn.q_proj": (HEADS * D, columns), "self_attn.k_proj": (KV * D, columns),
        "self_attn.v_proj": (KV * D, columns), "self_attn.o_proj": (H, HEADS * D),
        "mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H), "mlp.down_proj": (H, INNER),
        "post_attention_layernorm": (H,), **{name: (H,) for name in norms},
    }  # fmt: skip
    return {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}


def official_eagle() -> dict[str, Tensor]:
    return {
        "embed_tokens.weight": random(V, H), "fc.weight": random(H, 2 * H), "fc.bias": random(H),
        **block("layers.0."),
    }  # fmt: skip


def official_eagle3(prefix: str = "midlayer.") -> dict[str, Tensor]:
    return {
        "fc.weight": random(H, 3 * H), "norm.weight": random(H), "lm_head.weight": random(VD, H),
        "d2t": D2T, "t2d": T2D,
        **block(prefix, 2 * H, norms=("hidden_norm", "input_layernorm")),
    }  # fmt: skip


def put(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def refused(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], message: str):
    with pytest.raises(CheckpointError, match=message):
        read_drafter(put(folder, config, tensors)).tensors()


def same(read: DrafterCheckpoint, tensors: Mapping[str, Tensor], **renamed: str) -> None:
    """All tensors were read, under their internal names."""
    found = read.tensors()
    for name, tensor in tensors.items():
        inner = name.replace("midlayer.", "layers.0.")
        assert torch.equal(found.pop(inner), tensor), name
    assert not found


def but(values: Mapping[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k not in names} | changes


TARGET = tiny_config(num_layers=9, hidden_size=H, vocab_size=V, num_heads=HEADS, head_dim=D)


def numbers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: D2T if name == "d2t" else random(*shape) for name, shape in shapes.items()}


def small(**changes: Any) -> ModelConfig:
    """One layer of the target's width."""
    return replace(EagleConfig.for_target(TARGET).layers, **changes)
