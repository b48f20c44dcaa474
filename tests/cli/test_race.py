"""The race's pictures, on a terminal that is a string."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from forespeak.bench.compare import Case, Runner
from forespeak.cli import consoles, race
from forespeak.cli.engine import EngineRunner
from forespeak.types import Completion, SamplingParams
from tests.cli.fakes import ANSWER, FakeLLM

PARAMS = SamplingParams(max_new_tokens=6)


def runners() -> list[Runner]:
    methods = ("autoregressive", "ngram", "draft_model")
    fakes: list[Any] = [FakeLLM(method=method) for method in methods]
    return [EngineRunner(fake, raw=False) for fake in fakes]


def play(shown: race.Race, cast: list[Runner]) -> None:
    for case in (Case("p1", "Say [red]it[/red]."), Case("p2", "Again.")):
        plain: Completion | None = None
        for runner in cast:
            shown.begin(case, runner)
            answer = runner.run(case.dialogue, PARAMS, shown.text)
            plain = plain or answer
            shown.end(case, runner, answer, plain)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_panels(monkeypatch: pytest.MonkeyPatch, width: int):
    screen = io.StringIO()
    terminal = Console(
        file=screen, force_terminal=True, width=width, height=30, markup=False, highlight=False
    )
    monkeypatch.setattr(consoles, "out", lambda: terminal)
    cast = runners()
    with race.PanelRace(cast) as shown:
        play(shown, cast)
    text = screen.getvalue()
    assert "Say [red]it[/red]." in text
    assert "[bold]Straße[/bold]" in text
    assert "Again." in text
    for runner in cast:
        assert runner.method in text
    assert "139 tok/s 1.67x same text" in text
    assert "…" not in text


def test_an_interrupt_gives_the_screen_back(monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80, height=30)
    monkeypatch.setattr(consoles, "out", lambda: terminal)
    cast = runners()
    with pytest.raises(KeyboardInterrupt), race.PanelRace(cast) as shown:
        shown.begin(Case("p", "x"), cast[0])
        raise KeyboardInterrupt
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_result_says_speed_ratio_and_sameness():
    plain, fast, _ = (runner.run("x", PARAMS, None) for runner in runners())
    other = Completion(ANSWER, (9,), "stop", fast.stats, 0.0)
    assert race.result(plain, plain) == "83 tok/s"
    assert race.result(fast, plain) == "139 tok/s 1.67x same text"
    assert race.result(other, plain).endswith("OTHER TEXT")
