"""ModelConfig: sizes and switches of a decoder. The only file that reads HF field names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from forespeak.errors import CheckpointError, shown

OUR_FAMILIES = ("llama", "mimo", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` that our own decoder runs; the adapter takes the others."""

_SAME_RULES = {"mimo": "qwen2"}  # families whose config has another's fields and defaults

ROPE_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")
"""Rotary embedding kinds that ``rope.rope_frequencies`` knows."""

# Far beyond any model: damaged numbers must not make millions of layers or overflow a float32.
_MOST_LAYERS, _LEAST, _MOST = 4096, 1e-18, 1e18
_RANGE = f"a number above 0, from {_LEAST:g} to {_MOST:g}"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder of the Llama, Qwen2, Qwen3, MiMo or Mistral family.

    Attributes:
        model_type: HF ``model_type``.
        rope_parameters: transformers-5 layout, ``{"rope_type": ..., "rope_theta": ..., ...}``.
            ``frequency_factors``, a list of head_dim / 2 numbers that divide the frequencies, is
            ours: GGUF files of Llama 3 carry their scaling that way.
        attention_bias: bias on q, k and v. ``output_bias``: bias on o.
        qk_norm: RMSNorm on each head's q and k (Qwen3).
        sliding_window: tokens a layer sees at most (own token counted), None for all;
            ``sliding_layers[i]`` says whether layer i has the window. Empty when there is none.
        max_position_embeddings: tokens a row may hold, prompt and answer together.
        eos_token_ids: ids that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    @classmethod
    def from_hf(cls, values: Mapping[str, object], *, origin: str = "config.json") -> ModelConfig:
        """Read the fields of an HF ``config.json``, in the layout of transformers 4 or 5.

        A size must be there; a switch that is absent has the default of its transformers class.

        Args:
            origin: the file's name, for messages.

        Raises:
            CheckpointError: a field is missing, of a wrong type, or asks for something that the
                decoder does not have.
        """
        reader = Fields(values, origin)
        name = reader.text("model_type")
        family = _SAME_RULES.get(name, name)
        if name not in OUR_FAMILIES:
            raise reader.error(
                f"model_type is {name!r}; the built-in decoder runs {', '.join(OUR_FAMILIES)}. "
                "Other architectures run through transformers from a folder or a Hub id."
            )
        _refuse_what_we_lack(reader)
        num_layers = reader.count("num_hidden_layers", most=_MOST_LAYERS)
        hidden_size = reader.count("hidden_size")
        num_heads = reader.count("num_attention_heads")
        num_kv_heads = _num_kv_heads(reader, family, num_heads)
        window, layers = _sliding(reader, family, num_layers)
        bias = family == "qwen2" or (
            family in ("llama", "qwen3") and reader.switch("attention_bias", default=False)
        )
        return cls(
            model_type=name,
            vocab_size=reader.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(reader, family, hidden_size, num_heads),
            rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
            max_position_embeddings=reader.count("max_position_embeddings"),
            rope_parameters=_rope_parameters(reader),
            tie_word_embeddings=reader.switch("tie_word_embeddings", default=False),
            attention_bias=bias,
            output_bias=bias and family != "qwen2",
            mlp_bias=family == "llama" and reader.switch("mlp_bias", default=False),
            qk_norm=family == "qwen3",
            sliding_window=window,
            sliding_layers=layers,
            bos_token_id=_bos(reader, family),
            eos_token_ids=_eos(reader, family),
        )


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (as in HF checkpoints) and shape of every tensor the decoder needs.

    ``lm_head.weight`` is absent when the head is tied to the embedding.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size)
    }
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    products = (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, has_bias in products:
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)


class Fields:
    """A parsed config; each refusal is one sentence that names the file."""

    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self._values = values
        self._origin = origin

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._origin}: {what}")

    def get(self, key: str) -> object:
        return self._values.get(key)

    def has(self, key: str) -> bool:
        return key in self._values

    def wrong(self, key: str, allowed: str) -> CheckpointError:
        given = shown(self.get(key)) if self.has(key) else "missing"
        return self.error(
            f"{key} is {given}; it must be {allowed}. Get the file again from where it came from."
        )

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a name")
        return value

    def count(self, key: str, *, most: int = 2**31) -> int:
        value = self.get(key)
        if not _is_whole(value) or not 0 < value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}")
        return value

    def optional_count(self, key: str) -> int | None:
        return None if self.get(key) is None else self.count(key)

    def switch(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def number(self, key: str, *, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if not _is_positive(value):
            raise self.wrong(key, _RANGE)
        return float(value)

    def token_id(self, key: str) -> int:
        value = self.get(key)
        if not _is_whole(value) or value < 0:
            raise self.wrong(key, "a token id (a whole number, 0 or more)")
        return value


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> TypeGuard[int | float]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return _LEAST <= value <= _MOST


def _refuse_what_we_lack(reader: Fields) -> None:
    act = reader.get("hidden_act")
    if act not in (None, "silu"):
        raise reader.error(
            f"hidden_act is {act!r}; the built-in decoder has silu. Choose another model."
        )
    if reader.get("quantization_config") is not None:
        raise reader.error(
            "the checkpoint is quantised (quantization_config); allowed are plain float32, float16 "
            "or bfloat16 weights, or a GGUF file. Use the original model and --dtype int8."
        )
    if reader.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise reader.error(
            f"partial_rotary_factor is {reader.get('partial_rotary_factor')!r}; the built-in "
            "decoder rotates whole heads (1.0). Choose another model."
        )


def _num_kv_heads(reader: Fields, family: str, num_heads: int) -> int:
    given = reader.optional_count("num_key_value_heads")
    if given is None:
        # transformers' classes have numbers of their own for an absent field, not for null.
        absent = {"mistral": 8, "qwen2": 32, "qwen3": 32}
        known = not reader.has("num_key_value_heads") and family in absent
        given = absent[family] if known else num_heads
    if num_heads % given:
        raise reader.error(
            f"num_attention_heads is {num_heads} and num_key_value_heads is {given}; the first "
            "must be a multiple of the second. Get the file again from where it came from."
        )
    return given


def _head_dim(reader: Fields, family: str, hidden_size: int, num_heads: int) -> int:
    given = reader.optional_count("head_dim")
    if given is None and family == "qwen3" and not reader.has("head_dim"):
        given = 128  # the default of transformers' class
    if given is None and hidden_size % num_heads:
        raise reader.error(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, and "
            "head_dim is missing; one of the two must hold. Get the file again."
        )
    head_dim = given or hidden_size // num_heads
    if head_dim % 2:
        raise reader.wrong("head_dim", "an even number, because rotary embedding turns pairs")
    return head_dim


def _sliding(reader: Fields, family: str, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Window and the layers that have it, by the rules of transformers' classes."""
    if family == "llama":
        return None, ()
    layer_types = _layer_types(reader, num_layers)
    if family == "mistral":
        window = reader.optional_count("sliding_window")
        if not reader.has("sliding_window"):
            window = 4096  # the default of transformers' class
        if window is not None and layer_types is not None and not all(layer_types):
            raise reader.error(
                "layer_types mixes full and sliding attention, which a Mistral model does not "
                "have; remove layer_types or set sliding_window to null."
            )
        return (None, ()) if window is None else (window, (True,) * num_layers)
    window = None
    if reader.switch("use_sliding_window", default=False):
        window = reader.optional_count("sliding_window")
        if not reader.has("sliding_window"):
            window = 4096
    if layer_types is None:
        first = 28 if reader.get("max_window_layers") is None else _first_window_layer(reader)
        layer_types = tuple(window is not None and i >= first for i in range(num_layers))
    if any(layer_types) and window is None:
        raise reader.error(
            "layer_types asks for sliding_attention but no window is on; set use_sliding_window "
            "and sliding_window, or use full_attention."
        )
    return (window, layer_types) if any(layer_types) else (None, ())


def _first_window_layer(reader: Fields) -> int:
    value = reader.get("max_window_layers")
    if not _is_whole(value) or value < 0:
        raise reader.wrong("max_window_layers", "a whole number, 0 or more")
    return value


def _layer_types(reader: Fields, num_layers: int) -> tuple[bool, ...] | None:
    """For each layer whether it slides; None when the file does not say."""
    given = reader.get("layer_types")
    if given is None:
        return None
    allowed = ("full_attention", "sliding_attention")
    if (
        not isinstance(given, list)
        or len(given) != num_layers
        or any(kind not in allowed for kind in given)
    ):
        raise reader.wrong("layer_types", f"a list of {num_layers} of {', '.join(allowed)}")
    return tuple(kind == "sliding_attention" for kind in given)


def _rope_parameters(reader: Fields) -> dict[str, Any]:
    """The rotary settings in the layout of transformers 5, whichever layout the file has."""
    # transformers reads both fields and lets the older one win.
    key = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    given = reader.get(key) or {}
    if not isinstance(given, dict):
        raise reader.wrong(key, "an object")
    rope = dict(given)
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind not in ROPE_KINDS:
        raise reader.error(
            f"the rotary embedding is of type {kind!r}; allowed: {', '.join(ROPE_KINDS)}. "
            "Choose another model."
        )
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = reader.number("rope_theta", default=10000.0)
    if kind in ("llama3", "yarn"):
        outer = reader.optional_count("original_max_position_embeddings")
        if outer is not None:
            rope["original_max_position_embeddings"] = outer
        rope.setdefault("original_max_position_embeddings", reader.count("max_position_embeddings"))
    _check_rope_numbers(reader, key, rope, kind)
    factors = rope.get("frequency_factors")
    if factors is not None and not (
        isinstance(factors, list) and factors and all(map(_is_positive, factors))
    ):
        raise reader.error("the rotary frequency factors must be numbers above 0. Get it again.")
    return rope


def _check_rope_numbers(reader: Fields, key: str, rope: dict[str, Any], kind: str) -> None:
    needed = ["rope_theta"]
    if kind in ("dynamic", "linear", "llama3"):
        needed.append("factor")
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    if kind == "yarn":
        # transformers takes the ratio of the two lengths where the factor is absent or null.
        rope.setdefault("factor", None)
        optional = ("attention_factor", "beta_fast", "beta_slow", "factor", "mscale_all_dim")
        needed += ["original_max_position_embeddings"]
        needed += [name for name in (*optional, "mscale") if rope.get(name) is not None]
    for name in needed:
        if not _is_positive(rope.get(name)):
            given = shown(rope[name]) if name in rope else "missing"
            raise reader.error(
                f"{key}: {name} is {given}; rope type {kind} needs {_RANGE} "
                "there. Get the file again from where it came from."
            )
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise reader.error(
            f"{key}: partial_rotary_factor is {rope['partial_rotary_factor']!r}; the built-in "
            "decoder rotates whole heads (1.0). Choose another model."
        )


def _bos(reader: Fields, family: str) -> int | None:
    if not reader.has("bos_token_id"):
        return 1 if family in ("llama", "mistral") else None
    return None if reader.get("bos_token_id") is None else reader.token_id("bos_token_id")


def _eos(reader: Fields, family: str) -> tuple[int, ...]:
    value = reader.get("eos_token_id")
    if not reader.has("eos_token_id"):
        return (2,) if family in ("llama", "mistral") else ()
    if value is None:
        return ()
    if isinstance(value, list):
        if not all(_is_whole(item) and item >= 0 for item in value):
            raise reader.wrong("eos_token_id", "a token id or a list of them")
        return tuple(dict.fromkeys(value))
    return (reader.token_id("eos_token_id"),)
