"""``forespeak chat``: a dialogue in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forespeak.cli import consoles
from forespeak.cli.controls import ControlOptions, SamplingOptions, sampling_params
from forespeak.cli.engine import check, open_llm, open_target
from forespeak.cli.generate import record, summary
from forespeak.cli.options import (
    MethodOptions,
    OutputOptions,
    SettingOptions,
    TargetOptions,
)
from forespeak.drafters.shipped import with_shipped
from forespeak.errors import PromptError
from forespeak.types import SamplingParams

if TYPE_CHECKING:
    from forespeak.engine.llm import LLM

HELP = "/reset forgets the dialogue, /exit leaves (as Ctrl-D does), Ctrl-C stops an answer."


def chat(
    *,
    target: TargetOptions,
    method: MethodOptions,
    settings: SettingOptions,
    sampling: SamplingOptions,
    controls: ControlOptions,
    output: OutputOptions,
) -> None:
    """Talk with the model; every answer streams. /help says what else there is."""
    config = with_shipped(settings.config(method.method), target.target)
    check(config)
    params = sampling_params(sampling, controls)
    model = open_target(target)
    talk = Talk(open_llm(model, config), params)
    consoles.say(f"{model.description}, {method.method}. {HELP}", style="dim")
    while True:
        line = read_line()
        if line is None or line.strip() == "/exit":
            break
        if line.strip():
            talk.take(line)
    if output.json:
        consoles.write_json({"messages": talk.messages, "answers": talk.answers})


def read_line() -> str | None:
    """The user's next line; None at the end. Ctrl-C drops the line that is being written."""
    asks = sys.stdin.isatty()
    while True:
        try:
            if asks:
                return _ask()
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        except EOFError:
            consoles.say("")
            return None
        except KeyboardInterrupt:
            consoles.say(f"\n{HELP}", style="dim")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"Standard input is not UTF-8 ({error.reason}); send the lines as UTF-8."
            ) from None


def _ask() -> str:
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing and history
    if sys.stdout.isatty():
        return input("> ")
    sys.stderr.write("> ")
    sys.stderr.flush()
    return input()


@dataclass
class Talk:
    """A dialogue with one model. ``answers`` holds a record for each finished answer."""

    llm: LLM
    params: SamplingParams
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def take(self, line: str) -> None:
        """One line of the user: a command or a turn."""
        command = line.strip()
        if command == "/help":
            consoles.say(HELP)
        elif command == "/reset":
            self.messages.clear()
            self.answers.clear()
            consoles.say("The dialogue starts anew.", style="dim")
        elif command.startswith("/") and " " not in command:
            consoles.say(f"There is no command {command}. {HELP}")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            consoles.write(piece)

        self.messages.append({"role": "user", "content": line})
        try:
            answer = self.llm.generate(tuple(self.messages), self.params, on_text=show)
        except PromptError as error:
            # The dialogue has grown too long, or the like: the program and the rest of it live on.
            self.messages.pop()
            consoles.say(f"{error} /reset starts anew.")
        except KeyboardInterrupt:
            consoles.write("\n")
            consoles.say("[stopped]", style="dim")
            self._keep("".join(pieces))
        else:
            consoles.write("\n")
            consoles.say(summary(answer), style="dim")
            self._keep(answer.text)
            self.answers.append(record(answer))

    def _keep(self, text: str) -> None:
        """What was said stays in the dialogue; a turn without any answer does not."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()
