"""LLM: a target under one method, for people. ``generate`` and ``stream`` share one engine."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from forespeak.drafters.loader import load_drafter
from forespeak.drafters.shipped import with_shipped
from forespeak.drafters.table import METHODS
from forespeak.engine.decode import Decoding
from forespeak.engine.proposer import Cascade, Proposer, Proposing
from forespeak.engine.reference import next_logits
from forespeak.engine.settings import (
    Resolved,
    choose_rules,
    refuse_missing_drafter,
    resolve,
    settled,
)
from forespeak.engine.target import Prompt, Target, load_target
from forespeak.engine.text import TextState
from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams
from forespeak.types import Completion, SpeculationConfig

__all__ = ["LLM", "Target", "load_target"]


class LLM:
    """A language model that drafts and verifies.

    Args:
        target: a loaded target, or the name of one (see ``load_target``).
        method: how to draft; names joined with ``+`` make a cascade, ``eagle3:5`` says a size.
        drafter, builder, num_speculative_tokens, node_budget, tree_depth, tree_top_k, tree_shape,
            confidence_threshold, recursion_state, draft_dtype, lookup_min, lookup_max,
            draft_sampling, rule: see :class:`SpeculationConfig`; None takes the method's default,
            and as drafter the one that is shipped for the target, if any.
        dtype, device, threads, context_length: of the target, where it is given by name.

    Raises:
        OptionError: a setting that the method does not take, or that is out of range.
        ModelError, DrafterError: a model cannot be read or does not fit.

    Attributes:
        speculation: the settings as resolved.
        builder: name of the builder, ``none`` for plain decoding.
        drafter_name: the drafter's model; None where the method has none.
    """

    def __init__(
        self,
        target: str | Target = "smollm2-135m",
        *,
        method: str = "autoregressive",
        drafter: str | None = None,
        builder: str | None = None,
        num_speculative_tokens: int | None = None,
        node_budget: int | None = None,
        tree_depth: int | None = None,
        tree_top_k: int | None = None,
        tree_shape: str | None = None,
        confidence_threshold: float | None = None,
        recursion_state: str | None = None,
        draft_dtype: str | None = None,
        lookup_min: int | None = None,
        lookup_max: int | None = None,
        draft_sampling: str | None = None,
        rule: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        context_length: int | None = None,
    ) -> None:
        asked = SpeculationConfig(
            method=method, drafter=drafter, builder=builder,
            num_speculative_tokens=num_speculative_tokens, node_budget=node_budget,
            tree_depth=tree_depth, tree_top_k=tree_top_k, tree_shape=tree_shape,
            confidence_threshold=confidence_threshold, recursion_state=recursion_state,
            draft_dtype=draft_dtype, lookup_min=lookup_min, lookup_max=lookup_max,
            draft_sampling=draft_sampling, rule=rule,
        )  # fmt: skip
        name = target.name if isinstance(target, Target) else target
        asked = with_shipped(asked, name)
        resolved = resolve(asked)  # refuses before anything is loaded
        refuse_missing_drafter(resolved)
        choose_rules(resolved, 0.0)  # and so does a rule that cannot verify such drafts
        if isinstance(target, Target):
            _refuse_target_options(dtype, device, threads, context_length)
            self.target = target
        else:
            self.target = load_target(
                target, dtype=dtype, device=device, threads=threads, context_length=context_length
            )
        self._proposer = self._open_proposer(resolved)
        self._free = threading.Lock()
        self.builder = "+".join(member.builder for member in self._members) or "none"
        given = [member.config.drafter for member in self._members if member.config.drafter]
        names = [Path(name).name if Path(name).exists() else name for name in given]
        self.drafter_name = "+".join(names) or None

    def _open_proposer(self, resolved: Resolved) -> Proposing | None:
        size = self.target.model.config.vocab_size
        drafters = [load_drafter(member.config, self.target.parts) for member in resolved.members]
        infos = [drafter.info for drafter in drafters]
        self._resolved = settled(resolved, infos, cpu=self.target.device == "cpu")
        self._members = self._resolved.members
        self.speculation = self._resolved.shown
        members = [
            Proposer(drafter, member.builder, member.config, vocab_size=size)
            for drafter, member in zip(drafters, self._members, strict=True)
        ]
        if len(members) > 1:
            return Cascade(members)
        return members[0] if members else None

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """Continue a prompt to its end.

        Args:
            prompt: a text, the messages of a dialogue, or token ids.
            params: how; the defaults are greedy.
            raw: leave the chat template out.
            on_text: is called with each piece of text as it is settled.

        Raises:
            PromptError: the prompt is empty or too long.
            OptionError: parameters that this model or method cannot honour.
        """
        start = time.perf_counter()
        text, decoding, prompt_ids = self._start(prompt, params, raw=raw)
        pieces: list[str] = []
        first: float | None = None
        with contextlib.closing(self._written(decoding, prompt_ids)) as written:
            for piece in written:
                first = first or time.perf_counter() - start
                if piece:
                    pieces.append(piece)
                    if on_text is not None:
                        on_text(piece)
        assert text.end is not None and text.end.finish_reason is not None and first is not None
        return Completion(
            text="".join(pieces), token_ids=tuple(text.token_ids),
            finish_reason=text.end.finish_reason, stats=decoding.stats,
            time_to_first_token_s=first, stop_reason=text.end.stop_reason,
            logprobs=tuple(text.logprobs) if text.params.logprobs is not None else None,
        )  # fmt: skip

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False
    ) -> Iterator[str]:
        """Pieces of the text as they are settled, each of whole characters.

        Until the iterator has ended or was closed, this LLM can write no other text.
        """
        _, decoding, prompt_ids = self._start(prompt, params, raw=raw)
        return (piece for piece in self._written(decoding, prompt_ids) if piece)

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids that a prompt becomes."""
        return self.target.encode(prompt, raw=raw)

    def gap(
        self, prompt: Prompt, answer_ids: Sequence[int], position: int, *, raw: bool = False
    ) -> float:
        """How far apart the target's two best logits are for token ``position`` of an answer."""
        text = [*self.encode(prompt, raw=raw), *answer_ids[:position]]
        best = next_logits(self.target.model, text).topk(2).values
        return float(best[0] - best[1])

    def _written(self, decoding: Decoding, prompt_ids: Sequence[int]) -> Generator[str, None, None]:
        """Runs a decoding; one at a time, because the drafter follows one text."""
        if not self._free.acquire(blocking=False):
            raise OptionError(
                "This LLM is writing another text; allowed: one at a time. Let the other one end, "
                "close its stream, or make a second LLM of the same target."
            )
        try:
            yield from decoding.run(prompt_ids)
        finally:
            self._free.release()

    def _start(
        self, prompt: Prompt, params: SamplingParams | None, *, raw: bool
    ) -> tuple[TextState, Decoding, list[int]]:
        if not isinstance(params, SamplingParams | None):
            raise OptionError(
                f"params is {params!r}; allowed: SamplingParams, such as "
                "SamplingParams(max_new_tokens=64)."
            )
        params = params or SamplingParams()
        rules = choose_rules(self._resolved, params.temperature)
        prompt_ids = self.encode(prompt, raw=raw)
        room = self.target.context_length - len(prompt_ids)
        if params.min_tokens > room:
            raise OptionError(
                f"min_tokens is {params.min_tokens}; allowed here: up to {room}, what the context "
                f"of {self.target.context_length} tokens has left after the prompt. Ask for fewer "
                "or shorten the prompt."
            )
        if params.max_new_tokens > room:
            params = dataclasses.replace(params, max_new_tokens=room)
        text = TextState(params, prompt_ids, self.target.vocabulary(params))
        sampled = params.temperature > 0 and self.speculation.draft_sampling == "probabilistic"
        decoding = Decoding(self.target.model, text, rules, self._proposer, sampled_drafts=sampled)
        return text, decoding, prompt_ids


def _refuse_target_options(
    dtype: str, device: str, threads: int | None, context_length: int | None
) -> None:
    given = {
        "dtype": dtype != "auto", "device": device != "auto", "threads": threads is not None,
        "context_length": context_length is not None,
    }  # fmt: skip
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise OptionError(
            f"{', '.join(names)} was given beside a target that is loaded already; allowed: with a "
            "target's name. Give it to load_target."
        )


def method_names() -> tuple[str, ...]:
    """Methods of this version."""
    return tuple(name for name, entry in METHODS.items() if entry.available)
