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
from forespeak.train.step_log import read_log
from tests.train.stubs import Bigram, Steps, job, recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from forespeak.train.devices import open_devices
from forespeak.train.loop import train
from tests.train.stubs import Bigram, job, recipe
from tests.train.test_devices import MADE
devices, device = open_devices(torch.device("cpu"))
assert devices.count == 2
objective = Bigram()
train(job(Path(sys.argv[1]), MADE, objective, devices))
torch.save(objective.network.state_dict(), f"{sys.argv[1]}/{devices.rank}.pt")
import torch.distributed
torch.distributed.destroy_process_group()
"""

# Three micro-batches for two processes: one has two, the other one.
MADE = recipe(batch={"tokens": 40, "micro_batches": 3}, compute={"dtype": "float32"})


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_two(out: Path) -> None:
    out.mkdir()
    shared = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(out)], cwd=ROOT, text=True, stderr=subprocess.PIPE,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_two_processes_are_one(tmp_path: Path):
    pytest.importorskip("accelerate")
    one, steps = Bigram(), Steps()
    train(job(tmp_path / "one", MADE, one), on_step=steps)
    run_two(tmp_path / "two")
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
    longer = replace(MADE, save=replace(MADE.save, every=100))
    assert train(job(tmp_path / "two", longer)).last is None


def test_one_process_needs_nothing():
    devices, device = open_devices(torch.device("cpu"))
    assert isinstance(devices, OneProcess) and device.type == "cpu"


def test_several_without_accelerate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(OptionError, match=r"forespeak\[train\]"):
        open_devices(torch.device("cpu"))
