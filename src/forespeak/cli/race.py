"""Methods answering the same prompt, drawn so that a person sees which is faster and that the
texts are equal: panels side by side on a terminal, one after the other in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forespeak.bench.compare import Case, Runner, Watcher, decode_speed
from forespeak.cli import consoles
from forespeak.types import Completion

_MIN_PANEL_WIDTH = 32  # room for the longest result
_SECONDS_BETWEEN_FRAMES = 0.1  # drawing takes time from the race, so seldom


class Race(Watcher):
    """A watcher that owns the screen while it is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the screen back."""


def open_race(runners: Sequence[Runner]) -> Race:
    """The race that suits stdout."""
    return PanelRace(runners) if sys.stdout.isatty() else PlainRace()


def result(answer: Completion, plain: Completion) -> str:
    """Speed of an answer against plain decoding's, and whether it is the same."""
    own, base = decode_speed(answer), decode_speed(plain)
    if own is None or base is None:
        speed = "too short to time"
    elif answer is plain:
        speed = f"{own:.0f} tok/s"
    else:
        speed = f"{own:.0f} tok/s {own / base:.2f}x"
    if answer is plain:
        return speed
    same = "same text" if answer.token_ids == plain.token_ids else "OTHER TEXT"
    return f"{speed} {same}"


def question(case: Case) -> str:
    """What the user asks in a case."""
    return case.dialogue if isinstance(case.dialogue, str) else case.dialogue[-1]["content"]


class PlainRace(Race):
    """Writes plain decoding's answer as it comes, and of the others how they went.

    Their text is written where it is another one.
    """

    def __init__(self) -> None:
        self._case_id: str | None = None
        self._is_first = True

    def begin(self, case: Case, runner: Runner) -> None:
        """The question once, then the method's name."""
        self._is_first = case.id != self._case_id
        if self._is_first:
            self._case_id = case.id
            consoles.write(f"\n=== {case.id}\n{question(case)}\n\n--- {runner.method}\n")

    def text(self, piece: str) -> None:
        """A piece of the answer."""
        if self._is_first:
            consoles.write(piece)

    def end(self, case: Case, runner: Runner, answer: Completion, plain: Completion) -> None:
        """How it went."""
        if self._is_first:
            consoles.write(f"\n[{result(answer, plain)}]\n\n")
            return
        rounds = f"{answer.stats.num_rounds} rounds"
        consoles.write(f"--- {runner.method} [{result(answer, plain)}, {rounds}]\n")
        if answer.token_ids != plain.token_ids:
            consoles.write(f"{answer.text}\n")


@dataclass
class _Lane:
    """One method's panel."""

    method: str
    pieces: list[str] = field(default_factory=list)
    clock: str = ""
    result: str = "waiting"
    style: str = "dim"


class PanelRace(Race):
    """A panel for each method, side by side; a prompt's last picture stays on the screen."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._names = [runner.method for runner in runners]
        self._console = consoles.out()
        self._lanes: list[_Lane] = []
        self._current = 0
        self._started = 0.0
        self._drawn = 0.0
        self._live: Live | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def begin(self, case: Case, runner: Runner) -> None:
        """Open the picture with the first method of a case; start this method's clock."""
        if self._live is None:
            self._open(case)
        self._started = time.perf_counter()
        self._lanes[self._current].style = "yellow"
        self._lanes[self._current].result = "..."
        self._draw()

    def text(self, piece: str) -> None:
        """A piece of the answer of the method whose turn it is."""
        self._lanes[self._current].pieces.append(piece)
        if time.perf_counter() - self._drawn > _SECONDS_BETWEEN_FRAMES:
            self._draw()

    def end(self, case: Case, runner: Runner, answer: Completion, plain: Completion) -> None:
        """Stop this method's clock; close the picture after the last."""
        same = answer.token_ids == plain.token_ids
        self._lanes[self._current].style = "green" if same else "red"
        self._lanes[self._current].result = result(answer, plain)
        self._draw()
        self._current += 1
        if self._current == len(self._lanes):
            self._close()

    def _open(self, case: Case) -> None:
        self._lanes = [_Lane(name) for name in self._names]
        self._current = 0
        self._console.print(Text(f"\n{question(case)}", style="bold"))
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        assert self._live is not None
        self._drawn = time.perf_counter()
        self._lanes[self._current].clock = f"{self._drawn - self._started:.1f} s"
        self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        per_row = max(1, min(len(self._lanes), self._console.width // _MIN_PANEL_WIDTH))
        num_rows = -(-len(self._lanes) // per_row)
        width = self._console.width // per_row
        height = max(5, min(18, (self._console.height - 2) // num_rows))
        grids = []
        for start in range(0, len(self._lanes), per_row):
            grid = Table.grid()
            grid.add_row(
                *(self._panel(lane, width, height) for lane in self._lanes[start:][:per_row])
            )
            grids.append(grid)
        return Group(*grids)

    def _panel(self, lane: _Lane, width: int, height: int) -> Panel:
        # A panel's border and padding take 4 columns and 2 lines; the end of the text is shown.
        lines = Text("".join(lane.pieces)).wrap(self._console, width - 4)
        shown = Text("\n").join(lines[-(height - 2) :])
        return Panel(
            shown,
            title=Text(f"{lane.method} {lane.clock}".rstrip()),
            subtitle=Text(lane.result),
            border_style=lane.style,
            width=width,
            height=height,
        )
