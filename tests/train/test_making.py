"""Runs of our own engine: dialogues, fates, and what an interruption changes (nothing)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forespeak.engine.llm import LLM
from forespeak.engine.target import in_memory
from forespeak.errors import DataError, OptionError
from forespeak.sampling import SamplingParams
from forespeak.train.dialogues import (
    DIALOGUES,
    MANIFEST,
    Dialogue,
    Fate,
    Manifest,
    read_dialogues,
    read_manifest,
    read_samples,
)
from forespeak.train.generate import EngineAnswers, Writer, picks_lockstep
from forespeak.train.making import Jobs, Making, begin, jobs_of
from forespeak.train.overlap import Exclusion
from forespeak.train.prompt_sets import PromptSet
from forespeak.train.talks import Job, Limits, Outcome
from tests.tiny import tiny_decoder
from tests.train.talking import CONTEXT, TOKENIZER, encode, manifest, prompt_set, target

pytestmark = pytest.mark.slow

SETTINGS = {"limit": None, "max_tokens_total": None, "seed": 3}
LIMITS = Limits(new_tokens=24, prompt_tokens=90, context=CONTEXT)
SINGLE = prompt_set(*([f"a{number} b"] for number in range(12)))
# Two-turn prompts, and ones that come to nothing.
MIXED = prompt_set(
    ["ab c", "d"], ["a"], ["b" * 100], ["<end>a"], ["b c", "<user>"], ["d1", "d2", "d3"],
    *(["e", f"{number}"] for number in range(8)), ["f"], ["g"], ["h"], name="mixed.jsonl",
)  # fmt: skip


def jobs(*sets: PromptSet, **changes: Any) -> Jobs:
    values = {"seed": 3, "temperature": 1.0, "greedy_share": 0.4} | changes
    return jobs_of(sets or (MIXED,), Exclusion(), **values)


def answers(num_rows: int = 4, limits: Limits = LIMITS) -> EngineAnswers:
    return EngineAnswers(Writer(target(), num_rows), limits=limits)


def make(
    folder: Path,
    made: Jobs,
    *,
    settings: dict[str, Any] | None = None,
    num_rows: int = 4,
    limits: Limits = LIMITS,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Manifest:
    settings = SETTINGS | (settings or {})
    begun = begin(folder, manifest(settings=settings), TOKENIZER)
    making = Making(folder, begun, made, TOKENIZER, max_tokens_total=settings["max_tokens_total"])
    return making.run(answers(num_rows, limits), on_outcome=on_outcome)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_answers_are_those_of_a_text_alone(tmp_path: Path):
    made = jobs(SINGLE)
    done = make(tmp_path, made)
    found = {one.id: one for one in read_dialogues(tmp_path)}
    assert list(found) == [job.prompt.id for job in made.jobs if job.prompt.id in found]
    llm = LLM(target())
    temperatures, num_empty = set(), 0
    for job in made.jobs:
        params = SamplingParams(max_new_tokens=24, temperature=job.temperature, seed=job.seed)
        alone = llm.generate([{"role": "user", "content": job.prompt.turns[0]}], params)
        one = found.get(job.prompt.id)
        if one is None:
            assert not alone.text.strip()
            num_empty += 1
            continue
        assert one.answers == (alone.token_ids,)
        assert one.finish_reasons == (alone.finish_reason,)
        assert (one.temperature, one.seed) == (job.temperature, job.seed)
        assert (one.turns, one.source) == (job.prompt.turns, "p.jsonl")
        temperatures.add(one.temperature)
    assert done.counts.get("empty", 0) == num_empty
    assert temperatures == {0.0, 1.0}


def test_later_turns_see_the_earlier_ones(tmp_path: Path):
    make(tmp_path, jobs(prompt_set(*(["a", "b"] for _ in range(30)))))
    llm = LLM(target())
    twice = [one for one in read_dialogues(tmp_path) if len(one.answers) == 2]
    assert twice
    for one in twice:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": TOKENIZER.decode(one.answers[0])},
            {"role": "user", "content": "b"},
        ]
        params = SamplingParams(max_new_tokens=24, temperature=one.temperature, seed=one.seed + 1)
        assert llm.generate(messages, params).token_ids == one.answers[1]


def test_fates(tmp_path: Path):
    done = make(tmp_path, jobs())
    found = {one.id: one for one in read_dialogues(tmp_path)}
    assert done.complete and done.counts["too_long"] == 1 and done.counts["special_tokens"] == 1
    assert "q2" not in found and "q3" not in found
    kinds = {fate.value for fate in Fate}
    assert sum(number for name, number in done.counts.items() if name in kinds) == len(
        MIXED.prompts
    )
    for name, one in found.items():
        turns = next(prompt.turns for prompt in MIXED.prompts if prompt.id == name)
        assert one.turns == turns[: len(one.turns)]
        assert (one.fate is Fate.WHOLE) == (one.turns == turns)
        if one.fate is Fate.CUT_LENGTH:
            assert one.finish_reasons[-1] == "length"
    assert {one.fate for one in found.values()} >= {Fate.WHOLE, Fate.CUT_LENGTH}
    read = read_samples(tmp_path, TOKENIZER)
    refused = {k: v for k, v in done.counts.items() if k.startswith("refused_")}
    assert sum(read.refused.values()) == sum(refused.values())
    assert len(read.samples) + read.refused.total() == len(found)


class Scripted:
    """Answers from a list, so that every way to end can be had."""

    def __init__(self, *replies: tuple[list[int], Any]) -> None:
        self._replies = list(replies)

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        from forespeak.train.talks import Talk
        from forespeak.train.turns import TurnMarks

        for job in jobs:
            talk = Talk(job, TOKENIZER, TurnMarks.of(TOKENIZER), Limits(24, 20, 22))
            while talk.ask() is not None:
                talk.take(*self._replies.pop(0))
            yield talk.outcome()


A, B = encode("a")[0], encode("b")[0]
LONG = encode("1" * 12)


@pytest.mark.parametrize(
    ("turns", "replies", "fate", "num_answers"),
    [
        (["a", "b"], [([A, 0], "stop"), ([B, 0], "stop")], Fate.WHOLE, 2),
        (["a", "b"], [([A, B], "length")], Fate.CUT_LENGTH, 1),
        (["a"], [([A, B], "length")], Fate.WHOLE, 1),
        (["a", "b"], [([A, B, 0], "stop")], Fate.CUT_TEMPLATE, 1),
        (["a", "b"], [([A, 0], "stop"), ([0], "stop")], Fate.CUT_EMPTY, 1),
        (["a", "b"], [([A, 0], "stop"), (encode(" "), "length")], Fate.CUT_EMPTY, 1),
        (["a", "b"], [([0], "stop")], Fate.EMPTY, 0),
        (["a", "b"], [([*LONG, 0], "stop")], Fate.CUT_CONTEXT, 1),
        (["a", "<end>"], [([A, 0], "stop")], Fate.CUT_TEMPLATE, 1),
        (["a" * 40], [], Fate.TOO_LONG, 0),
        (["a<user>"], [], Fate.SPECIAL_TOKENS, 0),
        (["a\ud800"], [], Fate.TEMPLATE, 0),
    ],
)
def test_every_end(turns: list[str], replies: list[Any], fate: Fate, num_answers: int):
    [job] = jobs(prompt_set(turns)).jobs
    [outcome] = Scripted(*replies).run([job])
    assert outcome.fate is fate
    assert (outcome.dialogue is None) == (num_answers == 0)
    if outcome.dialogue is not None:
        assert len(outcome.dialogue.answers) == len(outcome.dialogue.turns) == num_answers
        assert outcome.dialogue.fate is fate


def test_rows_and_order_change_nothing(tmp_path: Path):
    for num_rows in (1, 3, 16):
        make(tmp_path / str(num_rows), jobs(), num_rows=num_rows)
    assert content(tmp_path / "1") == content(tmp_path / "3") == content(tmp_path / "16")


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path: Path, after: int):
    make(tmp_path / "whole", jobs())
    left = after

    def interrupt(_: Outcome) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "cut", jobs(), on_outcome=interrupt)
    assert not read_manifest(tmp_path / "cut").complete
    before = set(read_dialogues(tmp_path / "cut"))
    asked: list[Outcome] = []
    make(tmp_path / "cut", jobs(), on_outcome=asked.append)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    again = {outcome.dialogue for outcome in asked if outcome.dialogue is not None}
    assert not again & before  # what was answered is not asked again
    assert len(again) + len(before) == len(list(read_dialogues(tmp_path / "whole")))


def test_cut_anywhere_a_run_goes_on_to_the_same_bytes(tmp_path: Path):
    make(tmp_path, jobs())
    whole = content(tmp_path)
    size = len(whole[DIALOGUES])
    for cut in (0, 1, size // 3, size // 2, size - 1):
        (tmp_path / DIALOGUES).write_bytes(whole[DIALOGUES][:cut])
        make(tmp_path, jobs(), num_rows=2)
        assert content(tmp_path) == whole
    (tmp_path / DIALOGUES).unlink()
    make(tmp_path, jobs())
    assert content(tmp_path) == whole


def test_what_has_ended_is_on_disk_at_once(tmp_path: Path):
    seen: list[Dialogue] = []

    def look(outcome: Outcome) -> None:
        if outcome.dialogue is not None:
            seen.append(outcome.dialogue)
        assert list(read_dialogues(tmp_path)) == seen

    make(tmp_path, jobs(), on_outcome=look)
    assert seen


@pytest.mark.parametrize("most", [1, 60, 130, 10_000])
def test_a_bound_on_all_tokens_takes_the_first_prompts(tmp_path: Path, most: int):
    make(tmp_path / "all", jobs(SINGLE))
    everything = list(read_dialogues(tmp_path / "all"))
    settings = {"max_tokens_total": most}
    for num_rows in (1, 5):
        folder = tmp_path / f"{num_rows}"
        make(folder, jobs(SINGLE), settings=settings, num_rows=num_rows)
        kept = list(read_dialogues(folder))
        assert kept == everything[: len(kept)]
        tokens = [one.num_tokens for one in kept]
        assert sum(tokens[:-1]) < most
        assert sum(tokens) >= most or len(kept) == len(everything)
    assert content(tmp_path / "1") == content(tmp_path / "5")


def test_more_may_be_asked_for_later_and_not_less(tmp_path: Path):
    few, more = jobs(SINGLE, limit=4), jobs(SINGLE, limit=9)
    make(tmp_path / "grown", few, settings={"limit": 4})
    make(tmp_path / "grown", more, settings={"limit": 9})
    make(tmp_path / "at once", more, settings={"limit": 9})
    assert content(tmp_path / "grown") == content(tmp_path / "at once")
    with pytest.raises(DataError, match="limit 9 and 4 was given; allowed: as many or more"):
        make(tmp_path / "grown", few, settings={"limit": 4})
    make(tmp_path / "grown", jobs(SINGLE), settings={"limit": None})
    with pytest.raises(DataError, match="limit without a limit and 9 was given"):
        make(tmp_path / "grown", more, settings={"limit": 9})


def test_other_settings_prompts_and_targets_are_refused(tmp_path: Path):
    make(tmp_path, jobs(SINGLE))
    before = content(tmp_path)
    for changes, message in (
        ({"settings": SETTINGS | {"seed": 4}}, "seed 3 and now has 4"),
        ({"settings": SETTINGS, "prompts": SINGLE_ORIGIN}, "prompts none and now has p.jsonl"),
        ({"settings": SETTINGS, "vocabulary": "x"}, None),
    ):
        if message is not None:
            with pytest.raises(DataError, match=message):
                begin(tmp_path, manifest(**changes), TOKENIZER)
    from tests.train.talking import TEMPLATE, chat_tokenizer

    with pytest.raises(DataError, match="chat template is another"):
        begin(tmp_path, manifest(settings=SETTINGS), chat_tokenizer(TEMPLATE + "x"))
    with pytest.raises(DataError, match="none of the prompts given"):
        make(tmp_path, jobs(prompt_set(["other"])))
    assert content(tmp_path)[DIALOGUES] == before[DIALOGUES]


SINGLE_ORIGIN = (SINGLE.origin,)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(DataError, match="holds files and no manifest.json"):
        make(tmp_path, jobs())
    with pytest.raises(DataError, match="is a file"):
        make(tmp_path / "notes", jobs())
    assert content(tmp_path) == {"notes": b"mine"}


def test_files_that_a_killed_process_did_not_finish_are_no_obstacle(tmp_path: Path):
    (tmp_path / ".part-manifest.json").write_text("{")
    make(tmp_path, jobs(SINGLE))
    (tmp_path / ".part-dialogues.jsonl").write_text("{")
    make(tmp_path, jobs(SINGLE))
    assert sorted(content(tmp_path)) == [DIALOGUES, MANIFEST]


def test_a_full_disk_ends_a_run_that_goes_on_later(tmp_path: Path):
    from tests.train.test_journal import disk_of

    make(tmp_path / "whole", jobs())
    size = (tmp_path / "whole" / DIALOGUES).stat().st_size
    with disk_of(size // 2), pytest.raises(DataError, match="cannot be written"):
        make(tmp_path / "full", jobs())
    list(read_dialogues(tmp_path / "full"))  # whole lines
    make(tmp_path / "full", jobs())
    assert content(tmp_path / "full") == content(tmp_path / "whole")


def test_damaged_lines_are_refused_and_stay(tmp_path: Path):
    make(tmp_path, jobs())
    path = tmp_path / DIALOGUES
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for bad, message in ((b"{]\n", "line 2 is broken"), (lines[0], "again")):
        damaged = b"".join([lines[0], bad, *lines[2:]])
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            make(tmp_path, jobs())
        assert path.read_bytes() == damaged


def test_excluded_prompts_never_enter(tmp_path: Path):
    exclusion = Exclusion(["A5, b!"])
    made = jobs_of([SINGLE], exclusion, seed=3, temperature=1.0, greedy_share=0.4, limit=8)
    assert made.num_excluded == 1 and len(made.jobs) == 8
    done = make(tmp_path, made)
    assert done.counts["excluded"] == 1
    assert "a5 b" not in {turn for one in read_dialogues(tmp_path) for turn in one.turns}
    assert (tmp_path / MANIFEST).exists()


def test_draws_follow_from_names_alone():
    one, other = jobs(SINGLE).jobs, jobs(MIXED, SINGLE).jobs[len(MIXED.prompts) :]
    assert [(j.seed, j.temperature) for j in one] == [(j.seed, j.temperature) for j in other]
    assert [j.seed for j in one] != [j.seed for j in jobs(SINGLE, seed=4).jobs]
    many = jobs(prompt_set(*(["a"] for _ in range(2000))), greedy_share=0.25).jobs
    assert 400 < sum(job.temperature == 0 for job in many) < 600
    assert len({job.seed for job in many}) == 2000


def test_out_of_time_everything_answered_stays_and_the_next_run_goes_on(tmp_path: Path):
    make(tmp_path / "whole", jobs())
    settings = SETTINGS
    begun = begin(tmp_path / "cut", manifest(settings=settings), TOKENIZER)
    making = Making(tmp_path / "cut", begun, jobs(), TOKENIZER)
    done = making.run(answers(), deadline=time.monotonic() - 1.0)
    assert not done.complete and not read_manifest(tmp_path / "cut").complete
    kept = list(read_dialogues(tmp_path / "cut"))
    assert len(kept) < len(list(read_dialogues(tmp_path / "whole")))
    assert sum(done.counts.values()) == making.num_ended
    make(tmp_path / "cut", jobs())
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_lockstep_writes_the_same_dialogues(tmp_path: Path):
    """In float32, where rounding between the two is far from any tie of this model."""
    model = tiny_decoder(target().model.config)
    floating = in_memory(model, tokenizer=TOKENIZER, name="tiny")
    for batching in ("rows", "lockstep"):
        folder = tmp_path / batching
        begun = begin(folder, manifest(settings=SETTINGS), TOKENIZER)
        answerer = EngineAnswers(Writer(floating, 5, batching), limits=LIMITS)
        Making(folder, begun, jobs(), TOKENIZER).run(answerer)
    assert content(tmp_path / "lockstep") == content(tmp_path / "rows")


def test_who_can_be_written_in_lockstep():
    floating = in_memory(tiny_decoder(), tokenizer=TOKENIZER, name="tiny")
    assert picks_lockstep(floating, "lockstep")
    assert not picks_lockstep(floating, "auto") and not picks_lockstep(floating, "rows")
    assert not picks_lockstep(target(), "auto")
    with pytest.raises(OptionError, match="tiny runs in int8"):
        picks_lockstep(target(), "lockstep")
