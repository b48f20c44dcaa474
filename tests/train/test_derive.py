"""Prompts made of answers."""

from __future__ import annotations

import pytest

from forespeak.errors import DataError, OptionError
from forespeak.train.derive import KINDS, Derived, Source, derive

LONG = " ".join(f"Sentence number {n} says that the answer is near." for n in range(12))
SOURCES = [
    Source("What is a near answer?", f"{letter}{LONG}", f"q/{letter}") for letter in "abcdefghijkl"
] + [Source("Short?", "No.", "q/short")]
FOREIGN = [
    Source("Translate", "Dies ist ein kurzer Satz auf Deutsch.\nMore", "translation/3/German"),
    Source("Translate", "Ceci est une phrase courte en langue.", "translation/4/French"),
    Source("Translate", "Kurz.", "translation/5/German"),
]


def made(kinds: dict[str, int], sources: list[Source] = SOURCES, seed: int = 0) -> list[Derived]:
    return sorted(derive(sources, kinds, seed=seed), key=_place)


def _place(one: Derived) -> tuple[str, int]:
    return one.task, int(one.id.split("/")[1])


@pytest.mark.parametrize("kind", ["summary", "question", "translation", "rewriting"])
def test_each_kind_stands_on_an_answer(kind: str):
    found = made({kind: 30})
    assert [one.id.split("/")[:2] for one in found] == [[kind, str(n)] for n in range(30)]
    assert {one.task for one in found} == {kind}
    for one in found:
        assert "answer is near" in one.text and "{" not in one.text
        if kind == "question":
            assert "What is a near answer?" in one.text and "[1] " in one.text
        if kind == "translation":
            assert one.id.split("/")[2] in one.text and one.text.count("Sentence number") == 1
    assert len({one.text for one in found}) > 5


def test_back_translations_are_of_translations_only():
    found = made({"back_translation": 2}, SOURCES + FOREIGN)
    languages = {one.id.split("/")[2] for one in found}
    assert languages == {"German", "French"}
    for one in found:
        assert ("Satz auf Deutsch" in one.text) == one.id.endswith("German")
        assert "More" not in one.text
    assert len(made({"back_translation": 3}, SOURCES + FOREIGN)) == 2  # there are no more


def test_ids_of_any_form_are_no_translations():
    odd = [Source("a", LONG, "0"), Source("a", LONG, "/"), Source("a", LONG, "translation")]
    assert len(made({"summary": 3}, odd)) == 3
    with pytest.raises(DataError, match="back_translation needs answers of 6 words"):
        made({"back_translation": 1}, odd[:2])


def test_kinds_are_mixed():
    kinds = {"summary": 40, "translation": 40}
    first = [one.task for one in derive(SOURCES, kinds)][:40]
    assert 10 < first.count("summary") < 30


def test_the_same_answers_and_seed_give_the_same_prompts():
    kinds = {"summary": 9, "question": 9}
    assert made(kinds) == made(kinds) != made(kinds, seed=1)
    # A kind does not depend on which others are asked for.
    assert made({"question": 9}) == made(kinds)[:9]
    more = made({"question": 12})
    assert more[:9] == made({"question": 9})


def test_passages_have_many_lengths_and_an_end():
    sizes = [len(one.text.split()) for one in made({"rewriting": 80})]
    assert min(sizes) < 150 and 300 < max(sizes) < 700


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_make_them_of(kind: str):
    with pytest.raises(DataError, match=f"{kind} needs"):
        made({kind: 1}, SOURCES[-1:])


def test_no_prompt_is_there_twice_and_few_answers_give_few():
    for kind in ("summary", "question", "translation", "rewriting"):
        texts = [one.text for one in derive(SOURCES, {kind: 1000})]
        assert len(set(texts)) == len(texts) <= 8 * len(SOURCES)


def test_a_kind_without_texts_is_left_out_beside_others():
    short = [Source("q", "This sentence is of just a few words.", "0")]
    found = derive(short, {"summary": 5, "translation": 5})
    assert found and {one.task for one in found} == {"translation"}


def test_sentences_end_at_a_mark_before_a_space():
    text = "The value of pi is 3.14159 for most people. See example.org for more of it! Or is it"
    found = {one.text for one in derive([Source("q", text, "0")], {"translation": 50})}
    assert found and all("3.14159 for most people." in one for one in found if "pi" in one)
    assert any("See example.org for more of it!" in one for one in found)
    quoted = (
        'He said "Stop it now please." Then they all went back home. **Note this rule well.** Next!'
    )
    found = {one.text for one in derive([Source("q", quoted, "0")], {"translation": 50})}
    assert any("Then they all went back home." in one and "Stop it" not in one for one in found)
    assert not any("Or is it" in one or one.endswith("3.") for one in found)


def test_unknown_kinds():
    with pytest.raises(OptionError, match="Did you mean 'summary'"):
        derive(SOURCES, {"sumary": 1})
