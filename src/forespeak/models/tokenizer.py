"""Text to token ids and back: transformers' tokenizer behind a small, typed face."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2
import transformers
from tokenizers.decoders import ByteLevel

from forespeak.errors import CheckpointError, OptionError, PromptError
from forespeak.formats.gguf_file import GgufFile
from forespeak.formats.weights import read_json_object

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class Tokenizer:
    """A model's tokenizer and chat template. Immutable."""

    def __init__(self, backend: transformers.PreTrainedTokenizerBase) -> None:
        # Untyped on purpose: the methods used differ in annotation between versions.
        self._backend: Any = backend

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of an HF folder, None when it has none.

        Raises:
            CheckpointError: its files are damaged or want code that is not part of transformers.
        """
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return None
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                read_json_object(folder / name)  # says more of a damaged file than what follows
        return cls(_load(folder, None))

    @classmethod
    def from_gguf(cls, file: GgufFile, cache: Path) -> Tokenizer | None:
        """The tokenizer inside a GGUF file, None when it has none.

        Conversion takes seconds, so its result is kept under ``cache``, by the content of the
        file's header. Without a folder to write to it is converted each time.

        Raises:
            CheckpointError: the vocabulary is damaged or transformers cannot convert its kind.
        """
        if "tokenizer.ggml.tokens" not in file.metadata:
            return None
        kept = cache / _header_digest(file)
        if (kept / "tokenizer.json").is_file():
            try:
                return cls.from_folder(kept)
            except CheckpointError:
                shutil.rmtree(kept, ignore_errors=True)  # damaged: convert again
        converted = _load(file.path.parent, file.path.name)
        _keep(converted, kept)
        return cls(converted)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence ids; a model's config may name more."""
        value = self._backend.eos_token_id
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    @property
    def has_chat_template(self) -> bool:
        return self._backend.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Raises:
            PromptError: the text has half characters (lone surrogates), which no bytes stand for.
        """
        _check_text(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (``role`` and ``content`` each) up to the answer's start.

        Raises:
            PromptError: there is no chat template, or it refuses these messages.
        """
        ids: list[int] = self._render(messages, up_to_answer=True, tokenize=True)
        return ids

    def render_whole(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation as it stands, nothing opened after its last message.

        Raises:
            PromptError: see :meth:`render_chat`.
        """
        ids: list[int] = self._render(messages, up_to_answer=False, tokenize=True)
        return ids

    def chat_text(self, messages: Sequence[Mapping[str, str]], *, up_to_answer: bool) -> str:
        """What a conversation looks like before it becomes token ids.

        Args:
            messages: ``role`` and ``content`` each.
            up_to_answer: open the answer that follows, as :meth:`render_chat` does.

        Raises:
            PromptError: see :meth:`render_chat`.
        """
        text: str = self._render(messages, up_to_answer=up_to_answer, tokenize=False)
        return text

    def _render(
        self, messages: Sequence[Mapping[str, str]], *, up_to_answer: bool, tokenize: bool
    ) -> Any:
        if not self.has_chat_template:
            raise PromptError(
                "The model has no chat template; messages need one. Give the prompt as plain text "
                "with --raw."
            )
        for message in messages:
            _check_text(message["content"])
        try:
            return self._backend.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=up_to_answer,
                tokenize=tokenize,
                return_dict=False,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise PromptError(
                f"The model's chat template refuses the messages ({error}); usually roles must "
                "take turns: user, assistant, user. Change the messages, or use --raw."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def save(self, folder: Path) -> None:
        """Its files, chat template included, as a model's folder has them."""
        self._backend.save_pretrained(folder)

    def vocab(self) -> dict[str, int]:
        """Every token, added ones included, and its id."""
        vocabulary: dict[str, int] = self._backend.get_vocab()
        return vocabulary

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for token, token_id in sorted(self.vocab().items(), key=lambda item: item[1]):
            digest.update(f"{token_id} {token!r}\n".encode())
        return digest.hexdigest()

    def vocabulary_digest(self) -> str:
        """Equal for two tokenizers exactly when every id stands for the same token in both."""
        return self._digest

    def template_digest(self) -> str:
        """Equal for two tokenizers exactly when their chat templates are; of none, too."""
        template = json.dumps(self._backend.chat_template, sort_keys=True)
        return hashlib.sha256(template.encode()).hexdigest()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``decode`` leaves out."""
        added = self._backend.added_tokens_decoder
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def to_json(self) -> str:
        """The text of a ``tokenizer.json``, which grammars are compiled from.

        Raises:
            OptionError: a tokenizer that has no such form.
        """
        backend = getattr(self._backend, "backend_tokenizer", None)
        if backend is None:
            raise OptionError(
                "A grammar was asked for and this model's tokenizer has no tokenizer.json; allowed "
                "for it: texts without a grammar. Leave the grammar out."
            )
        text: str = backend.to_str()
        return text

    @property
    def is_byte_level(self) -> bool:
        """Each token is a string of bytes and a text is their concatenation."""
        backend = getattr(self._backend, "backend_tokenizer", None)
        return isinstance(getattr(backend, "decoder", None), ByteLevel)

    def token(self, token_id: int) -> str | None:
        """A token as it is in the vocabulary, None for ids beyond it."""
        token: str | None = self._backend.convert_ids_to_tokens(token_id)
        return token


class IncrementalDecoder:
    """Turns a stream of token ids into text, each character once and only when it is whole.

    What all calls return, joined, equals ``Tokenizer.decode`` of all ids. A call costs the same
    however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        stream = _ByteStream if tokenizer.is_byte_level else _Window
        self._stream: _ByteStream | _Window = stream(tokenizer)
        self._special_ids = tokenizer.special_ids

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids and return the text that they complete, perhaps none."""
        visible = (token_id for token_id in token_ids if token_id not in self._special_ids)
        return "".join(map(self._stream.push, visible))

    def flush(self) -> str:
        """The end of the text: what is held back, incomplete characters as U+FFFD."""
        return self._stream.flush()


class _ByteStream:
    """For byte-level vocabularies: the bytes of each token through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = _byte_alphabet()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        try:
            raw = bytes(self._bytes_of[character] for character in token)
        except KeyError:  # an added token, written as it is
            raw = token.encode()
        return self._utf8.decode(raw)

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _Window:
    """For all other vocabularies: decode the last few tokens and take away what was out before.

    ids:   ... out before ... | context: out, kept for its spaces | pending: not out yet
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        # A run of byte tokens is judged as a whole (one bad byte spoils it all), so it is held
        # until another token ends it.
        if _is_byte_token(self._tokenizer.token(token_id)):
            return ""
        text = self._new_text()
        if text.endswith("\ufffd"):
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _advance(self) -> None:
        if self._pending:
            self._context, self._pending = self._pending, []


def _is_byte_token(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token.startswith("<0x") and token[-1] == ">"


@cache  # every text starts a stream; building the table takes longer than a round
def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies, reversed.

    Printable bytes stand for themselves; the others take the characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return table


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The prompt has half a character at position {error.start}; whole Unicode text is "
            "expected. Save the prompt as UTF-8."
        ) from None


def _load(folder: Path, gguf_name: str | None) -> transformers.PreTrainedTokenizerBase:
    options = {} if gguf_name is None else {"gguf_file": gguf_name}
    load: Callable[..., Any] = transformers.AutoTokenizer.from_pretrained
    try:
        backend = load(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:
        # transformers and tokenizers raise anything here, bare Exception included.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(
            f"The tokenizer in {folder / (gguf_name or '')} cannot be loaded ({reason}); allowed "
            "are tokenizers that are part of transformers. Get its files again."
        ) from error
    assert isinstance(backend, transformers.PreTrainedTokenizerBase)
    return backend


def _header_digest(file: GgufFile) -> str:
    """Content of the header (vocabulary included) and the version of the converter."""
    with file.path.open("rb") as stream:
        header = stream.read(file.header_bytes)
    digest = hashlib.sha256(header).hexdigest()[:32]
    return f"{digest}-transformers-{transformers.__version__}"


def _keep(backend: transformers.PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a converted tokenizer so that it is there whole or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="convert-") as temporary:
            part = Path(temporary) / "tokenizer"
            backend.save_pretrained(part)
            os.replace(part, folder)
    except OSError:
        # Another process was first, or there is nowhere to write: the next run converts again.
        return
