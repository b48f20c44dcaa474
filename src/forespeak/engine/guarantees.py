"""What is exact and what is refused, computed from the settings that the engine itself uses.

``docs/exactness.md`` is written from these tables (``make docs``), and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

from forespeak.drafters.naming import names_of
from forespeak.drafters.table import METHODS
from forespeak.engine.settings import DRAFT_SAMPLING, choose_rules, resolve
from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams
from forespeak.spec.verify import RULES
from forespeak.types import SpeculationConfig

# Each control at a value that changes something. A control missing here fails a test.
CONTROLS: Mapping[str, SamplingParams] = {
    "greedy (temperature 0)": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "seed": SamplingParams(temperature=1.0, seed=7),
    "top_k": SamplingParams(temperature=1.0, top_k=20),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "typical_p": SamplingParams(temperature=1.0, typical_p=0.9),
    "repetition_penalty": SamplingParams(repetition_penalty=1.3),
    "presence_penalty": SamplingParams(presence_penalty=0.5),
    "frequency_penalty": SamplingParams(frequency_penalty=0.5),
    "logit_bias": SamplingParams(logit_bias={5: 2.0}),
    "bad_words": SamplingParams(bad_words=("never",)),
    "allowed_token_ids": SamplingParams(allowed_token_ids=(1, 2, 3)),
    "min_tokens": SamplingParams(min_tokens=5),
    "max_new_tokens": SamplingParams(max_new_tokens=5),
    "stop": SamplingParams(stop=("end",)),
    "include_stop_str": SamplingParams(stop=("end",), include_stop_str=True),
    "stop_token_ids": SamplingParams(stop_token_ids=(3,)),
    "ignore_eos": SamplingParams(ignore_eos=True),
    "logprobs": SamplingParams(logprobs=5),
    "logprobs_after_processors": SamplingParams(logprobs=5, logprobs_after_processors=True),
    "json_schema": SamplingParams(json_schema='{"type": "object"}'),
    "json_object": SamplingParams(json_object=True),
    "regex": SamplingParams(regex="a+"),
    "grammar": SamplingParams(grammar='start: "a"'),
}


def methods() -> list[str]:
    """Methods of this version, and the cascade of look-up and a drafter with laws."""
    names = [name for name, entry in METHODS.items() if entry.available]
    return [*names, "ngram+draft_model"]


def cell(config: SpeculationConfig, temperature: float) -> str:
    """``exact``, ``lossy`` (a rule that was named changes the law) or ``refused``."""
    try:
        rules = choose_rules(resolve(config), temperature)
    except OptionError:
        return "refused"
    return "exact" if rules.point.lossless and rules.sampled.lossless else "lossy"


def control_table() -> str:
    """Control x method, as Markdown."""
    names = methods()
    lines = [_row("control", *(f"`{name}`" for name in names)), _rule(len(names) + 1)]
    for control, params in CONTROLS.items():
        cells = [cell(SpeculationConfig(method=name), params.temperature) for name in names]
        lines.append(_row(f"`{control}`" if " " not in control else control, *cells))
    return "\n".join(lines) + "\n"


def rule_table() -> str:
    """Method, builder and draft sampling x rule at temperatures above 0, as Markdown."""
    names = [name for name in RULES if name != "greedy"]
    lines = [
        _row("method", "builder", "draft tokens", "default", *(f"`{n}`" for n in names)),
        _rule(4 + len(names)),
    ]
    for method in methods():
        builders = METHODS[names_of(method)[-1]].builders or (None,)
        for builder in builders if len(builders) > 1 else (None,):
            for sampling in DRAFT_SAMPLING:
                line = _rule_row(method, builder, builders[0], sampling, names)
                lines += [line] if line else []
    return "\n".join(lines) + "\n"


def _rule_row(
    method: str, builder: str | None, only: str | None, sampling: str, rules: list[str]
) -> str | None:
    drawn = sampling if sampling == "probabilistic" else None
    config = SpeculationConfig(method=method, builder=builder, draft_sampling=drawn)
    try:
        chosen = choose_rules(resolve(config), 1.0)
    except OptionError:
        return None
    default = chosen.sampled if drawn else chosen.point
    cells = []
    for rule in rules:
        named = SpeculationConfig(method=method, builder=builder, draft_sampling=drawn, rule=rule)
        cells.append(cell(named, 1.0))
    tokens = "drawn from q" if drawn else "the best"
    return _row(f"`{method}`", builder or only or "none", tokens, default.name, *cells)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(count: int) -> str:
    return _row(*["---"] * count)
