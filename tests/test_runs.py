"""runs/smollm2.sh with a command in forespeak's place that notes how it is called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "runs" / "smollm2.sh"
METHODS = ["medusa", "mtp_parallel", "mtp", "eagle", "eagle3", "dflash", "dspark"]

# Makes what the real one would make, notes its words, and fails where FAIL is among them.
FAKE = """#!/bin/sh
echo "$*" >> "$CALLS"
case " $* " in *" ${FAIL:-no such word} "*) exit ${CODE:-2} ;; esac
out="" last=""
for word in "$@"; do
    if [ "$last" = --out ]; then out="$word"; fi
    last="$word"
done
case "$1 ${2:-}" in
"data derive") echo '{}' > "$out" ;;
"data generate") mkdir -p "$out"; touch "$out/manifest.json" "$out/dialogues.jsonl" ;;
"train "*) mkdir -p "$out/checkpoints"; touch "$out/config.json" "$out/log.png" ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "fake").write_text(FAKE)
    (tmp_path / "fake").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit ${NO_GPU:-9}\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    for folder in ("prompts", "eval"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.jsonl").write_text('{"id": "a", "turns": ["b"]}\n' * 5)
    return tmp_path


def run(place: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    shell = shutil.which("dash") or "sh"
    environment = os.environ | {
        "FORESPEAK": str(place / "fake"), "CALLS": str(place / "calls"), "OUT": str(place / "out"),
        "PROMPTS": str(place / "prompts"), "EXCLUDE": str(place / "eval"),
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
    } | settings  # fmt: skip
    return subprocess.run(
        [shell, str(SCRIPT), *arguments], env=environment, text=True, capture_output=True,
        timeout=60,
    )  # fmt: skip


def calls(place: Path) -> list[str]:
    lines = (place / "calls").read_text().splitlines()
    (place / "calls").unlink()
    return lines


def trained(lines: list[str]) -> list[str]:
    return [line.split()[1].removeprefix("smollm2/") for line in lines if line.startswith("train ")]


def test_from_nothing_to_all_and_once_only(place: Path):
    done = run(place)
    assert done.returncode == 0, done.stderr
    lines = calls(place)
    assert trained(lines) == METHODS
    generated = [line for line in lines if line.startswith("data generate")]
    assert len(generated) == 4 and all("--exclude" in line for line in generated)
    assert [line for line in lines if line.startswith("features ")]
    for line in lines:
        if line.startswith("train "):
            assert line.count(" --data ") == 4 and "--features" in line and "--resume" in line
            assert "--time-limit 20 " in line
    # The same command again has nothing left to do but to look at the features.
    assert run(place).returncode == 0
    assert {line.split()[0] for line in calls(place)} == {"features"}


@pytest.mark.parametrize(("no_gpu", "device"), [("9", "cpu"), ("0", "cuda")])
def test_a_gpu_is_found(place: Path, no_gpu: str, device: str):
    assert run(place, NO_GPU=no_gpu, METHODS="medusa").returncode == 0
    lines = calls(place)
    called = [line for line in lines if line.startswith(("train ", "data generate "))]
    assert called and all(f"--device {device}" in line for line in called)
    # With a GPU features are made as they are needed.
    assert any(line.startswith("features ") for line in lines) is (device == "cpu")


def test_finished_drafters_are_shipped_without_logs(place: Path):
    ship = place / "ship"
    (ship / "medusa").mkdir(parents=True)
    (ship / "medusa" / "model-00001-of-00002.safetensors").touch()  # of an older one
    done = run(place, SHIP=str(ship), METHODS="medusa eagle3")
    assert done.returncode == 0, done.stderr
    shipped = sorted(str(path.relative_to(ship)) for path in ship.rglob("*"))
    assert shipped == ["eagle3", "eagle3/config.json", "medusa", "medusa/config.json"]


def test_a_second_pass_goes_on_from_the_first_and_is_what_is_shipped(place: Path):
    ship = place / "ship"
    done = run(place, SHIP=str(ship), METHODS="medusa eagle3", SECOND="7")
    assert done.returncode == 0, done.stderr
    first, second = (
        [line for line in calls(place) if line.startswith("train smollm2/eagle3 ")]
    )  # fmt: skip
    assert "--start-from" not in first and "--time-limit 20 " in first
    assert f"--start-from {place}/out/drafters/eagle3 --draft-vocab-size 10240" in second
    assert f"--out {place}/out/second/eagle3" in second and "--time-limit 7 " in second
    assert (ship / "eagle3" / "config.json").is_file()
    assert run(place, SHIP=str(ship), METHODS="medusa eagle3", SECOND="7").returncode == 0
    assert trained(calls(place)) == []


def test_a_bad_ship_is_refused_before_anything_is_trained(place: Path):
    (place / "file").touch()
    done = run(place, SHIP=str(place / "file" / "x"), SECOND="7")
    assert done.returncode == 2 and "SHIP is" in done.stderr
    assert not (place / "calls").exists()
    for wrong in ({"SECOND": "abc"}, {"SECOND": "7", "LIMIT": "8"}):
        assert run(place, **wrong).returncode == 2


def test_what_was_made_before_is_shipped_later(place: Path):
    assert run(place, METHODS="medusa").returncode == 0
    assert run(place, METHODS="medusa", SHIP=str(place / "ship")).returncode == 0
    assert (place / "ship" / "medusa" / "config.json").is_file()


def test_what_was_stopped_by_hand_stops_all(place: Path):
    done = run(place, FAIL="smollm2/mtp", CODE="130", DEVICE="cuda")
    assert done.returncode == 130
    assert trained(calls(place)) == ["medusa", "mtp_parallel", "mtp"]


def test_a_method_that_fails_is_named_and_tried_again(place: Path):
    done = run(place, FAIL="smollm2/mtp")
    # `features` names every recipe, so the word fails there, too.
    assert done.returncode == 2
    done = run(place, "--device", "cuda", FAIL="smollm2/mtp")
    assert done.returncode == 1 and "There is none of: mtp;" in done.stderr
    calls(place)
    assert run(place, "--device", "cuda").returncode == 0
    assert trained(calls(place)) == ["mtp"]


def test_a_stage_that_fails_ends_the_run_and_goes_on_later(place: Path):
    assert run(place, FAIL="--self-written").returncode == 2
    assert len(calls(place)) == 1
    assert run(place).returncode == 0
    assert trained(calls(place)) == METHODS


def test_prompts_that_cannot_be_derived_are_done_without(place: Path):
    assert run(place, FAIL="derive").returncode == 0
    lines = calls(place)
    assert len([line for line in lines if line.startswith("data generate")]) == 2
    assert trained(lines) == METHODS


def test_a_time_limit_is_shared_out(place: Path):
    done = run(place, "--device=cuda", LIMIT="8")
    assert done.returncode == 0, done.stderr
    lines = calls(place)
    assert not [line for line in lines if line.startswith("features")]
    limits = {}
    for line in lines:
        words = line.split()
        if "--time-limit" in words:
            limits[words[1] if words[0] == "train" else words[words.index("--out") + 1]] = float(
                words[words.index("--time-limit") + 1]
            )
    data = [value for name, value in limits.items() if "/out/" in name]
    assert len(data) == 4 and max(data) <= 8 * 0.46
    shares = [limits[f"smollm2/{method}"] for method in METHODS]
    # Nothing here takes time, so each gets a growing share of all that is left.
    assert shares == sorted(shares) and 0.9 < shares[0] < 1.2 and shares[-1] < 8
    for line in lines:
        if line.startswith("train "):
            assert "--set batch.tokens=16384" in line and "--device cuda" in line


def test_no_time_at_all(place: Path):
    done = run(place, LIMIT="0.1")
    assert done.returncode == 1 and "There are no answers to train on" in done.stderr
    assert not (place / "calls").exists()
    # With more time it begins from the beginning.
    assert run(place).returncode == 0
    lines = calls(place)
    assert trained(lines) == METHODS
    assert len([line for line in lines if line.startswith("data generate")]) == 4


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        (["--devise", "cuda"], {}, "takes --device NAME"),
        (["--device"], {}, "--device needs"),
        ([], {"EXCLUDE": "/no/such/folder"}, "There is no folder /no/such/folder"),
        ([], {"PROMPTS": "/no/such/folder"}, "There is no folder /no/such/folder"),
        ([], {"PROMPTS": "/"}, "no .jsonl file in /"),
        ([], {"LIMIT": "abc"}, "LIMIT is 'abc'"),
        ([], {"LIMIT": "-1"}, "LIMIT is '-1'"),
        ([], {"LIMIT": "0"}, "LIMIT is '0'"),
        ([], {"MINUTES": "0"}, "MINUTES is '0'"),
        ([], {"MINUTES": "1e"}, "MINUTES is '1e'"),
        ([], {"MOST": "abc"}, "MOST is 'abc'"),
        ([], {"MOST": "0"}, "MOST is '0'"),
        ([], {"WRITTEN": "many"}, "WRITTEN is 'many'"),
        ([], {"DERIVED": "-3"}, "DERIVED '-3'"),
        ([], {"METHODS": "medusa nosuch"}, "no recipe smollm2/nosuch"),
        ([], {"METHODS": " "}, "METHODS names no method"),
    ],
)
def test_what_it_does_not_take(
    place: Path, arguments: list[str], settings: dict[str, str], said: str
):
    done = run(place, *arguments, **settings)
    assert done.returncode == 2 and said in done.stderr
    assert not (place / "calls").exists()


def test_stages_switched_off(place: Path):
    done = run(place, WRITTEN="0", DERIVED="0", EXCLUDE="none", METHODS="eagle3")
    assert done.returncode == 0, done.stderr
    lines = calls(place)
    assert [line.split()[0] for line in lines] == ["data", "features", "train"]
    assert "--exclude" not in lines[0]
