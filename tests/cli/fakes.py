"""A stand-in for ``forespeak.engine.llm`` with the same shape and no model behind it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forespeak.drafters.naming import names_of, parts_of
from forespeak.errors import ModelError, PromptError
from forespeak.types import Completion, RoundStats, SamplingParams, SpeculationConfig

TOKENS_A_ROUND = {"autoregressive": 1, "ngram": 2, "draft_model": 3}
ANSWER = "[bold]Straße[/bold] ✓ "  # what rich would take for markup, and bytes beyond ASCII


NUM_LAYERS = 10


@dataclass
class FakeTarget:
    name: str
    dtype_name: str = "int8"
    device: str = "cpu"
    threads: int = 2
    tokenizer: object = None
    description: str = "Fake 1B, int8 on cpu"
    model: Any = field(
        default_factory=lambda: types.SimpleNamespace(
            config=types.SimpleNamespace(num_layers=NUM_LAYERS), device=torch.device("cpu")
        )
    )
    notices: list[str] = field(default_factory=lambda: ["A notice about the machine."])


def load_target(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    context_length: int | None = None,
) -> FakeTarget:
    if name == "missing":
        raise ModelError("There is no model 'missing'; allowed: a folder. Check the spelling.")
    return FakeTarget(name, "int8" if dtype == "auto" else dtype, "cpu", threads or 2)


class FakeLLM:
    """Answers with ``ANSWER`` over and over, as many words as tokens are asked for.

    ``differs`` makes ``draft_model`` give another token at that position. ``interrupt_after``
    raises KeyboardInterrupt after so many pieces, once. ``most_layers`` limits ``truncate:N``.
    ``draft_s_a_token`` is what drafting a token costs.
    """

    differs: int | None = None
    interrupt_after: int | None = None
    most_layers = NUM_LAYERS - 1
    draft_s_a_token = 0.0005

    def __init__(
        self, target: Any = "smollm2-135m", *, method: str = "autoregressive", **given: Any
    ):
        cut = (given.get("drafter") or "").partition("truncate:")[2]
        if cut and int(cut) > self.most_layers:
            raise ModelError(f"truncate:{cut} is too many; allowed: 1 to {self.most_layers}.")
        self.target = target
        size = parts_of(method)[-1].size
        if method != "autoregressive":
            given["num_speculative_tokens"] = given.get("num_speculative_tokens") or size or 4
        self.speculation = SpeculationConfig(method=method, **given)
        self.builder = "none" if method == "autoregressive" else "chain"
        self.drafter_name = self.speculation.drafter
        self.prompts: list[Any] = []

    def generate(
        self,
        prompt: str | Sequence[dict[str, str]],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        params = params or SamplingParams()
        self.prompts.append(prompt)
        if "too long" in str(prompt):
            raise PromptError("The prompt has 9999 tokens; allowed: 10. Shorten it.")
        ids = list(range(params.max_new_tokens))
        if self.differs is not None and self.speculation.method == "draft_model":
            ids[self.differs] = -1
        for number in range(len(ids)):
            if on_text is not None:
                on_text(ANSWER)
            if number + 1 == type(self).interrupt_after:
                type(self).interrupt_after = None
                raise KeyboardInterrupt
        return Completion(ANSWER * len(ids), tuple(ids), "length", self._stats(len(ids)), 0.25)

    def _stats(self, num_ids: int) -> RoundStats:
        drafted = self.speculation.num_speculative_tokens or 0
        a_round = min(TOKENS_A_ROUND[names_of(self.speculation.method)[-1]], drafted + 1)
        rounds = -(-(num_ids - 1) // a_round)
        return RoundStats(
            num_rounds=rounds,
            num_tokens=num_ids - 1,
            num_drafted=0 if a_round == 1 else 4 * rounds,
            num_accepted=num_ids - 1 - rounds,
            verify_s=0.010 * rounds,
            draft_s=(self.draft_s_a_token * drafted if drafted else 0.002) * rounds,
        )

    def stream(self, prompt: Any, params: Any = None, *, raw: bool = False) -> Iterator[str]:
        yield ANSWER

    def gap(
        self, prompt: Any, answer_ids: Sequence[int], position: int, *, raw: bool = False
    ) -> float:
        return 0.0005


def module() -> types.ModuleType:
    """What takes the place of ``forespeak.engine.llm`` in ``sys.modules``."""
    fake = types.ModuleType("forespeak.engine.llm")
    fake.__dict__.update(
        LLM=type("LLM", (FakeLLM,), {}), load_target=load_target, Target=FakeTarget
    )
    return fake
