"""From dialogues on disk to a drafter that drafts, for every method; and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forespeak.engine.llm import LLM, load_target
from forespeak.errors import DataError, OptionError, TrainingError
from forespeak.formats.drafters import read_drafter
from forespeak.sampling import SamplingParams
from forespeak.train.dialogues import DIALOGUES
from forespeak.train.loop import Stop
from forespeak.train.objective import drafter_config
from forespeak.train.recipe import read_recipe, recipe_names
from forespeak.train.request import Request, Watchers, check_request, objective_settings
from forespeak.train.session import cache_features, run_request
from forespeak.train.ship import split_weights
from tests.train.stubs import KilledHere, Steps
from tests.train.tiny_run import CONFIG, request, tiny_recipe, write_data, write_target

pytestmark = pytest.mark.slow

SETTINGS: dict[str, dict[str, Any]] = {"dflash": {"num_anchors": 8}, "dspark": {"num_anchors": 8}}
METHODS = ("medusa", "mtp_parallel", "mtp", "eagle", "eagle3", "dflash", "dspark")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return read_drafter(folder).tensors()


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_from_dialogues(root: Path, tmp_path: Path, method):
    recipe = tiny_recipe(
        method, schedule={"steps": 30}, save={"every": 10},
        objective=SETTINGS.get(method, {}), data={"features": "cache"},
    )  # fmt: skip
    asked = request(root, recipe, out=tmp_path / "out")
    notes: list[str] = []
    steps = Steps()
    done = run_request(asked, Watchers(note=notes.append, on_step=steps))
    assert done.outcome is not None and done.outcome.ending == "complete"
    losses = [report.loss for report in steps.reports]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert any("bytes a token" in note for note in notes)
    llm = LLM(load_target(asked.target, threads=1), method=method, drafter=str(asked.out))
    plain = LLM(load_target(asked.target, threads=1), method="autoregressive")
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    one, other = llm.generate("abc", params), plain.generate("abc", params)
    assert one.token_ids == other.token_ids and one.stats.num_drafted > 0
    card = (asked.out / "README.md").read_text()
    assert method in card and "30 of 30 (the whole run)" in card and "held-out texts" in card
    record = json.loads((asked.out / "provenance.json").read_text())
    assert record["recipe"]["method"] == method and record["data"]["trained"] > 0
    assert record["versions"]["torch"] == torch.__version__ and record["progress"]["step"] == 30
    assert (asked.out / "log.png").is_file()
    # In three parts: killed twice, the same drafter comes out.
    cut = replace(asked, out=tmp_path / "cut", resume=True, features=asked.out / "features")
    for kill_at in (13, 27):
        with pytest.raises(KilledHere):
            run_request(cut, Watchers(on_step=Steps(kill_at=kill_at)))
    run_request(cut)
    again, whole = tensors_of(cut.out), tensors_of(asked.out)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize("method", METHODS)
def test_a_reduced_vocabulary_in_bfloat16(root: Path, tmp_path: Path, method):
    recipe = tiny_recipe(
        method, drafter={"draft_vocab_size": 20}, compute={"dtype": "bfloat16"},
        objective=SETTINGS.get(method, {}), schedule={"steps": 20},
    )  # fmt: skip
    asked, steps = request(root, recipe, out=tmp_path / "out"), Steps()
    run_request(asked, Watchers(on_step=steps))
    losses = [report.loss for report in steps.reports]
    assert sum(losses[-5:]) < sum(losses[:5])
    found = read_drafter(asked.out)
    assert found.config.draft_vocab_size == 20
    ids = found.tensors()["d2t"] + torch.arange(20)
    assert 0 in ids.tolist()  # what ends a text is always inside
    floats = [t.dtype for t in found.tensors().values() if t.is_floating_point()]
    assert set(floats) == {torch.bfloat16}


@pytest.mark.parametrize("method", METHODS)
def test_shards(root: Path, tmp_path: Path, method, monkeypatch):
    asked = request(root, tiny_recipe(method, objective=SETTINGS.get(method, {})),
                    out=tmp_path / "out")  # fmt: skip
    run_request(asked)
    whole = tensors_of(asked.out)
    monkeypatch.setattr("forespeak.train.ship._HEADER_BYTES", 0)
    largest = max(t.numel() * t.element_size() for t in whole.values())
    monkeypatch.setattr("forespeak.train.ship.MEGABYTE", largest + 8)
    files = split_weights(asked.out, 1)
    assert len(files) > 1 and sorted(asked.out.glob("*.safetensors")) == sorted(files)
    again = tensors_of(asked.out)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    # The drafter is written again over its shards.
    run_request(replace(asked, resume=True))
    assert len(list(asked.out.glob("*.safetensors"))) == 1
    assert not (asked.out / "model.safetensors.index.json").exists()


def test_a_draft_model(root: Path, tmp_path: Path):
    recipe = tiny_recipe("draft_model", schedule={"steps": 30})
    asked, steps = request(root, recipe, out=tmp_path / "out"), Steps()
    run_request(asked, Watchers(on_step=steps))
    losses = [report.loss for report in steps.reports]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    target = load_target(asked.target, threads=1)
    one = LLM(target, method="draft_model", drafter=str(asked.out)).generate("abc", params)
    other = LLM(target, method="autoregressive").generate("abc", params)
    assert one.token_ids == other.token_ids and one.stats.num_drafted > 0


def test_a_new_target_with_heads(root: Path, tmp_path: Path):
    recipe = tiny_recipe("medusa2", schedule={"steps": 20}, objective={"rank": 4})
    asked, steps = request(root, recipe, out=tmp_path / "out"), Steps()
    run_request(asked, Watchers(on_step=steps))
    losses = [report.loss for report in steps.reports]
    assert sum(losses[-5:]) < sum(losses[:5])
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    target = load_target(str(asked.out), threads=1)
    one = LLM(target, method="medusa").generate("abc", params)
    other = LLM(target, method="autoregressive").generate("abc", params)
    assert one.token_ids == other.token_ids and one.stats.num_drafted > 0


def test_a_tensor_that_fits_no_file(root: Path, tmp_path: Path, monkeypatch):
    asked = request(root, tiny_recipe("medusa"), out=tmp_path / "out")
    run_request(asked)
    monkeypatch.setattr("forespeak.train.ship.MEGABYTE", 100)
    with pytest.raises(OptionError, match="save.file_megabytes is 1"):
        split_weights(asked.out, 1)


def test_live_is_cached(root: Path, tmp_path: Path):
    recipe = tiny_recipe("eagle3")
    cached = replace(recipe, data=replace(recipe.data, features="cache"))
    run_request(request(root, recipe, out=tmp_path / "live"))
    run_request(request(root, cached, out=tmp_path / "cached"))
    one, other = tensors_of(tmp_path / "live"), tensors_of(tmp_path / "cached")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_cache_for_several_recipes(root: Path, tmp_path: Path):
    recipes = {name: tiny_recipe(name) for name in ("medusa", "eagle3", "mtp_parallel")}
    asked = request(root, recipes["medusa"])
    notes: list[str] = []
    watchers = Watchers(note=notes.append)
    assert cache_features(recipes, asked, tmp_path / "f", watchers)
    manifest = json.loads((tmp_path / "f" / "manifest.json").read_text())
    assert manifest["hidden"] is True and len(manifest["taps"]) >= 3
    for name, recipe in recipes.items():
        run_request(request(root, recipe, out=tmp_path / name, features=tmp_path / "f"))
    assert len(notes) == 1
    other = replace(recipes["medusa"], data=replace(recipes["medusa"].data, max_length=20))
    with pytest.raises(OptionError, match="data.max_length"):
        cache_features(recipes | {"other": other}, asked, tmp_path / "f", watchers)
    with pytest.raises(OptionError, match="other texts"):
        run_request(request(root, other, out=tmp_path / "other", features=tmp_path / "f"))


def test_stopped_while_features_are_written(root: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("forespeak.train.feature_cache._SHARD_BYTES", 1)
    recipe = tiny_recipe("medusa", data={"features": "cache"})
    asked = request(root, recipe, out=tmp_path / "out")
    stop = Stop(wanted=True)
    done = run_request(asked, stop=stop)
    assert done.outcome is None and done.files == [] and done.ending == "signal"
    done = run_request(replace(asked, resume=True))
    assert done.outcome is not None and done.outcome.ending == "complete"


def test_the_time_limit_leaves_a_drafter(root: Path, tmp_path: Path):
    import time

    recipe = tiny_recipe("medusa", schedule={"steps": 10**6})
    asked = request(root, recipe, out=tmp_path / "out", time_limit_s=5.0)
    done = run_request(asked, Watchers(on_step=lambda report: time.sleep(0.2)))
    assert done.outcome is not None and done.outcome.ending == "time"
    assert "the time limit came first" in (asked.out / "README.md").read_text()
    assert tensors_of(asked.out)


def test_other_data_are_refused_before_features_are_made(root: Path, tmp_path: Path):
    recipe = tiny_recipe("medusa", data={"features": "cache"})
    asked = request(root, recipe, out=tmp_path / "out")
    run_request(asked)
    shutil.rmtree(asked.out / "features")
    other = write_data(tmp_path / "other", count=30)
    changed = replace(asked, data=[other], resume=True)
    refused(changed, "other dialogues than those of --data", TrainingError)
    assert not (asked.out / "features").exists()


def test_nothing_held_out_is_said(root: Path, tmp_path: Path):
    notes: list[str] = []
    recipe = tiny_recipe("dspark", data={"held_out": 0.01}, objective=SETTINGS["dspark"])
    asked = request(root, recipe, out=tmp_path / "out")
    done = run_request(asked, Watchers(note=notes.append))
    assert done.outcome is not None and done.outcome.held_out is None
    assert any("holds out no text, so nothing is measured" in note for note in notes)
    card = (asked.out / "README.md").read_text()
    assert "held-out texts" not in card and "forespeak compare" in card
    assert not (asked.out / "sts.json").exists()


def test_a_schedule_that_follows_the_time_is_whole_when_it_is_over(root: Path, tmp_path: Path):
    import time

    recipe = tiny_recipe("medusa", schedule={"steps": 10**6, "follows": "time"})
    asked = request(root, recipe, out=tmp_path / "out", time_limit_s=5.0)
    done = run_request(asked, Watchers(on_step=lambda report: time.sleep(0.2)))
    assert done.ending == "time" and done.files
    card = (asked.out / "README.md").read_text()
    assert "the whole of a schedule that followed the time limit" in card
    assert "1000000" not in card.split("## Recipe")[0]


def test_a_limit_that_features_use_up_gives_no_drafter(root: Path, tmp_path: Path):
    asked = request(
        root, tiny_recipe("medusa", data={"features": "cache"}), out=tmp_path / "out",
        time_limit_s=1e-6,
    )  # fmt: skip
    done = run_request(asked)
    assert (done.ending, done.files) == ("time", [])


def refused(asked: Request, match: str, kind: type[Exception] = OptionError) -> None:
    with pytest.raises(kind, match=match):
        run_request(asked)


def test_refusals(root: Path, tmp_path: Path):
    recipe = tiny_recipe("medusa")
    asked = request(root, recipe, out=tmp_path / "out")
    refused(replace(asked, recipe=replace(recipe, method="ngram")), "Method to train 'ngram'")
    wrong = replace(recipe, objective={"dept_decay": 1.0})
    refused(replace(asked, recipe=wrong), "Did you mean 'objective.depth_decay'")
    wrong = replace(recipe, drafter={"num_head": 3})
    refused(replace(asked, recipe=wrong), "Did you mean 'num_heads'")
    refused(replace(asked, time_limit_s=0.0), "time limit")
    timed = replace(recipe, schedule=replace(recipe.schedule, follows="time"))
    refused(replace(asked, recipe=timed), "--time-limit")
    (tmp_path / "file").write_text("x")
    refused(replace(asked, out=tmp_path / "file"), "is a file")
    refused(replace(asked, out=root), "other files")
    run_request(asked)
    refused(asked, "holds a run")
    other = replace(recipe, seed=1)
    refused(replace(asked, recipe=other, resume=True), "another seed", TrainingError)


def test_data_that_cannot_be(root: Path, tmp_path: Path):
    asked = request(root, tiny_recipe("medusa"), out=tmp_path / "out")
    data = write_data(tmp_path / "template", template="0" * 64)
    refused(replace(asked, data=[data]), "chat template is another", DataError)
    data = write_data(tmp_path / "broken")
    lines = (data / DIALOGUES).read_text().splitlines(keepends=True)
    (data / DIALOGUES).write_text(lines[0] + lines[1][:-20] + "\n" + lines[2])
    refused(replace(asked, data=[data]), "line 2", DataError)
    refused(replace(asked, data=[tmp_path / "none"]), "manifest", DataError)
    assert not asked.out.exists()


def test_a_cache_of_another_target(root: Path, tmp_path: Path):
    recipe = tiny_recipe("medusa", data={"features": "cache"})
    asked = request(root, recipe, out=tmp_path / "one")
    run_request(asked)
    other = write_target(tmp_path / "other", seed=4)
    changed = replace(asked, target=str(other), out=tmp_path / "two",
                      features=asked.out / "features")  # fmt: skip
    refused(changed, "features of another target")


def test_every_recipe_of_the_package_is_whole():
    for name in recipe_names():
        recipe = read_recipe(name)
        objective_settings(recipe)
        sizes = replace(CONFIG, num_layers=30, vocab_size=49_152)
        drafter_config(recipe.method, sizes, recipe.drafter_changes())
        assert recipe.method == name.split("/")[-1]
    assert {n for n in recipe_names() if "/" not in n} >= set(METHODS)


def test_check_request_needs_no_target(tmp_path: Path):
    check_request(
        Request(recipe=tiny_recipe("eagle"), target="none", data=[tmp_path], out=tmp_path / "out")
    )
