"""HF folders: whole, sharded, old and damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from forespeak.errors import CheckpointError
from forespeak.formats.weights import iter_weights, read_json_object
from forespeak.models.loading import load_checkpoint
from tests.formats.tiny_checkpoints import (
    TINY,
    TINY_HF,
    changed_byte,
    random_weights,
    write_folder,
    write_sharded,
)

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


def _assert_same(folder: Path) -> None:
    got, expected = dict(iter_weights(folder)), random_weights(TINY)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def _load_all(folder: Path) -> None:
    for _ in load_checkpoint(folder).weights():
        pass


def test_single_file_and_shards(tmp_path: Path):
    _assert_same(write_folder(tmp_path / "single", TINY_HF, random_weights(TINY)))
    _assert_same(write_sharded(tmp_path / "shards", TINY_HF, random_weights(TINY)))


def test_dtypes_are_kept(tmp_path: Path):
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(TINY).items()}
    folder = write_folder(tmp_path, TINY_HF, weights)
    assert {tensor.dtype for _, tensor in iter_weights(folder)} == {torch.bfloat16}


def test_old_torch_file_is_read_as_data(tmp_path: Path):
    torch.save(random_weights(TINY), tmp_path / "pytorch_model.bin")
    _assert_same(tmp_path)


class _Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_code_in_a_torch_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": _Attack()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds code, which is never run"):
        dict(iter_weights(tmp_path))
    assert not (tmp_path / "attacked").exists()


def test_torch_file_cut_anywhere(tmp_path: Path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(4)}, path)
    for length in reversed(range(0, path.stat().st_size, 3)):
        os.truncate(path, length)
        with pytest.raises(CheckpointError):
            dict(iter_weights(tmp_path))


def test_cut_at_every_byte(tmp_path: Path):
    folder = write_folder(tmp_path, TINY_HF, random_weights(TINY))
    path = folder / "model.safetensors"
    _load_all(folder)
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        with pytest.raises(CheckpointError, match="is cut or damaged"):
            _load_all(folder)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_changed_header_byte_never_breaks_out(tmp_path: Path, mask: int):
    folder = write_folder(tmp_path, TINY_HF, random_weights(TINY))
    path = folder / "model.safetensors"
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    num_refused = 0
    for place in range(header_bytes):
        with changed_byte(path, place, mask):
            try:
                _load_all(folder)
            except CheckpointError:
                num_refused += 1
    assert num_refused > header_bytes // 2


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_cut_json(tmp_path: Path, name: str):
    folder = write_sharded(tmp_path, TINY_HF, random_weights(TINY))
    path = folder / name
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        with pytest.raises(CheckpointError, match=name):
            _load_all(folder)


def test_missing_shard(tmp_path: Path):
    folder = write_sharded(tmp_path, TINY_HF, random_weights(TINY))
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"names {SECOND}, which is not in the folder"):
        load_checkpoint(folder)


def test_index_and_files_disagree(tmp_path: Path):
    folder = write_sharded(tmp_path, TINY_HF, random_weights(TINY))
    index = read_json_object(folder / INDEX)
    weight_map = index["weight_map"]
    assert isinstance(weight_map, dict)
    less = {name: file for name, file in weight_map.items() if name != "lm_head.weight"}
    more = weight_map | {"model.extra.weight": SECOND}
    outside = weight_map | {"lm_head.weight": "../model.safetensors"}
    for changed, message in (
        (less, "has lm_head.weight, which the index does not"),
        (more, "lacks model.extra.weight, which the index puts there"),
        (outside, "a file name in the same folder is expected"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(CheckpointError, match=message):
            dict(iter_weights(folder))


def test_no_weights(tmp_path: Path):
    with pytest.raises(CheckpointError, match="has no weights; expected is one of"):
        dict(iter_weights(tmp_path))


def test_rotary_buffers_of_old_files_are_left_out(tmp_path: Path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    _load_all(write_folder(tmp_path, TINY_HF, random_weights(TINY) | extra))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", torch.ones(7), r"of shape \(7,\); by its config it is \(8,\)"),
        ("model.norm.weight", torch.ones(8, dtype=torch.int64), "torch.int64"),
        ("model.layers.1.mlp.up_proj.weight", torch.ones(8, 8), "has no place for"),
        ("model.norm.weight", None, "lacks the tensor model.norm.weight"),
    ],
)
def test_weights_must_fit_the_config(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
):
    weights = random_weights(TINY)
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    with pytest.raises(CheckpointError, match=message):
        _load_all(write_folder(tmp_path, TINY_HF, weights))


def test_tied_head_that_is_stored_is_left_out(tmp_path: Path):
    values = TINY_HF | {"tie_word_embeddings": True}
    checkpoint = load_checkpoint(write_folder(tmp_path, values, random_weights(TINY)))
    assert "lm_head.weight" not in dict(checkpoint.weights())
