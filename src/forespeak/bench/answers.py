"""What each answer of a comparison took, for a record that others can look into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from forespeak.bench.compare import Case, Row, Runner, Watcher, decode_speed
from forespeak.bench.prompts import Prompt
from forespeak.types import Completion


class AnswerLog(Watcher):
    """Notes every answer and hands on what it is told.

    Args:
        prompts: of the comparison, for their tasks.
        inner: who else watches.
    """

    def __init__(self, prompts: Sequence[Prompt], inner: Watcher) -> None:
        self._tasks = {prompt.id: prompt.task for prompt in prompts}
        self._inner = inner
        self.answers: list[dict[str, Any]] = []

    def begin(self, case: Case, runner: Runner) -> None:
        """See ``Watcher``."""
        self._inner.begin(case, runner)

    def text(self, piece: str) -> None:
        """See ``Watcher``."""
        self._inner.text(piece)

    def end(self, case: Case, runner: Runner, answer: Completion, plain: Completion) -> None:
        """See ``Watcher``."""
        own, base, stats = decode_speed(answer), decode_speed(plain), answer.stats
        self.answers.append(
            {
                "method": runner.method, "prompt": case.id, "task": self._tasks.get(case.id, ""),
                "num_tokens": len(answer.token_ids), "num_rounds": stats.num_rounds,
                "round_tokens": stats.num_tokens, "tokens_per_second": own,
                "speedup": own / base if own and base else None,
            }
        )  # fmt: skip
        self._inner.end(case, runner, answer, plain)

    def record(self, rows: Sequence[Row]) -> dict[str, Any]:
        """All there is: the rows with quartiles, lengths by task, and every answer."""
        return {
            "rows": [asdict(row) for row in rows],
            "acceptance_length_by_task": self._by_task(),
            "answers": self.answers,
        }

    def _by_task(self) -> dict[str, dict[str, float]]:
        """Tokens a round over the answers to each task, bonus included, by method."""
        sums: dict[str, dict[str, list[int]]] = {}
        for answer in self.answers:
            cell = sums.setdefault(answer["method"], {}).setdefault(answer["task"], [0, 0])
            cell[0] += answer["round_tokens"]
            cell[1] += answer["num_rounds"]
        return {
            method: {task: tokens / rounds for task, (tokens, rounds) in cells.items() if rounds}
            for method, cells in sums.items()
        }
