"""Random schemas, regexes and grammars of moderate size, with a small vocabulary for them.

``random_case(rng)`` gives what a request would ask for and a function that says whether a finished
text obeys it, written without the grammar library.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from forespeak.sampling import SamplingParams

EOS = 0
END_OF_TURN = 1
PADDING = 2
_PIECES = [
    b'":',
    b'", "',
    b"true",
    b"null",
    b"ab",
    b"cab",
    b'{"',
    b"]}",
    b"12",
    b"  ",
    "é→".encode(),
]


def vocabulary() -> list[bytes]:
    """Two ends, a padding token, every byte that text needs and a few longer pieces."""
    ascii_bytes = [bytes([c]) for c in (9, 10, *range(32, 127))]
    high_bytes = [bytes([c]) for c in (*range(0x80, 0xC0), 0xC3, 0xE2)]
    return [b"<eos>", b"<eot>", b"", *ascii_bytes, *high_bytes, *_PIECES]


@dataclass(frozen=True)
class GrammarCase:
    """One constraint and its judge."""

    controls: SamplingParams
    obeys: Callable[[str], bool]


def random_case(rng: random.Random, *, max_new_tokens: int = 256, **fields: Any) -> GrammarCase:
    """A JSON schema (half of the time), a regex or a Lark grammar; ``fields`` are more controls."""
    kind = rng.choice(["json_schema", "json_schema", "regex", "grammar"])
    if kind == "json_schema":
        schema = random_schema(rng, depth=rng.randint(1, 3))
        text = json.dumps(schema)

        def obeys(output: str) -> bool:
            return is_valid(schema, json.loads(output))
    else:
        body = random_regex(rng, depth=3)
        pattern = body if kind == "regex" else rf"\({body}\)(?:\[{body}\])?"
        text = body if kind == "regex" else as_lark(body)

        def obeys(output: str) -> bool:
            return re.fullmatch(pattern, output) is not None

    fields[kind] = text
    controls = SamplingParams(max_new_tokens=max_new_tokens, **fields)
    return GrammarCase(controls, obeys)


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A JSON schema whose texts are of bounded length, so that every model comes to an end."""
    simple = ["string", "integer", "boolean", "null", "enum", "const"]
    kind = rng.choice(simple if depth == 0 else ["object", "object", "array", "anyOf", *simple])
    if kind == "object":
        names = rng.sample(["a", "b", "name", "x y", "é", 'q"t'], rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "string":
        low = rng.randint(0, 2)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 5)}
    if kind == "integer":
        low = rng.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "blue", 7, -1, True, None, "caba"], rng.randint(1, 4))}
    return {"const": rng.choice(["c", 0, False])} if kind == "const" else {"type": kind}


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """Whether the value obeys a schema of ``random_schema``."""
    if "anyOf" in schema:
        return any(is_valid(option, value) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(option) and value == option for option in options)
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(properties)
            and all(is_valid(properties[name], inner) for name, inner in value.items())
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(is_valid(schema["items"], inner) for inner in value)
        )
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)


def random_regex(rng: random.Random, depth: int) -> str:
    """A regex of bounded length that Python and the grammar library read in the same way."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(["a", "b", "cab", "[abc]", "[0-9]", "[^a]", "é", r"\.", "ab?"])
    kind = rng.choice(["sequence", "sequence", "choice", "repeat"])
    first = random_regex(rng, depth - 1)
    if kind == "repeat":
        return f"(?:{first})" + rng.choice(["?", "{2}", "{0,3}", "{1,4}"])
    second = random_regex(rng, depth - 1)
    return f"(?:{first}|{second})" if kind == "choice" else first + second


def as_lark(pattern: str) -> str:
    """A grammar of two rules that writes what the pattern matches, once or twice in brackets."""
    return f'start: "(" body ")" ("[" body "]")?\nbody: /{pattern}/\n'


def cases(seed: int, number: int, **fields: Any) -> Iterator[GrammarCase]:
    """``number`` cases, each with its own seed."""
    for index in range(number):
        yield random_case(random.Random(f"{seed}/{index}"), **fields)
