"""Two processes give what one gives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.train.devices import OneProcess, open_devices
from forespeak.train.loop import train
from forespeak.train.recipe import Recipe
from forespeak.train.request import Request
from forespeak.train.session import run_request
from forespeak.train.step_log import read_log
from tests.train.stubs import Bigram, Steps, job, recipe
from tests.train.tiny_run import request, tiny_recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from forespeak.train.devices import open_devices
from forespeak.train.loop import train
from forespeak.train.recipe import Recipe
from forespeak.train.request import Request
from forespeak.train.session import run_request
from tests.train.stubs import Bigram, job, recipe
from tests.train.test_devices import made
sharded = sys.argv[2] == "sharded"
devices, device = open_devices(torch.device("cpu"), sharded=sharded)
assert devices.count == 2
objective = Bigram()
train(job(Path(sys.argv[1]), made(sharded, int(sys.argv[3])), objective, devices))
torch.save(objective.network.state_dict(), f"{sys.argv[1]}/{devices.rank}.pt")
devices.close()
"""

RUN_METHOD = """
import sys
import time
from pathlib import Path
import torch
torch.set_num_threads(1)
from forespeak.train.session import run_request
from tests.train.test_devices import method_request
run_request(method_request(Path(sys.argv[1]), sys.argv[2], sharded=sys.argv[3] == "sharded"))
# One that lives on may ask for the interpreter when it is gone, and abort: a rare, bad ending.
def left():
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(file.read_text().strip())
        except OSError:  # it has just ended
            continue
    return [name for name in names if "gloo" in name]
until = time.monotonic() + 5
while left() and time.monotonic() < until:
    time.sleep(0.05)
assert not left(), f"threads that should have ended: {left()}"
"""


def made(sharded: bool = False, micro_batches: int = 3) -> Recipe:
    """Three micro-batches for two processes: one has two, the other one."""
    return recipe(
        batch={"tokens": 40, "micro_batches": micro_batches},
        compute={"dtype": "float32", "sharded": sharded},
    )


def method_request(root: Path, method: str, *, sharded: bool = False, out: str = "two") -> Request:
    """A tiny run of a real method; two processes sum in another order than one."""
    asked = tiny_recipe(
        method, batch={"tokens": 60, "micro_batches": 3}, data={"held_out": 0.2},
        compute={"dtype": "float32", "sharded": sharded}, objective=SETTINGS.get(method, {}),
    )  # fmt: skip
    return request(root, asked, out=root / f"{out}-{method}")


SETTINGS = {"dspark": {"num_anchors": 8}, "medusa2": {"rank": 4}}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_two(program: str, *arguments: str) -> None:
    shared = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, text=True,
            stderr=subprocess.PIPE, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


@pytest.mark.parametrize(("sharded", "micro_batches"), [(False, 3), (True, 1), (True, 3)])
def test_two_processes_are_one(tmp_path: Path, sharded: bool, micro_batches: int):
    pytest.importorskip("accelerate")
    one, steps = Bigram(), Steps()
    train(job(tmp_path / "one", made(micro_batches=micro_batches), one), on_step=steps)
    kind = "sharded" if sharded else "whole"
    (tmp_path / "two").mkdir()
    run_two(RUN, str(tmp_path / "two"), kind, str(micro_batches))
    logged = {r["step"]: r for r in read_log(tmp_path / "two") if r["kind"] == "step"}
    assert logged.keys() == steps.losses.keys()
    for report in steps.reports:
        record = logged[report.step]
        assert record["loss"] == pytest.approx(report.loss, rel=1e-5)
        assert record["gradient_norm"] == pytest.approx(report.gradient_norm, rel=1e-4)
        assert record["acceptance_length"] == pytest.approx(report.acceptance_length, rel=1e-5)
        assert record["tokens"] == report.tokens
    states = [torch.load(tmp_path / "two" / f"{rank}.pt") for rank in range(2)]
    for name, tensor in one.network.state_dict().items():
        assert torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-4, atol=1e-5)
    # What two wrote, one takes up.
    same = made(sharded, micro_batches)
    longer = replace(same, save=replace(same.save, every=100))
    assert train(job(tmp_path / "two", longer)).last is None


@pytest.mark.parametrize(
    ("method", "sharded"),
    [("eagle3", False), ("eagle3", True), ("mtp_parallel_joint", True), ("draft_model", True)],
)
def test_methods_in_two_processes(tmp_path: Path, method: str, sharded: bool):
    pytest.importorskip("accelerate")
    run_request(method_request(tmp_path, method, out="one"))
    run_two(RUN_METHOD, str(tmp_path), method, "sharded" if sharded else "whole")
    one, two = (read_log(tmp_path / f"{out}-{method}") for out in ("one", "two"))
    assert len(one) == len(two) and any(record["kind"] == "held_out" for record in one)
    for alone, record in zip(one, two, strict=True):
        assert record["kind"] == alone["kind"]
        assert record["loss"] == pytest.approx(alone["loss"], rel=1e-3)


def test_sharded_and_alone(tmp_path: Path):
    with pytest.raises(OptionError, match="nobody to share with"):
        run_request(method_request(tmp_path, "medusa", sharded=True))
    asked = method_request(tmp_path, "medusa", sharded=True)
    muon = replace(asked.recipe, optimizer=replace(asked.recipe.optimizer, name="muon"))
    with pytest.raises(OptionError, match="exclude each other"):
        run_request(replace(asked, recipe=muon))


def test_one_process_needs_nothing():
    devices, device = open_devices(torch.device("cpu"))
    assert isinstance(devices, OneProcess) and device.type == "cpu"


def test_several_without_accelerate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(OptionError, match=r"forespeak\[train\]"):
        open_devices(torch.device("cpu"))
