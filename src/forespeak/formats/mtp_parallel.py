"""Parallel prediction heads on disk. There is no release to follow, so the layout is ours.

N heads, hidden size H, draft vocabulary Vd::

    config.json         model_type "mtp_parallel"
                        num_heads N, trunk_layer: the target's layer whose output the heads read
                        layer: sizes of each head's decoder layer, as in an HF config
                        draft_vocab_size Vd where the draft vocabulary is reduced
    model.safetensors   heads.{i}.self_attn.q_proj.weight ... one decoder layer of HF's names each
                        d2t [Vd] where the draft vocabulary is reduced

Norm and head are the target's and not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from forespeak.errors import CheckpointError, DrafterError, OptionError, shown
from forespeak.formats.drafter_files import DrafterFiles, Shape, write_drafter_files
from forespeak.formats.drafters import D2T, Dialect, DrafterCheckpoint, match_tensors
from forespeak.formats.fields import MOST_PARTS, refuse_other_fields, whole_number
from forespeak.formats.layer_fields import layer_fields
from forespeak.models.config import OUR_FAMILIES, ModelConfig, weight_shapes

_KIND = "mtp_parallel"
_KNOWN = ("num_heads", "trunk_layer", "layer", "draft_vocab_size")


@dataclass(frozen=True, kw_only=True)
class MtpParallelConfig:
    """Sizes of parallel heads.

    Attributes:
        layer: of each head's decoder layer; ``num_layers`` is 1.
        trunk_layer: 0-based target layer whose output, before the final norm, is the trunk state.
        num_heads: N, heads besides the target's own last layer: draft tokens of a round.
        draft_vocab_size: Vd of a reduced draft vocabulary, None for the whole.
    """

    layer: ModelConfig
    trunk_layer: int
    num_heads: int = 3
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_heads <= MOST_PARTS:
            raise OptionError(
                f"num_heads is {self.num_heads}; allowed: 1 or more, up to {MOST_PARTS}."
            )
        if self.trunk_layer < 0:
            raise OptionError(f"trunk_layer is {self.trunk_layer}; allowed: 0 or more.")
        if self.layer.num_layers != 1:
            raise OptionError(
                f"layer.num_layers is {self.layer.num_layers}; a head is one layer. For more draft "
                "tokens raise num_heads."
            )

    @classmethod
    def for_target(cls, target: ModelConfig) -> MtpParallelConfig:
        """Three heads like the target's last layer, beside it.

        Raises:
            OptionError: the target has one layer, or its layers are not ours.
        """
        if target.model_type not in OUR_FAMILIES:
            raise OptionError(
                f"A new head gets a layer like the target's, and a {target.model_type} model runs "
                f"through transformers; allowed targets: {', '.join(OUR_FAMILIES)}. Choose one of "
                "these or another method."
            )
        if target.num_layers < 2:
            raise OptionError(
                "The target has 1 layer, so nothing lies below its last one for the heads to read; "
                "allowed: targets of 2 layers or more. Choose another method."
            )
        slides = bool(target.sliding_layers) and target.sliding_layers[-1]
        layer = replace(
            target, num_layers=1, sliding_layers=(True,) if slides else (),
            sliding_window=target.sliding_window if slides else None,
        )  # fmt: skip
        return cls(layer=layer, trunk_layer=target.num_layers - 2)

    @property
    def hidden_size(self) -> int | None:
        """H of the target."""
        return self.layer.hidden_size

    @property
    def vocab_size(self) -> int | None:
        """V of the target."""
        return self.layer.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Tokens of context that the heads' layers can serve."""
        return self.layer.max_position_embeddings

    @property
    def context_values(self) -> int:
        """Keys and values of all heads for a token of context."""
        return self.num_heads * 2 * self.layer.num_kv_heads * self.layer.head_dim

    def facts(self) -> dict[str, str]:
        """For people."""
        facts = {
            "draft tokens a round": f"up to {self.num_heads}",
            "head": f"one {self.layer.model_type} layer each",
            "reads": f"the output of the target's layer {self.trunk_layer} (from 0)",
        }
        if self.draft_vocab_size is not None:
            facts["draft vocabulary"] = f"{self.draft_vocab_size} tokens"
        return facts

    def check_target(self, target: ModelConfig) -> None:
        """Refuse a target without the trunk layer.

        Raises:
            DrafterError: it has too few layers.
        """
        if self.trunk_layer >= target.num_layers:
            raise DrafterError(
                f"The heads read the output of layer {self.trunk_layer}, and the target has layers "
                f"0 to {target.num_layers - 1}. Choose the target that they were trained for."
            )

    @property
    def stacked(self) -> ModelConfig:
        """The heads as the layers of one config, side by side and not one after another."""
        windows = self.layer.sliding_layers * self.num_heads
        return replace(self.layer, num_layers=self.num_heads, sliding_layers=windows)


CONFIGS = {_KIND: MtpParallelConfig}


def tensor_shapes(config: MtpParallelConfig) -> dict[str, Shape]:
    """Internal names and shapes of all parameters; files have the same."""
    inside = {
        name.removeprefix("model.layers.0."): shape
        for name, shape in weight_shapes(config.layer).items()
        if name.startswith("model.layers.0.")
    }
    heads = range(config.num_heads)
    return {f"heads.{head}.{name}": shape for head in heads for name, shape in inside.items()}


def stored_shapes(config: MtpParallelConfig) -> dict[str, Shape]:
    """All that a checkpoint holds: the parameters, and the draft vocabulary where it is reduced."""
    size = config.draft_vocab_size
    return tensor_shapes(config) | ({} if size is None else {D2T: (size,)})


def write(folder: Path, config: MtpParallelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter; ``tensors`` by internal names."""
    values: dict[str, object] = {
        "model_type": _KIND,
        "num_heads": config.num_heads,
        "trunk_layer": config.trunk_layer,
        "layer": layer_fields(config.layer),
    }
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    write_drafter_files(folder, values, {name: tensors[name] for name in stored_shapes(config)})


def _recognises(files: DrafterFiles) -> bool:
    return files.config.get("model_type") == _KIND


def _read(files: DrafterFiles) -> DrafterCheckpoint:
    refuse_other_fields(files, _KNOWN, layout=_KIND)
    place = files.folder / "config.json"
    sizes = files.config.get("layer")
    if not isinstance(sizes, dict):
        raise CheckpointError(
            f"{place}: layer is {shown(sizes)}; it must be an object with the sizes of a decoder "
            "layer, named as in an HF config. Get the file again from where it came from."
        )
    layer = ModelConfig.from_hf(sizes, origin=f"{place} (layer)")
    if layer.num_layers != 1:
        raise CheckpointError(
            f"{place}: num_hidden_layers of layer is {layer.num_layers}; a head is one layer."
        )
    reduced = None
    if files.config.get("draft_vocab_size") is not None:
        reduced = whole_number(files, "draft_vocab_size")
    config = MtpParallelConfig(
        layer=layer, trunk_layer=whole_number(files, "trunk_layer", least=0),
        num_heads=whole_number(files, "num_heads", most=MOST_PARTS), draft_vocab_size=reduced,
    )  # fmt: skip
    expected = stored_shapes(config)
    names = match_tensors(files, {name: name for name in expected}, expected)
    return DrafterCheckpoint(
        method=_KIND, dialect=_KIND, origin=files.folder, config=config, names=names, files=files
    )


DIALECTS: tuple[Dialect, ...] = (Dialect(_KIND, _recognises, _read),)
