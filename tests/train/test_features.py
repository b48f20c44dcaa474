"""Features live and from disk, and every cache that must be refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forespeak.errors import CheckpointError, OptionError
from forespeak.train import atomic, feature_cache
from forespeak.train.feature_cache import CachedFeatures, check_cache, plan_cache, write_cache
from forespeak.train.features import LiveFeatures, Needs, target_features
from tests.tiny import random_tokens, run, tiny_decoder, tiny_int8

NEEDS = Needs((0, 2), True)
TEXTS = [random_tokens(n, seed=n) for n in (5, 19, 3, 40, 8)]


def equal(one, other) -> bool:
    return torch.equal(one.hidden, other.hidden) and torch.equal(one.taps, other.taps)


def test_features_are_the_forward_of_each_text(monkeypatch):
    model = tiny_int8()
    monkeypatch.setattr("forespeak.train.features.FORWARD_TOKENS", 24)  # groups, and 40 in chunks
    found: list[Any] = list(target_features(model, TEXTS, NEEDS))
    for text, features in zip(TEXTS, found, strict=True):
        alone: Any = run(model, text, taps=NEEDS.taps)
        assert torch.equal(features.hidden, alone.hidden.bfloat16())
        assert torch.equal(features.taps, alone.taps.bfloat16())


def test_float_features_are_the_forward_up_to_rounding():
    model = tiny_decoder()
    found: list[Any] = list(target_features(model, TEXTS, NEEDS))
    for text, features in zip(TEXTS, found, strict=True):
        alone: Any = run(model, text, taps=NEEDS.taps)
        torch.testing.assert_close(features.hidden, alone.hidden.bfloat16(), rtol=0.02, atol=1e-4)
        torch.testing.assert_close(features.taps, alone.taps.bfloat16(), rtol=0.02, atol=1e-4)


def test_only_what_is_needed():
    (features,) = target_features(tiny_int8(), [TEXTS[0]], Needs((), True))
    assert features.taps is None and features.hidden is not None
    (features,) = target_features(tiny_int8(), [TEXTS[0]], Needs((1,), False))
    assert features.hidden is None and features.taps is not None


@pytest.mark.parametrize("shard_bytes", [1, 40 * 2 * 3 * 30, 10**9])
def test_cached_is_live(tmp_path: Path, shard_bytes):
    model = tiny_int8()
    seen: list[int] = []
    done = write_cache(
        tmp_path / "f", model, TEXTS, NEEDS, shard_bytes=shard_bytes,
        on_texts=lambda n, total: seen.append(n),
    )  # fmt: skip
    assert done and seen[-1] == len(TEXTS) and check_cache(tmp_path / "f") == []
    cached = CachedFeatures(tmp_path / "f", model, TEXTS, NEEDS)
    live = LiveFeatures(model, TEXTS, NEEDS)
    asked, lengths = [3, 0, 1], [17, 5, 2]
    for one, other in zip(cached.get(asked, lengths), live.get(asked, lengths), strict=True):
        assert equal(one, other)


def test_a_part_of_the_layers(tmp_path: Path):
    model = tiny_int8()
    write_cache(tmp_path, model, TEXTS, NEEDS)
    part = Needs((2,), False)
    cached: Any = CachedFeatures(tmp_path, model, TEXTS, part).get([3], [40])[0]
    live: Any = LiveFeatures(model, TEXTS, part).get([3], [40])[0]
    assert cached.hidden is None and torch.equal(cached.taps, live.taps)
    assert plan_cache(tmp_path, model, TEXTS, part).num_bytes == 0


def test_size_is_known_before(tmp_path: Path):
    plan = plan_cache(tmp_path / "f", tiny_int8(), TEXTS, NEEDS)
    assert plan.num_bytes == sum(map(len, TEXTS)) * 3 * 40 * 2
    assert not (tmp_path / "f").exists()


def test_a_stopped_run_goes_on(tmp_path: Path):
    model = tiny_int8()
    assert not write_cache(tmp_path / "a", model, TEXTS, NEEDS, shard_bytes=1,
                           should_stop=lambda: True)  # fmt: skip
    assert plan_cache(tmp_path / "a", model, TEXTS, NEEDS).done == 1
    (tmp_path / "a" / f"{atomic.PART}shard-00001.safetensors").write_bytes(b"half")
    # A shard that was whole but did not get into the manifest is written again.
    (tmp_path / "a" / "shard-00001.safetensors").write_bytes(b"half")
    assert write_cache(tmp_path / "a", model, TEXTS, NEEDS, shard_bytes=1)
    assert write_cache(tmp_path / "b", model, TEXTS, NEEDS, shard_bytes=1)
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_new_texts_are_added(tmp_path: Path):
    model = tiny_int8()
    write_cache(tmp_path, model, TEXTS[:2], NEEDS)
    with pytest.raises(OptionError, match="2 texts and the data has 5"):
        CachedFeatures(tmp_path, model, TEXTS, NEEDS)
    assert plan_cache(tmp_path, model, TEXTS, NEEDS).done == 2
    assert write_cache(tmp_path, model, TEXTS, NEEDS)
    (cached,) = CachedFeatures(tmp_path, model, TEXTS, NEEDS).get([4], [8])
    assert equal(cached, LiveFeatures(model, TEXTS, NEEDS).get([4], [8])[0])


def test_full_disk_keeps_the_shards_before(tmp_path: Path, monkeypatch):
    model = tiny_int8()
    calls = []

    def save(tensors, path):
        calls.append(path)
        if len(calls) == 4:  # the probe and two shards went well
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(feature_cache, "save_file", save)
    with pytest.raises(OSError, match="No space"):
        write_cache(tmp_path, model, TEXTS, NEEDS, shard_bytes=1)
    assert not list(tmp_path.glob(f"{atomic.PART}*"))
    monkeypatch.setattr(feature_cache, "save_file", save_file)
    assert plan_cache(tmp_path, model, TEXTS, NEEDS).done == 2
    assert write_cache(tmp_path, model, TEXTS, NEEDS) and check_cache(tmp_path) == []


def test_no_room_is_said_before(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("U", (), {"free": 9}))
    with pytest.raises(OptionError, match="free some space"):
        plan_cache(tmp_path / "f", tiny_int8(), TEXTS, NEEDS)


def refused(folder: Path, model, texts, needs, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        CachedFeatures(folder, model, texts, needs)
    with pytest.raises(OptionError, match=match):
        write_cache(folder, model, texts, needs)


def test_refusals(tmp_path: Path):
    model = tiny_int8()
    write_cache(tmp_path, model, TEXTS, NEEDS)
    refused(tmp_path, tiny_int8(seed=1), TEXTS, NEEDS, "the same tokens give other values")
    refused(tmp_path, tiny_decoder(), TEXTS, NEEDS, "precision is int8")
    refused(tmp_path, model, TEXTS, Needs((1,), True), r"layers \[0, 2\]")
    refused(tmp_path, model, TEXTS[1:], NEEDS, "other texts")
    refused(tmp_path, model, [t[:10] for t in TEXTS], NEEDS, "other texts")
    refused(tmp_path, model, [TEXTS[0][::-1], *TEXTS[1:]], NEEDS, "other texts")


def test_without_the_last_state(tmp_path: Path):
    model = tiny_int8()
    write_cache(tmp_path, model, TEXTS, Needs((0,), False))
    refused(tmp_path, model, TEXTS, Needs((0,), True), "without the last state")


def test_damage(tmp_path: Path):
    model = tiny_int8()
    write_cache(tmp_path, model, TEXTS, NEEDS, shard_bytes=1)
    shard = tmp_path / "shard-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match="cut or damaged"):
        CachedFeatures(tmp_path, model, TEXTS, NEEDS)
    assert "shard-00001" in check_cache(tmp_path)[0]
    shard.write_bytes(whole)
    tensors = load_file(shard)
    tensors["hidden"][1, 2] = torch.inf
    save_file(tensors, shard)
    assert "not finite" in check_cache(tmp_path)[0]
    shard.write_bytes((tmp_path / "shard-00002.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="other tensors or sizes"):
        CachedFeatures(tmp_path, model, TEXTS, NEEDS)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    first, *others = manifest["shards"]
    for key in ("file", "digest", "lengths"):
        for wrong in ({k: v for k, v in first.items() if k != key}, first | {key: 3}):
            broken = manifest | {"shards": [wrong, *others]}
            (tmp_path / "manifest.json").write_text(json.dumps(broken))
            with pytest.raises(CheckpointError, match="damaged"):
                check_cache(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(CheckpointError, match="version 2"):
        check_cache(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        check_cache(tmp_path)
