"""Controls that bite: each made from the text that is written without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from forespeak.sampling import SamplingParams
from forespeak.types import Completion

LENGTH = 40
EOS = 0
SCHEMA = """{"type": "object", "properties": {"a": {"enum": ["ab", 12]}, "b": {"type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 3}},
    "required": ["a", "b"], "additionalProperties": false}"""
LARK = 'start: "{" body "}" | body\nbody: ("ab" | /[0-9]/ "-")+ "end"\n'.replace('(" b', '{" b')


@dataclass(frozen=True)
class ControlCase:
    """What is asked, and the same without the control that is to be seen at work."""

    params: SamplingParams
    without: SamplingParams


def _against_nothing(**fields: object) -> Callable[[Completion], ControlCase]:
    def make(base: Completion) -> ControlCase:
        return ControlCase(_params(**fields), _params())

    return make


def _params(**fields: object) -> SamplingParams:
    return dataclasses.replace(SamplingParams(max_new_tokens=LENGTH), **fields)  # type: ignore[arg-type]


def _bias(base: Completion) -> ControlCase:
    often = max(base.token_ids, key=base.token_ids.count)
    return ControlCase(_params(logit_bias={often: -3.0, base.token_ids[5]: 1.5}), _params())


def _bad_words(base: Completion) -> ControlCase:
    words = tuple({base.text[at : at + 2].strip() for at in range(3, 12, 2)} - {""})
    return ControlCase(_params(bad_words=words), _params())


def _allowed(base: Completion) -> ControlCase:
    gone = base.token_ids[4]
    return ControlCase(_params(allowed_token_ids=tuple(range(gone))), _params())


def _min_tokens(base: Completion) -> ControlCase:
    eager = {EOS: 4.0}
    return ControlCase(_params(logit_bias=eager, min_tokens=23), _params(logit_bias=eager))


def _stop_token(base: Completion) -> ControlCase:
    return ControlCase(_params(stop_token_ids=(base.token_ids[9],), min_tokens=5), _params())


def _ignored_end(base: Completion) -> ControlCase:
    eager = {EOS: 4.0}
    return ControlCase(_params(logit_bias=eager, ignore_eos=True), _params(logit_bias=eager))


def _stop_string(base: Completion) -> ControlCase:
    return ControlCase(_params(stop=(base.text[12:14],)), _params())


def _together(base: Completion) -> ControlCase:
    params = _params(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, min_tokens=7,
        logit_bias={base.token_ids[0]: -1.0, EOS: 1.5}, stop_token_ids=(base.token_ids[11],),
        bad_words=(base.text[1:3].strip() or "ab",), stop=("zzzz",),
        temperature=0.0, top_k=3, min_p=0.2,
    )  # fmt: skip
    return ControlCase(params, _params())


CONTROLS: dict[str, Callable[[Completion], ControlCase]] = {
    "repetition_penalty": _against_nothing(repetition_penalty=1.6),
    "presence_penalty": _against_nothing(presence_penalty=2.0),
    "frequency_penalty": _against_nothing(frequency_penalty=1.5),
    "negative_penalties": _against_nothing(frequency_penalty=-1.0, presence_penalty=-0.5),
    "logit_bias": _bias,
    "bad_words": _bad_words,
    "allowed_token_ids": _allowed,
    "min_tokens": _min_tokens,
    "stop_token_ids": _stop_token,
    "stop": _stop_string,
    "ignore_eos": _ignored_end,
    "json_schema": _against_nothing(json_schema=SCHEMA),
    "json_object": _against_nothing(json_object=True),
    "regex": _against_nothing(regex=r"(ab|[0-9]{2},)*[c-e]{3,30}-(true|false)"),
    "grammar": _against_nothing(grammar=LARK),
    "together": _together,
}
GRAMMARS = ("json_schema", "json_object", "regex", "grammar")
