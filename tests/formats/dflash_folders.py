"""Folders of block drafters as the tools write them that made each layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forespeak.formats.dflash import CONFIGS
from forespeak.formats.dflash_config import DFlashConfig, copy_shapes, tensor_shapes
from forespeak.formats.drafters import DrafterCheckpoint, read_drafter
from tests.tiny import tiny_config

TARGET = tiny_config(num_layers=8)
LAYERS: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu",
    "hidden_size": 40, "initializer_range": 0.02, "intermediate_size": 72,
    "layer_types": ["full_attention"] * 2, "max_position_embeddings": 512,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 83,
}  # fmt: skip
OLD_ROPE = {"rope_scaling": None, "rope_theta": 1000000.0}
NEW_ROPE = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}
INNER = {"mask_token_id": 80, "target_layer_ids": [1, 4]}
ZLAB = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 8, "bos_token_id": 1, "dflash_config": INNER, "dtype": "bfloat16",
    "eos_token_id": 2, "num_target_layers": 8, "transformers_version": "4.57.1",
    **LAYERS, **OLD_ROPE,
}  # fmt: skip
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "confidence_head_with_markov": True,
    "enable_confidence_head": True, "markov_head_type": "gated", "markov_rank": 6,
    "mask_token_id": 80, "num_anchors": 512, "num_target_layers": 8, "pad_token_id": None,
    "target_layer_ids": [-1, 4], **LAYERS, **NEW_ROPE,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DSparkDraftModel"], "auto_map": {"": "config.DSparkSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 5], "block_size": 6, "confidence_head_with_markov": True,
    "draft_vocab_size": 50, "dtype": "float32", "enable_confidence_head": True,
    "markov_head_type": "rnn", "markov_rank": 6, "mask_token_id": 80, "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dspark", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "org/target"},
    },
    "speculators_model_type": "dspark", "speculators_version": "0.6.0",
    "target_hidden_size": None, "tie_word_embeddings": False,
    "transformer_layer_config": {**LAYERS, **NEW_ROPE}, "transformers_version": "5.10.2",
}  # fmt: skip
BLOCK_NAMES = {
    "fc.weight", "hidden_norm.weight", "norm.weight",
    *[f"layers.{layer}.{name}.weight" for layer in range(2) for name in (
        "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )],
}  # fmt: skip


def config_of(**changes: Any) -> DFlashConfig:
    """What the z-lab folder says, changed."""
    base = DFlashConfig.for_target(TARGET)
    layers = replace(
        base.layers, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip
    defaults: dict[str, Any] = {
        "layers": layers, "block_size": 8, "mask_token_id": 80, "target_layer_ids": (1, 4),
    }  # fmt: skip
    return replace(base, **{**defaults, **changes})


def tensors_of(config: DFlashConfig, *, copies: bool = False) -> dict[str, Tensor]:
    """Random ones; a map to every second token below 100, or the last tokens."""
    generator = torch.Generator().manual_seed(3)
    shapes = {**tensor_shapes(config), **(copy_shapes(config) if copies else {})}
    tensors = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    if config.draft_vocab_size is not None:
        offset = config.vocab_size - config.draft_vocab_size
        tensors["d2t"] = torch.full((config.draft_vocab_size,), offset)
    return tensors


def folder_with(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], sts: object = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    if sts is not None:
        (folder / "sts.json").write_text(json.dumps(sts))
    return folder


def read(folder: Path) -> DrafterCheckpoint:
    return read_drafter(folder, modules=["forespeak.formats.dflash"])


def check(found: DrafterCheckpoint, config: DFlashConfig, tensors: dict[str, Tensor]) -> None:
    layers = replace(found.config.layers, bos_token_id=None, eos_token_ids=())
    assert replace(found.config, layers=layers) == config
    read_back = found.tensors()
    assert read_back.keys() == tensors.keys()
    assert all(torch.equal(read_back[name], tensors[name]) for name in tensors)


def dspark(config: DFlashConfig, **changes: Any) -> DFlashConfig:
    """The same as the config of a drafter with heads."""
    values = {**vars(config), **changes}
    return CONFIGS["dspark"](**values)
