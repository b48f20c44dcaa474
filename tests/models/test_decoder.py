"""The torch decoder against transformers, on tiny checkpoints that transformers wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from forespeak.models.decoder import Decoder
from forespeak.models.loading import load_checkpoint
from tests.tiny import ROPES, random_tokens, random_weights, run, tiny_config, tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")

_TOLERANCE = 1e-4
_SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 7}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("Llama", {"head_dim": 24}),
    "llama odd heads": (
        "Llama",
        {"head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1},
    ),
    "llama one key head": ("Llama", {"num_key_value_heads": 1}),
    "llama all key heads": ("Llama", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {"head_dim": 10}),
    "qwen2 tied": ("Qwen2", {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen2 some windows": (
        "Qwen2",
        {"head_dim": 10, "use_sliding_window": True, "max_window_layers": 1, **_WINDOW},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3 biases": ("Qwen3", {"attention_bias": True}),
    "qwen3 tied, wide heads": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", _WINDOW),
    **{
        f"{name.lower()} {kind}": (name, {"rope_parameters": rope})
        for name in ("Llama", "Qwen3")
        for kind, rope in ROPES.items()
    },
}


def _randomize(model: torch.nn.Module) -> None:
    """Gains away from one, biases away from zero, and attention that is not uniform."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)


def _saved(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    """A random model of transformers, written to ``folder``."""
    config = getattr(transformers, f"{family}Config")(**_SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    _randomize(model)
    model.save_pretrained(folder)
    return model


def _loaded(folder: Path, device: torch.device, **options: Any) -> Decoder:
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config is not None
    return Decoder(checkpoint.config, checkpoint.weights(), device=device, **options)


def _close(found: Tensor, expected: Tensor, tolerance: float = _TOLERANCE) -> None:
    torch.testing.assert_close(found.cpu(), expected.cpu(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", _CASES)
def test_equals_transformers(name: str, tmp_path: Path, device: torch.device):
    family, changes = _CASES[name]
    theirs = _saved(tmp_path, family, changes)
    tokens = random_tokens(60)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens]), output_hidden_states=True)
    assert expected.logits.std() > 0.5  # not a model whose logits are all alike
    for plain in (False, True):
        ours = _loaded(tmp_path, device, plain_attention=plain)
        found = run(ours, tokens, taps=(0, 1))
        _close(found.logits, expected.logits[0])
        _close(found.hidden, expected.hidden_states[-1][0])
        assert found.taps is not None
        _close(found.taps, torch.stack([h[0] for h in expected.hidden_states[1:3]], dim=1))


def test_window_matters():
    """The windowed cases above would pass without a window only if it changed nothing."""
    tokens = random_tokens(60)
    narrow = tiny_config("mistral")
    wide = tiny_config("mistral", sliding_window=None, sliding_layers=())
    weights = random_weights(narrow)
    first, second = (run(Decoder(c, weights.items()), tokens).logits for c in (narrow, wide))
    assert narrow.sliding_window == 7
    _close(first[:7], second[:7])
    assert (first[7:] - second[7:]).abs().amax(-1).min() > 0.01


def test_dynamic_rope_beyond_its_length(tmp_path: Path, device: torch.device):
    """Served at 60 tokens a row, a model made for 32 has the frequencies of a text of 60."""
    changes = {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": 32}
    theirs = _saved(tmp_path, "Llama", changes)
    tokens = random_tokens(60)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(_loaded(tmp_path, device, context_length=60), tokens).logits
    _close(found, expected)
    assert (run(_loaded(tmp_path, device), tokens).logits - found).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_bfloat16_is_near_float32(family: str, device: torch.device):
    config = tiny_config(family)
    tokens = random_tokens(40)
    full = run(tiny_decoder(config, device=device), tokens).logits
    half = run(tiny_decoder(config, device=device, dtype=torch.bfloat16), tokens).logits
    assert half.dtype == torch.float32
    error = (full - half).abs()
    assert 0 < error.mean() < 0.05 * full.std()


def test_asked_logits_in_the_order_asked(device: torch.device):
    decoder = tiny_decoder(device=device)
    tokens = random_tokens(20)
    at = torch.tensor([19, 3, 3, 0], device=device)
    found = run(decoder, tokens, logits_at=at)
    _close(found.logits, run(decoder, tokens).logits[at], 1e-5)
    assert found.hidden.shape[0] == 20  # of all tokens, whatever was asked


def test_taps_come_in_the_order_asked(device: torch.device):
    decoder = tiny_decoder(device=device)
    forward = run(decoder, random_tokens(5), taps=(0, 2)).taps
    backward = run(decoder, random_tokens(5), taps=(2, 0)).taps
    assert forward is not None and backward is not None
    assert torch.equal(forward.flip(1), backward)
    assert run(decoder, random_tokens(5)).taps is None


def test_head_and_embedding_are_the_models_own(device: torch.device):
    config = tiny_config()
    weights = random_weights(config)
    decoder = Decoder(config, weights.items(), device=device)
    tokens = torch.tensor(random_tokens(6), device=device).view(2, 3)
    embedded = decoder.embed(tokens)
    assert torch.equal(embedded.cpu(), weights["model.embed_tokens.weight"][tokens.cpu()])
    out = run(decoder, random_tokens(6))
    _close(decoder.head(out.hidden.view(2, 3, -1)), out.logits.view(2, 3, -1), 1e-5)
    _close(out.logits, out.hidden.cpu() @ weights["lm_head.weight"].T, 1e-5)


def test_the_first_layers_are_a_model_of_their_own(device: torch.device):
    config = tiny_config("qwen3", sliding_window=5, sliding_layers=(True, False, True))
    short = replace(config, num_layers=2, sliding_layers=(True, False))
    kept = {n: w for n, w in random_weights(config).items() if ".layers.2." not in n}
    model = tiny_decoder(config, device=device)
    cut = run(model.truncated(2), random_tokens(30)).logits
    expected = run(Decoder(short, kept.items(), device=device), random_tokens(30)).logits
    _close(cut, expected, 1e-6)
    assert (run(model, random_tokens(30)).logits - cut).abs().max() > 0.01
