"""Medusa heads as the official code, its successors and vLLM write them, read into one form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from forespeak.drafters.medusa import random_drafter
from forespeak.errors import CheckpointError, OptionError
from forespeak.formats.drafters import DrafterCheckpoint, read_drafter
from forespeak.formats.medusa import MedusaConfig, stored_shapes, tensor_shapes, write
from tests.tiny import tiny_config

H, V, K = 6, 11, 3
OWN = MedusaConfig(hidden_size=H, vocab_size=V, num_heads=K, output="own")
FAMILY = ["forespeak.formats.medusa"]


def fresh(config: MedusaConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = stored_shapes(config).items()
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes}
    if config.draft_vocab_size is not None:
        made["d2t"] = torch.tensor([1, 1, 4, 5])[: config.draft_vocab_size]
    return made


def official(tensors: dict[str, Tensor], num_blocks: int, prefix: str = "") -> dict[str, Tensor]:
    """The names of the official code's state dict."""
    named = {}
    for name, tensor in tensors.items():
        _, head, part, *rest = name.split(".")
        if part == "output":
            named[f"{prefix}{head}.{num_blocks}.weight"] = tensor
        else:
            named[f"{prefix}{head}.{rest[0]}.linear.{rest[1]}"] = tensor
    return named


def save(
    folder: Path, values: dict[str, Any], tensors: dict[str, Tensor], name="model.safetensors"
):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def read(folder: Path) -> DrafterCheckpoint:
    return read_drafter(folder, modules=FAMILY)


def check(found: DrafterCheckpoint, config: MedusaConfig, tensors: dict[str, Tensor]) -> None:
    assert found.config == config
    read_back = found.tensors()
    assert read_back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read_back[name], tensor), name


# --- official ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_official_files(tmp_path: Path, name: str, num_blocks: int):
    config = replace(OWN, num_blocks=num_blocks)
    tensors = fresh(config)
    values = {
        "base_model_name_or_path": "x", "medusa_num_heads": K, "medusa_num_layers": num_blocks,
        "transformers_version": "4.31.0",
    }  # fmt: skip
    found = read(save(tmp_path, values, official(tensors, num_blocks), name))
    assert (found.method, found.dialect, found.notes) == ("medusa", "medusa", ())
    check(found, config, tensors)


def test_the_file_knows_the_number_of_heads_better_than_the_config(tmp_path: Path):
    """The released 7B says two and holds five."""
    values = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    found = read(save(tmp_path, values, official(fresh(OWN), 1), "medusa_lm_head.pt"))
    check(found, OWN, fresh(OWN))
    assert "2 heads" in found.notes[0] and str(K) in found.notes[0]


def test_version_two_borrows_the_targets_head(tmp_path: Path):
    config = replace(OWN, output="target", vocab_size=None)
    tensors = fresh(config)
    values = {"medusa_num_heads": K, "medusa_num_layers": 1, "version": "2"}
    folder = save(tmp_path, values, official(tensors, 1), "medusa_lm_head.safetensors")
    check(read(folder), config, tensors)


@pytest.mark.parametrize("has_output", [True, False])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_blocks_that_are_one_module_several_times(tmp_path: Path, name: str, has_output: bool):
    """A list of one module repeated, as the official code builds it; writers of safetensors keep
    one copy and torch.save keeps both names."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, H)

    torch.manual_seed(0)
    heads = nn.ModuleList(nn.Sequential(*([Block()] * 2)) for _ in range(K))
    for module in heads if has_output else ():
        assert isinstance(module, nn.Sequential)
        module.append(nn.Linear(H, V, bias=False))
    values = {"medusa_num_heads": K, "medusa_num_layers": 2}
    if name.endswith(".pt"):
        save(tmp_path, values, heads.state_dict(), name)
    else:
        save(tmp_path, values, {}, name)
        save_model(heads, str(tmp_path / name))
    found = read(tmp_path)
    assert (found.config.num_blocks, found.config.num_heads) == (2, K)
    tensors = found.tensors()
    for head in range(K):
        given = heads.state_dict()[f"{head}.0.linear.weight"]
        for block in range(2):
            assert torch.equal(tensors[f"heads.{head}.blocks.{block}.weight"], given)


def test_heads_inside_a_target(tmp_path: Path):
    tensors = fresh(OWN)
    inside = official(tensors, 1, "medusa_head.")
    inside |= {"model.norm.weight": torch.ones(H), "lm_head.weight": torch.ones(V, H)}
    values = {"model_type": "llama", "hidden_size": H, "vocab_size": V, "rope_theta": 1e4}
    found = read(save(tmp_path, values | {"medusa_num_heads": K, "medusa_num_layers": 1}, inside))
    assert found.dialect == "medusa in a target"
    check(found, OWN, tensors)


# --- ours ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduced", [None, 4])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_what_is_written_is_read(tmp_path: Path, output, bias, reduced, num_blocks):
    config = MedusaConfig(
        hidden_size=H, vocab_size=V, num_heads=K, num_blocks=num_blocks, bias=bias, output=output,
        draft_vocab_size=reduced,
    )  # fmt: skip
    tensors = fresh(config)
    write(tmp_path / "drafter", config, tensors)
    check(read(tmp_path / "drafter"), config, tensors)
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == [
        "config.json", "medusa_lm_head.safetensors",
    ]  # fmt: skip


def test_a_fresh_drafter_of_a_target_is_whole():
    target = tiny_config()
    config = MedusaConfig.for_target(target)
    assert (config.hidden_size, config.vocab_size) == (target.hidden_size, target.vocab_size)
    made = random_drafter(config, torch.Generator().manual_seed(1))
    assert {name: tuple(t.shape) for name, t in made.items()} == tensor_shapes(config)
    config.check_target(target)
    assert config.context_values == 0 and config.max_positions is None
    assert config.facts()["draft tokens a round"] == "up to 4"


# --- vLLM ----------------------------------------------------------------------------------------


def vllm(tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    named = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if name == "output.weight":
            named["lm_head.weight"] = tensor
        elif parts[2] == "output":
            named[f"lm_heads.{parts[1]}.weight"] = tensor
        else:
            named[f"blocks.{parts[1]}.layers.{parts[3]}.{parts[4]}"] = tensor
    return {prefix + name: tensor for name, tensor in named.items()}


VLLM = {
    "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": K,
    "num_hidden_layers": 1, "hidden_size": H, "vocab_size": V, "max_paths": 64, "topk": 10,
    "truncated_vocab_size": V,
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_vllm_heads(tmp_path: Path, prefix: str, bias: bool):
    config = replace(OWN, bias=bias)
    tensors = fresh(config)
    values = VLLM | ({"medusa_fc_bias": True} if bias else {})
    found = read(save(tmp_path, values, vllm(tensors, prefix)))
    assert found.dialect == "vllm medusa"
    check(found, config, tensors)


def test_vllm_one_matrix_for_all_heads(tmp_path: Path):
    config = replace(OWN, bias=False, output="shared")
    tensors = fresh(config)
    values = VLLM | {"original_lm_head": True}
    check(read(save(tmp_path / "a", values, vllm(tensors))), config, tensors)
    check(read(save(tmp_path / "b", VLLM, vllm(tensors))), config, tensors)
    # What vLLM reads where all heads' matrices were saved: the first.
    several = vllm(tensors)
    several |= {
        "lm_heads.0.weight": several.pop("lm_head.weight"),
        "lm_heads.1.weight": torch.ones(V, H),
    }
    check(read(save(tmp_path / "c", values, several)), config, tensors)


def test_vllm_without_matrices_borrows_the_targets_head(tmp_path: Path):
    config = replace(OWN, bias=False, output="target")
    tensors = fresh(config)
    check(read(save(tmp_path, VLLM | {"original_lm_head": True}, vllm(tensors))), config, tensors)
    with pytest.raises(CheckpointError, match="lacks the tensor lm_heads.0.weight"):
        read(save(tmp_path, VLLM, vllm(tensors)))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_vllm_token_map_in_any_order(tmp_path: Path, whole: bool, dtype: torch.dtype):
    """A map by frequency; matrices of the map's tokens or of all, as vLLM takes both."""
    config = replace(OWN, bias=False, draft_vocab_size=4)
    token_map = torch.tensor([9, 2, 0, 5], dtype=dtype)
    tensors = fresh(OWN)
    full = {name: t for name, t in tensors.items() if "bias" not in name}
    stored = dict(full)
    for name, tensor in full.items():
        if "output" in name:
            stored[name] = tensor if whole else tensor[token_map.long()]
    values = VLLM | {"truncated_vocab_size": 4}
    found = read(save(tmp_path, values, vllm(stored) | {"token_map": token_map}))
    ids = torch.tensor([0, 2, 5, 9])
    expected = {name: t[ids] if "output" in name else t for name, t in full.items()}
    check(found, config, expected | {"d2t": ids - torch.arange(4)})


def test_vllm_map_of_the_whole_vocabulary_is_not_used(tmp_path: Path):
    config = replace(OWN, bias=False)
    tensors = fresh(config)
    stored = vllm(tensors) | {"token_map": torch.arange(V)}
    check(read(save(tmp_path, VLLM, stored)), config, tensors)


# --- refusals ------------------------------------------------------------------------------------


HEADS = {"medusa_num_heads": K, "medusa_num_layers": 1}


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        (HEADS | {"medusa_hidden_size": 9}, {}, "a field medusa_hidden_size.*allowed"),
        (HEADS | {"medusa_num_heads": 4}, {}, r"heads \[0, 1, 2\]; by its config there are 4"),
        (HEADS | {"medusa_num_heads": "3"}, {}, "medusa_num_heads is '3'; it must be"),
        (HEADS | {"medusa_num_layers": 2}, {}, "by its config there are 2"),
        (HEADS | {"hidden_size": 7}, {}, r"of shape \[6, 6\]; by its config it is \[7, 7\]"),
        (HEADS, {"1.0.linear.bias": None}, "lacks the tensor 1.0.linear.bias"),
        (HEADS, {"2.1.weight": None}, "lacks the tensor 2.1.weight"),
        (HEADS, {"1.1.weight": torch.ones(V + 1, H)}, r"1\.1\.weight of shape \[12, 6\]"),
        (HEADS, {"4.0.linear.weight": torch.ones(H, H)}, r"heads \[0, 1, 2, 4\]"),
        (HEADS, {"0.extra.weight": torch.ones(1)}, "0.extra.weight, which.*no place for"),
    ],
)
def test_official_files_that_are_refused(tmp_path: Path, values, change, message):
    stored = official(fresh(OWN), 1) | change
    present = {name: tensor for name, tensor in stored.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        read(save(tmp_path, values, present, "medusa_lm_head.pt"))


def test_a_setting_of_medusa_in_a_target_that_is_not_known(tmp_path: Path):
    inside = official(fresh(OWN), 1, "medusa_head.")
    with pytest.raises(CheckpointError, match="medusa_choices"):
        read(save(tmp_path, {"medusa_choices": "x"}, inside))


REDUCED = VLLM | {"truncated_vocab_size": 4}


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        (VLLM | {"logit_scale": 0.5}, {}, "logit_scale is 0.5"),
        (VLLM | {"hidden_act": "gelu"}, {}, "a field hidden_act"),
        (VLLM | {"medusa_fc_bias": True}, {}, "lacks the tensor blocks.0.layers.0.bias"),
        (VLLM | {"num_heads": 4}, {}, "lacks the tensor blocks.3.layers.0.weight"),
        ({k: v for k, v in VLLM.items() if k != "num_heads"}, {}, "num_heads is missing"),
        (VLLM | {"medusa_fc_bias": False}, {"blocks.0.layers.0.bias": torch.ones(H)}, "no place"),
        (REDUCED, {}, "lacks the tensor token_map"),
        (REDUCED, {"token_map": torch.tensor([0, 2, 2, 5])}, "different token ids"),
        (REDUCED, {"token_map": torch.tensor([0.0, 2, 3, 5])}, "different token ids"),
        (REDUCED, {"token_map": torch.tensor([0, 2, 3, V])}, "the id 11; allowed: 0 to 10"),
        (REDUCED, {"token_map": torch.tensor([0, 2, 3])}, r"token_map of shape \[3\]"),
    ],
)  # fmt: skip
def test_vllm_files_that_are_refused(tmp_path: Path, values, change, message):
    stored = vllm(fresh(replace(OWN, bias=False))) | change
    with pytest.raises(CheckpointError, match=message):
        read(save(tmp_path, values, stored))


def test_settings_of_a_new_drafter_that_cannot_be():
    with pytest.raises(OptionError, match="own, shared, target"):
        replace(OWN, output="mine")
    with pytest.raises(OptionError, match="num_heads is 0; allowed: 1 or more"):
        replace(OWN, num_heads=0)
    with pytest.raises(OptionError, match="num_blocks is 0; allowed: 1 or more"):
        replace(OWN, num_blocks=0)
