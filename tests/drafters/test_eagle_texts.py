"""EAGLE drafters in whole texts, in training, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forespeak.drafters import eagle, eagle3
from forespeak.drafters.base import TargetParts
from forespeak.drafters.sharing import Embedding, SharedHead, shared_or_own_head
from forespeak.drafters.starting import start_drafter
from forespeak.engine import decode
from forespeak.engine.llm import LLM
from forespeak.engine.reference import decode_greedy
from forespeak.engine.target import in_memory
from forespeak.errors import CheckpointError, DrafterError
from forespeak.formats import eagle as eagle_format
from forespeak.formats.drafter_files import write_drafter_files
from forespeak.formats.eagle import EagleConfig
from forespeak.formats.eagle3_config import Eagle3Config
from forespeak.models.attention import attend
from forespeak.models.blocks import load_parameters
from forespeak.models.config import ModelConfig
from forespeak.sampling import SamplingParams
from forespeak.types import Frontier, Observation
from tests.drafters.eagle_cases import TARGET, H, drafter_weights, opened
from tests.tiny import random_tokens, random_weights, run, tiny_decoder, tiny_int8

pytestmark = pytest.mark.slow

# --- whole texts ---------------------------------------------------------------------------------

BUILDERS = ("chain", "static_tree", "dynamic_tree")
PAIRS = [
    *(("eagle", builder) for builder in BUILDERS),
    *(("eagle3", builder) for builder in BUILDERS),
    ("eagle2", "dynamic_tree"),
]
CONTEXT = 48


@pytest.fixture(params=["float32", "int8"])
def model(request):
    config = replace(TARGET, max_position_embeddings=CONTEXT)
    return tiny_decoder(config) if request.param == "float32" else tiny_int8(config)


@pytest.mark.parametrize(("method", "builder"), PAIRS)
def test_greedy_texts_are_plain_decoding(method, builder, model, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "PREFILL_CHUNK", 4)
    family = "eagle" if method == "eagle2" else method
    start_drafter(family, model.config, tmp_path / "drafter")
    options = {"builder": builder, "node_budget": 6, "tree_depth": 3, "tree_top_k": 2}
    if builder == "chain":
        options = {"builder": "chain", "num_speculative_tokens": 3}
    llm = LLM(in_memory(model), method=method, drafter=str(tmp_path / "drafter"), **options)
    for prompt in ([5], random_tokens(11, 3)):
        room = CONTEXT - len(prompt)  # to the last position
        completion = llm.generate(prompt, SamplingParams(max_new_tokens=room, ignore_eos=True))
        assert completion.token_ids == tuple(decode_greedy(model, prompt, room))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("builder", ["chain", "static_tree"])
def test_drawn_drafts(method, builder, tmp_path):
    target = in_memory(tiny_decoder(TARGET))
    start_drafter(method, TARGET, tmp_path / "drafter", changes={"draft_vocab_size": "40"})
    llm = LLM(
        target, method=method, drafter=str(tmp_path / "drafter"), builder=builder,
        draft_sampling="probabilistic",
    )  # fmt: skip
    texts = [
        llm.generate([3, 4], SamplingParams(max_new_tokens=30, temperature=1.2, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert texts[0].token_ids == texts[1].token_ids != texts[2].token_ids


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_bfloat16_drafts_on_every_device(method, device, tmp_path):
    """No promise about tokens there; a text is written and its drafts come from finite laws."""
    model = tiny_decoder(TARGET, dtype=torch.bfloat16, device=device)
    start_drafter(method, TARGET, tmp_path / "drafter")
    drafter = opened(tmp_path / "drafter", method, model=model)
    drafter.admit(0)
    output = run(model, [1, 2, 3], taps=drafter.info.taps)
    drafter.observe([Observation(0, (1, 2, 3), output.hidden, output.taps)])
    first = drafter.propose([0], [4], 2).logits
    second = drafter.expand([Frontier(0, (1, 2), (5, 6), (0, 0))]).logits
    assert first.dtype == second.dtype == torch.float32 and first.device.type == device.type
    assert bool(first.isfinite().all()) and bool(second.isfinite().all())


@pytest.mark.parametrize("target", [tiny_decoder, tiny_int8])
def test_a_copy_of_the_targets_embedding_and_head_is_not_kept(target, tmp_path):
    model, weights = target(TARGET), random_weights(TARGET)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    parts = TargetParts(model)
    assert Embedding(parts, embedding.bfloat16()).is_shared
    assert not Embedding(parts, embedding * 1.1).is_shared
    ids = torch.tensor([3, 8, 50])
    assert isinstance(shared_or_own_head(parts, head, None), SharedHead)
    assert isinstance(shared_or_own_head(parts, head, ids), SharedHead)
    assert isinstance(shared_or_own_head(parts, head[ids].half(), ids), SharedHead)
    other = shared_or_own_head(parts, head * 1.1, ids)
    states, tolerance = torch.ones(2, H), 0.05 if target is tiny_int8 else 1e-5
    exact = states @ (head[ids] * 1.1).T
    torch.testing.assert_close(other(states), exact, rtol=tolerance, atol=tolerance)
    floating = shared_or_own_head(replace(parts, draft_dtype="float32"), head * 1.1, ids)
    torch.testing.assert_close(floating(states), exact)


# --- training ------------------------------------------------------------------------------------


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, T, G, D] and [B, T, kv, D] to [B, T, G * D]."""
    mask = torch.ones(q.shape[1], q.shape[1]).tril().bool()
    rows = [attend(a, b.transpose(0, 1), c.transpose(0, 1), mask) for a, b, c in zip(q, k, v)]  # noqa: B905
    return torch.stack(rows).flatten(2)


def rotation_of(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    speeds = 10000.0 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.arange(length)[:, None] * speeds
    return angles.cos(), angles.sin()


def test_networks_train_in_batches():
    """Two steps of a batch; every parameter gets a gradient and rows do not mix."""
    layers = replace(EagleConfig.for_target(TARGET).layers, num_layers=2)
    first = eagle.EagleNetwork(EagleConfig(layers=layers))
    second = eagle3.Eagle3Network(
        replace(Eagle3Config.for_target(TARGET), layers=layers, fc_norm=True, norm_output=True)
    )
    taps, embedded = torch.randn(2, 5, 3, H), torch.randn(2, 5, H)
    rotation = rotation_of(layers, 5)
    for network in (first, second):
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        load_parameters(network, drafter_weights(shapes), "the test")
        states = network.fuse(taps) if isinstance(network, eagle3.Eagle3Network) else taps[:, :, 0]
        for _ in range(2):
            out = network(embedded, states, rotation, causal)
            states = network.hand_on(out) if isinstance(network, eagle3.Eagle3Network) else out
        if isinstance(network, eagle3.Eagle3Network):
            assert network.lm_head is not None
            out = network.lm_head(network.norm(out))
        gradients = torch.autograd.grad(
            out[0].square().sum(), [*network.parameters()], retain_graph=True
        )
        assert all(bool(gradient.abs().sum() > 0) for gradient in gradients)
        alone = network(embedded[:1], taps[:1, :, 0], rotation, causal)
        both = network(embedded, taps[:, :, 0], rotation, causal)
        torch.testing.assert_close(alone[0], both[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_parameters_are_nan_until_loaded(method):
    network = (
        eagle.EagleNetwork(EagleConfig.for_target(TARGET))
        if method == "eagle"
        else eagle3.Eagle3Network(Eagle3Config.for_target(TARGET))
    )
    assert all(bool(p.isnan().all()) for p in network.parameters())


# --- copies and refusals -------------------------------------------------------------------------


def test_an_embedding_of_its_own_is_used(tmp_path):
    """A copy of the target's embedding is shared; another one drafts."""
    config = EagleConfig.for_target(TARGET)
    tensors = drafter_weights(eagle_format.tensor_shapes(config))
    theirs = random_weights(TARGET)["model.embed_tokens.weight"]
    found = []
    for name, embedding in (("copy", theirs.bfloat16()), ("other", theirs * 1.1), ("none", None)):
        extra = {} if embedding is None else {"embed_tokens.weight": embedding}
        folder = tmp_path / name
        eagle_format.write(folder, config, tensors)
        write_drafter_files(
            folder, json.loads((folder / "config.json").read_text()), {**tensors, **extra}
        )
        drafter = opened(folder, "eagle")
        drafter.admit(0)
        drafter.observe([Observation(0, (1, 2), torch.ones(2, H))])
        laws = drafter.propose([0], [3], 1)
        found.append(laws.logits)
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1], atol=1e-2)


def test_the_other_method_is_named(tmp_path):
    start_drafter("eagle3", TARGET, tmp_path / "three")
    start_drafter("eagle", TARGET, tmp_path / "one")
    with pytest.raises(DrafterError, match="is of method eagle3, and method eagle was asked"):
        opened(tmp_path / "three", "eagle")
    with pytest.raises(DrafterError, match="Take --method eagle, or eagle2"):
        opened(tmp_path / "one", "eagle3")
    for name in ("one", "three"):
        assert opened(tmp_path / name, "eagle2").info.method == "eagle2"


def test_a_drafter_of_another_target(tmp_path):
    start_drafter("eagle", TARGET, tmp_path / "drafter")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hidden_size": 32}, "for a target of hidden size 24"),
        ({"vocab_size": 90}, "for a vocabulary of 83 tokens"),
        ({"max_position_embeddings": 1024}, "knows positions up to 512"),
    ]
    for changes, message in cases:
        with pytest.raises(DrafterError, match=message):
            opened(tmp_path / "drafter", "eagle", model=tiny_decoder(replace(TARGET, **changes)))
    longer = tiny_decoder(replace(TARGET, max_position_embeddings=1024))
    assert opened(tmp_path / "drafter", "eagle", model=longer, context_length=512)


@pytest.mark.parametrize(
    ("ids", "num_layers", "message"),
    [
        (None, 6, r"usual ones of a target of 6 layers are \[1, 2\]; three different ones need 7"),
        (None, 2, r"usual ones of a target of 2 layers are \[-2, 0, 1\]"),
        ((1, 3, 6), 7, "allowed: up to 5 for a target of 7 layers"),
        ((1, 3, 9), 8, "allowed: up to 6 for a target of 8 layers"),
    ],
)
def test_layers_that_a_target_does_not_have(ids, num_layers, message):
    config = replace(Eagle3Config.for_target(TARGET), target_layer_ids=ids)
    with pytest.raises(DrafterError, match=message):
        config.check_target(replace(TARGET, num_layers=num_layers))


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_every_depth_of_target_has_layers_to_read(num_layers):
    target = replace(TARGET, num_layers=num_layers)
    config = Eagle3Config.for_target(target)
    config.check_target(target)
    assert 1 <= config.num_features <= 3


def test_values_that_are_not_finite(tmp_path):
    config = EagleConfig.for_target(TARGET)
    tensors = drafter_weights(eagle_format.tensor_shapes(config))
    tensors["fc.weight"][0, 0] = float("inf")
    eagle_format.write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match="fc.weight that is not finite"):
        opened(tmp_path, "eagle")
