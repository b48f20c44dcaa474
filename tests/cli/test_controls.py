"""Every control of SamplingParams that the command line has arrives as it was given."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from forespeak.sampling import SamplingParams
from forespeak.types import Completion, RoundStats, TokenLogprob
from tests.cli.conftest import Command


@pytest.fixture
def params_of(forespeak: Command, llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What reaches the engine."""
    seen: list[SamplingParams] = []
    generate = llm.generate

    def recorded(self: Any, prompt: object, params: SamplingParams, **named: Any) -> Any:
        seen.append(params)
        return generate(self, prompt, SamplingParams(max_new_tokens=1), **named)

    monkeypatch.setattr(llm, "generate", recorded)

    def run(*arguments: str, command: tuple[str, ...] = ("generate", "x")) -> SamplingParams:
        done = forespeak(*command, *arguments)
        assert done.code == 0, done.err
        return seen[-1]

    return run


def test_nothing_given_is_the_default(params_of: Any):
    assert params_of() == SamplingParams()


def test_every_control_arrives(params_of: Any, tmp_path: Path):
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "object"}')
    lark.write_text('start: "a"')
    given = {
        "max_new_tokens": (["--max-new-tokens", "9"], 9),
        "min_tokens": (["--min-tokens", "3"], 3),
        "temperature": (["--temperature", "0.5"], 0.5),
        "seed": (["--seed", "7"], 7),
        "top_k": (["--top-k", "4"], 4),
        "top_p": (["--top-p", "0.9"], 0.9),
        "min_p": (["--min-p", "0.1"], 0.1),
        "typical_p": (["--typical-p", "0.8"], 0.8),
        "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
        "presence_penalty": (["--presence-penalty", "0.2"], 0.2),
        "frequency_penalty": (["--frequency-penalty", "-0.3"], -0.3),
        "logit_bias": (["--logit-bias", "5=-2.5", "--logit-bias", "6=1"], {5: -2.5, 6: 1.0}),
        "bad_words": (["--bad-words", "one", "--bad-words", "two"], ("one", "two")),
        "stop": (["--stop", "\n", "--stop", "END"], ("\n", "END")),
        "allowed_token_ids": (["--allowed-token-id", "3", "--allowed-token-id", "8"], (3, 8)),
        "json_object": (["--json-object"], True),
        "stop_token_ids": (["--stop-token-id", "1", "--stop-token-id", "2"], (1, 2)),
        "ignore_eos": (["--ignore-eos"], True),
        "logprobs": (["--logprobs", "2", "--json"], 2),
        "json_schema": (["--json-schema", str(schema)], '{"type": "object"}'),
        "regex": (["--regex", "a+"], "a+"),
        "grammar": (["--grammar", str(lark)], 'start: "a"'),
    }
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*given, "include_stop_str", "logprobs_after_processors"}
    for name, (arguments, value) in given.items():
        assert params_of(*arguments) == dataclasses.replace(SamplingParams(), **{name: value})  # type: ignore[arg-type]


def test_controls_that_need_another_arrive(params_of: Any):
    params = params_of("--stop", "END", "--include-stop-str")
    assert params == SamplingParams(stop=("END",), include_stop_str=True)
    params = params_of("--logprobs", "1", "--logprobs-after-processors", "--json")
    assert params == SamplingParams(logprobs=1, logprobs_after_processors=True)


def test_chat_and_compare_take_them_too(forespeak: Command):
    for command in ("chat", "compare"):
        shown = forespeak(command, "--help").out
        assert "--repetition-penalty" in shown
        assert "--logprobs" not in shown


def test_logprobs_stand_in_the_json_of_generate(
    forespeak: Command, llm: Any, monkeypatch: pytest.MonkeyPatch
):
    logprobs = (TokenLogprob(4, -0.5, ((4, -0.5), (9, -1.5))), TokenLogprob(2, -0.25))
    answer = Completion("a", (4, 2), "stop", RoundStats(), 0.0, logprobs=logprobs)
    monkeypatch.setattr(llm, "generate", lambda self, *given, **named: answer)
    assert forespeak("generate", "x", "--logprobs", "2", "--json").record["logprobs"] == [
        {
            "token": 4,
            "logprob": -0.5,
            "top": [{"token": 4, "logprob": -0.5}, {"token": 9, "logprob": -1.5}],
        },
        {"token": 2, "logprob": -0.25, "top": []},
    ]
