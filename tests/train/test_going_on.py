"""What a run begins with and what is measured at its end: a drafter to go on from, temperatures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forespeak.errors import CheckpointError, DrafterError, OptionError, TrainingError
from forespeak.formats.drafters import read_drafter
from forespeak.train.atomic import only_writer
from forespeak.train.calibrating import CalibrationRequest, calibrate_drafter
from forespeak.train.request import Request, Watchers, check_request
from forespeak.train.session import run_request
from tests.engine.tiny_text import write_checkpoint
from tests.train.stubs import KilledHere, Steps
from tests.train.talking import TOKENIZER
from tests.train.tiny_run import CONFIG, request, tiny_recipe

pytestmark = pytest.mark.slow

SETTINGS = {"dflash": {"num_anchors": 8}, "dspark": {"num_anchors": 8}}
METHODS = ("medusa", "mtp_parallel", "mtp", "eagle", "eagle3", "dflash", "dspark")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def losses_of(asked: Request) -> list[float]:
    steps = Steps()
    run_request(asked, Watchers(on_step=steps))
    return [report.loss for report in steps.reports]


@pytest.mark.parametrize("method", METHODS)
def test_goes_on_from_a_drafter(root: Path, tmp_path: Path, method):
    drafter = {"draft_vocab_size": 20}
    recipe = tiny_recipe(
        method, schedule={"steps": 40}, objective=SETTINGS.get(method, {}), drafter=drafter
    )
    first = request(root, recipe, out=tmp_path / "first")
    before = losses_of(first)
    # The sizes are the drafter's own: the recipe's have no say.
    other = replace(recipe, drafter={"draft_vocab_size": 12}, seed=recipe.seed)
    second = replace(first, recipe=other, out=tmp_path / "second", start_from=first.out)
    after = losses_of(second)
    # The same texts in the same order: the first steps are where the first run ended.
    assert sum(after[:5]) < 0.9 * sum(before[:5])
    one, two = read_drafter(first.out), read_drafter(second.out)
    assert two.config.draft_vocab_size == 20
    assert torch.equal(one.tensors()["d2t"], two.tensors()["d2t"])
    record = json.loads((second.out / "provenance.json").read_text())
    assert record["start_from"]["name"] == "first" and record["recipe"]["drafter"] == {}
    assert record["start_from"]["progress"]["step"] == 40
    assert "| started from | first: 40 steps, " in (second.out / "README.md").read_text()


def test_the_first_step_has_the_drafters_weights(root: Path, tmp_path: Path):
    recipe = tiny_recipe("eagle3", schedule={"steps": 10}, data={"held_out": 0.0})
    first = request(root, recipe, out=tmp_path / "first")
    losses_of(first)
    still = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=1e-12))
    second = replace(first, recipe=still, out=tmp_path / "second", start_from=first.out)
    losses_of(second)
    one, two = read_drafter(first.out).tensors(), read_drafter(second.out).tensors()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_killed_run_resumes_from_its_own_start_only(root: Path, tmp_path: Path):
    recipe = tiny_recipe("medusa", schedule={"steps": 20}, save={"every": 5})
    first = request(root, recipe, out=tmp_path / "first")
    losses_of(first)
    whole = replace(first, out=tmp_path / "whole", start_from=first.out)
    losses_of(whole)
    cut = replace(whole, out=tmp_path / "cut", resume=True)
    with pytest.raises(KilledHere):
        run_request(cut, Watchers(on_step=Steps(kill_at=13)))
    with pytest.raises(TrainingError, match="began from another drafter"):
        run_request(replace(cut, start_from=whole.out))
    run_request(cut)
    one, two = read_drafter(whole.out).tensors(), read_drafter(cut.out).tensors()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_cannot_be_started_from(root: Path, tmp_path: Path):
    recipe = tiny_recipe("medusa")
    asked = request(root, recipe, out=tmp_path / "out")
    run_request(asked)
    other = replace(asked, out=tmp_path / "other", start_from=asked.out)
    for method, match in (
        ("eagle3", "is a drafter of method medusa and the recipe trains eagle3"),
        ("draft_model", "draft_model writes a model of its own"),
        ("medusa2", "medusa2 writes a model of its own"),
    ):
        with pytest.raises(OptionError, match=match):
            run_request(replace(other, recipe=tiny_recipe(method)))
    with pytest.raises(CheckpointError):
        run_request(replace(other, start_from=tmp_path / "nowhere"))


def test_confidences_are_calibrated(root: Path, tmp_path: Path):
    recipe = tiny_recipe(
        "dspark", schedule={"steps": 40}, objective={"num_anchors": 8}, data={"held_out": 0.4}
    )
    asked = request(root, recipe, out=tmp_path / "out")
    run_request(asked)
    found = json.loads((asked.out / "provenance.json").read_text())["calibration"]
    config = read_drafter(asked.out).config
    assert list(config.temperatures) == pytest.approx(found["temperatures"])
    assert len(config.temperatures) == config.max_depth and found["num_blocks"] > 0
    # Among the temperatures tried is 1, so that the first depth cannot come out worse.
    assert found["ece_after"][0] <= found["ece_before"][0] + 1e-9
    assert "calibration error" in (asked.out / "README.md").read_text()
    off = replace(recipe, objective={"num_anchors": 8, "calibrate": False})
    run_request(replace(asked, recipe=off, out=tmp_path / "off"))
    assert read_drafter(tmp_path / "off").config.temperatures == ()


@pytest.mark.parametrize("text", ["{", '{"progress": {}}', '{"start_from": "x"}', "[]"])
def test_damaged_records_are_said_before_training(root: Path, tmp_path: Path, text: str):
    asked = request(root, tiny_recipe("medusa"), out=tmp_path / "out")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "provenance.json").write_text(text)
    with pytest.raises(CheckpointError, match="provenance.json"):
        check_request(replace(asked, start_from=tmp_path / "old"))


def test_features_do_not_lie_in_the_drafters_folder(root: Path, tmp_path: Path):
    asked = request(root, tiny_recipe("medusa"), out=tmp_path / "out")
    with pytest.raises(OptionError, match="--features and --out are both"):
        check_request(replace(asked, features=tmp_path / "out"))
    assert not asked.out.exists()


def test_a_drafter_of_another_width(root: Path, tmp_path: Path):
    asked = request(root, tiny_recipe("medusa"), out=tmp_path / "out")
    run_request(asked)
    config = replace(CONFIG, hidden_size=48, head_dim=12)
    write_checkpoint(tmp_path / "wide", config, None)
    TOKENIZER._backend.save_pretrained(tmp_path / "wide")
    other = replace(
        asked, target=str(tmp_path / "wide"), out=tmp_path / "other", start_from=asked.out
    )
    with pytest.raises(DrafterError, match="hidden size 40; this one has 48"):
        run_request(other)


def test_a_drafter_is_not_overwritten_by_its_successor(root: Path, tmp_path: Path):
    asked = request(root, tiny_recipe("medusa"), out=tmp_path / "out")
    run_request(asked)
    with pytest.raises(OptionError, match="--start-from and --out are both"):
        run_request(replace(asked, start_from=asked.out, resume=True))


def test_a_calibrated_drafter_is_calibrated_anew_or_not_at_all(root: Path, tmp_path: Path):
    settings = {"num_anchors": 8}
    recipe = tiny_recipe("dspark", objective=settings, data={"held_out": 0.4})
    asked = request(root, recipe, out=tmp_path / "out")
    run_request(asked)
    assert read_drafter(asked.out).config.temperatures
    off = replace(recipe, objective=settings | {"calibrate": False})
    run_request(replace(asked, recipe=off, out=tmp_path / "off", start_from=asked.out))
    assert read_drafter(tmp_path / "off").config.temperatures == ()


def test_a_drafter_calibrated_by_itself(root: Path, tmp_path: Path):
    recipe = tiny_recipe(
        "dspark", schedule={"steps": 30}, objective={"num_anchors": 8, "calibrate": False}
    )
    asked = request(root, recipe, out=tmp_path / "out")
    run_request(asked)
    before = read_drafter(asked.out).tensors()
    seen: list[tuple[int, int]] = []
    for greedy in (False, True):
        wanted = CalibrationRequest(
            drafter=asked.out, target=asked.target, data=asked.data, threads=1, num_texts=12,
            greedy=greedy,
        )  # fmt: skip
        found = calibrate_drafter(wanted, Watchers(on_texts=lambda *done: seen.append(done)))
        config = read_drafter(asked.out).config
        assert list(config.temperatures) == pytest.approx(list(found["temperatures"]))
        assert found["greedy"] is greedy and found["num_blocks"] > 12
        assert found["ece_after"][0] <= found["ece_before"][0] + 1e-9
        record = json.loads((asked.out / "provenance.json").read_text())
        assert record["calibration"] == json.loads(json.dumps(found))
        card = (asked.out / "README.md").read_text()
        assert card.count("calibration error") == 1 and "recipe" in record
        how = "greedy" if greedy else "temperature 1"
        assert f"({how}; fitted to {found['num_blocks']} blocks of data and measured on" in card
    assert seen[-1] == (12, 12)
    before_it = (asked.out / "sts.json").read_bytes()
    damaged = ("{", "{}", "[]", '{"recipe": 3}', json.dumps(record | {"progress": {}}))
    for text in damaged:
        (asked.out / "provenance.json").write_text(text)
        with pytest.raises(CheckpointError, match="provenance.json"):
            calibrate_drafter(wanted)
        assert (asked.out / "sts.json").read_bytes() == before_it
    with only_writer(asked.out), pytest.raises(TrainingError, match="another process"):
        calibrate_drafter(wanted)
    (asked.out / "provenance.json").unlink()
    card = (asked.out / "README.md").read_text()
    calibrate_drafter(wanted)  # a drafter from elsewhere has no provenance of ours
    assert (asked.out / "README.md").read_text() == card
    after = read_drafter(asked.out).tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(OptionError, match="is 0; allowed: 1 or more"):
        calibrate_drafter(replace(wanted, num_texts=0))
    run_request(request(root, tiny_recipe("medusa"), out=tmp_path / "medusa"))
    with pytest.raises(OptionError, match="has no confidence head"):
        calibrate_drafter(replace(wanted, drafter=tmp_path / "medusa"))


@pytest.mark.parametrize("method", METHODS)
def test_a_vocabulary_that_grows(root: Path, tmp_path: Path, method):
    recipe = tiny_recipe(
        method, drafter={"draft_vocab_size": 12}, objective=SETTINGS.get(method, {}),
        schedule={"steps": 20},
    )  # fmt: skip
    first = request(root, recipe, out=tmp_path / "first")
    run_request(first)
    still = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=1e-12))
    second = replace(
        first, recipe=still, out=tmp_path / "second", start_from=first.out, draft_vocab_size=20
    )
    run_request(second)
    one, two = read_drafter(first.out), read_drafter(second.out)
    assert two.config.draft_vocab_size == 20
    old, new = (
        (found.tensors()["d2t"] + torch.arange(size)).tolist()
        for found, size in ((one, 12), (two, 20))
    )
    assert set(old) < set(new) and new == sorted(new)
    before, after = one.tensors(), two.tensors()
    places = torch.tensor([new.index(word) for word in old])
    for name, tensor in before.items():
        if name == "t2d":
            continue
        grew = name != "d2t" and after[name].shape != tensor.shape
        assert name == "d2t" or torch.equal(after[name][places] if grew else after[name], tensor)
        if grew and "markov_w2" in name:
            rest = [place for place in range(20) if place not in places.tolist()]
            assert float(after[name][rest].abs().max()) < 1e-9  # the rate is not quite zero
    with pytest.raises(TrainingError, match="began from another drafter"):
        run_request(replace(second, draft_vocab_size=22, resume=True))
    for size in (12, 10**6):
        with pytest.raises(OptionError, match="allowed: above 12"):
            run_request(replace(second, out=tmp_path / f"{size}", draft_vocab_size=size))
    with pytest.raises(OptionError, match="has no effect without --start-from"):
        run_request(replace(second, out=tmp_path / "none", start_from=None))
