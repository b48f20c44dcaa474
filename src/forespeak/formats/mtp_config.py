"""Config and tensors of chained prediction modules (MTP).

M modules, H hidden size, V target vocabulary, Vd draft vocabulary. Internal names and shapes::

    layers.{m}.token_layernorm.weight    [H]      norm of the embedding
    layers.{m}.hidden_layernorm.weight   [H]      norm of the state before it
    layers.{m}.input_proj.weight         [H, 2H]  joins the two
    layers.{m}.block.*                            one decoder layer
    layers.{m}.final_layernorm.weight    [H]      before the target's head
    embed_tokens.{m}.weight, lm_head.{m}.weight   [V, H] copies of the target's, where stored
    d2t [Vd], t2d [V]                             reduced draft vocabulary only

The block is a layer of ours, whose tensors have the names of ``blocks.DecoderLayer``, or one of
transformers, whose tensors have the names of the target's own layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forespeak.errors import DrafterError, OptionError, unknown_choice
from forespeak.formats.drafter_files import Shape
from forespeak.formats.drafters import D2T, T2D
from forespeak.formats.fields import MOST_PARTS
from forespeak.models.config import OUR_FAMILIES, ModelConfig, weight_shapes

RECURSION_STATES = ("normed", "raw")
"""What a module hands on: its output after or before ``final_layernorm``."""

_UNIT_OFFSET = (
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Chained modules.

    Attributes:
        model_type: family of the block.
        hidden_size: H.
        vocab_size: V.
        rms_norm_eps: of the norms around the block.
        num_modules: M. Drafts deeper than that use the modules in turn.
        layer: sizes of a block of ours; None takes a layer of the target's own kind from
            transformers.
        hidden_first: input_proj reads [state, embedding], as in the paper and in MiMo; most
            releases have [embedding, state].
        recursion_state: one of ``RECURSION_STATES``.
        zero_first_embedding: the pair at position 0 has an embedding of zeros, as vLLM and SGLang
            run DeepSeek, GLM and MiMo modules.
        draft_vocab_size: Vd of a reduced draft vocabulary.
        layer_values: numbers that a block of transformers keeps for a token of context.

    Raises:
        OptionError: values that cannot be.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    num_modules: int = 1
    layer: ModelConfig | None = None
    hidden_first: bool = True
    recursion_state: str = "normed"
    zero_first_embedding: bool = False
    draft_vocab_size: int | None = None
    layer_values: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_modules <= MOST_PARTS:
            raise OptionError(
                f"num_modules is {self.num_modules}; allowed: 1 or more, up to {MOST_PARTS}."
            )
        if self.recursion_state not in RECURSION_STATES:
            raise OptionError(
                unknown_choice("Recursion state", self.recursion_state, RECURSION_STATES)
            )
        layer = self.layer
        if layer is not None and (layer.hidden_size, layer.num_layers) != (self.hidden_size, 1):
            raise OptionError(
                f"A module's block has {layer.num_layers} layers of hidden size "
                f"{layer.hidden_size}; it is one layer of {self.hidden_size}."
            )
        if layer is not None and layer.vocab_size != self.vocab_size:
            raise OptionError(
                f"vocab_size is {self.vocab_size} and layer.vocab_size {layer.vocab_size}; both "
                "are the target's tokens and must be equal."
            )

    @classmethod
    def for_target(cls, target: ModelConfig) -> MtpConfig:
        """One module with a layer like the target's.

        Raises:
            OptionError: the target's layers are not ours.
        """
        if target.model_type not in OUR_FAMILIES:
            raise OptionError(
                f"A new module gets a layer like the target's, and a {target.model_type} model "
                f"runs through transformers; allowed targets: {', '.join(OUR_FAMILIES)}. Choose "
                "one of these or another method."
            )
        layer = module_layer(target)
        return cls(
            model_type=layer.model_type, hidden_size=layer.hidden_size,
            vocab_size=layer.vocab_size, rms_norm_eps=layer.rms_norm_eps, layer=layer,
        )  # fmt: skip

    @property
    def max_positions(self) -> int | None:
        """A layer of the target's own kind reaches as far as the target."""
        return None if self.layer is None else self.layer.max_position_embeddings

    @property
    def context_values(self) -> int:
        """Keys and values (or what stands for them) of all modules for a token of context."""
        one = self.layer_values
        if self.layer is not None:
            one = 2 * self.layer.num_kv_heads * self.layer.head_dim
        return one * self.num_modules

    @property
    def unit_offset(self) -> bool:
        """Norm weights are distances from one (Qwen3-Next and later)."""
        return self.model_type in _UNIT_OFFSET

    def facts(self) -> dict[str, str]:
        """Sizes and conventions, for people."""
        inner = "ours" if self.layer is not None else "of transformers"
        found = {
            "modules": f"{self.num_modules}, used in turn for deeper drafts",
            "block": f"a {self.model_type} layer {inner}",
            "joined": "[state, embedding]" if self.hidden_first else "[embedding, state]",
            "handed on": f"the {self.recursion_state} state",
            "embedding at position 0": "zeros" if self.zero_first_embedding else "kept",
        }
        if self.draft_vocab_size is not None:
            found["draft vocabulary"] = f"{self.draft_vocab_size} of {self.vocab_size} tokens"
        return found

    def check_target(self, target: ModelConfig) -> None:
        """Refuse a target whose layers are not those of the blocks.

        Raises:
            DrafterError: they are of another kind.
        """
        if self.layer is None and target.model_type != self.model_type:
            raise DrafterError(
                f"The modules have layers of a {self.model_type} model, which are made like the "
                f"target's own, and this target is a {target.model_type} model. Choose the target "
                "that they were trained for."
            )


def module_layer(model: ModelConfig) -> ModelConfig:
    """The sizes of one layer of a model; with a window where all its layers have it."""
    slides = bool(model.sliding_layers) and all(model.sliding_layers)
    return replace(
        model, num_layers=1, sliding_layers=(True,) if slides else (),
        sliding_window=model.sliding_window if slides else None,
    )  # fmt: skip


OUTER = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight",
         "final_layernorm.weight")  # fmt: skip
"""Tensors of a module besides its block."""


def tensor_shapes(config: MtpConfig) -> dict[str, Shape]:
    """Internal names and shapes of all parameters; those of a block of transformers left out."""
    hidden, shapes = config.hidden_size, dict[str, Shape]()
    for module in range(config.num_modules):
        for name in OUTER:
            is_product = name.startswith("input_proj")
            shapes[f"layers.{module}.{name}"] = (hidden, 2 * hidden) if is_product else (hidden,)
        if config.layer is not None:
            for name, shape in block_shapes(config.layer).items():
                shapes[f"layers.{module}.block.{name}"] = shape
    return shapes


def block_shapes(layer: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of one decoder layer of ours."""
    prefix = "model.layers.0."
    return {
        name.removeprefix(prefix): shape
        for name, shape in weight_shapes(layer).items()
        if name.startswith(prefix)
    }


def extra_shapes(config: MtpConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Tensors besides the parameters: those that must be there, and those that may be."""
    size, needed, optional = config.draft_vocab_size, dict[str, Shape](), dict[str, Shape]()
    if size is not None:
        needed[D2T], optional[T2D] = (size,), (config.vocab_size,)
    for module in range(config.num_modules):
        for name in ("embed_tokens", "lm_head"):
            optional[f"{name}.{module}.weight"] = (config.vocab_size, config.hidden_size)
    return needed, optional
