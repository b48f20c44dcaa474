"""``forespeak data``: the whole way over a tiny target on disk, and every refusal."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forespeak.cli.app import execute
from forespeak.models.tokenizer import Tokenizer
from forespeak.train.dialogues import read_dialogues, read_samples
from tests.cli.conftest import Outcome
from tests.engine.tiny_text import write_checkpoint
from tests.tiny import tiny_config
from tests.train.talking import SIZE, TOKENIZER
from tests.train.test_endpoint import completion, serving

pytestmark = pytest.mark.slow

Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-talker"
    folder.mkdir()
    config = tiny_config(vocab_size=SIZE, max_position_embeddings=128, eos_token_ids=(0,))
    write_checkpoint(folder, config, None)
    TOKENIZER._backend.save_pretrained(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], target: Path) -> Run:
    def call(*arguments: Any, target: Path | None = target) -> Outcome:
        capsys.readouterr()
        given = ["data", *map(str, arguments)]
        if arguments[0] == "generate" and "--help" not in given:
            given += ["--target", str(target), "--max-new-tokens", "20"]
            given += [] if "--endpoint" in given else ["--rows", "4", "--threads", "1"]
        code = execute(given)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [json.dumps({"id": f"q{n}", "turns": [f"a{n} b", "c"][: 1 + n % 2]}) for n in range(9)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"id": "e", "turns": ["A4, B"]}\n')
    return path


def test_from_prompts_to_a_packed_file_and_back(
    run: Run, tmp_path: Path, prompts: Path, evaluation: Path
):
    out = tmp_path / "out"
    done = run("generate", "--prompts", prompts, "--exclude", evaluation, "--out", out, "--json")
    assert done.code == 0, done.err
    found = list(read_dialogues(out))
    assert done.record["num_dialogues"] == len(found) > 1
    assert done.record["num_tokens"] == sum(one.num_tokens for one in found)
    assert done.record["counts"]["excluded"] == 1 and done.record["complete"]
    assert "q4" not in {one.id for one in found}
    assert done.record["target"] == "tiny-talker"  # no folder of this machine
    assert str(tmp_path) not in (out / "manifest.json").read_text()
    assert [one["name"] for one in done.record["excluded"]] == ["eval.jsonl"]

    shown = run("show", out, "--json").record
    assert shown == {k: v for k, v in done.record.items() if k != "path"}
    lengths = sorted(len(answer) for one in found for answer in one.answers)
    told = shown["answer_tokens"]
    assert (told["shortest"], told["longest"]) == (lengths[0], lengths[-1])
    people = run("show", out)
    assert "dialogues by source" in people.out and "prompts.jsonl" in people.out

    file = tmp_path / "answers.jsonl.gz"
    assert run("pack", out, "--out", file, "--json").record["num_bytes"] == file.stat().st_size
    assert run("show", file, "--json").record == shown
    back = tmp_path / "back"
    unpacked = run("unpack", file, "--prompts", prompts, "--out", back, "--json")
    assert unpacked.record == {"path": str(back), "num_dialogues": len(found)}
    for name in ("dialogues.jsonl", "manifest.json"):
        assert (back / name).read_bytes() == (out / name).read_bytes()


def test_a_run_goes_on_and_says_what_it_did(run: Run, tmp_path: Path, prompts: Path):
    out = tmp_path / "out"
    first = run("generate", "--prompts", prompts, "--out", out)
    assert first.code == 0 and first.out == ""
    assert re.search(r"\d+ dialogues, \d+ answer tokens \(.*whole \d+.*data show", first.err)
    whole = (out / "dialogues.jsonl").read_bytes()
    (out / "dialogues.jsonl").write_bytes(whole[: len(whole) // 2])
    assert run("generate", "--prompts", prompts, "--out", out).code == 0
    assert (out / "dialogues.jsonl").read_bytes() == whole
    other = run("generate", "--prompts", prompts, "--out", out, "--seed", 1)
    assert other.code == 2 and "was begun with seed 0 and now has 1" in other.err
    assert other.err.count("\n") == 1


def test_self_written(run: Run, tmp_path: Path, target: Path):
    out = tmp_path / "out"
    done = run("generate", "--self-written", 5, "--min-written-tokens", 2, "--out", out, "--json")
    assert done.code == 0, done.err
    counts = done.record["counts"]
    assert counts["prompts_kept"] == 5
    assert {one.source for one in read_dialogues(out)} == {"self-written"}
    tokenizer = Tokenizer.from_folder(target)
    assert tokenizer is not None
    read = read_samples(out, tokenizer)
    assert len(read.samples) + read.refused.total() == done.record["num_dialogues"]
    file = tmp_path / "own.gz"
    run("pack", out, "--out", file)
    assert run("unpack", file, "--out", tmp_path / "back").code == 0
    assert list(read_dialogues(tmp_path / "back")) == list(read_dialogues(out))


def test_an_endpoint(run: Run, tmp_path: Path, prompts: Path):
    with serving(lambda body, _: (200, completion(body))) as server:
        done = run(
            "generate", "--prompts", prompts, "--endpoint", server.url, "--model", "tiny",
            "--in-flight", 3, "--out", tmp_path / "out", "--json",
        )  # fmt: skip
    assert done.code == 0, done.err
    assert done.record["counts"] == {"whole": 9}
    assert done.record["settings"]["endpoint_model"] == "tiny"


def test_a_data_set(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = types.ModuleType("datasets")
    rows = [{"prompt": f"a{number}"} for number in range(6)]
    package.__dict__["load_dataset"] = lambda name, *, split: rows
    monkeypatch.setitem(sys.modules, "datasets", package)
    done = run("generate", "--dataset", "org/set", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert [one["name"] for one in done.record["prompts"]] == ["org/set:train"]
    file = tmp_path / "x.gz"
    run("pack", tmp_path / "out", "--out", file)
    back = run("unpack", file, "--dataset", "org/set", "--out", tmp_path / "back")
    assert back.code == 0, back.err
    assert list(read_dialogues(tmp_path / "back")) == list(read_dialogues(tmp_path / "out"))


REFUSED: list[tuple[list[str], str]] = [
    ([], "No prompts were given; allowed: one of --prompts"),
    (["--prompts", "P", "--self-written", "3"], "--prompts and --self-written were given"),
    (["--prompts", "P", "--dataset-split", "x"], "--dataset-split has no effect"),
    (["--prompts", "P", "--min-written-tokens", "9"], "have no effect without --self-written"),
    (["--self-written", "1", "--min-written-tokens", "500"], "the first up to the second"),
    (["--prompts", "P", "--model", "m"], "--model has no effect without --endpoint"),
    (["--prompts", "P", "--in-flight", "3"], "--in-flight has no effect without --endpoint"),
    (["--prompts", "P", "--endpoint", "http://a"], "--endpoint needs --model NAME"),
    (
        ["--prompts", "P", "--endpoint", "http://a", "--model", "m", "--dtype", "int8"],
        "--dtype has no effect beside --endpoint",
    ),
    (
        ["--prompts", "P", "--endpoint", "http://a", "--model", "m", "--rows", "3"],
        "--rows has no effect beside --endpoint",
    ),
    (
        ["--prompts", "P", "--endpoint", "http://a", "--model", "m", "--batching", "rows"],
        "--batching has no effect beside --endpoint",
    ),
    (
        ["--prompts", "P", "--time-limit", "0"],
        "The time limit is 0 minutes",
    ),
    (["--self-written", "3", "--endpoint", "http://a", "--model", "m"], "exclude each other"),
    (["--prompts", "P", "--endpoint", "a", "--model", "m"], "'a' is no address"),
    (["--prompts", "missing.jsonl"], "missing.jsonl does not exist"),
    (["--prompts", "P", "--exclude", "missing.jsonl"], "missing.jsonl does not exist"),
    (["--prompts", "P", "--temperature", "-1"], "--temperature"),
    (["--dataset", "org/set"], "needs the package datasets"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refusals_leave_nothing_behind(
    run: Run, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, options: list[str],
    message: str,
):  # fmt: skip
    monkeypatch.setitem(sys.modules, "datasets", None)
    given = [str(prompts) if option == "P" else option for option in options]
    done = run("generate", *given, "--out", tmp_path / "out")
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_refusals_without_folders(run: Run, tmp_path: Path, prompts: Path):
    for arguments, message in (
        (("generate", "--prompts", prompts), "with --out FOLDER"),
        (("pack", tmp_path), "with --out FILE"),
        (("unpack", tmp_path / "x"), "with --out FOLDER"),
        (("show", tmp_path), "holds no dialogues"),
        (("show", prompts), "is cut or no gzip file"),
        (("pack", tmp_path, "--out", tmp_path / "x"), "holds no dialogues"),
    ):
        done = run(*arguments)
        assert done.code == 2 and message in done.err, done.err


def test_a_target_without_a_template(run: Run, tmp_path: Path, prompts: Path):
    config = tiny_config(vocab_size=SIZE, max_position_embeddings=128, eos_token_ids=(0,))
    (tmp_path / "bare").mkdir()
    write_checkpoint(tmp_path / "bare", config, None)
    done = run("generate", "--prompts", prompts, "--out", tmp_path / "o", target=tmp_path / "bare")
    assert done.code == 2 and "has no tokenizer" in done.err


def test_help_teaches(run: Run):
    told = run("generate", "--help").out
    assert "forespeak data generate --self-written 5000" in told
    for option in ("--prompts", "--exclude", "--greedy-share", "--endpoint", "--max-tokens-total"):
        assert option in told


def test_prompts_of_answers(run: Run, tmp_path: Path, prompts: Path, target: str):
    folder, out = tmp_path / "made", tmp_path / "derived.jsonl"
    done = run("generate", "--prompts", prompts, "--out", folder, "--max-new-tokens", "90")
    assert done.code == 0, done.err
    given = ("derive", folder, "--target", target, "--out", out)
    done = run(*given, "--kinds", "summary=2,translation=1")
    assert done.code == 2 and "hold nothing to make such prompts of: summary needs" in done.err
    assert not out.exists()
    many = ("summary=99999999999", f"summary={5000 * '9'}")
    for kinds in ("summary", "summary=x", "summary=0", "summary=1,", *many):
        done = run(*given, "--kinds", kinds)
        assert done.code == 2 and "is not KIND=NUMBER" in done.err
    done = run("derive", folder)
    assert done.code == 2 and "with --out FILE" in done.err
    file = folder / "dialogues.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["answers"][0][0] = 2**40
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(*given, "--kinds", "translation=1")
    assert done.code == 2 and not out.exists()


def test_no_dialogue_at_all(run: Run, tmp_path: Path):
    """Every prompt is too long: the run is whole and empty, and can be shown."""
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "q", "turns": ["a" * 400]}) + "\n")
    done = run("generate", "--prompts", path, "--out", tmp_path / "out")
    assert done.code == 0 and "0 dialogues" in done.err
    assert run("show", tmp_path / "out").code == 0


def test_a_time_limit_keeps_what_is_answered(run: Run, tmp_path: Path, prompts: Path):
    given = ("generate", "--prompts", prompts, "--out", tmp_path / "out", "--json")
    done = run(*given, "--time-limit", "0.0001")
    assert done.code == 0, done.err
    record = json.loads(done.out.splitlines()[-1])
    assert not record["complete"]
    record = json.loads(run(*given).out.splitlines()[-1])
    whole = run("generate", "--prompts", prompts, "--out", tmp_path / "whole", "--json")
    assert record == json.loads(whole.out.splitlines()[-1]) | {"path": str(tmp_path / "out")}
    assert record["complete"] and record["num_dialogues"] > 1


def test_lockstep_is_refused_before_anything_is_written(run: Run, tmp_path: Path, prompts: Path):
    given = ("generate", "--prompts", prompts, "--out", tmp_path / "out", "--batching", "lockstep")
    done = run(*given, "--dtype", "int8")
    assert done.code == 2 and "runs in int8" in done.err
    assert not (tmp_path / "out").exists()
    assert run(*given, "--dtype", "float32").code == 0
