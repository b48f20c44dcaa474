"""``forespeak compare`` and ``forespeak demo``."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forespeak.bench.compare import Row
from forespeak.cli.demo import explanation
from forespeak.cli.demo import prompts as demo_prompts
from tests.cli.conftest import Command
from tests.cli.fakes import ANSWER

ROW_KEYS = (
    "method builder drafter num_prompts num_tokens tokens_per_second speedup acceptance_length "
    "acceptance_rate draft_ms verify_ms other_ms exact_match peak_memory_mb first_differences"
).split()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{n}", "task": "t", "turns": [f"say {n}", "more"]}) for n in "012"]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_record(forespeak: Command, file: str):
    done = forespeak(
        *("compare", "--prompts", file, "--methods", "ngram", "--max-new-tokens", "9", "--json")
    )
    assert done.code == 0
    assert list(done.record) == ["target", "dtype", "device", "threads", "rows"]
    assert done.record["target"] == "smollm2-135m"
    assert (done.record["dtype"], done.record["threads"]) == ("int8", 2)
    plain, ngram = done.record["rows"]
    assert list(plain) == list(ngram) == ROW_KEYS
    assert (plain["method"], plain["builder"], plain["drafter"]) == ("autoregressive", "none", None)
    assert (plain["speedup"], plain["acceptance_length"]) == (1.0, 1.0)
    assert (plain["acceptance_rate"], plain["first_differences"]) == (None, [])
    assert (ngram["num_prompts"], ngram["num_tokens"], ngram["exact_match"]) == (3, 27, 1.0)
    assert ngram["speedup"] == pytest.approx(2.0)
    assert ngram["peak_memory_mb"] > 1


def test_limit_stride_and_all_turns(forespeak: Command, file: str):
    common = ("compare", "--prompts", file, "--methods", "ngram", "--max-new-tokens", "3", "--json")
    for more, expected in (
        (("--limit", "2"), 2),
        (("--stride", "2"), 2),
        (("--stride", "2", "--limit", "1"), 1),
        (("--all-turns",), 6),
    ):
        rows = forespeak(*common, *more).record["rows"]
        assert [row["num_prompts"] for row in rows] == [expected, expected]


def test_all_has_every_runnable_method_and_the_cascade_with_the_best(forespeak: Command, file: str):
    done = forespeak(
        *("compare", "--prompts", file, "--drafter", "truncate:4", "--limit", "1"),
        *("--max-new-tokens", "9", "--json"),
    )
    names = [row["method"] for row in done.record["rows"]]
    assert names == ["autoregressive", "ngram", "draft_model", "ngram+draft_model"]


def test_the_fastest_cascade_is_taken(forespeak: Command, llm: Any, file: str):
    given = ("compare", "--prompts", file, "--drafter", "truncate:4", "--max-new-tokens", "9")
    for cost, expected in ((0.0005, "ngram+draft_model"), (0.02, "ngram+draft_model:1")):
        llm.draft_s_a_token = cost
        names = [row["method"] for row in forespeak(*given, "--json").record["rows"]]
        assert names == ["autoregressive", "ngram", "draft_model", expected]
    # Where that is named as well, it is there once.
    more = forespeak(*given, "--methods", "all,ngram+draft_model:1", "--json").record["rows"]
    assert [row["method"] for row in more] == names


def test_all_may_stand_beside_names_with_sizes(forespeak: Command, file: str):
    done = forespeak(
        *("compare", "--prompts", file, "--drafter", "truncate:4", "--limit", "1", "--json"),
        *("--methods", "all,draft_model:2,ngram+draft_model:1,ngram", "--max-new-tokens", "9"),
    )
    names = [row["method"] for row in done.record["rows"]]
    first = ["autoregressive", "ngram", "draft_model", "ngram+draft_model"]
    assert names == [*first, "draft_model:2", "ngram+draft_model:1"]


def test_a_record_says_how_to_make_it_again(forespeak: Command, file: str, tmp_path: Path):
    record = tmp_path / "record.json"
    done = forespeak(
        *("compare", "--prompts", file, "--methods", "draft_model:2", "--drafter", "truncate:4"),
        *("--stride", "2", "--seed", "3", "--max-new-tokens", "5", "--record", str(record)),
    )
    assert done.code == 0
    made = json.loads(record.read_text("utf-8"))
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert made["prompts"] == {
        "file": "prompts.jsonl", "sha256": digest, "stride": 2, "limit": None, "all_turns": False,
    }  # fmt: skip
    assert (made["max_new_tokens"], made["temperature"], made["seed"]) == (5, 0.0, 3)
    assert made["settings"]["draft_model:2"]["num_speculative_tokens"] == 2
    assert made["settings"]["draft_model:2"]["drafter"] == "truncate:4"
    assert "torch" in made["measured"]["versions"] and made["measured"]["machine"]
    assert str(tmp_path) not in record.read_text("utf-8")


def test_a_record_goes_into_files_only(forespeak: Command, file: str, tmp_path: Path):
    given = ("compare", "--prompts", file, "--methods", "ngram", "--max-new-tokens", "3")
    os.mkfifo(tmp_path / "pipe")
    refused = forespeak(*given, "--record", str(tmp_path / "pipe"))
    assert refused.code == 2 and "a device or a pipe" in refused.err
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert forespeak(*given, "--record", str(tmp_path / "link.json")).code == 0
    assert (tmp_path / "link.json").is_symlink()
    assert "rows" in json.loads((tmp_path / "real.json").read_text("utf-8"))


def test_all_drafts_with_a_cut_of_the_target_where_no_drafter_was_named(
    forespeak: Command, file: str
):
    done = forespeak("compare", "--prompts", file, "--limit", "1", "--json")
    drafters = {row["method"]: row["drafter"] for row in done.record["rows"]}
    assert drafters["ngram"] is None
    assert drafters["draft_model"] == drafters["ngram+draft_model:1"] == "truncate:9"


def test_all_leaves_out_a_drafter_that_nobody_named_and_that_does_not_fit(
    forespeak: Command, llm: Any, file: str
):
    llm.most_layers = 1
    done = forespeak("compare", "--prompts", file, "--limit", "1", "--json")
    assert [row["method"] for row in done.record["rows"]] == ["autoregressive", "ngram"]
    assert "draft_model is left out: truncate:" in done.err
    named = forespeak("compare", "--prompts", file, "--drafter", "truncate:5")
    assert named.code == 2
    assert "truncate:5 is too many" in named.err


def test_plain_decoding_is_in_it_once_and_first(forespeak: Command, file: str):
    done = forespeak(
        *("compare", "--prompts", file, "--methods", "ngram,autoregressive,ngram", "--json"),
        *("--max-new-tokens", "3"),
    )
    assert [row["method"] for row in done.record["rows"]] == ["autoregressive", "ngram"]


def test_first_differences_are_reported(forespeak: Command, llm: Any, file: str):
    llm.differs = 2
    common = (
        *("compare", "--prompts", file, "--methods", "draft_model", "--drafter", "truncate:4"),
        *("--max-new-tokens", "5", "--limit", "1"),
    )
    row = forespeak(*common, "--json").record["rows"][1]
    assert row["exact_match"] == 0.0
    assert row["first_differences"] == [{"prompt": "p0", "position": 2, "gap": 0.0005}]
    shown = forespeak(*common)
    assert "draft_model leaves plain decoding in prompt p0 at token 2" in shown.err


def test_table_for_people(forespeak: Command, file: str):
    done = forespeak("compare", "--prompts", file, "--methods", "ngram", "--max-new-tokens", "9")
    assert done.code == 0
    assert "smollm2-135m, int8 on cpu, 2 threads" in done.out
    assert "2.00 (2.00-2.00)" in done.out
    assert "bonus included" in done.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "No prompts were given; name a prompt file with --prompts FILE."),
        (("--prompts", "no/such"), "no/such does not exist"),
        (("--prompts", "FILE", "--methods", "ngram,medusaa"), "'medusaa' is not known"),
        (
            ("--prompts", "FILE", "--methods", "eagle3"),
            "Method eagle3 needs a checkpoint trained for the target",
        ),
        (("--prompts", "FILE", "--drafters", "no/such"), "no/such is no folder"),
        (("--prompts", "FILE", "--methods", ","), "names no method"),
        (("--prompts", "FILE", "--limit", "0"), "--limit"),
        (("--prompts", "FILE", "--stride", "0"), "--stride"),
        (("--prompts", "FILE", "--record", "/"), "/ is a folder; name a file"),
        (("--prompts", "FILE", "--record", "/no/such/file"), "a folder that is not there"),
        (("--prompts", "FILE", "--raw", "--all-turns"), "exclude each other"),
        (
            ("--prompts", "FILE", "--methods", "ngram", "--tree-depth", "3"),
            "--tree-depth has no effect on autoregressive, ngram",
        ),
    ],
)
def test_bad_input(forespeak: Command, file: str, arguments: tuple[str, ...], sentence: str):
    done = forespeak("compare", *(file if part == "FILE" else part for part in arguments))
    assert done.code == 2
    assert sentence in done.err
    assert done.out == ""


def test_a_prompt_too_long_is_named(forespeak: Command, tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "big", "turns": ["this is too long"]}\n')
    done = forespeak("compare", "--prompts", str(path), "--methods", "ngram")
    assert done.code == 2
    assert "Prompt big: The prompt has 9999 tokens" in done.err


def test_demo_in_a_pipe(forespeak: Command):
    done = forespeak("demo", "--max-new-tokens", "4")
    assert done.code == 0
    for prompt in demo_prompts():
        assert prompt.turns[0] in done.out
    assert done.out.count("--- autoregressive") == 4
    assert done.out.count("same text") >= 4
    # Plain decoding's text once a prompt; the others' only where it is another one.
    assert done.out.count(ANSWER * 4) == len(demo_prompts())
    assert "same text, " in done.out and " rounds]" in done.out
    assert "exact" in done.out.split("same text")[-1]
    assert "Every text is plain decoding's, token for token." in done.err


def test_demo_shows_another_text(forespeak: Command, llm: Any):
    llm.differs = 1
    done = forespeak("demo", "--max-new-tokens", "4")
    assert done.out.count("OTHER TEXT") == 4
    assert done.out.count(ANSWER * 4) == 2 * len(demo_prompts())


def test_the_demo_says_why_fewer_rounds_are_slower():
    plain = row("autoregressive", 1.0, 1.0)
    cheap = replace(row("medusa", 0.9, 1.2), draft_ms=0.5)
    dear = replace(row("eagle", 0.8, 1.5), draft_ms=5.0)
    said = explanation([plain, cheap, dear, row("ngram", 1.3, 1.6)], "cpu")
    assert said is not None and said.startswith("2 methods need fewer rounds")
    assert said.endswith("--method ngram+medusa:1.")
    assert explanation([plain, cheap], "cuda") is None
    slow_lookup = explanation([plain, row("ngram", 0.9, 1.2)], "cpu")
    assert slow_lookup is not None and slow_lookup.startswith("One method needs")
    assert "--method" not in slow_lookup
    assert explanation([plain, row("ngram", 1.3, 1.6)], "cpu") is None


def row(method: str, speedup: float, length: float) -> Row:
    return Row(
        method=method, builder="chain", drafter=None if method == "ngram" else "x",
        num_prompts=1, num_tokens=1, tokens_per_second=1.0, speedup=speedup, speedup_quartiles=None,
        acceptance_length=length,
        acceptance_rate=None, draft_ms=1.0, verify_ms=1.0, other_ms=1.0, exact_match=1.0,
        peak_memory_mb=None,
    )  # fmt: skip


def test_demo_says_when_a_text_differs(forespeak: Command, llm: Any):
    llm.differs = 1
    done = forespeak("demo", "--max-new-tokens", "4", "--json")
    rows = {row["method"]: row for row in done.record["rows"]}
    assert rows["ngram"]["exact_match"] == 1.0
    if "draft_model" in rows:
        assert rows["draft_model"]["exact_match"] == 0.0
        assert "4 texts differ from plain decoding's" in done.err
