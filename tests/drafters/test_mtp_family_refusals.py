"""Modules with a layer of the target's own kind: what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from forespeak.drafters.base import TargetParts
from forespeak.drafters.loader import load_drafter
from forespeak.engine.target import load_target
from forespeak.errors import CheckpointError, DrafterError, ModelError
from forespeak.models.adapter import load_adapter
from forespeak.types import SpeculationConfig
from tests.drafters.mtp_cases import write_folder
from tests.drafters.test_mtp_families import SIZES, H, V, make

pytestmark = pytest.mark.slow


def test_targets_with_a_recurrent_state(tmp_path):
    """A rejected draft cannot be taken out of a linear attention's state."""
    sizes = SIZES | {"head_dim": 16}
    config = transformers.Qwen3_5TextConfig(**sizes | {"num_hidden_layers": 4})
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="linear_attention, whose cache cannot be cut back"):
        load_target(str(tmp_path), dtype="float32", device="cpu")


def test_modules_of_another_kind_of_target(tmp_path):
    made = make(tmp_path / "a", "deepseek_v3")
    other = make(tmp_path / "b", "glm4_moe")
    model = load_adapter(other.folder)
    config = SpeculationConfig(method="mtp", drafter=str(made.folder))
    with pytest.raises(DrafterError, match="deepseek_v3 model, .* this target is a glm4_moe"):
        load_drafter(config, TargetParts(model))


def test_targets_whose_layers_cannot_run_alone(tmp_path):
    sizes: dict[str, Any] = {
        "vocab_size": V,
        "n_embd": H,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
    }
    target = tmp_path / "target"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(target)
    values = {"model_type": "gpt2", "hidden_size": H, "vocab_size": V, "rms_norm_eps": 1e-6}
    own = "model.layers.2."
    tensors = {f"{own}{name}.weight": torch.ones(H) for name in ("enorm", "hnorm")}
    tensors |= {f"{own}shared_head.norm.weight": torch.ones(H)}
    tensors |= {f"{own}eh_proj.weight": torch.ones(H, 2 * H)}
    write_folder(tmp_path / "alone", values, tensors)
    config = SpeculationConfig(method="mtp", drafter=str(tmp_path / "alone"))
    with pytest.raises(ModelError, match="gpt2 model cannot run alone"):
        load_drafter(config, TargetParts(load_adapter(target)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"self_attn.o_proj.weight": None}, "lacks self_attn.o_proj.weight"),
        ({"mlp.experts.2.up_proj.weight": None}, "lacks mlp.experts.down_proj"),
        ({"self_attn.extra.weight": torch.ones(2)}, "has self_attn.extra.weight"),
        ({"mlp.gate.weight": torch.ones(5, H)}, "mlp.gate.weight of shape"),
        ({"input_layernorm.weight": torch.full((H,), float("nan"))}, "not finite"),
        ({"mlp.gate.weight_scale_inv": torch.ones(2)}, "quantised .* fp8_cast_bf16"),
    ],
)  # fmt: skip
def test_blocks_that_are_not_the_targets(tmp_path, change, message):
    made = make(tmp_path, "deepseek_v3")
    tensors = dict(made.tensors)
    for name, tensor in change.items():
        tensors.pop(f"model.layers.3.{name}", None)
        if tensor is not None:
            tensors[f"model.layers.3.{name}"] = tensor
    values = json.loads((made.folder / "config.json").read_text())
    write_folder(tmp_path / "alone", values, tensors)
    with pytest.raises(CheckpointError, match=message):
        made.opened(drafter=tmp_path / "alone")
