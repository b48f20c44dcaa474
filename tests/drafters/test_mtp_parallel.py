"""Parallel heads: the formulas over whole texts, rounds and rows, texts through the engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.drafters import mtp_parallel
from forespeak.drafters.base import TargetParts
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.mtp_parallel import MtpParallelDrafter, ParallelHeads, random_drafter
from forespeak.drafters.starting import spread_vocabulary
from forespeak.engine.llm import LLM
from forespeak.engine.target import in_memory
from forespeak.errors import DrafterError, OptionError
from forespeak.formats.mtp_parallel import MtpParallelConfig, write
from forespeak.models.base import TargetModel
from forespeak.models.blocks import load_parameters
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import Decoder, RopeTable
from forespeak.sampling import SamplingParams
from forespeak.types import DenseLaws, Observation, SpeculationConfig
from tests.tiny import (
    FAMILIES,
    random_tokens,
    random_weights,
    run,
    tiny_config,
    tiny_decoder,
    tiny_int8,
)

pytestmark = pytest.mark.slow

N = 3
CONTEXT = 64


def target_config(family: str = "llama", **changes) -> ModelConfig:
    return tiny_config(family, max_position_embeddings=CONTEXT, **changes)


def wild(config: MtpParallelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Tensors far from the identity: gains that are not one, biases that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = random_drafter(config, generator)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            tensors[name] = tensor + 0.3 * noise
        elif "o_proj" in name or "down_proj" in name:
            tensors[name] = 5 * tensor
    return tensors


def written(folder: Path, model: TargetModel, *, reduced: int | None = None) -> dict[str, Tensor]:
    config = MtpParallelConfig.for_target(model.config)
    config = replace(config, num_heads=N, draft_vocab_size=reduced)
    tensors = wild(config)
    if reduced is not None:
        tensors["d2t"] = spread_vocabulary(model.config.vocab_size, reduced)
    write(folder, config, tensors)
    return tensors


def opened(folder: Path, model: TargetModel, num_rows: int = 1) -> MtpParallelDrafter:
    config = SpeculationConfig(method="mtp_parallel", drafter=str(folder))
    drafter = load_drafter(config, TargetParts(model), num_rows=num_rows)
    assert isinstance(drafter, MtpParallelDrafter)
    return drafter


def trunk_of(model: TargetModel, tokens: list[int]) -> Tensor:
    """[T, H] output of the last layer but one."""
    taps = run(model, tokens, taps=(model.config.num_layers - 2,)).taps
    assert taps is not None
    return taps[:, 0]


# --- the formulas, over a whole text -------------------------------------------------------------


def norm_by_hand(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary embedding of x [T, heads, D] as a product of complex numbers."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    steps = torch.arange(len(x), dtype=torch.float64)[:, None]
    angles = steps * base ** (-torch.arange(half, dtype=torch.float64) / half)
    z = z * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([z.real, z.imag], -1)


def head_by_hand(z: Tensor, weights: dict[str, Tensor], c: ModelConfig) -> Tensor:
    """One decoder layer in float64, token by token and query head by query head. [T, H]"""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = norm_by_hand(z, w["input_layernorm.weight"], c.rms_norm_eps)

    def product(name: str, inner: Tensor) -> Tensor:
        return inner @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    q = product("self_attn.q_proj", x).view(len(x), -1, c.head_dim)
    k = product("self_attn.k_proj", x).view(len(x), -1, c.head_dim)
    v = product("self_attn.v_proj", x).view(len(x), -1, c.head_dim)
    if "self_attn.q_norm.weight" in w:
        q = norm_by_hand(q, w["self_attn.q_norm.weight"], c.rms_norm_eps)
        k = norm_by_hand(k, w["self_attn.k_norm.weight"], c.rms_norm_eps)
    base = float(c.rope_parameters["rope_theta"])
    q, k = turned(q, base), turned(k, base)
    mixed = torch.zeros_like(q)
    for t in range(len(x)):
        first = 0 if c.sliding_window is None else max(0, t - c.sliding_window + 1)
        for g in range(c.num_heads):
            kv = g // (c.num_heads // c.num_kv_heads)
            scores = torch.stack([q[t, g] @ k[s, kv] for s in range(first, t + 1)])
            shares = (scores / c.head_dim**0.5).softmax(0)
            mixed[t, g] = shares @ v[first : t + 1, kv]
    y = z + product("self_attn.o_proj", mixed.flatten(1))
    inner = norm_by_hand(y, w["post_attention_layernorm.weight"], c.rms_norm_eps)
    gate = product("mlp.gate_proj", inner)
    return y + product("mlp.down_proj", gate * gate.sigmoid() * product("mlp.up_proj", inner))


def laws_by_hand(
    model: TargetModel, tensors: dict[str, Tensor], tokens: list[int], *, seed: int = 0
) -> Tensor:
    """Laws after every token of a text, [T, N, V] float64."""
    c = model.config
    outer = random_weights(c, seed)
    z = trunk_of(model, tokens).cpu().double()
    laws = []
    for head in range(N):
        prefix = f"heads.{head}."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        state = head_by_hand(z, own, c)
        state = norm_by_hand(state, outer["model.norm.weight"].double(), c.rms_norm_eps)
        laws.append(state @ outer["lm_head.weight"].double().T)
    return torch.stack(laws, dim=1)


def observation(model: TargetModel, tokens: list[int], part: slice, row: int = 0) -> Observation:
    z = trunk_of(model, tokens[: part.stop])[part]
    return Observation(row, tuple(tokens[part]), torch.zeros_like(z), z[:, None])


def laws(drafter: MtpParallelDrafter, rows: list[int], depth: int = 99) -> Tensor:
    found = drafter.propose(rows, [0] * len(rows), depth)
    assert isinstance(found, DenseLaws) and found.logits.dtype == torch.float32
    return found.logits


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_the_formulas(tmp_path, device, family):
    model = tiny_decoder(target_config(family), device=device)
    tensors = written(tmp_path, model)
    drafter = opened(tmp_path, model)
    assert (drafter.info.max_depth, drafter.info.taps) == (N, (1,))
    tokens = random_tokens(14)
    expected = laws_by_hand(model, tensors, tokens)
    drafter.admit(0)
    for at in range(len(tokens)):
        drafter.observe([observation(model, tokens, slice(at, at + 1))])
        found = laws(drafter, [0])[0].cpu().double()
        torch.testing.assert_close(found, expected[at], atol=1e-4, rtol=0)


def test_the_targets_last_layer_as_a_head_gives_the_targets_law(tmp_path):
    """The first head of the paper is the target's own last layer."""
    model = tiny_decoder(target_config("qwen3"))
    tensors = written(tmp_path, model)
    last = random_weights(model.config)
    for name in tensors:
        if name.startswith("heads.1."):
            tensors[name] = last[name.replace("heads.1.", "model.layers.2.")]
    config = replace(MtpParallelConfig.for_target(model.config), num_heads=N)
    write(tmp_path, config, tensors)
    drafter = opened(tmp_path, model)
    drafter.admit(0)
    tokens = random_tokens(11)
    drafter.observe([observation(model, tokens, slice(0, 11))])
    expected = run(model, tokens).logits[-1]
    torch.testing.assert_close(laws(drafter, [0])[0, 1], expected, atol=1e-4, rtol=0)


def test_a_reduced_draft_vocabulary(tmp_path):
    model = tiny_decoder(target_config())
    tensors = written(tmp_path, model, reduced=20)
    drafter = opened(tmp_path, model)
    drafter.admit(0)
    tokens = random_tokens(6)
    drafter.observe([observation(model, tokens, slice(0, 6))])
    found = drafter.propose([0], [0], N)
    ids = tensors["d2t"] + torch.arange(20)
    assert found.token_ids is not None and torch.equal(found.token_ids, ids)
    expected = laws_by_hand(model, tensors, tokens)[-1][:, ids]
    torch.testing.assert_close(found.logits[0].double(), expected, atol=1e-4, rtol=0)


# --- rounds and rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("chunk", [3, 512])
def test_rounds_of_rows_of_their_own_lengths(tmp_path, monkeypatch, family, chunk):
    """Prompts in pieces, rounds of some rows, shallow rounds, rows that leave and come again: the
    laws are those of the whole text run anew."""
    monkeypatch.setattr(mtp_parallel, "_CHUNK", chunk)
    model = tiny_decoder(target_config(family))
    tensors = written(tmp_path, model)
    drafter = opened(tmp_path, model, num_rows=3)
    rng = random.Random(chunk)
    texts: dict[int, list[int]] = {}
    seen: dict[int, int] = {}
    checked = 0
    for step in range(30):
        for row in range(3):
            if row not in texts or seen[row] + 5 > len(texts[row]):
                if row in texts:
                    drafter.release(row)
                texts[row] = random_tokens(rng.randint(6, 30), seed=100 * step + row)
                drafter.admit(row)
                seen[row] = 0
                start = rng.randint(1, len(texts[row]) - 5)
                while seen[row] < start:
                    part = slice(seen[row], min(start, seen[row] + rng.randint(1, 9)))
                    drafter.observe([observation(model, texts[row], part, row)])
                    seen[row] = part.stop
        asked = rng.sample(range(3), rng.randint(1, 3))
        depth = rng.randint(1, 5)
        found = laws(drafter, asked, depth)
        for place, row in enumerate(asked):
            expected = laws_by_hand(model, tensors, texts[row][: seen[row]])[-1, :depth]
            torch.testing.assert_close(found[place].double(), expected, atol=1e-4, rtol=0)
            checked += 1
        parts = {row: slice(seen[row], seen[row] + rng.randint(1, 4)) for row in asked}
        drafter.observe([observation(model, texts[row], parts[row], row) for row in asked])
        seen |= {row: part.stop for row, part in parts.items()}
    assert checked > 30


def test_up_to_the_last_position_of_the_context(tmp_path):
    model = tiny_decoder(target_config())
    tensors = written(tmp_path, model)
    drafter = opened(tmp_path, model)
    drafter.admit(0)
    tokens = random_tokens(CONTEXT)
    drafter.observe([observation(model, tokens, slice(0, CONTEXT))])
    expected = laws_by_hand(model, tensors, tokens)[-1]
    torch.testing.assert_close(laws(drafter, [0])[0].double(), expected, atol=1e-4, rtol=0)


def test_training_sees_every_token_at_once():
    model = tiny_decoder(target_config("qwen2"))
    c = model.config
    config = replace(MtpParallelConfig.for_target(c), num_heads=N)
    heads = ParallelHeads(config)
    assert all(bool(p.isnan().all()) for p in heads.parameters())
    tensors = wild(config)
    load_parameters(heads, tensors, "here")
    tokens = random_tokens(9)
    z = trunk_of(model, tokens).clone()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(-3, -2).flatten(-2)

    rotation = RopeTable(c, CONTEXT).lookup(torch.arange(9))
    states = heads(z.expand(2, 9, -1), rotation, attend)
    assert states.shape == (2, 9, N, c.hidden_size)
    found = model.head(model.norm(states.detach()))[1].double()
    torch.testing.assert_close(found, laws_by_hand(model, tensors, tokens), atol=1e-4, rtol=0)
    states.square().sum().backward()
    for name, parameter in heads.named_parameters():
        # A bias of all keys moves all scores of a query alike.
        unmoved = name.endswith("k_proj.bias")
        assert parameter.grad is not None, name
        assert unmoved or bool(parameter.grad.abs().sum() > 0), name


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("reduced", [None, 30])
def test_texts_equal_plain_decoding(tmp_path, kind, reduced):
    config = target_config()
    target = in_memory(tiny_int8(config) if kind == "int8" else tiny_decoder(config))
    written(tmp_path, target.model, reduced=reduced)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompt = random_tokens(7)
    plain = LLM(target).generate(prompt, params)
    for builder in ("chain", "ddtree", "static_tree"):
        llm = LLM(target, method="mtp_parallel", drafter=str(tmp_path), builder=builder)
        spoken = llm.generate(prompt, params)
        assert spoken.token_ids == plain.token_ids, builder
        assert spoken.stats.num_drafted > 0


def test_heads_that_know_the_text_are_accepted(tmp_path):
    """Heads that hand on the trunk state of a target whose layers add nothing, so that every law is
    the one of the newest token; the text repeats that token, and every draft is right."""
    config = target_config(num_layers=2)
    weights = random_weights(config)
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(tensor)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    target = in_memory(Decoder(config, weights.items()))
    drafter = replace(MtpParallelConfig.for_target(config), num_heads=N)
    tensors = wild(drafter)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.zeros_like(tensor)
    write(tmp_path, drafter, tensors)
    llm = LLM(target, method="mtp_parallel", drafter=str(tmp_path), builder="chain")
    params = SamplingParams(max_new_tokens=21, ignore_eos=True)
    spoken = llm.generate([5, 8, 13], params)
    assert spoken.token_ids == (13,) * 21
    assert spoken.stats.round_lengths == [N + 1] * 5


# --- refusals ------------------------------------------------------------------------------------


def test_a_target_without_the_trunk_layer(tmp_path):
    written(tmp_path, tiny_decoder(target_config(num_layers=4)))
    with pytest.raises(DrafterError, match="output of layer 2, and the target has layers 0 to 1"):
        opened(tmp_path, tiny_decoder(target_config(num_layers=2)))


def test_a_target_of_other_sizes_or_a_longer_context(tmp_path):
    written(tmp_path, tiny_decoder(target_config()))
    with pytest.raises(DrafterError, match="hidden size 40; this one has 48"):
        opened(tmp_path, tiny_decoder(target_config(hidden_size=48)))
    with pytest.raises(DrafterError, match="knows positions up to 64"):
        opened(tmp_path, tiny_decoder(tiny_config(max_position_embeddings=65)))


def test_no_drafter_named():
    with pytest.raises(OptionError, match="mtp_parallel needs a checkpoint"):
        LLM(in_memory(tiny_decoder()), method="mtp_parallel")
