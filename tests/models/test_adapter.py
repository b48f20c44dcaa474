"""Architectures outside our own decoder against transformers' plain forward of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from forespeak.models.adapter import TransformersModel, load_adapter
from forespeak.models.decoder import Decoder
from forespeak.models.loading import load_checkpoint
from tests.models.driver import Driver, Row, chain, random_tree
from tests.tiny import random_tokens, run

pytestmark = pytest.mark.slow

_TOLERANCE = 1e-4
_VOCABULARY = 83
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_WINDOW = {"sliding_window": 7}  # smaller than the texts below
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", _SIZES | _MIXED | _WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", _SIZES | _MIXED | _WINDOW | {"head_dim": 8}),
    "phi3": ("Phi3", _SIZES | _WINDOW),
    "mixtral": ("Mixtral", _SIZES | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", _SIZES | _EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", _SIZES | _EXPERTS | {"head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", _SIZES | _ROUTED | _GROUPS | _LATENT),
    "glm4_moe": ("Glm4Moe", _SIZES | _ROUTED | _GROUPS | {"head_dim": 8}),
    "gpt_oss": ("GptOss", _SIZES | _MIXED | _WINDOW | {"head_dim": 8, "num_local_experts": 4}),
    "llama4": (
        "Llama4",
        _SIZES
        | {"head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 48}
        | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]}
        | {"num_local_experts": 4, "no_rope_layers": [1, 0, 1]},
    ),
    "gpt_neox": ("GPTNeoX", _SIZES),
    "gpt2": ("GPT2", _GPT),
    "granite": (
        "Granite",
        _SIZES
        | {"logits_scaling": 3.0, "embedding_multiplier": 2.0}
        | {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "cohere2": ("Cohere2", _SIZES | _MIXED | _WINDOW | {"logit_scale": 0.3}),
    "olmo2": ("Olmo2", _SIZES),
    "opt": (
        "OPT",
        _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 24},
    ),
}
_CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
}


def save(folder: Path, family: str, sizes: dict[str, Any]) -> Path:
    """A random checkpoint whose logits differ clearly, written by transformers."""
    names = _CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    torch.manual_seed(0)
    model = getattr(transformers, names[1])(getattr(transformers, names[0])(**sizes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), *CASES[request.param])


def plain_model(folder: Path, device: torch.device) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    )
    return model.to(device).eval()


@torch.inference_mode()
def plain(reference: Any, tokens: Sequence[int]) -> Tensor:
    ids = torch.tensor([tokens], device=reference.device)
    logits: Tensor = reference(input_ids=ids, use_cache=False).logits
    return logits[0].float()


class AdapterDriver(Driver):
    """The driver with an adapter's cache."""

    def __init__(self, model: TransformersModel, num_rows: int = 1) -> None:
        cache: Any = model.new_cache(num_rows, 4)  # small, so that it has to grow
        self.model, self.cache = model, cache
        self.rows = [Row() for _ in range(num_rows)]


def assert_near(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=_TOLERANCE, rtol=0)


def check_nodes(driver: Driver, row: int, logits: Tensor, first: int, reference: Any) -> None:
    """Logits of the pending nodes from ``first`` on against plain forwards of their paths."""
    for i, ours in enumerate(logits):
        assert_near(ours, plain(reference, driver.rows[row].tokens_to(first + i))[-1])


def test_chunks_equal_plain(folder: Path, device: torch.device):
    model, reference = load_adapter(folder, device=device), plain_model(folder, device)
    tokens = random_tokens(29)
    whole = plain(reference, tokens)
    ours = AdapterDriver(model).prefill(0, tokens, chunk=6)
    assert ours.logits.dtype == torch.float32
    assert_near(ours.logits, whole)
    assert_near(model.head(ours.hidden), whole)
    asked = torch.tensor([3, 28], device=device)
    assert_near(run(model, tokens, logits_at=asked).logits, whole[asked])


def test_trees_commits_and_cuts(folder: Path, device: torch.device):
    model, reference = load_adapter(folder, device=device), plain_model(folder, device)
    driver = AdapterDriver(model)
    driver.prefill(0, random_tokens(10, seed=1))
    tree = random_tree(9, seed=2, spread=4)
    check_nodes(driver, 0, driver.forward({0: tree})[0].logits, 0, reference)
    below = random_tree(3, seed=3, first_parent=8)  # a second forward over the same tree
    check_nodes(driver, 0, driver.forward({0: below})[0].logits, 9, reference)
    driver.commit(0, driver.rows[0].leaves()[-1])
    check_nodes(driver, 0, driver.forward({0: chain([5, 6])})[0].logits, 0, reference)
    driver.settle(0, 1)
    driver.forward({0: [(7, -1), (8, 0)]})
    driver.truncate(0, 9)
    check_nodes(driver, 0, driver.forward({0: chain([9, 4])})[0].logits, 0, reference)
    driver.release(0)
    check_nodes(driver, 0, driver.forward({0: chain([3, 2])})[0].logits, 0, reference)


def test_rows_of_different_lengths(folder: Path, device: torch.device):
    model, reference = load_adapter(folder, device=device), plain_model(folder, device)
    driver = AdapterDriver(model, num_rows=3)
    driver.prefill(0, random_tokens(11, seed=1))
    driver.prefill(2, random_tokens(4, seed=2))
    new = {2: random_tree(5, seed=3), 1: chain(random_tokens(9, seed=4)), 0: chain([7])}
    for row, out in driver.forward(new, taps=(1,)).items():
        check_nodes(driver, row, out.logits, 0, reference)
        assert out.taps is not None and out.taps.shape == (len(new[row]), 1, 32)


def test_taps_and_hidden(folder: Path, device: torch.device):
    model, reference = load_adapter(folder, device=device), plain_model(folder, device)
    tokens = random_tokens(12)
    ours = run(model, tokens, taps=(1, 0))
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=device)
        states = reference(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    assert ours.taps is not None
    assert_near(ours.taps[:, 0], states[2][0])
    assert_near(ours.taps[:, 1], states[1][0])
    hooks = [m for m in model.language_model.modules() if m._forward_hooks]
    again = run(model, tokens)
    assert again.taps is None
    assert not hooks, "a hook was left behind"


def test_config_and_embedding(folder: Path, device: torch.device):
    model = load_adapter(folder, device=device)
    assert (model.config.vocab_size, model.config.num_layers) == (_VOCABULARY, 3)
    assert model.config.max_position_embeddings == 128
    assert model.config.eos_token_ids == (2,)
    embedded = model.embed(torch.tensor([[1, 2, 3]], device=device))
    module = model.language_model.get_input_embeddings()
    assert torch.equal(embedded, module(torch.tensor([[1, 2, 3]], device=device)))
    assert model.dtype_name == "float32" and model.device.type == device.type


def test_llama_equals_our_decoder(tmp_path: Path, device: torch.device):
    save(tmp_path, "Llama", _SIZES)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config is not None
    ours = run(Decoder(checkpoint.config, checkpoint.weights(), device=device), random_tokens(15))
    adapted = run(load_adapter(tmp_path, device=device), random_tokens(15))
    assert_near(adapted.logits, ours.logits)
    assert_near(adapted.hidden, ours.hidden)


def test_bfloat16(tmp_path: Path, device: torch.device):
    save(tmp_path, "Gemma2", CASES["gemma2"][1])
    model = load_adapter(tmp_path, dtype="bfloat16", device=device)
    out = run(model, random_tokens(9), taps=(0,))
    assert model.dtype_name == "bfloat16"
    assert (out.logits.dtype, out.hidden.dtype) == (torch.float32, torch.bfloat16)


def test_rotary_frequencies_are_fixed(tmp_path: Path, device: torch.device):
    """longrope switches by the text's length; each context length is one model throughout."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
    }
    save(
        tmp_path,
        "Phi3",
        _SIZES | {"rope_parameters": rope, "original_max_position_embeddings": 16},
    )
    reference = plain_model(tmp_path, device)
    short = load_adapter(tmp_path, device=device)
    assert short.config.max_position_embeddings == 16
    tokens = random_tokens(30)
    assert_near(
        AdapterDriver(short).prefill(0, tokens[:16], 5).logits, plain(reference, tokens[:16])
    )
    long = load_adapter(tmp_path, device=device, context_length=100)
    assert long.config.max_position_embeddings == 100
    assert_near(AdapterDriver(long).prefill(0, tokens, 5).logits, plain(reference, tokens))
