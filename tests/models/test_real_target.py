"""SmolLM2 on real prompts: float32 against transformers, int8 against float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.quality import chat_prompts, compare, default_prompts
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import Decoder
from forespeak.models.int8_decoder import Int8Decoder
from forespeak.models.loading import Checkpoint, load_checkpoint
from tests.tiny import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

_LONGEST = 64  # tokens of a prompt, for the tests' time


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return load_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def config(checkpoint: Checkpoint) -> ModelConfig:
    assert checkpoint.config is not None
    return checkpoint.config


@pytest.fixture(scope="module")
def float32(checkpoint: Checkpoint, config: ModelConfig) -> Decoder:
    return Decoder(config, checkpoint.weights())


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """Twenty, or all that there are."""
    return chat_prompts(checkpoint, default_prompts(), 20, _LONGEST)


def _transformers_model(checkpoint: Checkpoint, config: ModelConfig) -> Any:
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):  # no time for random weights; frequencies are made below
        model: Any = transformers.LlamaForCausalLM(theirs)
    weights = dict(checkpoint.weights())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs)
    return model.float().eval()


def test_float32_equals_transformers(
    checkpoint: Checkpoint, config: ModelConfig, float32: Decoder, prompts: list[list[int]]
):
    assert config.tie_word_embeddings
    theirs = _transformers_model(checkpoint, config)
    for prompt in prompts:
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        found = run(float32, prompt).logits
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_int8_is_near_float32(
    checkpoint: Checkpoint, config: ModelConfig, float32: Decoder, prompts: list[list[int]]
):
    """The short form of ``benchmarks/quality.py``, with the same bounds."""
    int8 = Int8Decoder(config, checkpoint.weights(), threads=1)
    found = compare(float32, int8, prompts[::2], 16, config.eos_token_ids)
    assert found.num_tokens > 100
    assert found.holds, found
    assert found.kl > 0
