"""GGUF: every type, the layout of q and k, metadata, and files that are damaged."""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from forespeak.errors import CheckpointError
from forespeak.formats.gguf_file import TYPES, iter_gguf_weights, read_gguf, read_tensor
from forespeak.models.config import ModelConfig
from forespeak.models.loading import config_from_gguf, load_checkpoint
from tests.formats.tiny_checkpoints import (
    TINY,
    TINY_HF,
    changed_byte,
    finish,
    gguf_writer,
    random_weights,
    write_gguf,
)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", TINY, random_weights(TINY))


def _random_blocks(kind: Kind, rows: int, seed: int) -> np.ndarray:
    """Rows of one 256-value block of a K type: random bits under scales of ordinary size."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, num_bytes), dtype=np.uint8)
    scale = np.frombuffer(struct.pack("<e", 0.01), np.uint8)
    if kind == Kind.Q6_K:
        blocks[:, -2:] = scale
    else:
        blocks[:, 0:2] = scale
        blocks[:, 2:4] = scale
    return blocks


@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_comes_out_as_the_package_dequantises_it(tmp_path: Path, type_name: str):
    kind = Kind[type_name]
    values = np.random.default_rng(3).normal(size=(4, 256)).astype(np.float32)
    packed = _random_blocks(kind, 4, 3) if "_K" in type_name else gguf.quantize(values, kind)
    writer = gguf_writer(tmp_path / "m.gguf", TINY, "llama")
    writer.add_tensor("token_embd.weight", packed, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    finish(writer)
    file = read_gguf(tmp_path / "m.gguf")
    tensor = read_tensor(file, file.tensors["token_embd.weight"])
    assert tensor.dtype == torch.float32 and tensor.shape == (4, 256)
    assert np.array_equal(tensor.numpy(), gguf.dequantize(packed, kind))
    assert tensor.isfinite().all()
    if "_K" not in type_name:
        steps = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 2e-2}
        assert np.abs(tensor.numpy() - values).max() <= steps.get(type_name, 0.5)


@pytest.mark.parametrize("type_name", ["Q2_K", "IQ4_NL", "MXFP4"])
def test_other_types_are_refused_by_name(tmp_path: Path, type_name: str):
    kind = Kind[type_name]
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf_writer(tmp_path / "m.gguf", TINY, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, num_bytes), np.uint8), raw_dtype=kind)
    finish(writer)
    with pytest.raises(CheckpointError, match=rf"as {type_name}; allowed: F32, F16"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "head_dim": 4},
        {"model_type": "qwen3", "head_dim": 8},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_weights_come_back_in_hf_layout(tmp_path: Path, changes: dict[str, object], kind: Kind):
    config = ModelConfig.from_hf(TINY_HF | changes)
    weights = random_weights(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights, kind)
    checkpoint = load_checkpoint(path)
    got = dict(checkpoint.weights())
    assert got.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(got[name], tensor), name
    family = "llama" if config.model_type == "mistral" else config.model_type
    expected = dataclasses.replace(
        config,
        model_type=family,
        bos_token_id=None,
        eos_token_ids=(2,),
        rms_norm_eps=float(np.float32(config.rms_norm_eps)),
    )
    assert checkpoint.config == expected


@pytest.mark.slow
def test_real_file(smollm2_path: Path):
    file = read_gguf(smollm2_path)
    config = config_from_gguf(file)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 100000.0
    kinds = {tensor.type_name for tensor in file.tensors.values()}
    assert kinds == {"Q4_1", "Q8_0", "F32"}


# Metadata

Change = Callable[[gguf.GGUFWriter], None]


def _config_with(tmp_path: Path, change: Change) -> ModelConfig:
    writer = gguf_writer(tmp_path / "m.gguf", TINY, "llama")
    change(writer)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    finish(writer)
    return config_from_gguf(read_gguf(tmp_path / "m.gguf"))


def _scaling(kind: gguf.RopeScalingType, factor: float) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(4)

    return change


def test_rope_scaling_keys(tmp_path: Path):
    linear = _config_with(tmp_path, _scaling(gguf.RopeScalingType.LINEAR, 4.0))
    assert linear.rope_parameters["rope_type"] == "linear"
    assert linear.rope_parameters["factor"] == 4.0
    none = _config_with(tmp_path, _scaling(gguf.RopeScalingType.NONE, 4.0))
    assert none.rope_parameters["rope_type"] == "default"

    def yarn(writer: gguf.GGUFWriter) -> None:
        _scaling(gguf.RopeScalingType.YARN, 4.0)(writer)
        writer.add_rope_scaling_attn_factors(2.0)
        writer.add_rope_scaling_yarn_beta_fast(16.0)

    rope = _config_with(tmp_path, yarn).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["beta_fast"]) == ("yarn", 4.0, 16.0)
    assert rope["original_max_position_embeddings"] == 4
    assert rope["attention_factor"] == pytest.approx(2 * (0.1 * math.log(4) + 1))
    with pytest.raises(CheckpointError, match="longrope"):
        _config_with(tmp_path, _scaling(gguf.RopeScalingType.LONGROPE, 4.0))


def test_rope_factor_tensor_is_config_and_not_weight(tmp_path: Path):
    writer = gguf_writer(tmp_path / "m.gguf", TINY, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1.0, 8.0], np.float32))
    finish(writer)
    file = read_gguf(tmp_path / "m.gguf")
    assert config_from_gguf(file).rope_parameters["frequency_factors"] == [1.0, 8.0]
    assert [name for name, _ in iter_gguf_weights(file)] == ["model.embed_tokens.weight"]


def test_every_end_token_counts(tmp_path: Path):
    config = _config_with(tmp_path, lambda writer: writer.add_eot_token_id(7))
    assert config.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_expert_count(8), "expert_count is 8"),
        (lambda w: w.add_sliding_window(4), "sliding_window is 4"),
        (lambda w: w.add_logit_scale(0.5), "logit_scale is 0.5"),
        (lambda w: w.add_rope_dimension_count(2), "dimension_count is 2"),
        (lambda w: w.add_rope_scaling_attn_factors(2.0), "attn_factor is 2.0"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
    ],
)
def test_settings_that_the_decoder_lacks_are_refused(tmp_path: Path, change: Change, message: str):
    with pytest.raises(CheckpointError, match=message):
        _config_with(tmp_path, change)


def test_other_architectures_and_strange_tensors_are_refused(tmp_path: Path):
    writer = gguf_writer(tmp_path / "m.gguf", TINY, "gemma2")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match="'gemma2'; allowed in GGUF: llama, qwen2, qwen3"):
        load_checkpoint(tmp_path / "m.gguf")
    writer = gguf_writer(tmp_path / "n.gguf", TINY, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.add_tensor("blk.0.ssm_in.weight", np.zeros((8, 8), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match="'blk.0.ssm_in.weight'"):
        dict(load_checkpoint(tmp_path / "n.gguf").weights())


# Damage


def _load_all(path: Path) -> None:
    for _ in load_checkpoint(path).weights():
        pass


def test_cut_at_every_byte(tiny_gguf: Path):
    _load_all(tiny_gguf)
    for length in reversed(range(tiny_gguf.stat().st_size)):
        os.truncate(tiny_gguf, length)
        with pytest.raises(CheckpointError):
            _load_all(tiny_gguf)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_changed_header_byte_never_breaks_out(tiny_gguf: Path, mask: int):
    header_bytes = read_gguf(tiny_gguf).header_bytes
    num_refused = 0
    for place in range(header_bytes):
        with changed_byte(tiny_gguf, place, mask):
            try:
                _load_all(tiny_gguf)
            except CheckpointError:
                num_refused += 1
    assert num_refused > header_bytes // 2


@pytest.mark.parametrize("place", [8, 16])
@pytest.mark.parametrize("count", [2**62, 2**40, 10**6])
def test_absurd_counts_fail_at_once(tmp_path: Path, tiny_gguf: Path, place: int, count: int):
    data = bytearray(tiny_gguf.read_bytes())
    data[place : place + 8] = struct.pack("<Q", count)
    (tmp_path / "absurd.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="runs past its end"):
        read_gguf(tmp_path / "absurd.gguf")


def test_not_a_gguf_file(tmp_path: Path):
    path = tmp_path / "m.gguf"
    for data, message in ((b"", "is empty"), (b"PK\x03\x04zip", "letters GGUF")):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(64))
    with pytest.raises(CheckpointError, match="little-endian"):
        load_checkpoint(path)
