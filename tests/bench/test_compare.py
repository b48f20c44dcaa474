"""The comparison's arithmetic, with scripted runners."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from forespeak.bench import report
from forespeak.bench.answers import AnswerLog
from forespeak.bench.compare import (
    WARM_UP_TOKENS,
    Case,
    Runner,
    Watcher,
    compare,
    decode_speed,
    first_difference,
    num_cases,
)
from forespeak.bench.prompts import Dialogue, Prompt
from forespeak.errors import PromptError
from forespeak.types import Completion, RoundStats, SamplingParams

PROMPTS = [Prompt("p1", "qa", ("one", "more")), Prompt("p2", "qa", ("two",))]
PARAMS = SamplingParams(max_new_tokens=50)

KEYS = (
    "method builder drafter num_prompts num_tokens tokens_per_second speedup acceptance_length "
    "acceptance_rate draft_ms verify_ms other_ms exact_match peak_memory_mb first_differences"
).split()


@dataclass
class Scripted:
    """Answers every prompt with its ids; a token takes ``seconds_a_token``."""

    method: str
    ids: Callable[[Dialogue], tuple[int, ...]] = lambda dialogue: (1, 2, 3, 4, 5)
    seconds_a_token: Callable[[Dialogue], float] = lambda dialogue: 0.1
    tokens_a_round: int = 1
    builder: str = "chain"
    drafter: str | None = None
    calls: list[tuple[Dialogue, int]] = field(default_factory=list)
    gaps: list[tuple[Dialogue, tuple[int, ...], int]] = field(default_factory=list)

    def run(
        self, prompt: Dialogue, params: SamplingParams, on_text: Callable[[str], None] | None
    ) -> Completion:
        self.calls.append((prompt, params.max_new_tokens))
        ids = self.ids(prompt)
        if on_text is not None:
            on_text("text")
        decoded = len(ids) - 1  # prefill gave the first
        rounds = -(-decoded // self.tokens_a_round)
        seconds = decoded * self.seconds_a_token(prompt)
        stats = RoundStats(
            num_rounds=rounds,
            num_tokens=decoded,
            num_drafted=0 if self.tokens_a_round == 1 else 3 * rounds,
            num_accepted=decoded - rounds,
            draft_s=0.25 * seconds,
            verify_s=0.5 * seconds,
            other_s=0.25 * seconds,
        )
        return Completion(f"answer to {prompt}", ids, "stop", stats, 0.0)

    def gap(self, prompt: Dialogue, answer_ids: Sequence[int], position: int) -> float:
        self.gaps.append((prompt, tuple(answer_ids), position))
        return 0.125


def plain() -> Scripted:
    return Scripted("autoregressive", builder="none")


def test_rows_of_two_methods():
    fast = Scripted("ngram", seconds_a_token=lambda d: 0.05 if d == "one" else 0.025)
    fast.tokens_a_round = 2
    peaks = iter([10.0, 20.0, 30.0, 40.0])
    base, row = compare([plain(), fast], PROMPTS, PARAMS, peak_memory_mb=lambda: next(peaks))
    assert report.record(base) == dict(
        method="autoregressive",
        builder="none",
        drafter=None,
        num_prompts=2,
        num_tokens=10,
        tokens_per_second=pytest.approx(10.0),
        speedup=1.0,
        acceptance_length=1.0,
        acceptance_rate=None,
        draft_ms=pytest.approx(25.0),
        verify_ms=pytest.approx(50.0),
        other_ms=pytest.approx(25.0),
        exact_match=1.0,
        peak_memory_mb=30.0,
        first_differences=[],
    )
    assert base.speedup_quartiles == (1.0, 1.0)
    assert row.tokens_per_second == pytest.approx(8 / (4 * 0.05 + 4 * 0.025))
    assert row.speedup == pytest.approx(3.0)  # the median of 2 and 4
    assert row.speedup_quartiles == pytest.approx((2.5, 3.5))
    assert row.acceptance_length == 2.0
    assert row.acceptance_rate == pytest.approx(4 / 12)
    assert row.exact_match == 1.0
    assert row.peak_memory_mb == 40.0


def test_order_is_interleaved_after_a_short_warm_up():
    order: list[tuple[str, str]] = []

    class Order(Watcher):
        def begin(self, case: Case, runner: Runner) -> None:
            order.append((case.id, runner.method))

    runners = [plain(), Scripted("ngram")]
    compare(runners, PROMPTS, PARAMS, watcher=Order())
    names = ["autoregressive", "ngram"]
    assert order == [(prompt, name) for prompt in ("p1", "p2") for name in names]
    for runner in runners:
        assert runner.calls == [("one", WARM_UP_TOKENS), ("one", 50), ("two", 50)]


def test_watcher_sees_text_and_both_answers():
    seen: list[object] = []

    class Seen(Watcher):
        def text(self, piece: str) -> None:
            seen.append(piece)

        def end(self, case: Case, runner: Runner, answer: Completion, plain: Completion) -> None:
            seen.append((runner.method, answer is plain))

    compare([plain(), Scripted("ngram")], PROMPTS[:1], PARAMS, watcher=Seen())
    assert seen == ["text", ("autoregressive", True), "text", ("ngram", False)]


def test_first_differences_and_gap():
    base = plain()
    other = Scripted("draft_model", ids=lambda d: (1, 2, 9, 4, 5) if d == "two" else (1, 2, 3))
    _, row = compare([base, other], PROMPTS, PARAMS)
    assert row.exact_match == 0.0
    differences = report.record(row)["first_differences"]
    assert differences == [
        {"prompt": "p1", "position": 3, "gap": 0.125},
        {"prompt": "p2", "position": 2, "gap": 0.125},
    ]
    # Where one text is the start of the other, the longer one says what stood there.
    assert base.gaps == [("one", (1, 2, 3, 4, 5), 3), ("two", (1, 2, 9, 4, 5), 2)]
    assert not other.gaps


def test_all_turns_continue_plain_decodings_answers():
    base = plain()
    other = Scripted("draft_model", ids=lambda d: (7, 8))
    rows = compare([base, other], PROMPTS, PARAMS, all_turns=True)
    first = ({"role": "user", "content": "one"},)
    answered = {"role": "assistant", "content": f"answer to {first}"}
    second = (*first, answered, {"role": "user", "content": "more"})
    assert [call[0] for call in base.calls[1:3]] == [first, second]
    assert [call[0] for call in other.calls[1:3]] == [first, second]
    assert [row.num_prompts for row in rows] == [3, 3] == [num_cases(PROMPTS, True)] * 2
    assert [d.prompt for d in rows[1].first_differences] == ["p1", "p1#2", "p2"]


def test_answers_of_one_token_have_no_speed():
    runners = [plain(), Scripted("ngram")]
    for runner in runners:
        runner.ids = lambda d: (1,)
    base, row = compare(runners, PROMPTS, PARAMS)
    assert (base.speedup, base.acceptance_length) == (1.0, 1.0)
    assert base.tokens_per_second is None
    assert (row.speedup, row.acceptance_length, row.draft_ms) == (None, None, None)
    assert row.exact_match == 1.0
    json.dumps([report.record(base), report.record(row)], allow_nan=False)


def test_record_has_exactly_the_keys():
    rows = compare([plain()], PROMPTS, PARAMS)
    assert list(report.record(rows[0])) == KEYS


def test_a_bad_prompt_is_named():
    def refuse(dialogue: Dialogue) -> tuple[int, ...]:
        raise PromptError("The prompt has 9999 tokens; allowed: 10.")

    with pytest.raises(PromptError, match="^Prompt p1: The prompt has 9999 tokens"):
        compare([Scripted("autoregressive", ids=refuse)], PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), None), ((), (1,), 0)],
)
def test_first_difference(a: tuple[int, ...], b: tuple[int, ...], expected: int | None):
    assert first_difference(a, b) == first_difference(b, a) == expected


def test_decode_speed_counts_rounds_only():
    stats = RoundStats(num_rounds=2, num_tokens=4, prefill_s=9.0, verify_s=0.5)
    answer = Completion("", (1, 2, 3, 4, 5), "stop", stats, 9.0)
    assert decode_speed(answer) == 8.0


@pytest.mark.parametrize("width", [80, 140])
def test_table_fits_its_width(width: int):
    rows = compare([plain(), Scripted("ngram+draft_model", tokens_a_round=2)], PROMPTS, PARAMS)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.table(rows, title="target", width=width))
    text = console.export_text()
    assert "ngram+draft_model" in text
    assert "…" not in text
    assert ("ms a round" in text) == (width == 140)


def test_notes_say_where_texts_part():
    rows = compare([plain(), Scripted("x", ids=lambda d: (1, 9))], PROMPTS[:1], PARAMS)
    assert "x leaves plain decoding in prompt p1 at token 1" in report.notes(rows)[1]


def test_every_answer_is_noted():
    seen: list[str] = []

    class Other(Watcher):
        def end(self, case, runner, answer, plain):
            seen.append(runner.method)

    log = AnswerLog(PROMPTS, Other())
    rows = compare([plain(), plain()], PROMPTS, PARAMS, watcher=log)
    record = log.record(rows)
    assert len(record["answers"]) == len(seen) == 2 * len(PROMPTS)
    assert record["rows"][0]["speedup_quartiles"] == (1.0, 1.0)
    tasks = {prompt.task for prompt in PROMPTS}
    lengths = record["acceptance_length_by_task"][rows[0].method]
    assert set(lengths) == tasks and all(value == 1.0 for value in lengths.values())
    assert {answer["speedup"] for answer in record["answers"]} == {1.0}
    assert json.loads(json.dumps(record))["answers"] == record["answers"]
