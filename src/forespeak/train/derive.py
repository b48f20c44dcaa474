"""Prompts about texts: from a target's own answers, tasks that stand on a passage.

Plain prompts are short, and what users send often is not: a text to sum up, passages and a
question, a sentence to translate. A drafter that never saw such prompts guesses badly behind them.
Here the target's answers become the passages and its prompts the questions, so that no further text
is needed. The same dialogues and seed give the same prompts.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forespeak.errors import DataError, OptionError, unknown_choice

_LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch")
_SUMMARIES = (
    "Summarize: {text}",
    "Summarize the following text.\n\n{text}",
    "{text}\n\nTL;DR:",
    "Sum up this text in three sentences.\n\n{text}",
    "What are the main points of this text?\n\n{text}",
    "Write a short summary of the passage below.\n\n{text}",
)
_QUESTIONS = (
    "Answer the question by the passages below.\n\n{passages}\n\nQuestion: {question}",
    "Context:\n{passages}\n\nBased on the context, answer: {question}",
    "{passages}\n\nUse the text above to answer this question: {question}",
    "Passages:\n{passages}\nQuestion: {question}\nAnswer:",
    "{question}\n\nHere is what was found:\n\n{passages}",
)
_TRANSLATIONS = (
    "Translate into {language}: {text}",
    "Translate this from English to {language}: {text}",
    'What is "{text}" in {language}?',
    "Give the {language} translation of this sentence: {text}",
)
_BACK = (
    "Translate {language} to English: {text}",
    "Translate into English: {text}",
    "What does this {language} sentence mean in English?\n\n{text}",
    "Give the English translation of this {language} text: {text}",
)
_REWRITINGS = (
    "Rewrite this text in simpler words.\n\n{text}",
    "Correct the mistakes in this text.\n\n{text}",
    "List the most important words of this text.\n\n{text}",
    "Give this text a title and say why.\n\n{text}",
    "Turn this text into a list.\n\n{text}",
    "Continue this text.\n\n{text}",
)
_MIN_WORDS, _MAX_WORDS = 60, 400  # of a passage
_MIN_SENTENCE, _MAX_SENTENCE = 6, 40  # words of a sentence to translate
_MOST_OF_ONE = 8  # prompts of a kind for each text that it can be made of
_MOST_REPEATS = 100  # draws in a row that gave nothing new, before a kind is taken to be used up
# Up to a mark with a space or the end behind it: 3.14 and example.org do not end a sentence.
_END = r"[.!?][\"')\]*\u201d\u2019]*(?=\s|$)"
_SENTENCE = re.compile(rf"(?:(?!{_END})[^\n])+{_END}")


@dataclass(frozen=True)
class Source:
    """One answered turn.

    Attributes:
        question: what the user said.
        answer: what the target answered.
        id: of its prompt; that of a translation names the language.
    """

    question: str
    answer: str
    id: str


@dataclass(frozen=True)
class Derived:
    """A prompt made of others."""

    id: str
    task: str
    text: str

    def record(self) -> dict[str, object]:
        """Its line in a prompt file."""
        return {"id": self.id, "task": self.task, "turns": [self.text]}


def derive(sources: Sequence[Source], kinds: Mapping[str, int], *, seed: int = 0) -> list[Derived]:
    """Prompts of several kinds.

    Args:
        sources: in any order, which matters.
        kinds: how many of each of :data:`KINDS`.
        seed: of all draws.

    Returns:
        The kinds mixed, so that the first half of them has half of each. No prompt is there twice;
        of each kind there are as many as the sources allow, of some perhaps none.

    Raises:
        OptionError: an unknown kind.
        DataError: the sources have nothing that any of the kinds could use.
    """
    check_kinds(kinds)
    found: list[Derived] = []
    for kind, count in kinds.items():
        made = _distinct(KINDS[kind](sources, random.Random(f"{seed} {kind}")))
        found += [
            Derived(f"{kind}/{number}{name}", kind, text)
            for number, (name, text) in enumerate(itertools.islice(made, count))
        ]
    if not found:
        needs = "; ".join(f"{kind} needs {NEEDS[kind]}" for kind in kinds)
        raise DataError(
            f"The dialogues hold nothing to make such prompts of: {needs}. Give longer answers, or "
            "other kinds with --kinds."
        )
    random.Random(f"{seed}").shuffle(found)
    return found


def check_kinds(kinds: Iterable[str]) -> None:
    """Refuse a kind that is not known.

    Raises:
        OptionError: naming it.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise OptionError(unknown_choice("Kind of prompts", kind, list(KINDS)))


def _distinct(made: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Each once; it ends where draws have long given nothing new."""
    seen: set[str] = set()
    repeats = 0
    for name, text in made:
        repeats = repeats + 1 if text in seen else 0
        if repeats > _MOST_REPEATS:
            return
        if not repeats:
            seen.add(text)
            yield name, text


def _passages(sources: Sequence[Source], draw: random.Random) -> Iterator[str]:
    """Texts of a drawn length, each of one answer or of several."""
    long = [s.answer.strip() for s in sources if len(s.answer.split()) >= _MIN_WORDS]
    for _ in range(_MOST_OF_ONE * len(long)):
        wanted = draw.randint(_MIN_WORDS, _MAX_WORDS)
        parts: list[str] = []
        while sum(len(part.split()) for part in parts) < wanted and len(parts) < 8:
            parts.append(draw.choice(long))
        yield "\n\n".join(parts)


def _about_passages(templates: Sequence[str]) -> Callable[..., Iterator[tuple[str, str]]]:
    def make(sources: Sequence[Source], draw: random.Random) -> Iterator[tuple[str, str]]:
        for text in _passages(sources, draw):
            yield "", draw.choice(templates).format(text=text)

    return make


def _questions(sources: Sequence[Source], draw: random.Random) -> Iterator[tuple[str, str]]:
    """A question whose own answer is among the passages."""
    long = [s for s in sources if len(s.answer.split()) >= _MIN_WORDS and "\n" not in s.question]
    for _ in range(_MOST_OF_ONE * len(long)):
        asked = draw.choice(long)
        passages = [asked.answer.strip()]
        passages += [draw.choice(long).answer.strip() for _ in range(draw.randint(0, 4))]
        draw.shuffle(passages)
        numbered = "\n\n".join(f"[{n}] {text}" for n, text in enumerate(passages, start=1))
        template = draw.choice(_QUESTIONS)
        yield "", template.format(passages=numbered, question=asked.question.strip())


def _sentences(sources: Sequence[Source]) -> list[str]:
    found = (m.group().strip() for s in sources for m in _SENTENCE.finditer(s.answer))
    sized = (one for one in found if _MIN_SENTENCE <= len(one.split()) <= _MAX_SENTENCE)
    return list(dict.fromkeys(one for one in sized if one[0].isalpha() and not one[0].islower()))


def _translations(sources: Sequence[Source], draw: random.Random) -> Iterator[tuple[str, str]]:
    sentences = _sentences(sources)
    for _ in range(_MOST_OF_ONE * len(sentences)):
        language = draw.choice(_LANGUAGES)
        text = draw.choice(_TRANSLATIONS).format(language=language, text=draw.choice(sentences))
        yield f"/{language}", text


def _back_translations(sources: Sequence[Source], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Of answers to prompts of kind ``translation``."""
    foreign = []
    for source in sources:
        kind, _, rest = source.id.partition("/")
        language = rest.rpartition("/")[2]
        line = source.answer.strip().split("\n")[0].strip(" \"'")
        if kind == "translation" and _MIN_SENTENCE <= len(line.split()) <= _MAX_SENTENCE:
            foreign.append((language, line))
    draw.shuffle(foreign)
    for language, line in foreign:
        yield f"/{language}", draw.choice(_BACK).format(language=language, text=line)


KINDS: Mapping[str, Callable[..., Iterator[tuple[str, str]]]] = {
    "summary": _about_passages(_SUMMARIES),
    "question": _questions,
    "translation": _translations,
    "rewriting": _about_passages(_REWRITINGS),
    "back_translation": _back_translations,
}
"""(sources, draw) -> what is added to the id, and the prompt."""

NEEDS = {
    "summary": f"answers of {_MIN_WORDS} words or more",
    "rewriting": f"answers of {_MIN_WORDS} words or more",
    "question": f"questions of one line with answers of {_MIN_WORDS} words or more",
    "translation": f"sentences of {_MIN_SENTENCE} to {_MAX_SENTENCE} words",
    "back_translation": f"answers of {_MIN_SENTENCE} words or more to prompts of kind translation",
}
