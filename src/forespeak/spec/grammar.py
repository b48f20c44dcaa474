"""Grammars: which tokens keep the output inside a JSON schema, a regex or a grammar.

The parsing is llguidance's; this file gives it the shape that trees need. A state stands after
everything committed, the root's token included. Each node of a tree is reached by its own path and
the state comes back to where it was. End-of-sequence is allowed exactly where the output so far is
complete, and after it nothing else.

Tokens the grammar forbids are normal in drafts: they get probability 0, are left out of the
forward and counted apart. They are no error.

N nodes, V vocabulary (width of the logits; ids the tokenizer does not have are forbidden).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams
from forespeak.spec.tree import CandidateTree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Unbounded white space lets a model that is sure of nothing write blanks until the length limit.
# Forty characters hold a line break and the indent of ten levels.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,40}"


class GrammarTokenizer:
    """A vocabulary as grammars read it. Building one takes about a second; keep it.

    Attributes:
        vocab_size: V.
        eos_ids: end-of-sequence ids, at least one.
    """

    def __init__(self, library: LLTokenizer, *, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.library = library
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)

    @classmethod
    def from_json(
        cls, tokenizer_json: str, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> GrammarTokenizer:
        """From the text of a ``tokenizer.json`` (of a Hugging Face fast tokenizer:
        ``tokenizer.backend_tokenizer.to_str()``).

        Raises:
            OptionError: llguidance is not installed, cannot read it, or there is no
                end-of-sequence id.
        """
        _needs_eos(eos_ids)
        try:
            library = _llguidance().LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        except ValueError as error:
            raise OptionError(
                f"Grammars cannot read this model's tokenizer ({_reason(str(error))}); allowed: "
                "tokenizers that have a tokenizer.json. Leave the grammar out."
            ) from error
        return cls(library, vocab_size=vocab_size, eos_ids=eos_ids)

    @classmethod
    def from_tokens(
        cls, tokens: Sequence[bytes], *, vocab_size: int | None = None, eos_ids: Sequence[int]
    ) -> GrammarTokenizer:
        """From the bytes of each token, for small vocabularies without a tokenizer.

        Tokens that are not text are written ``b""``; end-of-sequence ids are never text.
        """
        _needs_eos(eos_ids)
        names = [b"<%d>" % i if i in eos_ids or not t else t for i, t in enumerate(tokens)]
        special = [i for i, t in enumerate(tokens) if i in eos_ids or not t]
        source = _TokenList(names, tuple(special), eos_ids[0])
        library = _llguidance()
        wrapper = library.TokenizerWrapper(source)
        built = library.LLTokenizer(wrapper, eos_token=list(eos_ids), slices=[])
        return cls(built, vocab_size=vocab_size or len(tokens), eos_ids=eos_ids)


@dataclass(frozen=True)
class _TokenList:
    """The few names that llguidance asks of a tokenizer object."""

    tokens: list[bytes]
    special_token_ids: tuple[int, ...]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Longest token first; only used for hints."""
        rest = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        while rest:
            fitting = [i for i, t in enumerate(self.tokens) if rest.startswith(t)]
            if not fitting:
                rest = rest[1:]
                continue
            ids.append(max(fitting, key=lambda i: len(self.tokens[i])))
            rest = rest[len(self.tokens[ids[-1]]) :]
        return ids


@dataclass(frozen=True)
class Grammar:
    """A grammar that has been checked and compiled for one vocabulary; states start from it.

    Attributes:
        warnings: what the library warns of, one sentence each.
    """

    tokenizer: GrammarTokenizer
    matcher: LLMatcher
    warnings: tuple[str, ...] = ()

    def start(self) -> GrammarState:
        """The state before the first token of an output."""
        return GrammarState(self.tokenizer, self.matcher.deep_copy())


def compile_grammar(controls: SamplingParams, tokenizer: GrammarTokenizer) -> Grammar:
    """The grammar that the controls ask for (``controls.constraint`` says which).

    Raises:
        OptionError: the schema, regex or grammar is invalid or uses what the library lacks.
    """
    library = _llguidance().LLMatcher
    name = controls.constraint
    assert name is not None, "no grammar was asked for"
    if name == "regex":
        source = library.grammar_from_regex(controls.regex)
    elif name == "grammar":
        source = library.grammar_from_lark(controls.grammar)
    else:
        schema = '{"type": "object"}' if controls.json_schema is None else controls.json_schema
        _check_schema_text(schema)
        source = library.grammar_from_json_schema(
            schema, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
    is_error, messages = library.validate_grammar_with_warnings(source, tokenizer.library)
    if not is_error:
        matcher = library(tokenizer.library, source, log_level=0)
        if not matcher.is_error():
            return Grammar(tokenizer, matcher, tuple(_reason(m) for m in messages))
        messages = [matcher.get_error()]
    raise OptionError(
        f"{name} cannot be used: {_reason(messages[0])}; allowed: what llguidance accepts. Correct "
        f"it or leave {name} out."
    )


@dataclass(frozen=True)
class TreeMasks:
    """What a grammar says of a tree.

    Attributes:
        allowed: [N, V] bool, what may follow each node; forbidden nodes allow the end alone.
        forbidden: nodes whose token may not follow their parent, with all that hangs below them.
            They need no forward. A token that was drawn from q must still be shown to the rule
            as rejected, with p = 0: dropping it as if it had never been drawn biases the law.
    """

    allowed: Tensor
    forbidden: frozenset[int]


class GrammarState:
    """Where one output stands in its grammar."""

    def __init__(self, tokenizer: GrammarTokenizer, matcher: LLMatcher, num_ends: int = 0) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._num_ends = num_ends  # end-of-sequence tokens; the matcher never sees them

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far is complete, end-of-sequence or not."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the output has ended with end-of-sequence."""
        return self._num_ends > 0

    def mask(self) -> Tensor:
        """Which tokens may come next. [V] bool, at least one of them True.

        Where the grammar leaves one text only, the library allows the first token of its usual
        tokenisation and no other, so the mask, and not the text alone, says what is allowed.
        """
        mask = torch.zeros(self._tokenizer.vocab_size, dtype=torch.bool)
        self._write_mask(mask)
        return mask

    def advance(self, token: int) -> None:
        """Add a token that the mask allows.

        End-of-sequence is taken anywhere: where all controls together leave no token the text ends
        before the grammar is complete (``LogitsPipeline.apply``).
        """
        if token in self._tokenizer.eos_ids:
            self._num_ends += 1
            return
        assert not self.is_finished, "text after the end of the output"
        assert self._matcher.validate_tokens([token]) == 1, f"token {token} is not in the grammar"
        self._matcher.consume_token(token)
        self._check()

    def rollback(self, num_tokens: int) -> None:
        """Take back the newest tokens."""
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        if num_tokens > num_ends:
            self._matcher.rollback(num_tokens - num_ends)
            self._check()

    def fork(self) -> GrammarState:
        """An independent state at the same place."""
        return GrammarState(self._tokenizer, self._matcher.deep_copy(), self._num_ends)

    def mask_after(self, path: Sequence[int]) -> Tensor:
        """What may follow these tokens, each of them allowed where it stands. [V] bool"""
        for token in path:
            self.advance(token)
        mask = self.mask()
        self.rollback(len(path))
        return mask

    def follow(self, tree: CandidateTree) -> TreeMasks:
        """What the grammar says of each node after its own path; the state is left as it was."""
        children = tree.children()
        allowed = torch.zeros(len(tree), self._tokenizer.vocab_size, dtype=torch.bool)
        reached: set[int] = set()

        def descend(node: int) -> None:
            reached.add(node)
            self._write_mask(allowed[node])
            for child in children[node]:
                if allowed[node, tree.tokens[child]]:
                    self.advance(tree.tokens[child])
                    descend(child)
                    self.rollback(1)

        descend(0)
        forbidden = frozenset(range(len(tree))) - reached
        for node in forbidden:
            allowed[node, list(self._tokenizer.eos_ids)] = True
        return TreeMasks(allowed, forbidden)

    def _write_mask(self, mask: Tensor) -> None:
        """Set the allowed entries of a zeroed row [V]."""
        if not self.is_finished:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check()
            size = min(len(mask), self._tokenizer.library.vocab_size)
            flags = np.unpackbits(bits, count=size, bitorder="little")
            mask[:size] = torch.from_numpy(flags).bool()
        mask[list(self._tokenizer.eos_ids)] = self.is_finished or self.is_accepting

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            raise OptionError(
                f"The grammar cannot be followed any further: {reason}; allowed: grammars within "
                "llguidance's limits. Make the grammar simpler."
            )


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise OptionError(
            "Grammars (json_schema, json_object, regex, grammar) need the package llguidance, "
            "which is not installed; install it with: pip install 'forespeak[grammar]'."
        ) from error
    return llguidance


def _needs_eos(eos_ids: Sequence[int]) -> None:
    if not eos_ids:
        raise OptionError(
            "A grammar needs a model with an end-of-sequence token to end the output with; this "
            "one has none. Leave the grammar out."
        )


def _check_schema_text(schema: str) -> None:
    try:
        value = json.loads(schema)
    except RecursionError:
        raise OptionError(
            "json_schema is nested too deep to be read; allowed: some hundred levels. Flatten it."
        ) from None
    except ValueError as error:
        raise OptionError(
            f"json_schema is no JSON ({error}); allowed: the text of a JSON schema. Correct it."
        ) from error
    if not isinstance(value, dict):
        raise OptionError(
            f"json_schema is {schema!r}; allowed: a JSON object, {{}} for any JSON. Correct it."
        )


def _reason(message: str) -> str:
    """The telling line of a message of several lines, without its full stop."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    telling = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (telling or lines)[0].rstrip(".:")
