"""Config and tensors of EAGLE-3 drafters; the layouts that they are stored in: ``eagle3.py``.

H hidden size of the drafter, Ht of the target, K target layers read, V target vocabulary, Vd draft
vocabulary. Internal names, which are those of the speculators package::

    fc.weight [H, K Ht]                      joins the K features; fc.bias [H] where there is one
    input_norm.weight [K Ht]                 norm_before_fc
    fc_norm.{k}.weight [Ht]                  fc_norm
    layers.0.hidden_norm.weight [H]          on the state
    layers.0.input_layernorm.weight [H]      on the embedding
    layers.0.self_attn.{q,k,v}_proj.weight   read [embedding, state]: 2H columns
    layers.0. ...                            the rest of a plain layer
    layers.{i}. ...                          plain layers
    norm.weight [H], lm_head.weight [Vd, H]
    d2t [Vd], t2d [V]                        offsets and members of a reduced draft vocabulary
    embed_tokens.weight [V, H]               mostly left out: the target's
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forespeak.errors import DrafterError, OptionError
from forespeak.formats.drafter_files import Shape
from forespeak.formats.drafters import D2T
from forespeak.formats.eagle import check_draft_vocabulary
from forespeak.formats.eagle_layers import layer_shapes, small_layers
from forespeak.formats.layer_fields import LayeredConfig
from forespeak.models.config import ModelConfig

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
EMBEDDING_OUTPUT = -1
"""The target layer id that means the output of the embedding, before the first layer."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayeredConfig):
    """An EAGLE-3 drafter.

    Attributes:
        layers: sizes of its decoder layers; ``vocab_size`` is the target's.
        target_hidden_size: Ht, None where it is the drafter's own.
        num_features: K.
        target_layer_ids: the K layers whose outputs it reads, 0-based and rising; -1 is the output
            of the embedding. None means the second, the one before the middle and the fourth last
            (outputs of layers 1, L // 2 - 1 and L - 4), as engines take them where a checkpoint
            names none.
        draft_vocab_size: Vd of a reduced draft vocabulary.
        own_head: it has a matrix of logits of its own; False takes the target's.
        fc_bias: the layer that joins the features has a bias.
        norm_before_residual: the first layer adds to the normed state instead of the state.
        norm_before_fc: one norm over all features before they are joined.
        fc_norm: a norm for each feature before they are joined (EAGLE-3.1).
        norm_output: a step hands the normed state to the next one (EAGLE-3.1), not the raw one.

    Raises:
        OptionError: values that cannot be.
    """

    target_hidden_size: int | None = None
    num_features: int = 3
    target_layer_ids: tuple[int, ...] | None = None
    own_head: bool = True
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        check_draft_vocabulary(self.draft_vocab_size, self.layers.vocab_size)
        if self.norm_before_fc and self.fc_norm:
            raise OptionError(
                "norm_before_fc and fc_norm exclude each other: one norm over all features, or one "
                "for each. Leave one of the two out."
            )
        if self.target_hidden_size not in (None, self.layers.hidden_size) and not self.own_head:
            raise OptionError(
                f"The drafter has hidden size {self.layers.hidden_size} and its target "
                f"{self.target_hidden_size}, so it cannot take the target's head; it needs its own."
            )
        ids = self.target_layer_ids
        if ids is None:
            return
        if len(ids) != self.num_features:
            raise OptionError(
                f"target_layer_ids is {list(ids)} and num_features is {self.num_features}; there "
                "must be as many layers as features."
            )
        if ids[0] < EMBEDDING_OUTPUT or any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
            raise OptionError(
                f"target_layer_ids is {list(ids)}; allowed: rising numbers of target layers from "
                "0, or -1 for the output of the embedding."
            )

    @property
    def feature_size(self) -> int:
        """Ht."""
        return self.target_hidden_size or self.layers.hidden_size

    @property
    def hidden_size(self) -> int:
        """The target's, as every family's config says it."""
        return self.feature_size

    @property
    def own_embedding(self) -> bool:
        """The target's embedding is too wide or narrow for it."""
        return self.feature_size != self.layers.hidden_size

    def facts(self) -> dict[str, str]:
        ids = self.target_layer_ids
        read = "2nd, before the middle, 4th last (the default)"
        if ids is not None:
            read = ", ".join("embedding" if i == EMBEDDING_OUTPUT else str(i) for i in ids)
        facts = {
            "layers": str(self.layers.num_layers),
            "target layers read": read,
            "handed to the next step": "normed state" if self.norm_output else "raw state",
        }
        if self.draft_vocab_size is not None:
            facts["draft vocabulary"] = str(self.draft_vocab_size)
        if self.layers.sliding_window is not None:
            facts["window"] = f"{self.layers.sliding_window} tokens in some layers"
        return facts

    def check_target(self, target: ModelConfig) -> None:
        self.layers_of(target.num_layers)

    def layers_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The K layers that it reads of a target, rising; -1 is the embedding.

        Raises:
            DrafterError: the target is not deep enough.
        """
        ids = self.target_layer_ids
        if ids is None:
            # An engine walks through the layers and picks what is in the list: twice the same is
            # once, and always in rising order.
            ids = tuple(sorted(set(default_layer_ids(num_target_layers))))
            if len(ids) != self.num_features or ids[0] < EMBEDDING_OUTPUT:
                raise DrafterError(
                    f"The drafter reads {self.num_features} layers and names none, and the usual "
                    f"ones of a target of {num_target_layers} layers are {list(ids)}; three "
                    "different ones need 7 layers. Choose the drafter that was trained for this "
                    "target, or name its layers in its config."
                )
        if ids[-1] >= num_target_layers - 1:
            raise DrafterError(
                f"The drafter reads the outputs of the target's layers {list(ids)}; allowed: up to "
                f"{num_target_layers - 2} for a target of {num_target_layers} layers. (The last "
                "layer is not to be read: some tools take its output before the final norm and "
                "some after it.) Choose the drafter that was trained for this target."
            )
        return ids

    @classmethod
    def for_target(cls, target: ModelConfig) -> Eagle3Config:
        """One layer of the target's width on up to three of the target's layers."""
        ids = spread_layer_ids(target.num_layers)
        return cls(
            layers=small_layers(target),
            num_features=len(ids),
            target_layer_ids=ids,
        )


CONFIGS: Mapping[str, type[Eagle3Config]] = {"eagle3": Eagle3Config}


def default_layer_ids(num_target_layers: int) -> tuple[int, int, int]:
    """The layers that a checkpoint means which names none, not always different ones."""
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


def spread_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """The usual three layers, or as many as a shallow target has before its last."""
    if num_target_layers >= 7:
        return default_layer_ids(num_target_layers)
    return tuple(range(num_target_layers - 1))[-3:] or (EMBEDDING_OUTPUT,)


def tensor_shapes(config: Eagle3Config) -> dict[str, Shape]:
    """Tensors of the network and their shapes, and ``d2t`` where the vocabulary is reduced."""
    hidden, width = config.layers.hidden_size, config.num_features * config.feature_size
    shapes: dict[str, Shape] = {"fc.weight": (hidden, width), "norm.weight": (hidden,)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (width,)
    if config.fc_norm:
        for feature in range(config.num_features):
            shapes[f"fc_norm.{feature}.weight"] = (config.feature_size,)
    shapes |= layer_shapes(config.layers)
    shapes["layers.0.hidden_norm.weight"] = (hidden,)
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        shapes[name] = (shapes[name][0], 2 * hidden)
    if config.own_head:
        shapes[HEAD] = (config.draft_vocab_size or config.vocab_size, hidden)
    if config.own_embedding:
        shapes[EMBED] = (config.vocab_size, hidden)
    if config.draft_vocab_size is not None:
        shapes[D2T] = (config.draft_vocab_size,)
    return shapes
