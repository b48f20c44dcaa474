"""What the adapter refuses: one sentence each, before anything could be decoded wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forespeak.errors import CheckpointError, ModelError, OptionError
from forespeak.models.adapter import load_adapter
from tests.models.test_adapter import CASES, save

_SMALL: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return save(tmp_path, *CASES["gpt2"])


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    write_config(folder, json.loads(path.read_text(encoding="utf-8")) | changes)


def refusal(folder: Path, kind: type[Exception] = ModelError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load_adapter(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    return message


def test_int8(gpt2: Path):
    assert "int8 is for the built-in families" in refusal(gpt2, OptionError, dtype="int8")
    assert "float32" in refusal(gpt2, OptionError, dtype="float16")


@pytest.mark.parametrize("length", [0, -1, 129])
def test_context_length(gpt2: Path, length: int):
    assert "1 to 128" in refusal(gpt2, OptionError, context_length=length)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MambaConfig(),
        transformers.RwkvConfig(),
        transformers.Qwen3NextConfig(),
        transformers.JambaConfig(),
        transformers.FalconH1Config(),
        transformers.MiniMaxConfig(),
        transformers.RecurrentGemmaConfig(),
        transformers.GPTNeoConfig(),
        transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    ],
    ids=lambda config: config.model_type,
)
def test_caches_that_cannot_be_cut_back(tmp_path: Path, config: Any):
    """By the config alone: there are no weights here."""
    config.save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert "cannot be cut back" in message
    assert config.model_type in message


def test_unknown_architecture(tmp_path: Path):
    write_config(tmp_path, {"model_type": "nobodys"})
    assert "does not know the architecture 'nobodys'" in refusal(tmp_path)


def test_code_of_a_model_is_never_run(tmp_path: Path):
    trap = tmp_path / "ran"
    (tmp_path / "modeling_own.py").write_text(
        f"import pathlib\npathlib.Path({str(trap)!r}).touch()\n", encoding="utf-8"
    )
    names = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    write_config(tmp_path, {"model_type": "nobodys", "auto_map": names})
    assert "never run" in refusal(tmp_path)
    assert not trap.exists()


def test_not_a_causal_model(tmp_path: Path):
    transformers.T5Config().save_pretrained(tmp_path)
    assert "encoder-decoder" in refusal(tmp_path)
    transformers.ViTConfig().save_pretrained(tmp_path)
    assert "not a causal language model" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("Bloom", {"vocab_size": 83, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "tree"),
        ("Mpt", {"vocab_size": 83, "d_model": 32, "n_layers": 2, "n_heads": 4}, "tree"),
        ("Electra", _SMALL | {"intermediate_size": 48, "embedding_size": 32}, "not causal"),
    ],
    ids=["bloom", "mpt", "electra"],
)
def test_the_self_test_refuses(tmp_path: Path, family: str, sizes: dict[str, Any], reason: str):
    """Positions from slots (ALiBi), masks of another form, tokens that see later ones."""
    save(tmp_path, family, sizes)
    assert reason in refusal(tmp_path)
    load_adapter(tmp_path, self_test=False)


def test_rotary_embedding_that_cannot_be_fixed(tmp_path: Path):
    """PhiMoE scales by the length of each forward; up to its original length that is constant."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "short_mscale": 1.0,
        "long_mscale": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
    }
    sizes = CASES["mixtral"][1] | {"rope_parameters": rope}
    save(tmp_path, "Phimoe", sizes)
    assert load_adapter(tmp_path).config.max_position_embeddings == 16
    assert "rotary embedding" in refusal(tmp_path, context_length=64)


def test_damaged_files(gpt2: Path):
    weights = gpt2 / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 7, 400, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        assert "cut or damaged" in refusal(gpt2, CheckpointError)
    weights.unlink()
    assert "no weights" in refusal(gpt2, CheckpointError)
    (gpt2 / "config.json").write_text("{", encoding="utf-8")
    assert "JSON" in refusal(gpt2, CheckpointError)


def test_missing_and_misshapen_tensors(gpt2: Path):
    weights = gpt2 / "model.safetensors"
    tensors = load_file(weights)
    name = "transformer.h.1.mlp.c_fc.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, weights, {"format": "pt"})
    assert name in refusal(gpt2, CheckpointError)
    wrong = tensors | {name: torch.zeros(3, 5)}
    save_file(wrong, weights, {"format": "pt"})
    assert "belong" in refusal(gpt2, CheckpointError)


def test_missing_expert(tmp_path: Path):
    """Experts are stored apart and merged when loaded; one less must show."""
    save(tmp_path, *CASES["mixtral"])
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "experts.2" in name)
    save_file({k: v for k, v in tensors.items() if k != name}, weights, {"format": "pt"})
    refusal(tmp_path, CheckpointError)


def test_impossible_configs(gpt2: Path):
    change_config(gpt2, n_head="four")
    refusal(gpt2, CheckpointError)
    change_config(gpt2, n_head=5)
    refusal(gpt2, CheckpointError)
    change_config(gpt2, n_head=4, quantization_config={"quant_method": "gptq"})
    assert "quantised" in refusal(gpt2, CheckpointError)
    change_config(gpt2, model_type=None, quantization_config=None)
    assert "model_type" in refusal(gpt2, CheckpointError)


def test_nothing_is_printed(gpt2: Path, capfd: pytest.CaptureFixture[str]):
    before = transformers.logging.get_verbosity()
    bars = transformers.utils.logging.is_progress_bar_enabled()
    load_adapter(gpt2)
    assert capfd.readouterr() == ("", "")
    assert transformers.logging.get_verbosity() == before
    assert transformers.utils.logging.is_progress_bar_enabled() == bars
