"""EAGLE-1, 2 and 3 against the official runs: features, chains, trees, whole texts, sampled rounds,
and the speculators package's forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forespeak.drafters.base import TargetParts
from forespeak.drafters.feature_chain import FeatureChain
from forespeak.drafters.loader import load_drafter
from forespeak.engine.llm import LLM
from forespeak.engine.proposer import DraftRequest, Proposer
from forespeak.spec.builders import build_static_tree
from forespeak.spec.tree import CandidateTree
from forespeak.spec.verify import point_siblings
from forespeak.types import DenseLaws, Frontier, Observation, Segment, SpeculationConfig
from tests.drafters import golden
from tests.spec.golden_data import rows, shape_parents, static_shape
from tests.spec.test_golden_rounds import _Replay
from tests.tiny import run

pytestmark = pytest.mark.golden
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 0.0}
METHODS = {"eagle1": "eagle", "eagle2": "eagle2", "eagle3": "eagle3"}
ALL = golden.cases(*METHODS)
DYNAMIC = golden.cases("eagle2", "eagle3")


def method_of(case: golden.Case) -> str:
    return METHODS[case.name.split("/")[0]]


def open_case(case: golden.Case) -> tuple[FeatureChain, TargetParts]:
    """The case's drafter with row 0 admitted."""
    parts = golden.target_of(case).parts
    method = "eagle3" if "speculators" in case.name else method_of(case)
    config = SpeculationConfig(method=method, drafter=str(golden.drafter_folder(case)))
    drafter = load_drafter(config, parts)
    assert isinstance(drafter, FeatureChain)
    drafter.admit(0)
    return drafter, parts


def stored(drafter: FeatureChain, tokens: Sequence[int], features: Tensor) -> Observation:
    """An observation of stored features [n, H] or [n, K * H]."""
    width = len(drafter.info.taps)
    taps = features.view(len(tokens), width, -1) if width else None
    return Observation(0, tuple(tokens), features, taps)


def start(case: golden.Case, drafter: FeatureChain, key: str = "chain") -> int:
    """Observe what a stored chain or tree begins with; its root."""
    ids = case.tensors[f"{key}.input_ids"][0].tolist()
    drafter.observe([stored(drafter, ids[:-1], case.tensors[f"{key}.features"][0])])
    return int(ids[-1])


def restart(drafter: FeatureChain) -> None:
    drafter.release(0)
    drafter.admit(0)


def propose(drafter: FeatureChain, root: int) -> Tensor:
    laws = drafter.propose([0], [root], 5)
    assert isinstance(laws, DenseLaws)
    return laws.logits[0, 0]


@pytest.mark.parametrize("folder", ALL)
def test_features(folder):
    """The target's states that the drafter reads are the official ones."""
    case = golden.load(folder)
    drafter, parts = open_case(case)
    ids = case.tensors["chain.input_ids"][0, :-1].tolist()
    output = run(parts.model, ids, taps=drafter.info.taps)
    mine = output.hidden if output.taps is None else output.taps.flatten(1)
    torch.testing.assert_close(mine, case.tensors["chain.features"][0], **CLOSE)
    if output.taps is not None:
        indices = case.facts["config"]["capture_hidden_state_indices"]
        assert list(drafter.info.taps) == [index - 1 for index in indices]
    assert drafter.info.needs_hidden == (output.taps is None)


@pytest.mark.parametrize("folder", ALL)
def test_output_of_every_pair(folder):
    case = golden.load(folder)
    drafter, _ = open_case(case)
    ids = case.tensors["chain.input_ids"][0].tolist()
    features, expected = case.tensors["chain.features"][0], case.tensors["chain.prefill_hidden"][0]
    assert len(expected) == len(ids) - 1
    for end in range(1, len(ids)):
        restart(drafter)
        drafter.observe([stored(drafter, ids[:end], features[:end])])
        propose(drafter, ids[end])
        torch.testing.assert_close(drafter._rows[0].states[0], expected[end - 1], **CLOSE)


@pytest.mark.parametrize("folder", ALL)
def test_chain_of_best_tokens(folder):
    case = golden.load(folder)
    drafter, _ = open_case(case)
    logits = propose(drafter, start(case, drafter))
    if "chain.prefill_last_logits" in case.tensors:
        torch.testing.assert_close(logits, case.tensors["chain.prefill_last_logits"][0], **CLOSE)
    drafts = case.tensors["chain.draft_ids"].tolist()
    for step, token in enumerate(drafts):
        torch.testing.assert_close(logits, case.tensors["chain.logits"][step], **CLOSE)
        state = drafter._rows[0].states[step]
        torch.testing.assert_close(state, case.tensors["chain.hidden"][step], **CLOSE)
        best = int(logits.argmax())
        laws = drafter.expand([Frontier(0, (step + 1,), (token,), (step,))])
        ids = laws.token_ids
        assert token == (best if ids is None else int(ids[best]))
        logits = laws.logits[0, 0]


@pytest.mark.parametrize("folder", DYNAMIC)
def test_dynamic_trees(folder):
    case = golden.load(folder)
    assert len(case.facts["trees"]) >= 3
    for entry in case.facts["trees"]:
        key = f"tree{entry['tree']}"
        drafter, parts = open_case(case)
        tree = dynamic_tree(drafter, parts, start(case, drafter, key), entry)
        assert list(tree.tokens) == case.tensors[f"{key}.tokens"].tolist()
        assert list(tree.parents) == case.tensors[f"{key}.parents"].tolist()
        assert torch.equal(tree.mask(), case.tensors[f"{key}.attn_mask"])
        assert tree.positions(0) == case.tensors[f"{key}.position_ids"].tolist()
        leaves = rows(case.tensors[f"{key}.retrieve_indices"])
        assert sorted(tree.leaf_paths()) == sorted(leaves)
        assert tree.scores is not None
        torch.testing.assert_close(
            torch.tensor(tree.scores), case.tensors[f"{key}.scores"], **CLOSE
        )


def dynamic_tree(
    drafter: FeatureChain, parts: TargetParts, root: int, sizes: dict
) -> CandidateTree:
    """The release counts the root among its tokens, and levels after the first."""
    settings = SpeculationConfig(
        node_budget=sizes["total_token"] - 1, tree_depth=sizes["depth"] + 1,
        tree_top_k=sizes["top_k"],
    )  # fmt: skip
    size = parts.model.config.vocab_size
    proposer = Proposer(drafter, "dynamic_tree", settings, vocab_size=size)
    (tree,) = proposer.propose(DraftRequest([0], [root], [100]))
    return tree


@pytest.mark.parametrize("folder", golden.cases("eagle1"))
def test_static_tree(folder):
    case = golden.load(folder)
    drafter, _ = open_case(case)
    shape, root = static_shape(case), start(case, drafter)
    laws = drafter.propose([0], [root], shape.depth)
    (tree,) = build_static_tree([root], laws, drafter.expand, [0], shape=shape)
    assert list(tree.tokens) == case.tensors["tree.tokens"].tolist()
    assert torch.equal(tree.mask(), case.tensors["tree.attn_mask"])
    assert tree.positions(0) == case.tensors["tree.position_ids"].tolist()


@pytest.mark.parametrize("folder", golden.cases("eagle1"))
def test_best_logits_of_every_expanded_node(folder):
    case = golden.load(folder)
    drafter, _ = open_case(case)
    found = expanded(case, drafter, case.tensors["tree.tokens"].tolist())
    ids, values = case.tensors["tree.pool_top10_ids"], case.tensors["tree.pool_top10_logits"]
    torch.testing.assert_close(torch.stack(found).gather(1, ids), values, **CLOSE)


def expanded(case: golden.Case, drafter: FeatureChain, tokens: Sequence[int]) -> list[Tensor]:
    """Laws of the nodes of EAGLE-1's tree that have children, in order."""
    parents = shape_parents(static_shape(case))
    tree = CandidateTree(tuple(tokens), parents)
    depths, inner = tree.depths(), sorted(set(parents[1:]))
    found = [propose(drafter, start(case, drafter))]
    for depth in range(1, max(depths)):
        level = [node for node in inner if depths[node] == depth]
        frontier = Frontier(
            0, tuple(level), tuple(tokens[n] for n in level), tuple(parents[n] for n in level)
        )
        found += list(drafter.expand([frontier]).logits[:, 0])
    return found


@pytest.mark.parametrize("folder", golden.cases("eagle1"))
def test_sampled_trees_of_eagle1(folder):
    """Laws of a drawn tree, at its temperature; the rounds themselves: ``test_golden_rounds``."""
    case = golden.load(folder)
    drafter, parts = open_case(case)
    keys = case.keys("sampled", "expanded_q")
    assert keys
    for entry in case.facts["sampled_runs"]:
        key = entry["key"]
        restart(drafter)
        tokens = case.tensors[f"{key}.node_tokens"].tolist()
        logits = torch.stack(expanded(case, drafter, tokens))
        q = (logits / entry["temperature"]).softmax(-1)
        torch.testing.assert_close(q, case.tensors[f"{key}.expanded_q"], **CLOSE)
        tree = CandidateTree(tuple(tokens), shape_parents(static_shape(case)))
        mine = verified(case, parts, tree)
        torch.testing.assert_close(mine, case.tensors[f"{key}.node_target_logits"], **CLOSE)


@pytest.mark.parametrize("folder", DYNAMIC)
def test_sampled_rounds_of_dynamic_trees(folder):
    """Tree, target logits, accepted path and the law of the token after it."""
    case = golden.load(folder)
    keys = case.keys("sampled", "uniforms")
    assert keys
    for entry in case.facts["sampled_runs"]:
        key = entry["key"]
        drafter, parts = open_case(case)
        tree = dynamic_tree(drafter, parts, start(case, drafter), case.facts["config"])
        assert list(tree.tokens) == case.tensors[f"{key}.node_tokens"].tolist()
        assert list(tree.parents) == case.tensors[f"{key}.parents"].tolist()
        logits = verified(case, parts, tree)
        torch.testing.assert_close(logits, case.tensors[f"{key}.node_target_logits"], **CLOSE)
        replay = _Replay(case.tensors[f"{key}.uniforms"])
        p = (logits / entry["temperature"]).softmax(-1)
        verdict = point_siblings(tree, p, replay)
        assert list(verdict.path) == case.tensors[f"{key}.accepted_path"].tolist()
        torch.testing.assert_close(replay.law, case.tensors[f"{key}.next_probs"], **CLOSE)


def verified(case: golden.Case, parts: TargetParts, tree: CandidateTree) -> Tensor:
    """The target's logits at the nodes of a tree after the chain's text."""
    text = case.tensors["chain.input_ids"][0, :-1]
    cache = parts.model.new_cache(1, 64)
    places = torch.arange(len(text))
    parts.model.forward(text, places, cache, [Segment(0, len(text))])
    cache.commit_all(0)
    return parts.model.forward(
        torch.tensor(tree.tokens), torch.tensor(tree.positions(len(text))), cache,
        [Segment(0, len(tree), tree.mask())],
    ).logits  # fmt: skip


@pytest.mark.parametrize("folder", ALL)
def test_greedy_texts_round_by_round(folder):
    """Every tree, every acceptance length and every token of the stored texts."""
    case = golden.load(folder)
    method, sizes = method_of(case), case.facts["config"]
    options: dict[str, Any] = {"tree_shape": "eagle", "builder": "static_tree"}
    if method != "eagle":
        options = {
            "node_budget": sizes["total_token"] - 1, "tree_depth": sizes["depth"] + 1,
            "tree_top_k": sizes["top_k"], "builder": "dynamic_tree",
        }  # fmt: skip
    llm = LLM(
        golden.target_of(case), method=method, drafter=str(golden.drafter_folder(case)), **options
    )
    keys = case.keys("gen", "accept_lengths")
    assert len(keys) >= 3
    for key in keys:
        trees = recorded(llm)
        ids = case.tensors[f"{key}.new_ids"].tolist()
        prompt = case.tensors[f"{key}.prompt_ids"][0].tolist()
        # More than is stored, so that no tree is cut at the end of the text.
        written = golden.write(llm, prompt, len(ids) + 12)
        lengths = case.tensors[f"{key}.accept_lengths"].tolist()
        assert written.tokens[: len(ids)] == ids
        assert written.rounds[: len(lengths)] == lengths
        expected = case.tensors[f"{key}.round_tree_tokens"].tolist()
        assert [list(tree.tokens) for tree in trees[: len(expected)]] == expected
        if f"{key}.round_parents" in case.tensors:
            above = case.tensors[f"{key}.round_parents"].tolist()
            assert [list(tree.parents) for tree in trees[: len(above)]] == above


def recorded(llm: LLM) -> list[CandidateTree]:
    """Trees that the method proposes from now on."""
    found: list[CandidateTree] = []
    proposer = llm._proposer
    assert isinstance(proposer, Proposer)

    def propose(request: DraftRequest) -> list[CandidateTree]:
        trees = Proposer.propose(proposer, request)
        found.extend(trees)
        return trees

    proposer.propose = propose  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("folder", golden.cases("eagle2", "eagle3"))
def test_eagle2_drafts_with_both(folder):
    """The method ``eagle2`` finds out which weights it was given."""
    case = golden.load(folder)
    parts = golden.target_of(case).parts
    config = SpeculationConfig(method="eagle2", drafter=str(golden.drafter_folder(case)))
    drafter = load_drafter(config, parts)
    assert drafter.info.method == "eagle2"
    assert drafter.info.needs_hidden == (method_of(case) == "eagle2")
    assert bool(drafter.info.taps) == (method_of(case) == "eagle3")


@pytest.mark.parametrize("folder", golden.cases("eagle1", "eagle3"))
def test_pickled_and_safe_files_hold_the_same(folder, tmp_path):
    case = golden.load(folder)
    both = golden.drafter_folder(case)
    if not (both / "pytorch_model.bin").is_file():
        return  # this case has the other form alone
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).write_bytes((both / name).read_bytes())
    found = []
    for place in (both, tmp_path):
        config = SpeculationConfig(method=method_of(case), drafter=str(place))
        drafter = load_drafter(config, golden.target_of(case).parts)
        assert isinstance(drafter, FeatureChain)
        drafter.admit(0)
        found.append(propose(drafter, start(case, drafter)))
    # Where a file puts its tensors in memory decides in which order products are summed.
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)


@pytest.mark.parametrize("folder", golden.cases("speculators", having="train.step_logits"))
def test_forward_passes_of_the_speculators_package(folder):
    """Its three unrolled steps are this chain, fed with the text's own tokens."""
    case = golden.load(folder)
    drafter, parts = open_case(case)
    ids = case.tensors["raw.input_ids"][0].tolist()
    features = case.tensors["raw.aux_hidden_states"][0]
    output = run(parts.model, ids, taps=drafter.info.taps)
    assert output.taps is not None
    torch.testing.assert_close(output.taps.flatten(1), features, **CLOSE)
    logits = case.tensors["train.step_logits"]
    for at in range(len(ids) - 1):  # step s of index at: drafts s tokens after text[: at + 2]
        restart(drafter)
        drafter.observe([stored(drafter, ids[: at + 1], features[: at + 1])])
        mine = propose(drafter, ids[at + 1])
        torch.testing.assert_close(mine, logits[0, at], **CLOSE)
        for step in range(1, min(len(logits), len(ids) - 1 - at)):
            token = ids[at + 1 + step]
            laws = drafter.expand([Frontier(0, (step,), (token,), (step - 1,))])
            torch.testing.assert_close(laws.logits[0, 0], logits[step, at], **CLOSE)


@pytest.mark.parametrize("folder", golden.cases("speculators", having="train.step_logits"))
def test_text_with_a_drafter_of_the_speculators_package(folder):
    case = golden.load(folder)
    target = golden.target_of(case)
    prompt = case.tensors["raw.input_ids"][0, :9].tolist()
    plain = golden.write(LLM(target), prompt, 30)
    llm = LLM(target, method="eagle3", drafter=str(golden.drafter_folder(case)))
    assert golden.write(llm, prompt, 30).tokens == plain.tokens
    assert llm.builder == "chain"
