"""Target: a model that is loaded and ready to decode, with what people need to know about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from forespeak.drafters.base import TargetParts
from forespeak.engine.text import Vocabulary
from forespeak.errors import CheckpointError, OptionError, PromptError
from forespeak.models.base import TargetModel
from forespeak.models.loading import Checkpoint, load_checkpoint
from forespeak.models.opening import open_model, pick_device, pick_dtype
from forespeak.models.tokenizer import Tokenizer
from forespeak.sampling import SamplingParams
from forespeak.spec.grammar import GrammarTokenizer
from forespeak.types import Segment

_SLOW_START_S = 5.0

Message = dict[str, str]
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass
class Target:
    """A loaded model.

    Attributes:
        name: as it was asked for.
        model: the model.
        tokenizer: None for a model of bare token ids.
        description: name and origin, for people.
        context_length: tokens that prompt and answer may have together.
        eos_ids: ids that end a text.
        threads: CPU threads of a forward.
        notices: what a user should know, one sentence each.
        checkpoint: where it came from; None for a model built in memory.
    """

    name: str
    model: TargetModel
    tokenizer: Tokenizer | None
    description: str
    context_length: int
    eos_ids: tuple[int, ...]
    threads: int
    notices: list[str] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    _grammar: GrammarTokenizer | None = None

    @property
    def dtype_name(self) -> str:
        """``float32``, ``bfloat16`` or ``int8``."""
        return self.model.dtype_name

    @property
    def device(self) -> str:
        """Where forwards run, such as ``cpu`` or ``cuda:0``."""
        return str(self.model.device)

    @property
    def parts(self) -> TargetParts:
        """What drafters may need of it."""
        threads = self.threads if self.dtype_name == "int8" else None
        return TargetParts(self.model, self.checkpoint, threads, self.context_length)

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: a text, the messages of a dialogue, or token ids (taken as they are).
            raw: leave the chat template out; a text then goes in as it stands.

        Raises:
            PromptError: it is empty, too long, or the model cannot take such a prompt.
        """
        ids = self._ids(prompt, raw=raw)
        if not ids:
            raise PromptError("The prompt is empty; give at least one character.")
        if len(ids) >= self.context_length:
            raise PromptError(
                f"The prompt has {len(ids)} tokens; allowed: up to {self.context_length - 1}, so "
                f"that one more fits into the context of {self.context_length}. Shorten it."
            )
        size = self.model.config.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise PromptError(
                f"Token id {wrong} is not in the vocabulary; allowed: 0 to {size - 1}. Check the "
                "ids, or that the tokenizer belongs to the model."
            )
        return ids

    def _ids(self, prompt: Prompt, *, raw: bool) -> list[int]:
        kind = _kind_of(prompt)
        if kind == "ids":
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise PromptError(
                f"{self.description} has no tokenizer; allowed: a prompt of token ids. Put the "
                "tokenizer files beside the weights to use texts."
            )
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                return self.tokenizer.encode(prompt, add_special_tokens=True)
            return self.tokenizer.render_chat([{"role": "user", "content": prompt}])
        if raw:
            raise PromptError("Messages need the chat template; leave --raw out or give a text.")
        return self.tokenizer.render_chat(list(prompt))  # type: ignore[arg-type]

    def vocabulary(self, params: SamplingParams) -> Vocabulary:
        """What a text with these parameters needs of the vocabulary."""
        if params.constraint is not None and self._grammar is None and self.tokenizer is not None:
            self._grammar = GrammarTokenizer.from_json(
                self.tokenizer.to_json(), vocab_size=self.model.config.vocab_size,
                eos_ids=self.eos_ids,
            )  # fmt: skip
        return Vocabulary(self.model.config.vocab_size, self.eos_ids, self.tokenizer, self._grammar)


def _kind_of(prompt: object) -> str:
    """``text``, ``ids`` or ``messages``.

    Raises:
        PromptError: it is empty or none of these.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise PromptError("The prompt is empty; give at least one character.")
        return "text"
    if isinstance(prompt, list | tuple):
        if not prompt:
            raise PromptError("The prompt is empty; give at least one token id or message.")
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return "ids"
        if all(_is_message(message) for message in prompt):
            return "messages"
    raise PromptError(
        f"The prompt is a {type(prompt).__name__} that cannot be read; allowed: a text, a list of "
        'token ids, or a list of messages such as {"role": "user", "content": "Hello"}.'
    )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def load_target(
    name: str = "smollm2-135m",
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    context_length: int | None = None,
) -> Target:
    """Find, read and warm up a model.

    Args:
        name: ``smollm2-135m``, a folder, a GGUF file or a Hub id ORG/NAME.
        dtype: ``auto`` is int8 on cpu (float32 for models through the adapter), bfloat16 on cuda.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads of a forward; None takes all cores. Sets torch's own number too (to 1
            for int8, whose kernels have threads of their own that torch's would disturb).
        context_length: tokens that prompt and answer may have together; None takes the model's.

    Raises:
        ModelError: no such model, or it cannot be read.
        OptionError: a setting that this model or machine cannot have.
    """
    place = pick_device(device)
    if threads is not None and threads < 1:
        raise OptionError(f"threads is {threads}; allowed: 1 or more.")
    checkpoint = load_checkpoint(name)
    precision = pick_dtype(dtype, place, checkpoint.family)
    model = open_model(
        checkpoint, dtype=precision, device=place, threads=threads, context_length=context_length
    )
    used = _set_threads(model, threads)
    target = in_memory(model, tokenizer=checkpoint.tokenizer, name=name, threads=used)
    target.checkpoint = checkpoint
    target.description = checkpoint.description
    if context_length is not None:
        target.context_length = context_length
        limit = model.config.max_position_embeddings
        if context_length > limit:
            target.notices.append(
                f"The context of {context_length} tokens is longer than the {limit} that the model "
                "was made for; what it writes beyond them may be poor."
            )
    _warm_up(target)
    return target


def in_memory(
    model: TargetModel,
    *,
    tokenizer: Tokenizer | None = None,
    name: str = "in memory",
    threads: int | None = None,
) -> Target:
    """A target around a model that is there already."""
    for token in model.config.eos_token_ids:
        if token >= model.config.vocab_size:
            raise CheckpointError(
                f"{name} names {token} as an end-of-sequence id; allowed: below "
                f"{model.config.vocab_size}, its vocabulary. Correct eos_token_id in config.json."
            )
    eos_ids = dict.fromkeys(
        [*model.config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())]
    )
    return Target(
        name=name, model=model, tokenizer=tokenizer, description=name,
        context_length=model.config.max_position_embeddings, eos_ids=tuple(eos_ids),
        threads=threads or torch.get_num_threads(),
    )  # fmt: skip


def _set_threads(model: TargetModel, threads: int | None) -> int:
    if model.dtype_name == "int8":
        torch.set_num_threads(1)
        return int(getattr(model, "threads"))  # noqa: B009
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _warm_up(target: Target) -> None:
    """One small forward, so that compiling kernels is no part of the first answer."""
    start = time.perf_counter()
    model = target.model
    model.forward(torch.zeros(2, dtype=torch.long), torch.arange(2), model.new_cache(1, 2),
                  [Segment(0, 2)])  # fmt: skip
    if time.perf_counter() - start > _SLOW_START_S:
        target.notices.append("The CPU kernels were compiled; they are kept for the next start.")
    if getattr(model, "portable", False):
        target.notices.append(
            "This CPU has no AVX-512 VNNI; int8 runs in portable code, with the same numbers and "
            "slower."
        )
