"""Methods side by side: every prompt goes through plain decoding and each method in turn.

Interleaved prompt by prompt, so that what else the machine does hits all methods alike. The engine
is handed in as runners; nothing here knows what runs behind them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from forespeak.bench.prompts import Dialogue, Prompt
from forespeak.errors import PromptError
from forespeak.types import Completion, SamplingParams

WARM_UP_TOKENS = 16


class Runner(Protocol):
    """One method, loaded and ready. The first runner of a comparison is plain decoding."""

    @property
    def method(self) -> str: ...

    @property
    def builder(self) -> str: ...

    @property
    def drafter(self) -> str | None: ...

    def run(
        self, prompt: Dialogue, params: SamplingParams, on_text: Callable[[str], None] | None
    ) -> Completion:
        """Continue a prompt; text is handed to ``on_text`` as it comes."""
        ...

    def gap(self, prompt: Dialogue, answer_ids: Sequence[int], position: int) -> float:
        """How far apart the target's two best logits are for the answer's token at a position."""
        ...


@dataclass(frozen=True)
class Case:
    """One turn to answer. ``dialogue`` holds everything before the answer."""

    id: str
    dialogue: Dialogue


class Watcher:
    """Is told what happens; does nothing. Progress bars and the demo derive from it."""

    def begin(self, case: Case, runner: Runner) -> None:
        """A runner starts on a case."""

    def text(self, piece: str) -> None:
        """A piece of its answer."""

    def end(self, case: Case, runner: Runner, answer: Completion, plain: Completion) -> None:
        """It is done; ``plain`` is plain decoding's answer to the same case."""


@dataclass(frozen=True)
class FirstDifference:
    """Where an answer leaves plain decoding's.

    Attributes:
        prompt: the prompt's id.
        position: index of the first token that differs (or that one of the two does not have).
        gap: difference of the target's two best logits there.
    """

    prompt: str
    position: int
    gap: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one method did over all prompts. Means of ``*_ms`` are per round.

    Attributes:
        num_tokens: all tokens that the user got.
        tokens_per_second: tokens of all decode rounds over the seconds of these rounds.
        speedup: median over prompts of the ratio to plain decoding of the same prompt.
        speedup_quartiles: the 25th and 75th percentile of the same ratios.
        acceptance_length: tokens a round yields, bonus included.
        acceptance_rate: accepted over proposed draft tokens, bonus never included.
        exact_match: share of prompts whose token ids equal plain decoding's; None above temperature
            0, where texts are drawn and equal ones are not promised.
        peak_memory_mb: the process's peak until this method's last answer.
    """

    method: str
    builder: str
    drafter: str | None
    num_prompts: int
    num_tokens: int
    tokens_per_second: float | None
    speedup: float | None
    speedup_quartiles: tuple[float, float] | None
    acceptance_length: float | None
    acceptance_rate: float | None
    draft_ms: float | None
    verify_ms: float | None
    other_ms: float | None
    exact_match: float | None
    peak_memory_mb: float | None
    first_differences: tuple[FirstDifference, ...] = ()


@dataclass
class _Tally:
    """What a runner did so far."""

    num_cases: int = 0
    num_exact: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    round_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    ratios: list[float] = field(default_factory=list)
    differences: list[FirstDifference] = field(default_factory=list)
    peak_memory_mb: float | None = None

    def add(
        self, answer: Completion, plain: Completion, difference: FirstDifference | None
    ) -> None:
        stats = answer.stats
        self.num_cases += 1
        self.num_tokens += len(answer.token_ids)
        self.num_rounds += stats.num_rounds
        self.round_tokens += stats.num_tokens
        self.num_drafted += stats.num_drafted
        self.num_accepted += stats.num_accepted
        self.draft_s += stats.draft_s
        self.verify_s += stats.verify_s
        self.other_s += stats.other_s
        own, base = decode_speed(answer), decode_speed(plain)
        if own is not None and base is not None:
            self.ratios.append(own / base)
        if difference is None:
            self.num_exact += 1
        else:
            self.differences.append(difference)


def decode_speed(answer: Completion) -> float | None:
    """Tokens of the decode rounds over their seconds; None when prefill gave the whole answer."""
    stats = answer.stats
    return stats.num_tokens / stats.decode_s if stats.num_tokens and stats.decode_s > 0 else None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, None when all are equal."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(
    runners: Sequence[Runner],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    all_turns: bool = False,
    peak_memory_mb: Callable[[], float | None] = lambda: None,
    watcher: Watcher | None = None,
) -> list[Row]:
    """Run every prompt through every runner, the first of which is plain decoding.

    With ``all_turns`` each user turn is a prompt of its own whose history holds plain decoding's
    answers, so that all methods continue the same text.

    Returns:
        One row for each runner, in their order.
    """
    assert runners and prompts
    watcher = watcher or Watcher()
    warm_up(runners, prompts[0], params)
    tallies = [_Tally() for _ in runners]
    for prompt in prompts:
        for case, answered in _cases(prompt, all_turns):
            plain: Completion | None = None
            for runner, tally in zip(runners, tallies, strict=True):
                watcher.begin(case, runner)
                answer = _run(runner, case, params, watcher.text)
                plain = plain or answer
                tally.add(answer, plain, _difference(runners[0], case, answer, plain))
                tally.peak_memory_mb = peak_memory_mb()
                watcher.end(case, runner, answer, plain)
            assert plain is not None
            answered(plain.text)
    rows = [_row(runner, tally) for runner, tally in zip(runners, tallies, strict=True)]
    if params.temperature > 0:
        rows = [replace(row, exact_match=None, first_differences=()) for row in rows]
    # True of plain decoding by definition, even where prefill alone gave every answer.
    rows[0] = replace(rows[0], speedup=1.0, acceptance_length=1.0)
    return rows


def num_cases(prompts: Sequence[Prompt], all_turns: bool) -> int:
    """How many answers each runner will give."""
    return sum(len(prompt.turns) if all_turns else 1 for prompt in prompts)


def warm_up(runners: Sequence[Runner], prompt: Prompt, params: SamplingParams) -> list[Completion]:
    """Let every runner allocate and compile on a short answer, so that no row pays for it."""
    short = replace(params, max_new_tokens=min(params.max_new_tokens, WARM_UP_TOKENS))
    case = Case(prompt.id, prompt.turns[0])
    return [_run(runner, case, short, None) for runner in runners]


def quick_speed(
    runner: Runner, prompts: Sequence[Prompt], params: SamplingParams, num_tokens: int
) -> float:
    """Tokens a second of decoding over one answer of so many tokens to each prompt."""
    warm_up([runner], prompts[0], params)
    short = replace(params, max_new_tokens=min(params.max_new_tokens, num_tokens))
    done = [_run(runner, Case(p.id, p.turns[0]), short, None).stats for p in prompts]
    seconds = sum(stats.decode_s for stats in done)
    return sum(stats.num_tokens for stats in done) / seconds if seconds > 0 else 0.0


def _cases(prompt: Prompt, all_turns: bool) -> Iterator[tuple[Case, Callable[[str], None]]]:
    """The turns to answer; each comes with the function that takes its answer."""
    if not all_turns:
        yield Case(prompt.id, prompt.turns[0]), lambda _: None
        return
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(prompt.turns, start=1):
        messages.append({"role": "user", "content": turn})
        case_id = prompt.id if number == 1 else f"{prompt.id}#{number}"
        yield (
            Case(case_id, tuple(messages)),
            lambda text: messages.append({"role": "assistant", "content": text}),
        )


def _run(
    runner: Runner, case: Case, params: SamplingParams, on_text: Callable[[str], None] | None
) -> Completion:
    try:
        return runner.run(case.dialogue, params, on_text)
    except PromptError as error:
        raise PromptError(f"Prompt {case.id}: {error}") from error


def _difference(
    plain_runner: Runner, case: Case, answer: Completion, plain: Completion
) -> FirstDifference | None:
    position = first_difference(answer.token_ids, plain.token_ids)
    if position is None:
        return None
    longer = max(answer.token_ids, plain.token_ids, key=len)
    return FirstDifference(case.id, position, plain_runner.gap(case.dialogue, longer, position))


def _row(runner: Runner, tally: _Tally) -> Row:
    seconds = tally.draft_s + tally.verify_s + tally.other_s
    return Row(
        method=runner.method,
        builder=runner.builder,
        drafter=runner.drafter,
        num_prompts=tally.num_cases,
        num_tokens=tally.num_tokens,
        tokens_per_second=_ratio(tally.round_tokens, seconds),
        speedup=statistics.median(tally.ratios) if tally.ratios else None,
        speedup_quartiles=_quartiles(tally.ratios),
        acceptance_length=_ratio(tally.round_tokens, tally.num_rounds),
        acceptance_rate=_ratio(tally.num_accepted, tally.num_drafted),
        draft_ms=_ratio(1000 * tally.draft_s, tally.num_rounds),
        verify_ms=_ratio(1000 * tally.verify_s, tally.num_rounds),
        other_ms=_ratio(1000 * tally.other_s, tally.num_rounds),
        exact_match=tally.num_exact / tally.num_cases,
        peak_memory_mb=tally.peak_memory_mb,
        first_differences=tuple(tally.differences),
    )


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
