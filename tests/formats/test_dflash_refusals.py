"""What is no block drafter of a known layout, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forespeak.errors import CheckpointError
from tests.formats.dflash_folders import (
    DEEPSPEC,
    INNER,
    SPECULATORS,
    ZLAB,
    config_of,
    folder_with,
    read,
    tensors_of,
)

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ZLAB, {"dflash_config": {**INNER, "target_layer_ids": [1, 7]}}, "up to 6 for a target of 8"),
    (ZLAB, {"dflash_config": {**INNER, "target_layer_ids": []}}, "numbers of target layers"),
    (ZLAB, {"dflash_config": {**INNER, "target_layer_ids": "1"}}, "list of layer numbers"),
    (ZLAB, {"dflash_config": {**INNER, "target_layer_ids": [-2, 1]}}, "-1 for the output"),
    (ZLAB, {"dflash_config": 3}, "must be an object"),
    (ZLAB, {"dflash_config": {**INNER, "mask_token_id": 83}}, "0 to 82"),
    (ZLAB, {"dflash_config": {"target_layer_ids": [1, 4]}}, "mask_token_id is missing"),
    (ZLAB, {"dflash_config": {**INNER, "output_multiplier": 2.0}}, "output_multiplier"),
    (ZLAB, {"dflash_config": {**INNER, "causal": True}}, "causal is true"),
    (ZLAB, {"is_causal": True}, "is_causal is true"),
    (ZLAB, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (ZLAB, {"block_size": 1}, "2 to 256 rows"),
    (ZLAB, {"block_size": None}, "block_size is None"),
    (ZLAB, {"num_hidden_layers": 3, "layer_types": None}, "lacks the tensor layers.2"),
    (ZLAB, {"model_type": "gpt_oss"}, "model_type is 'gpt_oss'"),
    (ZLAB, {"architectures": ["DFlash2DraftModel"]}, "convolutions"),
    (ZLAB, {"layer_types": ["sliding_attention"] * 2}, "no window is on"),
    (DEEPSPEC, {"architectures": ["Gemma4DSparkModel"]}, "Gemma 4's layers have four norms"),
    (DEEPSPEC, {"markov_head_type": "transformer"}, "gated, rnn, vanilla"),
    (DEEPSPEC, {"markov_rank": -1}, "from 0 on"),
    (DEEPSPEC, {"markov_rank": 0}, "without the Markov input"),
    (DEEPSPEC, {"markov_rank": 7}, "shape"),
    (DEEPSPEC, {"enable_confidence_head": "yes"}, "true or false"),
    (SPECULATORS, {"speculators_model_type": "dflash2"}, "dflash2"),
    (SPECULATORS, {"projector_type": "domino"}, "allowed: dflash"),
    (SPECULATORS, {"shift_label": True}, "sample_from_anchor"),
    (SPECULATORS, {"target_hidden_size": 64}, "allowed: 40"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "must be a list of layers"),
    (SPECULATORS, {"transformer_layer_config": None}, "must be an object"),
    (SPECULATORS, {"draft_vocab_size": 90}, "1 to 83"),
    (SPECULATORS, {"num_experts": 4}, "num_experts"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "message"), REFUSED)
def test_refusals(
    base: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kinds = {
        id(ZLAB): config_of(),
        id(DEEPSPEC): config_of(
            block_size=7, markov_rank=6, markov_head_type="gated", confidence_head=True,
            confidence_with_markov=True,
        ),
        id(SPECULATORS): config_of(
            block_size=6, sample_from_anchor=True, markov_rank=6, markov_head_type="rnn",
            confidence_head=True, confidence_with_markov=True, draft_vocab_size=50,
        ),
    }  # fmt: skip
    folder = folder_with(tmp_path, {**base, **changes}, tensors_of(kinds[id(base)]))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(folder)
    assert str(tmp_path) in str(caught.value)


def test_unknown_tensors(tmp_path: Path) -> None:
    tensors = {**tensors_of(config_of()), "layers.0.self_attn.sinks": torch.zeros(4)}
    with pytest.raises(CheckpointError, match="self_attn.sinks"):
        read(folder_with(tmp_path, ZLAB, tensors))


@pytest.mark.parametrize(
    ("sts", "message"),
    [
        ({"temperatures": [1.0] * 6}, "6 temperatures; expected are 7"),
        ({"temperatures": [1.0] * 6 + [0.0]}, "above 0"),
        ({"temperatures": "1"}, "no list of temperatures"),
        ({"values": []}, "no list of temperatures"),
        ([1.0], "object is expected"),
    ],
)
def test_temperatures(sts: object, message: str, tmp_path: Path) -> None:
    config = config_of(
        block_size=7, target_layer_ids=(-1, 4), sample_from_anchor=True, markov_rank=6,
        markov_head_type="gated", confidence_head=True, confidence_with_markov=True,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        read(folder_with(tmp_path, DEEPSPEC, tensors_of(config), sts))


def test_temperatures_of_nothing(tmp_path: Path) -> None:
    sts = {"temperatures": [1.0] * 7}
    with pytest.raises(CheckpointError, match="there is none"):
        read(folder_with(tmp_path, ZLAB, tensors_of(config_of()), sts))
