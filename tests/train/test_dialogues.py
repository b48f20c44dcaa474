"""Dialogues on disk, and where their answers stand in the template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forespeak.errors import DataError, PromptError
from forespeak.models.loading import load_checkpoint
from forespeak.models.tokenizer import Tokenizer
from forespeak.train.dialogues import (
    DIALOGUES,
    MANIFEST,
    Refusal,
    Sample,
    build_sample,
    read_dialogues,
    read_manifest,
    read_samples,
    write_manifest,
)
from forespeak.train.journal import to_line
from forespeak.train.turns import TurnMarks
from tests.train.talking import (
    SIZE,
    TEMPLATE,
    TOKENIZER,
    chat_tokenizer,
    dialogue,
    encode,
    manifest,
)

MARKS = TurnMarks.of(TOKENIZER)
ONE = dialogue(("abc a", "dea b ab"))
TWO = dialogue(("a", "bab d"), ("c1", "0,1 :"), id="q1")


def write(folder: Path, *dialogues: Any, **changes: Any) -> Path:
    write_manifest(folder, manifest(**changes))
    lines = [to_line(one if isinstance(one, dict) else one.record()) for one in dialogues]
    (folder / DIALOGUES).write_bytes(b"".join(lines))
    return folder


def test_marks():
    user, assistant = (TOKENIZER.vocab()[f"<{role}>"] for role in ("user", "assistant"))
    assert MARKS == TurnMarks((user,), 0, 0)
    assert TOKENIZER.render_chat([{"role": "user", "content": "a"}]) == [
        user,
        *encode("a"),
        0,
        assistant,
    ]


def test_what_is_written_is_read(tmp_path: Path):
    write(tmp_path, ONE, TWO)
    assert list(read_dialogues(tmp_path, vocab_size=SIZE)) == [ONE, TWO]
    assert read_manifest(tmp_path) == manifest()


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_masks_are_those_of_an_independent_rendering(number: int, end: bool):
    """The text written by hand, tokenised whole, and the characters of the answers marked."""
    pairs = [("ab c", "dab"), ("1", "a a:0"), ("e,", "abab d")][:number]
    built = build_sample(dialogue(*pairs, end=end), TOKENIZER, MARKS)
    text, marked = "", list[int]()
    for place, (turn, answer) in enumerate(pairs):
        # Where the target was cut off, the end of turn is the template's own and not supervised.
        head = f"{'' if end or not place else '<end>'}<user>{turn}<end><assistant>"
        tail = "<end>" if end else ""
        text += head + answer + tail
        marked += [0] * len(head) + [place + 1] * len(answer + tail)
    whole = TOKENIZER._backend(text, add_special_tokens=False, return_offsets_mapping=True)
    places = [marked[first] for first, _ in whole["offset_mapping"]]
    assert isinstance(built, Sample)
    assert list(built.token_ids) == whole["input_ids"]
    found = [0] * len(built.token_ids)
    for place, (begin, stop) in enumerate(built.spans):
        found[begin:stop] = [place + 1] * (stop - begin)
    assert found == places
    assert built.num_supervised == sum(place > 0 for place in places)


# As templates do that leave reasoning out of earlier turns.
FORGETFUL = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['role'] == 'user' or loop.last %}{{ message['content'] }}{% endif %}",
)
A, B = encode("a")[0], encode("b")[0]
USER = TOKENIZER.vocab()["<user>"]


def test_the_last_answer_stays_as_the_target_wrote_it():
    """Two tokens where the tokenizer would have made one."""
    assert encode("ab") != [A, B]
    built = build_sample(dialogue(("a", "c"), answers=((A, B, 0),)), TOKENIZER, MARKS)
    assert isinstance(built, Sample)
    assert built.token_ids[slice(*built.spans[0])] == (A, B, 0)
    assert built.token_ids[: built.spans[0][0]] == tuple(
        TOKENIZER.render_chat([{"role": "user", "content": "a"}])
    )


@pytest.mark.parametrize(
    ("changes", "template", "reason"),
    [
        ({"answers": ((A, B, 0), (A, 0))}, TEMPLATE, Refusal.RENDERING),
        ({"answers": ((A, 0), (A, USER, A, 0))}, TEMPLATE, Refusal.SPECIAL_TOKENS),
        ({"answers": ((A, 0), (A, USER))}, TEMPLATE, Refusal.END_OF_TURN),
        ({"answers": ((A, 0), (encode(" ")[0], 0))}, TEMPLATE, Refusal.EMPTY),
        (
            {"answers": ((A, 0), (encode(" ")[0], A, 0))},
            TEMPLATE.replace("['content']", "['content'] | trim"),
            Refusal.CONTENT,
        ),
        ({}, FORGETFUL, Refusal.RENDERING),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, changes: dict[str, Any], template: str, reason: Refusal):
    tokenizer = chat_tokenizer(template)
    bad = dialogue(("a", "a"), ("b", "a"), **changes)
    assert build_sample(bad, tokenizer, TurnMarks.of(tokenizer)) == reason
    write(tmp_path, bad, dialogue(("d", "e"), id="good"), tokenizer=tokenizer)
    read = read_samples(tmp_path, tokenizer)
    assert len(read.samples) == 1 and read.refused == {reason.value: 1}


def test_a_template_without_ends_is_refused():
    without = chat_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match="where an answer begins and ends cannot be told"):
        TurnMarks.of(without)
    with pytest.raises(PromptError, match="no chat template"):
        TurnMarks.of(chat_tokenizer(None))  # type: ignore[arg-type]


def test_other_vocabularies_and_templates_are_refused(tmp_path: Path):
    write(tmp_path, ONE)
    with pytest.raises(DataError, match="whose chat template is another"):
        read_samples(tmp_path, chat_tokenizer(TEMPLATE + " "))
    with pytest.raises(DataError, match="answered by tiny, whose vocabulary is another"):
        read_samples(tmp_path, chat_tokenizer(tokens=list("abcdefgh")))


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"answers": [[0]]}, "empty answer 1"),
    ({"answers": [[]]}, "empty answer 1"),
    ({"answers": [[]], "finish_reasons": ["length"]}, "empty answer 1"),
    ({"answers": []}, "not as many answers"),
    ({"answers": "abc"}, "not as many answers"),
    ({"answers": [[1, True]]}, "no list of token ids"),
    ({"answers": [[1, -1]]}, "no list of token ids"),
    ({"answers": [["a", 0]]}, "no list of token ids"),
    ({"answers": [[1, SIZE]]}, f"token id {SIZE}; allowed: below {SIZE}"),
    ({"finish_reasons": ["gone"]}, "finish reason 'gone'"),
    ({"finish_reasons": []}, "one finish reason for each"),
    ({"turns": [" "]}, "an empty one among them"),
    ({"turns": "abc"}, "no list of turns"),
    ({"temperature": "hot"}, "temperature 'hot'"),
    ({"temperature": -1}, "temperature -1"),
    ({"seed": 1.5}, "seed 1.5"),
    ({"id": 3}, "id 3"),
    ({"source": ""}, "source ''"),
    ({"fate": "too_long"}, "fate 'too_long'"),
    ({"extra": 1}, "unknown extra"),
    ({"id": "q1"}, "dialogue 'q1' of p.jsonl again"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_broken_dialogues_are_named_by_line(tmp_path: Path, changes: dict[str, Any], message: str):
    write(tmp_path, TWO, ONE.record() | changes)
    with pytest.raises(DataError, match="line 2") as caught:
        list(read_dialogues(tmp_path, vocab_size=SIZE))
    assert message in str(caught.value)


def test_a_missing_field_is_named(tmp_path: Path):
    record = ONE.record()
    del record["seed"], record["fate"]
    with pytest.raises(DataError, match="line 1 lacks seed, fate"):
        list(read_dialogues(write(tmp_path, record)))


def test_half_a_line_is_refused_by_readers(tmp_path: Path):
    path = write(tmp_path, ONE, TWO) / DIALOGUES
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="line 2 is half-written"):
        read_samples(tmp_path, TOKENIZER)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', "\xff"])
def test_broken_manifests(tmp_path: Path, text: str):
    (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match="is no manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("field", ["prompts", "excluded"])
@pytest.mark.parametrize("entry", [{}, {"name": "a"}, "a", None])
def test_manifests_that_name_no_files(tmp_path: Path, field: str, entry: object):
    path = write(tmp_path, ONE) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: [entry]}))
    with pytest.raises(DataError, match="without name or sha256"):
        read_manifest(tmp_path)


def test_other_manifests(tmp_path: Path):
    with pytest.raises(DataError, match="holds no dialogues"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, manifest())
    values = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(values | {"version": 2}))
    with pytest.raises(DataError, match="version 2; allowed: 1"):
        read_manifest(tmp_path)


@pytest.mark.slow
def test_the_real_targets_template(smollm2_path: Path):
    tokenizer = load_checkpoint(smollm2_path).tokenizer
    assert tokenizer is not None
    marks = TurnMarks.of(tokenizer)
    assert tokenizer.token(marks.end_of_answer) == tokenizer.token(marks.end_of_prompt) == END
    pairs = [("What is 2+2?", "It is 4.\n\n- Four"), ("Écris", " Voilà ✓ "), ("Stop", "Ok")]
    answers = [
        (*tokenizer.encode(a, add_special_tokens=False), marks.end_of_answer) for _, a in pairs
    ]
    made = dialogue(*pairs, answers=tuple(answers))
    built = build_sample(made, tokenizer, marks)
    assert isinstance(built, Sample)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = f"<|im_start|>system\n{system}{END}\n"
    assert marks.opening_ids == tuple(ids_of(tokenizer, f"{text}<|im_start|>user\n"))
    spans = []
    for turn, answer in pairs:
        text += f"<|im_start|>user\n{turn}{END}\n<|im_start|>assistant\n"
        begin = len(ids_of(tokenizer, text))
        text += f"{answer}{END}"
        spans.append((begin, len(ids_of(tokenizer, text))))
        text += "\n"
    assert built.spans == tuple(spans)
    assert list(built.token_ids) == ids_of(tokenizer, text.removesuffix("\n"))


END = "<|im_end|>"


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
