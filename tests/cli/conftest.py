"""The command line in this process, with a stand-in for the engine."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cli import fakes


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def record(self) -> Any:
        """The JSON object in the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


Command = Callable[..., Outcome]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in's class, in place of the engine's."""
    module = fakes.module()
    monkeypatch.setitem(sys.modules, "forespeak.engine.llm", module)
    import forespeak.engine

    monkeypatch.setattr(forespeak.engine, "llm", module, raising=False)
    return module.__dict__["LLM"]


@pytest.fixture
def forespeak(
    llm: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Command:
    """Runs one command line, without shipped drafters; ``stdin`` may be text or bytes."""
    monkeypatch.setenv("FORESPEAK_CHECKPOINTS", str(tmp_path_factory.mktemp("none")))
    from forespeak.cli.app import execute

    def run(*arguments: str, stdin: str | bytes = "") -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        code = execute(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
