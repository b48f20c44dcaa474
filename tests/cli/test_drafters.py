"""``init`` and ``inspect``: a drafter is written, seen for what it is, refused when wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forespeak.drafters.starting import startable
from tests.cli.conftest import Command
from tests.engine.tiny_text import SIZE, characters, write_checkpoint
from tests.tiny import tiny_config

CONFIG = tiny_config(num_layers=6, vocab_size=SIZE, eos_token_ids=(0,))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("target"), CONFIG, characters()))


@pytest.mark.parametrize("method", startable())
def test_what_init_writes_inspect_finds_sound(
    forespeak: Command, target: str, tmp_path: Path, method: str
):
    out = str(tmp_path / method)
    made = forespeak("init", method, "--target", target, "--out", out, "--json")
    assert made.code == 0, made.err
    found = forespeak("inspect", out, "--target", target, "--json")
    assert found.code == 0, found.err
    assert found.record["method"] == method
    assert found.record["num_parameters"] == made.record["num_parameters"] > 0
    assert found.record["problems"] == []
    assert found.record["facts"]
    shown = forespeak("inspect", out)
    assert shown.code == 0 and method in shown.out and "memory per token of context" in shown.out
    assert "fits" not in shown.out
    held = forespeak("inspect", out, "--target", target)
    [line] = [line for line in held.out.splitlines() if line.startswith("fits ")]
    assert line.split()[-1] == "yes"


def test_seed_and_settings(forespeak: Command, target: str, tmp_path: Path):
    def weights(name: str, *more: str) -> dict[str, torch.Tensor]:
        out = tmp_path / name
        done = forespeak("init", "medusa", "--target", target, "--out", str(out), *more)
        assert done.code == 0, done.err
        [file] = out.glob("*.safetensors")
        return load_file(file)

    first, again = weights("a"), weights("b")
    other, more_heads = weights("c", "--seed", "1"), weights("d", "--set", "num_heads=6")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert len(more_heads) > len(first)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["init", "medusa"], "No folder was given; name the one to write with --out FOLDER"),
        (["init", "ngram", "--out", "x"], "Method to start a drafter of 'ngram' is not known"),
        (["init", "medusaa", "--out", "x"], "Did you mean 'medusa'?"),
        (["init", "medusa", "--out", "x", "--set", "heads"], "'heads' is not KEY=VALUE"),
        (["init", "medusa", "--out", "x", "--set", "num_head=3"], "Did you mean 'num_heads'?"),
        (
            ["init", "medusa", "--out", "x", "--set", "num_heads=two"],
            "num_heads='two' is not a whole",
        ),
        (["init", "medusa", "--out", "FULL"], "is there already and not empty"),
        (
            ["inspect", "no/such/one"],
            "There is no drafter 'no/such/one'; allowed: a folder with config.json or a Hub id",
        ),
        (["inspect", "FULL"], "has no config.json"),
    ],
)
def test_bad_input(
    forespeak: Command, target: str, tmp_path: Path, arguments: list[str], sentence: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    full = tmp_path / "full"
    full.mkdir()
    (full / "note").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = [str(full) if part == "FULL" else part for part in arguments]
    more = ["--target", target] if given[0] == "init" else []
    done = forespeak(*given, *more)
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert (full / "note").read_text() == "mine"


def test_what_is_wrong_with_a_drafter(forespeak: Command, target: str, tmp_path: Path):
    out = tmp_path / "drafter"
    done = forespeak(
        "init", "eagle3", "--target", target, "--out", str(out), "--set", "draft_vocab_size=6"
    )
    assert done.code == 0, done.err
    [file] = out.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"d2t": torch.zeros_like(tensors["d2t"])}, file)
    found = forespeak("inspect", str(out), "--json")
    assert found.code == 2 and "d2t is all zero" in found.record["problems"][0]
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * float("nan")}, file)
    found = forespeak("inspect", str(out))
    assert found.code == 2 and "not finite" in found.err
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, file)
    found = forespeak("inspect", str(out))
    assert found.code == 2 and "lacks the tensor fc.weight" in found.err
    save_file(tensors | {"odd": torch.zeros(2)}, file)
    found = forespeak("inspect", str(out))
    assert found.code == 2 and "odd" in found.err


def test_a_drafter_of_another_target(forespeak: Command, target: str, tmp_path: Path):
    out = tmp_path / "drafter"
    assert forespeak("init", "eagle", "--target", target, "--out", str(out)).code == 0
    other = write_checkpoint(
        tmp_path / "other", tiny_config(num_layers=6, vocab_size=SIZE, hidden_size=48), characters()
    )
    found = forespeak("inspect", str(out), "--target", str(other), "--json")
    assert found.code == 2
    assert "hidden size 40; this one has 48" in found.record["problems"][0]
    held = forespeak("inspect", str(out), "--target", str(other))
    [line] = [line for line in held.out.splitlines() if line.startswith("fits ")]
    assert held.code == 2 and line.split()[-1] == "no"


def test_config_is_json_that_people_can_read(forespeak: Command, target: str, tmp_path: Path):
    out = tmp_path / "drafter"
    assert forespeak("init", "dspark", "--target", target, "--out", str(out)).code == 0
    config = json.loads((out / "config.json").read_text())
    assert config["block_size"] >= 2
