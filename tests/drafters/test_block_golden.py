"""DFlash, DDTree and DSpark against the official runs, stage by stage: block, drafts, texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.drafters.base import TargetParts
from forespeak.drafters.dflash import DFlashDrafter, DFlashNetwork, block_masks, block_parts
from forespeak.drafters.dspark import DSparkNetwork
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.sharing import SharedHead
from forespeak.engine.llm import LLM
from forespeak.engine.target import load_target
from forespeak.formats.dflash_config import HEAD, DFlashConfig
from forespeak.formats.drafters import read_drafter
from forespeak.models.blocks import Rotation, load_parameters
from forespeak.models.decoder import RopeTable
from forespeak.sampling import SamplingParams
from forespeak.spec.builders import build_chain, build_ddtree
from forespeak.types import DenseLaws, Observation, SpeculationConfig
from tests.drafters import golden
from tests.drafters.golden import Case, cases, load
from tests.tiny import run

pytestmark = pytest.mark.golden

METHODS = {"dflash": "dflash", "ddtree": "ddtree", "dspark": "dspark"}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def opened(case: Case, method: str) -> tuple[DFlashDrafter, TargetParts]:
    parts = golden.target_of(case).parts
    folder = str(golden.drafter_folder(case))
    drafter = load_drafter(SpeculationConfig(method=method, drafter=folder), parts)
    assert isinstance(drafter, DFlashDrafter)
    drafter.admit(0)
    return drafter, parts


def plain_network(folder: Path) -> tuple[DSparkNetwork, dict[str, Tensor]]:
    """The module that training uses, and the tensors besides it."""
    checkpoint = read_drafter(folder, modules=["forespeak.formats.dflash"])
    network = DSparkNetwork(checkpoint.config)
    tensors = checkpoint.tensors()
    own = {name: tensors.pop(name) for name in dict(network.named_parameters())}
    load_parameters(network, own, "")
    return network, tensors


def rotations(config: DFlashConfig, positions: Tensor) -> Rotation:
    """[..., D / 2] each."""
    table = RopeTable(config.layers, config.max_positions)
    cos, sin = table.lookup(positions.flatten())
    return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)


def block(case: Case, network: DFlashNetwork, embed: Tensor) -> Tensor:
    """[1, B, H] of the stored block, through the plain form."""
    ids = case.tensors["block.input_ids"]
    length = case.tensors["block.features"].shape[1]
    places = torch.arange(length + ids.shape[1])
    states: Tensor = network(
        case.tensors["block.features"], embed[ids], rotations(network.config, places[:length]),
        rotations(network.config, places[length:]),
    )  # fmt: skip
    return states


def observe_block(drafter: DFlashDrafter, case: Case) -> None:
    """The stored context, in two pieces."""
    features = case.tensors["block.features"][0]
    taps = features.view(len(features), len(drafter.info.taps), -1)
    ids = case.tensors["block.context_ids"][0].tolist()
    for part in (slice(0, 7), slice(7, None)):
        hidden = torch.zeros(len(ids[part]), 1)
        drafter.observe([Observation(0, tuple(ids[part]), hidden, taps[part])])


@pytest.mark.parametrize("folder", cases("dflash", "dspark"))
def test_blocks(folder: Path | None) -> None:
    """All rows, through the plain form and through the drafter."""
    case = load(folder)
    method = METHODS[case.name.split("/")[0]]
    drafter, parts = opened(case, method)
    network, rest = plain_network(golden.drafter_folder(case))
    embed = parts.model.embed(torch.arange(parts.model.config.vocab_size))
    close(block(case, network, embed).detach(), case.tensors["block.hidden"])
    observe_block(drafter, case)
    root = int(case.tensors["block.input_ids"][0, 0])
    assert set(case.tensors["block.input_ids"][0, 1:].tolist()) == {network.config.mask_token_id}
    name = "block.logits" if method == "dflash" else "block.base_logits"
    logits = case.tensors[name][0]
    size = network.config.block_size
    states = drafter._states([0], [root], 0, size)
    close(states, case.tensors["block.hidden"])
    close(parts.model.head(states[0]), logits)
    laws = drafter.propose([0], [root], 99)
    if laws.logits.shape[1] > 1:  # all depths at once
        close(laws.logits[0], logits[0 if network.config.sample_from_anchor else 1 :])
    if HEAD in rest:
        assert drafter._embedding.is_shared and isinstance(drafter._head, SharedHead)


@pytest.mark.parametrize("folder", cases("dspark"))
def test_heads(folder: Path | None) -> None:
    """Corrected laws and estimates for given tokens, and along greedy drafts."""
    case = load(folder)
    network, _ = plain_network(golden.drafter_folder(case))
    base, hidden = case.tensors["block.base_logits"], case.tensors["block.hidden"]
    previous = case.tensors["block.prev_ids"]
    with torch.no_grad():
        close(network.correct(base, hidden, previous), case.tensors["block.corrected_logits"])
        estimates = network.confidence_logits(hidden, previous)
    assert (estimates is not None) == case.has("block.confidence_logits")
    if estimates is not None:
        close(estimates, case.tensors["block.confidence_logits"])
    drafter, _ = opened(case, "dspark")
    observe_block(drafter, case)
    root = int(case.tensors["block.input_ids"][0, 0])
    laws, chances, drafts = along(drafter, root, case.tensors["block.greedy_ids"].shape[1])
    assert drafts == case.tensors["block.greedy_ids"][0].tolist()
    close(laws, case.tensors["block.greedy_corrected_logits"][0])
    if case.has("block.greedy_confidence_logits"):
        assert chances is not None
        close(chances, case.tensors["block.greedy_confidence_logits"][0].sigmoid())


def along(drafter: DFlashDrafter, root: int, depth: int) -> tuple[Tensor, Tensor | None, list[int]]:
    """Laws [D, V], estimates [D] and tokens of a greedy chain."""
    seen: list[DenseLaws] = []

    def noted(laws: DenseLaws) -> DenseLaws:
        seen.append(laws)
        return laws

    first = noted(drafter.propose([0], [root], depth))
    expand = None
    if drafter.info.expansion == "head":
        expand = lambda frontiers: noted(drafter.expand(frontiers))  # noqa: E731
    (tree,) = build_chain([root], first, expand, [0], lengths=[depth])
    laws = torch.cat([laws.logits[0] for laws in seen])
    if seen[0].confidences is None:
        return laws, None, list(tree.tokens[1:])
    chances = [laws.confidences[0] for laws in seen if laws.confidences is not None]
    return laws, torch.cat(chances), list(tree.tokens[1:])


def rounds(case: Case, key: str, drafter: DFlashDrafter, parts: TargetParts) -> Iterator[int]:
    """The root of each stored round, after the drafter has observed what came before."""
    prompt = case.tensors[f"{key.split('.b')[0]}.prompt_ids"].flatten().tolist()
    text = prompt + case.tensors[f"{key}.new_ids"].tolist()
    output = run(parts.model, text, taps=drafter.info.taps)
    assert output.taps is not None
    seen, end = 0, len(prompt)
    for length in case.tensors[f"{key}.accept_lengths"].tolist():
        if end >= len(text):
            return
        part = slice(seen, end)
        drafter.observe([Observation(0, tuple(text[part]), output.hidden[part], output.taps[part])])
        yield text[end]
        seen, end = end, end + length


@pytest.mark.parametrize("folder", cases("dflash", "dspark"))
def test_drafts_of_every_round(folder: Path | None) -> None:
    case = load(folder)
    keys = case.keys("gen", "round_drafts") + case.keys("thr", "round_drafts")
    assert keys
    for key in keys:
        drafter, parts = opened(case, METHODS[case.name.split("/")[0]])
        drafts = case.tensors[f"{key}.round_drafts"].tolist()
        lengths = case.tensors.get(f"{key}.proposal_lengths")
        logits = case.tensors.get(f"{key}.round_confidence_logits")
        count = 0
        for number, root in enumerate(rounds(case, key, drafter, parts)):
            _, chances, found = along(drafter, root, drafter.info.max_depth or 0)
            least = float(key.removeprefix("thr")) if key.startswith("thr") else 0.0
            if chances is not None and least:
                below = (chances < least).nonzero().flatten().tolist()
                found = found[: below[0]] if below else found
            assert found == [token for token in drafts[number] if token >= 0]
            if lengths is not None:
                assert len(found) == int(lengths[number])
            if chances is not None and logits is not None and found:
                close(chances[: len(found)], logits[number, : len(found)].sigmoid())
            count += 1
        assert count > 5


@pytest.mark.parametrize("folder", cases("ddtree"))
def test_trees_of_every_round(folder: Path | None) -> None:
    case = load(folder)
    keys = sorted(n.removesuffix(".new_ids") for n in case.tensors if n.endswith(".new_ids"))
    assert keys
    for key in keys:
        drafter, parts = opened(case, "ddtree")
        assert drafter.info.expansion == "none"
        budget = int(key.split(".b")[1])
        tokens = case.tensors[f"{key}.round_tokens"].tolist()
        parents = case.tensors[f"{key}.round_parents"].tolist()
        for number, root in enumerate(rounds(case, key, drafter, parts)):
            laws = drafter.propose([0], [root], drafter.info.max_depth or 0)
            (tree,) = build_ddtree([root], laws, None, [0], budgets=[budget])
            count = len(tree) - 1
            assert list(tree.tokens[1:]) == tokens[number][:count]
            assert list(tree.parents[1:]) == parents[number][:count]
            assert all(token < 0 for token in tokens[number][count:])


def texts(case: Case) -> list[str]:
    return sorted(
        name.removesuffix(".new_ids")
        for name in case.tensors
        if name.endswith(".new_ids") and not name.startswith("stop")
    )


@pytest.mark.parametrize("folder", cases("dflash", "ddtree", "dspark"))
def test_greedy_texts(folder: Path | None) -> None:
    """The stored text with the stored acceptance length in every round."""
    case = load(folder)
    method, target = METHODS[case.name.split("/")[0]], golden.target_of(case)
    for key in texts(case):
        budget = int(key.split(".b")[1]) if method == "ddtree" else None
        threshold = float(key.removeprefix("thr")) if key.startswith("thr") else None
        llm = LLM(
            target, method=method, drafter=str(golden.drafter_folder(case)), node_budget=budget,
            confidence_threshold=threshold,
        )  # fmt: skip
        prompt = case.tensors[f"{key.split('.b')[0]}.prompt_ids"].flatten().tolist()
        expected = case.tensors[f"{key}.new_ids"].tolist()
        lengths = case.tensors[f"{key}.accept_lengths"].tolist()
        # The official loop drafts past the end of its text and ours does not: write on a little.
        written = golden.write(llm, prompt, len(expected) + 24)
        assert written.tokens[: len(expected)] == expected
        assert written.rounds[: len(lengths)] == lengths, key


@pytest.mark.parametrize("folder", cases("dspark"))
def test_texts_beside_an_int8_target(folder: Path | None) -> None:
    """Another target, with a text of its own; a stored copy of the head is still known as one."""
    case = load(folder)
    named = golden.target_of(case, "int8").name
    target = load_target(named, dtype="int8", device="cpu", threads=1)
    llm = LLM(target, method="dspark", drafter=str(golden.drafter_folder(case)))
    drafter = llm._proposer._drafter  # type: ignore[union-attr]
    assert drafter._embedding.is_shared and isinstance(drafter._head, SharedHead)
    prompt = case.tensors["gen0.prompt_ids"].flatten().tolist()
    written, plain = golden.write(llm, prompt, 32), golden.write(LLM(target), prompt, 32)
    assert written.tokens == plain.tokens and max(written.rounds) > 1


@pytest.mark.parametrize("folder", cases("dflash", "dspark"))
def test_texts_with_a_stop_id(folder: Path | None) -> None:
    case = load(folder)
    if case.has("stop.stop_id"):
        stops = case.tensors["stop.stop_id"].tolist()
    else:
        (stops,) = [run["stop_ids"] for run in case.facts["runs"] if run["key"] == "stop"]
    method = METHODS[case.name.split("/")[0]]
    llm = LLM(
        golden.target_of(case), method=method, drafter=str(golden.drafter_folder(case))
    )  # fmt: skip
    prompt = case.tensors["gen1.prompt_ids"].flatten().tolist()
    params = SamplingParams(max_new_tokens=48, ignore_eos=True, stop_token_ids=tuple(stops))
    written = llm.generate(prompt, params)
    expected = case.tensors["stop.new_ids"].tolist()
    lengths = case.tensors["stop.accept_lengths"].tolist()
    assert list(written.token_ids) == expected and written.finish_reason == "stop"
    rounds = written.stats.round_lengths
    assert len(rounds) == len(lengths) and rounds[:-1] == lengths[:-1]
    assert rounds[-1] <= lengths[-1] and sum(rounds) == len(expected) - 1


@pytest.mark.parametrize("folder", cases("speculators", having="draft_logits"))
def test_speculators_dflash(folder: Path | None) -> None:
    case = load(folder)
    check_speculators(case, {"draft_logits": None})


@pytest.mark.parametrize("folder", cases("speculators", having="base_logits"))
def test_speculators_dspark(folder: Path | None) -> None:
    case = load(folder)
    previous = case.tensors["block_tokens"]
    check_speculators(case, {"base_logits": None, "corrected_logits": previous})
    network, _ = plain_network(golden.drafter_folder(case))
    estimates = network.confidence_logits(case.tensors["hidden"], previous)
    assert estimates is not None
    close(estimates.detach(), case.tensors["confidence_logits"])


def check_speculators(case: Case, stages: dict[str, Tensor | None]) -> None:
    """All blocks in one forward, and each through the drafter after its own context."""
    folder = golden.drafter_folder(case)
    network, rest = plain_network(folder)
    config, anchors = network.config, case.tensors["anchors"]
    ids, features = case.tensors["input_ids"][0], case.tensors["aux_hidden_states"][0]
    block_ids = torch.full((len(anchors), config.block_size), config.mask_token_id)
    block_ids[:, 0] = ids[anchors]
    places = anchors[:, None] + torch.arange(config.block_size)
    parts = golden.target_of(case).parts
    with torch.no_grad():
        states = network(
            features, parts.model.embed(block_ids.flatten()),
            rotations(config, torch.arange(len(ids))), rotations(config, places.flatten()),
            block_masks(config, anchors, len(ids)),
        ).view(*block_ids.shape, -1)  # fmt: skip
        close(states, case.tensors["hidden"])
        checkpoint = read_drafter(folder, modules=["forespeak.formats.dflash"])
        head = block_parts(checkpoint, parts).head
        for name, previous in stages.items():
            logits = head(states)
            close(
                logits if previous is None else network.correct(logits, states, previous),
                case.tensors[name],
            )
    drafter, _ = opened(case, "dspark" if network.markov_head else "dflash")
    for at, anchor in enumerate(anchors.tolist()):
        drafter.release(0)
        drafter.admit(0)
        taps = features[:anchor].view(anchor, len(config.taps), -1)
        drafter.observe([Observation(0, tuple(ids[:anchor].tolist()), taps[:, 0], taps)])
        shift = 0 if config.sample_from_anchor else 1
        found = drafter._states([0], [int(ids[anchor])], shift, config.block_size)
        close(found[0], case.tensors["hidden"][at, shift:])


@pytest.mark.parametrize("folder", cases("dspark"))
def test_training_forward(folder: Path | None) -> None:
    """A batch of sequences with many blocks each; gradients reach every parameter."""
    case = load(folder)
    network, _ = plain_network(golden.drafter_folder(case))
    config, size = network.config, network.config.block_size
    ids, anchors = case.tensors["train.input_ids"], case.tensors["train.anchors"]
    labels, features = case.tensors["train.target_ids"], case.tensors["train.features"]
    count = anchors.shape[1]
    block_ids = torch.full((*anchors.shape, size), config.mask_token_id)
    roots = ids.gather(1, anchors)
    block_ids[:, :, 0] = roots
    model = golden.target_of(case).parts.model
    places = anchors[..., None] + torch.arange(size)
    masks = [block_masks(config, row, ids.shape[1]) for row in anchors]
    states = network(
        features, model.embed(block_ids.flatten(1)), rotations(config, torch.arange(ids.shape[1])),
        rotations(config, places.flatten(1)),
        (torch.stack([m[0] for m in masks]), torch.stack([m[1] for m in masks])),
    ).view(*block_ids.shape, -1)  # fmt: skip
    previous = torch.cat([roots[..., None], labels[..., :-1]], -1)
    logits = network.correct(model.head(states), states, previous)
    keep = case.tensors["train.block_keep"]
    for row in range(len(ids)):
        for slot in range(min(3, count)):
            if keep[row, slot]:
                expected = case.tensors["train.draft_logits_b0"][row, slot]
                close(logits[row, slot].detach(), expected)
    estimates = network.confidence_logits(states, previous)
    loss = logits[keep].logsumexp(-1).sum()
    if estimates is not None:
        stored = case.tensors["train.confidence_logits"]
        close(estimates[keep].detach(), stored[keep])
        loss = loss + estimates[keep].sum()
    torch.autograd.backward(loss)
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()), name
