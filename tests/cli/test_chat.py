"""``forespeak chat``."""

from __future__ import annotations

from typing import Any

from tests.cli.conftest import Command
from tests.cli.fakes import ANSWER

SHORT = ("chat", "--max-new-tokens", "2")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_answers_stream_and_the_dialogue_grows(forespeak: Command):
    done = forespeak(*SHORT, "--json", stdin="one\n\ntwo ü\n")
    assert done.code == 0
    assert done.out.startswith(f"{ANSWER * 2}\n{ANSWER * 2}\n")
    said = ANSWER * 2
    turns = [user("one"), assistant(said), user("two ü"), assistant(said)]
    assert done.record["messages"] == turns
    assert [answer["token_ids"] for answer in done.record["answers"]] == [[0, 1], [0, 1]]


def test_reset_forgets(forespeak: Command):
    done = forespeak(*SHORT, "--json", stdin="one\n/reset\ntwo\n")
    assert done.record["messages"] == [user("two"), assistant(ANSWER * 2)]
    assert "The dialogue starts anew." in done.err


def test_exit_ends_before_the_rest(forespeak: Command):
    done = forespeak(*SHORT, "--json", stdin="/exit\nnever read\n")
    assert (done.code, done.record) == (0, {"messages": [], "answers": []})


def test_help_and_unknown_commands(forespeak: Command):
    done = forespeak(*SHORT, stdin="/help\n/rest\n")
    assert done.err.count("/reset forgets the dialogue") == 3  # the greeting counts
    assert "There is no command /rest." in done.err
    assert done.out == ""


def test_a_slash_in_a_sentence_is_no_command(forespeak: Command):
    done = forespeak(*SHORT, "--json", stdin="/etc holds what?\n")
    assert done.record["messages"][0] == user("/etc holds what?")


def test_ctrl_c_stops_the_answer_and_not_the_program(forespeak: Command, llm: Any):
    llm.interrupt_after = 1
    done = forespeak(*SHORT, "--json", stdin="one\ntwo\n")
    assert done.code == 0
    assert "[stopped]" in done.err
    turns = [user("one"), assistant(ANSWER), user("two"), assistant(ANSWER * 2)]
    assert done.record["messages"] == turns
    assert len(done.record["answers"]) == 1


def test_a_turn_that_cannot_be_answered_leaves_the_dialogue_usable(forespeak: Command):
    done = forespeak(*SHORT, "--json", stdin="this is too long\nshort\n")
    assert done.code == 0
    assert "The prompt has 9999 tokens" in done.err
    assert "/reset starts anew" in done.err
    assert done.record["messages"] == [user("short"), assistant(ANSWER * 2)]


def test_broken_utf8(forespeak: Command):
    done = forespeak(*SHORT, stdin=b"a\xff\n")
    assert done.code == 2
    assert "Standard input is not UTF-8" in done.err
