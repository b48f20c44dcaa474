"""TurnMarks: what a chat template writes around a turn, found by rendering one.

    opening   everything up to the first user turn's text: what a target continues with a prompt
    ends      the token right after a turn's text

Nothing is assumed of the template's words: a marker is rendered in a turn's place, and what stands
before and after it is read off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forespeak.errors import DataError
from forespeak.models.tokenizer import Tokenizer

_MARKER = "forespeak-turn-marker"  # a text that no template writes itself


@dataclass(frozen=True)
class TurnMarks:
    """Marks of one template.

    Attributes:
        opening_ids: from the text's start to the first user turn's text.
        end_of_prompt: the token after a user turn's text.
        end_of_answer: the token after an answer's text.
    """

    opening_ids: tuple[int, ...]
    end_of_prompt: int
    end_of_answer: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TurnMarks:
        """Read them off a tokenizer's template.

        Raises:
            PromptError: there is no template.
            DataError: it writes no such marks.
        """
        user = {"role": "user", "content": _MARKER}
        asked = tokenizer.chat_text([user], up_to_answer=True)
        before, found, after = asked.partition(_MARKER)
        answer = {"role": "assistant", "content": _MARKER}
        question = {"role": "user", "content": "a"}
        told = tokenizer.chat_text([question, answer], up_to_answer=False)
        _, answered, end = told.partition(_MARKER)
        opening = tokenizer.encode(before, add_special_tokens=False)
        prompt_end = tokenizer.encode(after, add_special_tokens=False)
        answer_end = tokenizer.encode(end, add_special_tokens=False)
        if not (found and answered and opening and prompt_end and answer_end):
            raise DataError(
                "The target's chat template does not write a turn between marks of its own, so "
                "where an answer begins and ends cannot be told; choose a target whose template "
                "ends each turn with a token."
            )
        return cls(tuple(opening), prompt_end[0], answer_end[0])


def has_special_tokens(tokenizer: Tokenizer, turns: Sequence[str]) -> bool:
    """Whether a turn holds text that the tokenizer takes for special tokens, such as an end of
    turn; a template would then no longer say where the turn ends."""
    return any(
        not tokenizer.special_ids.isdisjoint(tokenizer.encode(turn, add_special_tokens=False))
        for turn in turns
    )
