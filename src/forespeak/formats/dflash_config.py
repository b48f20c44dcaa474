"""Config and tensors of block drafters: DFlash, and DSpark, which is DFlash with heads on top.

Vd draft vocabulary, V target vocabulary, H hidden size, K features, r Markov rank, B block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forespeak.errors import DrafterError, OptionError, unknown_choice
from forespeak.formats.drafter_files import Shape
from forespeak.formats.drafters import D2T
from forespeak.formats.layer_fields import LayeredConfig
from forespeak.models.config import ModelConfig, weight_shapes

EMBEDDING_OUTPUT = -1
"""The target layer id that means the output of the embedding, before the first layer."""

MARKOV_HEADS = ("vanilla", "gated", "rnn")
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Copies of the target's embedding and head, which some releases carry."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayeredConfig):
    """A block drafter.

    Attributes:
        layers: sizes of its decoder layers; ``vocab_size`` is the target's. A windowed layer sees
            ``sliding_window`` positions of context.
        block_size: B rows of a block: the root and B - 1 masks.
        mask_token_id: what stands at the places to fill.
        target_layer_ids: layers whose outputs are its features, in that order, 0-based; -1 is the
            output of the embedding. Some may stand twice (small targets with the default rule).
        num_target_layers: of the target it was trained for, where known.
        sample_from_anchor: row i gives the token after its own place, so that B rows give B drafts.
            False: row i fills its own place, row 0 (the root's) gives nothing and there are B - 1.
        causal_windows: in a windowed layer a block row sees no later row of its block.
        anchored_windows: windows of all rows are counted from the root (those before it in number),
            not from each row's own place (itself included).
        markov_rank: r of the sequential head, 0 for none.
        markov_head_type: ``vanilla``, ``gated`` or ``rnn``.
        confidence_head: it estimates the chance of acceptance of each draft token.
        confidence_with_markov: that estimate reads the token before, too.
        confidence_bias: the estimate has a bias.
        temperatures: divide the logits of the estimates by depth (STS); empty for ones.
        draft_vocab_size: Vd of a reduced draft vocabulary.

    Raises:
        OptionError: values that cannot be.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    sample_from_anchor: bool = False
    causal_windows: bool = False
    anchored_windows: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = False
    confidence_bias: bool = True
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_block(self)
        _check_layer_ids(self.target_layer_ids, self.num_target_layers)
        _check_heads(self)

    @property
    def max_depth(self) -> int:
        """Draft tokens of a round."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def taps(self) -> tuple[int, ...]:
        """Decoder layers of the target that it reads, the embedding not among them."""
        return tuple(sorted(set(self.target_layer_ids) - {EMBEDDING_OUTPUT}))

    @property
    def has_heads(self) -> bool:
        """It is more than a DFlash drafter."""
        return self.markov_rank > 0 or self.confidence_head

    def facts(self) -> dict[str, str]:
        rows = "each row the token after it" if self.sample_from_anchor else "each row its own"
        facts = {
            "layers": str(self.layers.num_layers),
            "block size": f"{self.block_size} ({rows})",
            "draft tokens a round": f"up to {self.max_depth}",
            "target layers read": ", ".join(
                "embedding" if i == EMBEDDING_OUTPUT else str(i) for i in self.target_layer_ids
            ),
            "mask token": str(self.mask_token_id),
        }
        if self.layers.sliding_window is not None:
            facts["window"] = f"{self.layers.sliding_window} tokens in some layers"
        if self.markov_rank:
            facts["sequential head"] = f"{self.markov_head_type} of rank {self.markov_rank}"
        if self.confidence_head:
            calibrated = "calibrated" if self.temperatures else "not calibrated"
            facts["confidence head"] = calibrated
        if self.draft_vocab_size is not None:
            facts["draft vocabulary"] = str(self.draft_vocab_size)
        return facts

    def check_target(self, target: ModelConfig) -> None:
        if self.num_target_layers not in (None, target.num_layers):
            raise DrafterError(
                f"The drafter is for a target of {self.num_target_layers} layers; this one has "
                f"{target.num_layers}. Choose the drafter that was trained for this target."
            )
        try:
            _check_layer_ids(self.target_layer_ids, target.num_layers)
        except OptionError as error:
            raise DrafterError(f"The drafter does not fit this target: {error}") from None

    @classmethod
    def for_target(cls, target: ModelConfig) -> DFlashConfig:
        """A small drafter for a target."""
        return cls(
            layers=_small_layers(target), block_size=8, mask_token_id=target.vocab_size - 1,
            target_layer_ids=spread_layer_ids(target.num_layers, 3),
            num_target_layers=target.num_layers,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """A block drafter with heads: the same fields."""

    @classmethod
    def for_target(cls, target: ModelConfig) -> DSparkConfig:
        return cls(
            layers=_small_layers(target), block_size=7, mask_token_id=target.vocab_size - 1,
            target_layer_ids=spread_layer_ids(target.num_layers, 3),
            num_target_layers=target.num_layers, sample_from_anchor=True, markov_rank=32,
            confidence_head=True, confidence_with_markov=True,
        )  # fmt: skip


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The layers that a release means which names none: from the second to the third last, as many
    as it has layers, rounded to even at the half."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


def spread_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Up to ``count`` layers of a target of any depth, by the same rule where it has enough."""
    if num_target_layers >= count + 3:
        return default_layer_ids(num_target_layers, count)
    last = num_target_layers - 2  # the last layer's output is not to be read
    return tuple(range(max(0, last - count + 1), last + 1)) or (EMBEDDING_OUTPUT,)


def tensor_shapes(config: DFlashConfig) -> dict[str, Shape]:
    """Tensors of the network and their shapes, and ``d2t`` where the vocabulary is reduced.

    The copies of the target's embedding and head (:func:`copy_shapes`) are no part of it.
    """
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for name, shape in weight_shapes(config.layers).items():
        if name.startswith("model.layers."):
            shapes[name.removeprefix("model.")] = shape
    shapes |= dict(_head_shapes(config))
    if config.draft_vocab_size is not None:
        shapes[D2T] = (config.draft_vocab_size,)
    return shapes


def copy_shapes(config: DFlashConfig) -> dict[str, Shape]:
    """Copies of the target's embedding and of the part of its head that is drafted over."""
    head = config.draft_vocab_size or config.vocab_size
    return {EMBED: (config.vocab_size, config.hidden_size), HEAD: (head, config.hidden_size)}


def _head_shapes(config: DFlashConfig) -> Iterator[tuple[str, Shape]]:
    rank, hidden = config.markov_rank, config.hidden_size
    if rank:
        yield "markov_head.markov_w1.weight", (config.vocab_size, rank)
        yield "markov_head.markov_w2.weight", (config.draft_vocab_size or config.vocab_size, rank)
        if config.markov_head_type == "gated":
            yield "markov_head.gate_proj.weight", (rank, hidden + rank)
            yield "markov_head.gate_proj.bias", (rank,)
        if config.markov_head_type == "rnn":
            yield "markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden)
            yield "markov_head.joint_proj.bias", (3 * rank,)
    if config.confidence_head:
        width = hidden + (rank if config.confidence_with_markov else 0)
        yield "confidence_head.proj.weight", (1, width)
        if config.confidence_bias:
            yield "confidence_head.proj.bias", (1,)


def _small_layers(target: ModelConfig) -> ModelConfig:
    """Two layers of the target's width."""
    theta = target.rope_parameters.get("rope_theta", 10000.0)
    return ModelConfig(
        model_type="qwen3", vocab_size=target.vocab_size, hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size, num_layers=2, num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads, head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps, qk_norm=True,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip


def _check_block(config: DFlashConfig) -> None:
    if not 2 <= config.block_size <= 256:
        raise OptionError(
            f"block_size is {config.block_size}; allowed: 2 to 256 rows, the root's and the masks'."
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise OptionError(
            f"mask_token_id is {config.mask_token_id}; allowed: 0 to {config.vocab_size - 1}, an "
            "id of the target's vocabulary that its texts do not use."
        )
    windowed = config.layers.sliding_window is not None
    if config.anchored_windows and not windowed or config.causal_windows > config.anchored_windows:
        raise OptionError(
            "anchored_windows is for layers with windows, and causal_windows for anchored windows; "
            "allowed: false where there are none."
        )
    size = config.draft_vocab_size
    if size is not None and not 0 < size <= config.vocab_size:
        raise OptionError(
            f"draft_vocab_size is {size}; allowed: 1 to {config.vocab_size}, the target's tokens."
        )


def _check_layer_ids(ids: tuple[int, ...], num_target_layers: int | None) -> None:
    if not ids or min(ids) < EMBEDDING_OUTPUT:
        raise OptionError(
            f"target_layer_ids is {list(ids)}; allowed: numbers of target layers from 0, or -1 for "
            "the output of the embedding."
        )
    if num_target_layers is not None and max(ids) >= num_target_layers - 1:
        raise OptionError(
            f"target_layer_ids is {list(ids)}; allowed: up to {num_target_layers - 2} for a target "
            f"of {num_target_layers} layers. The last layer is not to be read: some tools take its "
            "output before the final norm and some after it."
        )


def _check_heads(config: DFlashConfig) -> None:
    if config.markov_head_type not in MARKOV_HEADS:
        raise OptionError(
            unknown_choice("Markov head type", str(config.markov_head_type), MARKOV_HEADS)
        )
    if config.markov_rank < 0:
        raise OptionError(f"markov_rank is {config.markov_rank}; allowed: 0 (no head) or more.")
    if config.confidence_head and config.confidence_with_markov and not config.markov_rank:
        raise OptionError(
            "confidence_with_markov is true and markov_rank is 0; allowed: a rank of 1 or more, or "
            "a confidence head without the Markov input."
        )
    if config.temperatures and not config.confidence_head:
        raise OptionError("Temperatures calibrate a confidence head, and there is none.")
    if config.temperatures and len(config.temperatures) != config.max_depth:
        raise OptionError(
            f"There are {len(config.temperatures)} temperatures; expected are {config.max_depth}, "
            "one for each draft token of a round."
        )
    if any(not 0 < value < float("inf") for value in config.temperatures):
        raise OptionError("A temperature is not a number above 0.")
