"""Dialogues answered by a target: a folder of them, and what training reads of it.

    FOLDER/manifest.json      whose answers, how they were made, how many of which fate
    FOLDER/dialogues.jsonl    one dialogue a line, in the order of the prompts once complete

Answers are kept as the token ids that the target wrote, its end-of-turn token included. A
``Sample`` puts them back between the tokens that the chat template writes around them. A dialogue
whose template would not reproduce its answers is refused with a reason: a model would otherwise be
trained on text that no target ever saw.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from forespeak.errors import DataError
from forespeak.models.tokenizer import Tokenizer
from forespeak.train.journal import Line, read_lines, write_lines
from forespeak.train.turns import TurnMarks
from forespeak.types import FinishReason

VERSION = 1
MANIFEST = "manifest.json"
DIALOGUES = "dialogues.jsonl"
SELF_WRITTEN = "self-written"  # the source of prompts that the target wrote

_KEYS = ("id", "source", "turns", "answers", "finish_reasons", "temperature", "seed", "fate")


class Fate(enum.StrEnum):
    """How a prompt ended. The first six gave dialogues, the cut ones without their later turns."""

    WHOLE = "whole"
    CUT_LENGTH = "cut_length"  # an answer reached its limit, so no later turn was asked
    CUT_CONTEXT = "cut_context"  # the next turn would have been too long
    CUT_EMPTY = "cut_empty"  # a later answer was empty
    CUT_TEMPLATE = "cut_template"  # the template would have written an answer otherwise
    CUT_REJECTED = "cut_rejected"  # the endpoint refused a later turn
    TOO_LONG = "too_long"
    EMPTY = "empty"
    SPECIAL_TOKENS = "special_tokens"  # the prompt holds text of special tokens
    TEMPLATE = "template"  # the template refuses the prompt
    REJECTED = "rejected"  # the endpoint refuses the prompt

    @property
    def is_dialogue(self) -> bool:
        """Whether at least one turn was answered."""
        return self is Fate.WHOLE or self.startswith("cut_")


@dataclass(frozen=True)
class Dialogue:
    """One dialogue.

    Attributes:
        id: of its prompt, unique within the source.
        source: name of the prompt file or data set, or ``self-written``.
        turns: the user's, each answered.
        answers: token ids of each answer, the end-of-turn token included when it was written.
        finish_reasons: of each answer; ``stop`` has an end-of-turn token.
        temperature, seed: what the answers were drawn with; answer n takes seed + n.
        fate: ``whole``, or why later turns were not answered.
    """

    id: str
    source: str
    turns: tuple[str, ...]
    answers: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[FinishReason, ...]
    temperature: float
    seed: int
    fate: Fate

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))

    @property
    def key(self) -> tuple[str, str]:
        """What names it in its folder."""
        return self.source, self.id

    def record(self) -> dict[str, Any]:
        """Its line."""
        return {name: getattr(self, name) for name in _KEYS}


def dialogue_from(line: Line) -> Dialogue:
    """A dialogue from its line.

    Raises:
        DataError: something is missing, of another kind, or empty.
    """
    record = line.record
    missing = [key for key in _KEYS if key not in record]
    unknown = [key for key in record if key not in _KEYS]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise _broken(line, what)
    for name in ("id", "source"):
        if not isinstance(record[name], str) or not record[name]:
            raise _broken(line, f"has {name} {record[name]!r}, which must be a text")
    turns, answers = record["turns"], record["answers"]
    if not _texts(turns):
        raise _broken(line, "has no list of turns, or an empty one among them")
    if not isinstance(answers, list) or len(answers) != len(turns):
        raise _broken(line, f"has {len(turns)} turns and not as many answers")
    reasons = record["finish_reasons"]
    if not isinstance(reasons, list) or len(reasons) != len(answers):
        raise _broken(line, "has not one finish reason for each answer")
    for number, (answer, reason) in enumerate(zip(answers, reasons, strict=True), start=1):
        _check_answer(line, number, answer, reason)
    temperature, seed = record["temperature"], record["seed"]
    if not _is_number(temperature) or temperature < 0:
        raise _broken(line, f"has temperature {temperature!r}, which must be 0 or more")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise _broken(line, f"has seed {seed!r}, which must be a whole number from 0")
    fates = [fate.value for fate in Fate if fate.is_dialogue]
    if record["fate"] not in fates:
        raise _broken(line, f"has fate {record['fate']!r}; allowed: {', '.join(fates)}")
    return Dialogue(
        record["id"], record["source"], tuple(turns), tuple(map(tuple, answers)),
        tuple(reasons), float(temperature), seed, Fate(record["fate"]),
    )  # fmt: skip


def _check_answer(line: Line, number: int, answer: object, reason: object) -> None:
    if reason not in ("stop", "length"):
        raise _broken(line, f"has finish reason {reason!r}; allowed: stop, length")
    ids = isinstance(answer, list) and all(type(token) is int and token >= 0 for token in answer)
    if not ids:
        raise _broken(line, f"has an answer {number} that is no list of token ids")
    if len(cast(list[int], answer)) < (2 if reason == "stop" else 1):
        raise _broken(line, f"has an empty answer {number}")


def _broken(line: Line, what: str) -> DataError:
    return DataError(
        f"{line.place} {what}; take the file from its source again, or take the line out."
    )


def _texts(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(text, str) and text.strip() for text in value)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Manifest:
    """What a folder of dialogues says of itself.

    Attributes:
        version: of this layout.
        target: whose answers they are.
        vocabulary, template: digests of its vocabulary and chat template.
        settings: how they were made; a run that goes on must have the same.
        prompts: name and sha256 of each prompt set.
        excluded: name and sha256 of each file whose prompts never enter.
        counts: dialogues and prompts by fate.
        complete: whether the run came to its end.
    """

    target: str
    vocabulary: str
    template: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[Mapping[str, str]] = ()
    excluded: Sequence[Mapping[str, str]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    complete: bool = False
    version: int = VERSION

    def check_target(self, tokenizer: Tokenizer, place: Path) -> None:
        """Refuse data of another target.

        Raises:
            DataError: vocabulary or chat template differ.
        """
        for name, mine, theirs in (
            ("vocabulary", tokenizer.vocabulary_digest(), self.vocabulary),
            ("chat template", tokenizer.template_digest(), self.template),
        ):
            if mine != theirs:
                raise DataError(
                    f"The dialogues in {place} were answered by {self.target}, whose {name} is "
                    "another than this target's; allowed: answers of the target itself. Name that "
                    "target, or make new ones with `forespeak data generate`."
                )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        DataError: there is none, or it is broken or of another version.
    """
    path = folder / MANIFEST
    if folder.is_file():
        raise DataError(
            f"{folder} is a file, and dialogues lie in a folder. Let the target answer a prompt "
            "file by `forespeak data generate`, unpack a packed file by `forespeak data unpack`."
        )
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {MANIFEST}, so it holds no dialogues; name a folder that `forespeak "
            "data generate` or `forespeak data unpack` wrote."
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except (ValueError, RecursionError):
        values = None
    return manifest_from(values, str(path))


def manifest_from(values: object, place: str) -> Manifest:
    """A manifest from parsed JSON.

    Raises:
        DataError: see :func:`read_manifest`.
    """
    kinds = {
        "target": str, "vocabulary": str, "template": str, "settings": dict, "prompts": list,
        "excluded": list, "counts": dict, "complete": bool, "version": int,
    }  # fmt: skip
    whole = isinstance(values, dict) and all(
        isinstance(values.get(item.name), kinds[item.name]) for item in fields(Manifest)
    )
    if not whole or not isinstance(values, dict):
        raise DataError(
            f"{place} is no manifest of dialogues; take the folder from its source again."
        )
    if values["version"] != VERSION:
        raise DataError(
            f"{place} has version {values['version']}; allowed: {VERSION}. Make the dialogues "
            "again with this version of forespeak, or use the version that made them."
        )
    sources = [*values["prompts"], *values["excluded"]]
    if not all(isinstance(one, dict) and {"name", "sha256"} <= one.keys() for one in sources):
        raise DataError(
            f"{place} names prompt files without name or sha256; take the folder from its source "
            "again."
        )
    found = {name: values[name] for name in kinds}
    return Manifest(**found | {name: tuple(found[name]) for name in ("prompts", "excluded")})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in place, whole.

    Raises:
        DataError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made ({error.strerror}); name another.") from None
    text = json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    write_lines(folder / MANIFEST, iter([text.encode()]))


def read_dialogues(folder: Path, *, vocab_size: int | None = None) -> Iterator[Dialogue]:
    """Every dialogue of a folder that no run is writing.

    Args:
        folder: with a manifest.
        vocab_size: refuse token ids from here on.

    Raises:
        DataError: a line is broken or half-written, or a dialogue is there twice.
    """
    seen: set[tuple[str, str]] = set()
    for line in read_lines(folder / DIALOGUES):
        dialogue = dialogue_from(line)
        if dialogue.key in seen:
            raise _broken(line, f"has dialogue {dialogue.id!r} of {dialogue.source} again")
        seen.add(dialogue.key)
        worst = max(map(max, dialogue.answers))
        if vocab_size is not None and worst >= vocab_size:
            raise _broken(line, f"has token id {worst}; allowed: below {vocab_size}")
        yield dialogue


class Refusal(enum.StrEnum):
    """Why the place of a dialogue's answers cannot be told."""

    RENDERING = "the template writes an earlier answer otherwise"
    CONTENT = "the template changes the answer's text"
    SPECIAL_TOKENS = "a special token inside an answer"
    END_OF_TURN = "another end of turn than the template's"
    EMPTY = "an answer without text"


@dataclass(frozen=True)
class Sample:
    """A dialogue as training sees it.

    Attributes:
        token_ids: template, user turns and answers.
        spans: half-open ranges to supervise, in order: each answer with its end-of-turn token.
    """

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def num_supervised(self) -> int:
        """Tokens in the spans."""
        return sum(end - begin for begin, end in self.spans)


def build_sample(dialogue: Dialogue, tokenizer: Tokenizer, marks: TurnMarks) -> Sample | Refusal:
    """Put the answers into the template and check that they are where it has them.

    Earlier answers must come out of the rendering token for token; the last one, which stays as the
    target wrote it, as text.

    Args:
        marks: of the tokenizer.

    Raises:
        PromptError: the template refuses the turns.
    """
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    spans = []
    for turn, answer, reason in zip(
        dialogue.turns, dialogue.answers, dialogue.finish_reasons, strict=True
    ):
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.render_chat(messages)
        if prompt[: len(ids)] != ids:
            return Refusal.RENDERING
        content = answer[:-1] if reason == "stop" else answer
        if reason == "stop" and answer[-1] != marks.end_of_answer:
            return Refusal.END_OF_TURN
        if not tokenizer.special_ids.isdisjoint(content):
            return Refusal.SPECIAL_TOKENS
        text = tokenizer.decode(content)
        if not text.strip():
            return Refusal.EMPTY
        ids = [*prompt, *answer]
        spans.append((len(prompt), len(ids)))
        before = tokenizer.chat_text(messages, up_to_answer=True)
        messages.append({"role": "assistant", "content": text})
    end = tokenizer.token(marks.end_of_answer) or "" if reason == "stop" else ""
    if not tokenizer.chat_text(messages, up_to_answer=False).startswith(before + text + end):
        return Refusal.CONTENT
    return Sample(tuple(ids), tuple(spans))


@dataclass(frozen=True)
class Samples:
    """What a folder holds for training.

    Attributes:
        samples: in the folder's order.
        refused: how many dialogues were refused, by reason.
    """

    samples: list[Sample]
    refused: Counter[str]


def read_samples(folder: Path, tokenizer: Tokenizer) -> Samples:
    """All samples of a folder.

    Raises:
        DataError: the data are damaged, or of another vocabulary or template.
    """
    read_manifest(folder).check_target(tokenizer, folder)
    marks = TurnMarks.of(tokenizer)
    samples, refused = [], Counter[str]()
    vocab_size = max(tokenizer.vocab().values()) + 1
    for dialogue in read_dialogues(folder, vocab_size=vocab_size):
        built = build_sample(dialogue, tokenizer, marks)
        if isinstance(built, Refusal):
            refused[built.value] += 1
        else:
            samples.append(built)
    return Samples(samples, refused)
