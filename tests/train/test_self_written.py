"""Prompts that the target writes itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forespeak.engine.llm import LLM
from forespeak.errors import DataError
from forespeak.sampling import SamplingParams
from forespeak.train.generate import Writer
from forespeak.train.generate_prompts import PROMPTS, PromptBounds, PromptWriter, SelfWritten
from forespeak.train.journal import read_lines
from forespeak.train.overlap import Exclusion, words_of
from forespeak.train.talks import derived
from tests.train.talking import TOKENIZER, target

COUNT = 8


def write(
    folder: Path, count: int = COUNT, *, num_rows: int = 4, exclude: tuple[str, ...] = (),
    bounds: tuple[int, int] = (2, 40),
) -> SelfWritten:  # fmt: skip
    writer = PromptWriter(
        Writer(target(), num_rows), bounds=PromptBounds(*bounds), seed=5,
        exclusion=Exclusion(exclude),
    )  # fmt: skip
    kept: list[int] = []
    found = writer.write(folder, count, on_kept=kept.append)
    assert kept == list(range(1, count + 1))
    return found


def test_a_prompt_is_the_target_going_on_after_the_opening(tmp_path: Path):
    found = write(tmp_path)
    opening = [TOKENIZER.vocab()["<user>"]]
    llm = LLM(target())
    for prompt in found.prompts.prompts:
        seed, _ = derived(5, "self-written", prompt.id)
        alone = llm.generate(opening, SamplingParams(max_new_tokens=41, temperature=1.0, seed=seed))
        assert alone.finish_reason == "stop"
        assert prompt.turns == (alone.text.strip(),)
        assert 2 <= len(alone.token_ids) - 1 <= 40
    texts = [words_of(prompt.turns[0]) for prompt in found.prompts.prompts]
    assert len(set(texts)) == COUNT and all(texts)
    numbers = [int(prompt.id) for prompt in found.prompts.prompts]
    assert numbers == sorted(numbers)
    assert found.counts["kept"] == COUNT and found.counts.total() == numbers[-1] + 1
    assert found.counts["unfinished"] > 0


def test_rows_interruptions_and_growth_change_nothing(tmp_path: Path):
    found = write(tmp_path / "a")
    whole = (tmp_path / "a" / PROMPTS).read_bytes()
    assert write(tmp_path / "b", num_rows=1) == found
    assert (tmp_path / "b" / PROMPTS).read_bytes() == whole
    for cut in (1, len(whole) // 3, len(whole) - 2):
        (tmp_path / "b" / PROMPTS).write_bytes(whole[:cut])
        assert write(tmp_path / "b", num_rows=7) == found
        assert (tmp_path / "b" / PROMPTS).read_bytes() == whole
    write(tmp_path / "c", 3)
    assert write(tmp_path / "c") == found
    assert (tmp_path / "c" / PROMPTS).read_bytes() == whole


def test_excluded_and_short_ones_are_counted(tmp_path: Path):
    first = write(tmp_path / "all").prompts.prompts[0].turns[0]
    without = write(tmp_path / "without", exclude=(first.upper(),))
    assert without.counts["excluded"] == 1
    assert first not in {prompt.turns[0] for prompt in without.prompts.prompts}
    longer = write(tmp_path / "longer", 3, bounds=(12, 40))
    assert longer.counts["short"] > 0


def test_a_target_that_writes_nothing_of_use_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"wrote 0 usable prompts in 220 tries, and 1 were asked"):
        write(tmp_path, 1, bounds=(2, 1))
    assert len(list(read_lines(tmp_path / PROMPTS))) == 220  # they are not written again
    with pytest.raises(DataError, match="wrote 0 usable prompts"):
        write(tmp_path, 1, bounds=(2, 1))


def test_another_file_of_that_name_is_refused(tmp_path: Path):
    (tmp_path / PROMPTS).write_text('{"id": "a", "turns": ["b"]}\n')
    with pytest.raises(DataError, match="line 1 is no prompt that the target wrote"):
        write(tmp_path)


def test_out_of_time_the_prompts_that_there_are_must_do(tmp_path: Path):
    writer = PromptWriter(
        Writer(target(), 4), bounds=PromptBounds(2, 40), seed=5, exclusion=Exclusion(())
    )
    found = writer.write(tmp_path, COUNT, deadline=time.monotonic() - 1.0)
    assert len(found.prompts.prompts) < COUNT
    whole = writer.write(tmp_path, COUNT)
    assert whole == write(tmp_path / "other")
    assert whole.prompts.prompts[: len(found.prompts.prompts)] == found.prompts.prompts
