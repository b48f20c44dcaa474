"""Layer sizes written as HF fields are read back as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forespeak.formats.layer_fields import layer_fields
from forespeak.models.config import ModelConfig
from tests.tiny import FAMILIES, ROPES, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ROPES)
def test_round_trip(family, rope):
    config = tiny_config(family, rope)
    assert ModelConfig.from_hf(layer_fields(config)) == config


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("mistral", sliding_window=None, sliding_layers=()),
        tiny_config("qwen2", sliding_window=9, sliding_layers=(False, True, False)),
        tiny_config("qwen3", attention_bias=True, output_bias=True),
        tiny_config("llama", attention_bias=True, output_bias=True, mlp_bias=True),
        tiny_config("llama", bos_token_id=None, eos_token_ids=(), tie_word_embeddings=True),
        replace(tiny_config("qwen2", eos_token_ids=(3, 5), bos_token_id=7), model_type="mimo"),
    ],
)
def test_round_trip_of_switches(config):
    assert ModelConfig.from_hf(layer_fields(config)) == config


def test_a_llama_with_biases_on_q_k_and_v_alone_is_written_as_a_qwen2():
    config = tiny_config("llama", attention_bias=True)
    assert ModelConfig.from_hf(layer_fields(config)) == replace(config, model_type="qwen2")
