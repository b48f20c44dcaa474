"""A tiny target that talks: a chat template over the tokenizer of a few dozen tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import transformers
from tokenizers import AddedToken

from forespeak.bench.prompts import Prompt
from forespeak.engine.target import Target, in_memory
from forespeak.models.tokenizer import Tokenizer
from forespeak.train.dialogues import Dialogue, Fate, Manifest
from forespeak.train.prompt_sets import PromptSet
from tests.engine.tiny_text import END, backend
from tests.tiny import tiny_config, tiny_int8

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 128


def chat_tokenizer(template: str = TEMPLATE, tokens: Sequence[str] | None = None) -> Tokenizer:
    made = backend(tokens)
    made.add_special_tokens(
        [AddedToken(f"<{role}>", special=True) for role in ("user", "assistant")]
    )
    make: Any = transformers.PreTrainedTokenizerFast
    wrapped = make(tokenizer_object=made, eos_token=END)
    wrapped.chat_template = template
    return Tokenizer(wrapped)


TOKENIZER = chat_tokenizer()
SIZE = len(TOKENIZER.vocab())


@cache
def target(seed: int = 0) -> Target:
    """In int8, so that a text does not depend on what runs beside it."""
    config = tiny_config(
        vocab_size=SIZE, eos_token_ids=(0,), max_position_embeddings=CONTEXT, num_layers=2
    )
    return in_memory(tiny_int8(config, seed=seed), tokenizer=TOKENIZER, name="tiny")


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def manifest(tokenizer: Tokenizer = TOKENIZER, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "target": "tiny", "vocabulary": tokenizer.vocabulary_digest(),
        "template": tokenizer.template_digest(),
    }  # fmt: skip
    return Manifest(**(values | changes))


def prompt_set(*turns: Sequence[str], name: str = "p.jsonl") -> PromptSet:
    prompts = [Prompt(f"q{number}", "", tuple(these)) for number, these in enumerate(turns)]
    return PromptSet(name, "0" * 64, prompts)


def dialogue(*pairs: tuple[str, str], end: bool = True, **changes: Any) -> Dialogue:
    """User turns and answers as text, each answer ended by the end-of-turn token."""
    values: dict[str, Any] = {
        "id": "q0", "source": "p.jsonl", "turns": tuple(turn for turn, _ in pairs),
        "answers": tuple((*encode(text), *([0] if end else [])) for _, text in pairs),
        "finish_reasons": tuple("stop" if end else "length" for _ in pairs),
        "temperature": 0.0, "seed": 1, "fate": Fate.WHOLE,
    }  # fmt: skip
    return Dialogue(**(values | changes))
