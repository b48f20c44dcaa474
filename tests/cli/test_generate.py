"""``forespeak generate``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from forespeak.engine.settings import Resolved
from forespeak.types import SamplingParams, SpeculationConfig
from tests.cli.conftest import Command
from tests.cli.fakes import ANSWER

KEYS = (
    "text token_ids finish_reason num_rounds acceptance_length acceptance_rate tokens_per_second "
    "time_to_first_token_s draft_s verify_s other_s"
).split()


def test_text_streams_raw_to_stdout_and_the_rest_to_stderr(forespeak: Command):
    done = forespeak("generate", "Hello", "--max-new-tokens", "3")
    assert done.code == 0
    assert done.out == ANSWER * 3 + "\n"
    assert "A notice about the machine." in done.err
    assert "3 tokens, length limit" in done.err
    assert "acceptance length 1.00 (bonus included)" in done.err


def test_json_has_exactly_the_keys(forespeak: Command):
    done = forespeak("generate", "Hello", "--max-new-tokens", "5", "--method", "ngram", "--json")
    assert done.code == 0
    assert done.out.count("\n") == 1
    assert list(done.record) == KEYS
    assert done.record["text"] == ANSWER * 5
    assert done.record["token_ids"] == [0, 1, 2, 3, 4]
    assert done.record["num_rounds"] == 2
    assert done.record["acceptance_length"] == 2.0
    assert done.record["acceptance_rate"] == 0.25
    assert done.record["tokens_per_second"] == pytest.approx(4 / 0.024)


def test_plain_decoding_has_no_acceptance_rate(forespeak: Command):
    record = forespeak("generate", "Hello", "--json").record
    assert record["acceptance_rate"] is None
    assert record["acceptance_length"] == 1.0
    assert len(record["token_ids"]) == SamplingParams.max_new_tokens


@pytest.fixture
def prompt_of(forespeak: Command, llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The prompt that reaches the engine."""
    prompts: list[str] = []
    generate = llm.generate

    def recorded(self: Any, prompt: str, *given: Any, **named: Any) -> Any:
        prompts.append(prompt)
        return generate(self, prompt, *given, **named)

    monkeypatch.setattr(llm, "generate", recorded)

    def run(*arguments: str, stdin: str | bytes = "") -> str:
        done = forespeak("generate", "--max-new-tokens", "1", *arguments, stdin=stdin)
        assert done.code == 0, done.err
        return prompts[-1]

    return run


def test_prompt_from_argument_file_and_stdin(prompt_of: Any, tmp_path: Path):
    file = tmp_path / "prompt.txt"
    file.write_text("Zwei\nZeilen ü\n", encoding="utf-8")
    assert prompt_of("as it stands\n") == "as it stands\n"
    assert prompt_of("--file", str(file)) == "Zwei\nZeilen ü"
    assert prompt_of("-", stdin="piped\r\n") == "piped"
    assert prompt_of("--", "-starts with a dash") == "-starts with a dash"


def test_settings_reach_the_engine(forespeak: Command, llm: Any, monkeypatch: pytest.MonkeyPatch):
    seen: list[SpeculationConfig] = []
    init = llm.__init__

    def recorded(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        seen.append(self.speculation)

    monkeypatch.setattr(llm, "__init__", recorded)
    # No method takes all of them; what is refused is the engine's business and tested there.
    monkeypatch.setattr("forespeak.engine.settings.resolve", lambda config: Resolved(config, ()))
    flags = {
        "method": "ngram",
        "drafter": "truncate:3",
        "builder": "chain",
        "num_speculative_tokens": 1,
        "node_budget": 2,
        "tree_depth": 3,
        "tree_top_k": 4,
        "tree_shape": "eagle",
        "confidence_threshold": 0.5,
        "recursion_state": "raw",
        "draft_dtype": "float32",
        "lookup_min": 5,
        "lookup_max": 6,
        "draft_sampling": "greedy",
        "rule": "typical",
    }
    assert set(flags) == set(inspect.signature(SpeculationConfig).parameters), "a flag is missing"
    line = [part for name, value in flags.items() for part in (flag(name), str(value))]
    assert forespeak("generate", "x", *line, "--max-new-tokens", "1").code == 0
    assert seen == [SpeculationConfig(**flags)]  # type: ignore[arg-type]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate"], "No prompt was given; give one of PROMPT, --file FILE"),
        (["generate", "x", "--file", "y"], "both given"),
        (["generate", ""], "The prompt is empty"),
        (["generate", " \n"], "The prompt is empty"),
        (["generate", "-"], "The prompt is empty"),
        (["generate", "--file", "no/such/file"], "no/such/file does not exist"),
        (["generate", "x", "--method", "ngran"], "Did you mean 'ngram'?"),
        (["generate", "x", "--method", "ngram+"], "Method '' is not known"),
        (["generate", "x", "--dtype", "int4"], "Did you mean 'int8'?"),
        (["generate", "x", "--device", "gpu"], "'gpu' is not known; allowed: auto, cpu, cuda"),
        (["generate", "x", "--threads", "0"], "--threads"),
        (["generate", "x", "--node-budget", "-1"], "--node-budget"),
        (
            ["generate", "x", "--max-new-tokens", "-5"],
            "max_new_tokens is -5; allowed: whole",
        ),
        (["generate", "x", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0; allowed: numbers from 0"),
        (["generate", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "x", "--method", "ngram", "--tree-depth", "3"], "tree_depth=3 has no effect"),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias '5' is not ID=V"),
        (["generate", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"], "names token 5 twice"),
        (["generate", "x", "--logprobs", "2"], "--logprobs shows in the JSON object only"),
        (["generate", "x", "--json-schema", "no/such"], "no/such does not exist"),
        (["generate", "x", "--stop", ""], "stop is ('',)"),
        (["generate", "x", "--methd", "ngram"], "No such option: --methd"),
        (["generate", "x", "--target", "missing"], "There is no model 'missing'"),
        (["generate", "this is too long"], "The prompt has 9999 tokens"),
        (["generate", "two", "prompts"], "prompts"),
        (["generat", "x"], "generat"),
        (["--wrong"], "--wrong"),
        (["models"], "forespeak models --help"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    forespeak: Command, arguments: list[str], sentence: str
):
    done = forespeak(*arguments)
    assert done.code == 2
    assert sentence in done.err
    assert done.out == ""
    [said] = [line for line in done.err.splitlines() if line.startswith("forespeak: ")]
    assert sentence in said
    assert "Traceback" not in done.err


def test_broken_utf8(forespeak: Command, tmp_path: Path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"ab\xffc")
    for done in (
        forespeak("generate", "--file", str(file)),
        forespeak("generate", "-", stdin=b"ab\xffc"),
    ):
        assert done.code == 2
        assert "is not UTF-8: byte 2, in line 1" in done.err


def test_interrupt_ends_the_program_with_130(forespeak: Command, llm: Any):
    llm.interrupt_after = 2
    done = forespeak("generate", "x")
    assert done.code == 130
    assert done.out == ANSWER * 2
    assert "Traceback" not in done.err


def test_a_method_without_its_drafter_is_refused_before_the_target_is_loaded(forespeak: Command):
    done = forespeak("generate", "x", "--method", "dflash", "--target", "missing")
    assert done.code == 2
    assert "Method dflash needs a checkpoint trained for the target, and none was given" in done.err
