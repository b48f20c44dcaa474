"""SamplingParams: everything a user may ask of the text besides the prompt, checked once.

Importing this file does not import torch. Names follow vLLM's and OpenAI's request fields. A bad
value is an :class:`OptionError` that says what was given, what is allowed and what to do; a field
that could have no effect beside another one is refused too.

Filters (top-k, top-p, min-p, typical-p) at temperature 0 are not refused: they hold, because none
of them can remove the best token (see ``processors``), and clients send them along by default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from forespeak.errors import OptionError

MAX_LOGIT_BIAS = 100.0  # the range of OpenAI's API
MAX_PENALTY = 2.0  # the range of OpenAI's API for presence and frequency
REPETITION_RANGE = (0.01, 100.0)  # far beyond use; further out logits leave float32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one text is continued and what it may look like.

    Attributes:
        max_new_tokens: every token the user gets counts, end-of-sequence included.
        min_tokens: end-of-sequence and stop token ids are impossible, and stop strings do not
            count, until this many tokens are out. A grammar that is finished ends the text sooner:
            nothing else is left to write.
        temperature: 0 takes the best token always.
        seed: of all randomness of this text.
        top_k: only the k best tokens, ties with the k-th included; 0 is off.
        top_p: the smallest set of best tokens whose mass reaches top_p; 1 is off.
        min_p: tokens at least min_p times as likely as the best one; 0 is off.
        typical_p: the smallest set of tokens of nearly average surprise whose mass reaches
            typical_p (arXiv 2202.00666); 1 is off.
        repetition_penalty: logits of tokens seen in prompt or output are divided by it where
            positive and multiplied where negative; 1 is off.
        presence_penalty: subtracted once from tokens that stand in the output; 0 is off.
        frequency_penalty: subtracted for each time a token stands in the output; 0 is off.
        logit_bias: added to the logits of these ids.
        bad_words: texts that may not be written; each is forbidden in the tokenisations at the
            start of a text and after a space.
        allowed_token_ids: nothing else may be written; None allows all.
        stop: strings that end the text, found in the text as decoded.
        include_stop_str: leave the stop string, or the text of the stop token, in the text.
        stop_token_ids: tokens that end the text.
        ignore_eos: end-of-sequence is a token like any other.
        logprobs: log-probabilities of each token and of this many best ones; None is off.
        logprobs_after_processors: report those of the logits after the controls instead of those
            of the model.
        json_schema: text of a JSON schema that the output obeys.
        json_object: the output is some JSON object.
        regex: the whole output matches it.
        grammar: the output is derived from this grammar, in llguidance's Lark notation.
    """

    max_new_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_after_processors: bool = False
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_law()
        self._check_tokens()
        self._check_texts()
        self._check_grammars()

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0

    @property
    def constraint(self) -> str | None:
        """Name of the field that gives the output a grammar; None when there is none."""
        given = self._constraints()
        return given[0] if given else None

    def _constraints(self) -> list[str]:
        fields = {
            "json_schema": self.json_schema is not None,
            "json_object": self.json_object,
            "regex": self.regex is not None,
            "grammar": self.grammar is not None,
        }
        return [name for name, is_set in fields.items() if is_set]

    def _check_lengths(self) -> None:
        _int_from("max_new_tokens", self.max_new_tokens, 1, "Ask for at least one token.")
        _int_from("min_tokens", self.min_tokens, 0, "Leave it at 0 when any length will do.")
        if self.min_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_tokens is {self.min_tokens}; allowed: up to max_new_tokens, which is "
                f"{self.max_new_tokens}. Lower the one or raise the other."
            )

    def _check_law(self) -> None:
        _number("temperature", self.temperature, 0, math.inf, "Use 0 for the best token always.")
        _int_from("top_k", self.top_k, 0, "Use 0 to switch it off.")
        _number("top_p", self.top_p, 0, 1, "Use 1 to switch it off.", low_open=True)
        _number("min_p", self.min_p, 0, 1, "Use 0 to switch it off.")
        _number("typical_p", self.typical_p, 0, 1, "Use 1 to switch it off.", low_open=True)
        off = "Use 1 to switch it off."
        least, most = REPETITION_RANGE
        _number("repetition_penalty", self.repetition_penalty, least, most, off)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _number(name, value, -MAX_PENALTY, MAX_PENALTY, "Use 0 to switch it off.")
        if not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            raise OptionError(
                f"seed is {self.seed!r}; allowed: whole numbers from 0 to 2**63 - 1. Take a "
                "smaller one."
            )

    def _check_tokens(self) -> None:
        for token, bias in self.logit_bias.items():
            _token_id("logit_bias", token)
            what = f"logit_bias of token {token}"
            hint = "Use allowed_token_ids or bad_words to force or forbid a token."
            _number(what, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, hint)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise OptionError(
                    "allowed_token_ids is empty; allowed: at least one token id. Leave the option "
                    "out to allow all tokens."
                )
            for token in self.allowed_token_ids:
                _token_id("allowed_token_ids", token)
        for token in self.stop_token_ids:
            _token_id("stop_token_ids", token)
        if self.logprobs is not None:
            _int_from("logprobs", self.logprobs, 0, "0 reports the chosen token alone.")
        elif self.logprobs_after_processors:
            raise OptionError(
                "logprobs_after_processors is on and logprobs is off, so it has no effect; give "
                "logprobs=N too or leave it out."
            )

    def _check_texts(self) -> None:
        _texts("stop", self.stop)
        _texts("bad_words", self.bad_words)
        if any(not word.strip() for word in self.bad_words):
            raise OptionError(
                f"bad_words is {self.bad_words!r}; allowed: texts with more than white space. "
                "Drop the blank one."
            )
        if self.include_stop_str and not (self.stop or self.stop_token_ids):
            raise OptionError(
                "include_stop_str is on and there is no stop string and no stop token, so it has "
                "no effect; give stop or stop_token_ids too or leave it out."
            )

    def _check_grammars(self) -> None:
        given = self._constraints()
        if len(given) > 1:
            raise OptionError(
                f"{' and '.join(given)} are given together; allowed: one of json_schema, "
                "json_object, regex, grammar. Keep one."
            )
        if not given:
            return
        if self.ignore_eos:
            raise OptionError(
                f"ignore_eos and {given[0]} are given together, but a finished grammar allows "
                "nothing except the end; drop one of the two."
            )
        if given[0] != "json_object" and not str(getattr(self, given[0])).strip():
            raise OptionError(f"{given[0]} is empty; give its text or leave the option out.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _int_from(name: str, value: int, low: int, hint: str) -> None:
    if not (_is_int(value) and value >= low):
        raise OptionError(f"{name} is {value!r}; allowed: whole numbers from {low}. {hint}")


def _token_id(name: str, token: int) -> None:
    if not (_is_int(token) and token >= 0):
        raise OptionError(
            f"{name} has token id {token!r}; allowed: whole numbers from 0. Look the id up in the "
            "model's tokenizer."
        )


def _texts(name: str, texts: object) -> None:
    if isinstance(texts, str):
        raise OptionError(
            f"{name} is the single text {texts!r}; allowed: a sequence of texts. "
            f"Write ({texts!r},)."
        )
    if not isinstance(texts, tuple | list) or any(
        not (isinstance(text, str) and text) for text in texts
    ):
        raise OptionError(
            f"{name} is {texts!r}; allowed: texts of at least one character. Drop the empty one."
        )


def _number(
    name: str, value: float, low: float, high: float, hint: str, *, low_open: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and low <= value <= high:
        if not (low_open and value == low):
            return
    border = f"above {low:g}" if low_open else f"from {low:g}"
    upper = ", finite" if math.isinf(high) else f" to {high:g}"
    raise OptionError(f"{name} is {value!r}; allowed: numbers {border}{upper}. {hint}")
