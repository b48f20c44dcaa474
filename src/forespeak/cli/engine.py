"""The only door from the command line to the engine. torch is imported when it is opened."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from forespeak.bench.prompts import Dialogue
from forespeak.cli import consoles
from forespeak.cli.options import TargetOptions
from forespeak.types import Completion, SamplingParams, SpeculationConfig

if TYPE_CHECKING:
    from forespeak.engine.llm import LLM, Target


def check(config: SpeculationConfig, *, drafter: bool = True) -> None:
    """Refuse settings that a method does not take, before anything is loaded.

    Args:
        drafter: refuse a method that needs a drafter and was given none, too.
    """
    from forespeak.engine.settings import refuse_missing_drafter, resolve

    resolved = resolve(config)
    if drafter:
        refuse_missing_drafter(resolved)


def open_target(options: TargetOptions) -> Target:
    """Load the target and say, once, what there is to know about it."""
    with consoles.waiting(f"Loading {options.target}"):
        from forespeak.engine.llm import load_target

        target = load_target(
            options.target,
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
            context_length=options.context_length,
        )
    for notice in target.notices:
        consoles.say(notice, style="dim")
    return target


def open_llm(target: Target, config: SpeculationConfig) -> LLM:
    """The target under one method."""
    with consoles.waiting(f"Preparing {config.method}"):
        from forespeak.engine.llm import LLM

        return LLM(target, **vars(config))


class EngineRunner:
    """One method of a comparison, run by the engine."""

    def __init__(self, llm: LLM, *, raw: bool) -> None:
        self._llm = llm
        self._raw = raw
        self.speculation: SpeculationConfig = llm.speculation
        self.method: str = llm.speculation.method
        self.builder: str = llm.builder
        self.drafter: str | None = llm.drafter_name

    def run(
        self,
        prompt: Dialogue,
        params: SamplingParams,
        on_text: Callable[[str], None] | None,
    ) -> Completion:
        """See ``bench.compare.Runner``."""
        return self._llm.generate(prompt, params, raw=self._raw, on_text=on_text)

    def gap(self, prompt: Dialogue, answer_ids: Sequence[int], position: int) -> float:
        """See ``bench.compare.Runner``."""
        return self._llm.gap(prompt, answer_ids, position, raw=self._raw)


def peak_memory_meter(device: str) -> Callable[[], float | None]:
    """A function that gives the process's peak so far in MB: of its device where that is CUDA.

    It gives None where the operating system does not say (Windows).
    """
    if device.startswith("cuda"):
        import torch

        return lambda: torch.cuda.max_memory_allocated() / 1e6
    try:
        import resource
    except ImportError:
        return lambda: None
    # ru_maxrss counts KiB on Linux and bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
