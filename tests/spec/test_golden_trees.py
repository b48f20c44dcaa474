"""Trees, masks and recorded rounds of the official implementations, as far as no network is needed.

From stored logits the trees are built; from stored trees and texts the greedy rounds are walked;
from stored uniforms the sampled rounds are replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.spec.builders import (
    TreeShape,
    build_chain,
    build_ddtree,
    build_dynamic_tree,
    build_static_tree,
)
from forespeak.spec.tree import CandidateTree, chain
from forespeak.spec.uniforms import RecordedUniforms
from forespeak.spec.verify import follow, greedy, point_siblings, siblings, typical
from forespeak.types import DenseLaws, Frontier
from tests.spec.golden_data import Case, cases, load, rows

pytestmark = pytest.mark.golden


def _check_layout(tree: CandidateTree, case: Case, key: str) -> None:
    """Mask, positions and leaf paths as stored; the order of leaf rows is the release's own."""
    assert torch.equal(tree.mask(), case.tensors[f"{key}.attn_mask"])
    assert tree.positions(0) == case.tensors[f"{key}.position_ids"].tolist()
    assert sorted(tree.leaf_paths()) == sorted(rows(case.tensors[f"{key}.retrieve_indices"]))


def _shape(case: Case) -> TreeShape:
    """The static shape, whose own order must be the stored one."""
    paths = rows(case.tensors["tree.sorted_choices"])
    shape = TreeShape(tuple(tuple(path) for path in reversed(paths)))
    assert [list(path) for path in shape.paths] == paths
    return shape


def _shape_parents(shape: TreeShape) -> tuple[int, ...]:
    index = {(): 0} | {path: at for at, path in enumerate(shape.paths, start=1)}
    return (-1, *(index[path[:-1]] for path in shape.paths))


# --- trees from stored logits -------------------------------------------------------------------


@pytest.mark.parametrize("folder", cases("ddtree"))
@pytest.mark.parametrize("compiled", [True, False])
def test_ddtree_builder(folder: Path | None, compiled: bool) -> None:
    case = load(folder)
    logits = case.tensors["tree.draft_logits"]
    budgets = case.facts["config"]["tree_budgets"]
    assert budgets
    for budget in budgets:
        (tree,) = build_ddtree(
            [5], DenseLaws(logits[None]), None, [0], budgets=[budget], compiled=compiled
        )
        key = f"tree.b{budget}"
        assert list(tree.tokens[1:]) == case.tensors[f"{key}.tokens"].tolist()
        assert list(tree.parents) == case.tensors[f"{key}.parents"].tolist()
        assert tree.depths()[1:] == case.tensors[f"{key}.depths"].tolist()
        assert torch.equal(tree.mask(), case.tensors[f"{key}.visibility"])
        assert tree.scores is not None
        weights = case.tensors[f"{key}.log_weights"].tolist()
        assert list(tree.scores[1:]) == pytest.approx(weights, abs=1e-5)


@pytest.mark.parametrize("folder", cases("ddtree"))
def test_ddtree_conditional_form(folder: Path | None) -> None:
    """On laws that do not depend on the parent the level search finds the same trees."""
    case = load(folder)
    logits = case.tensors["tree.draft_logits"]
    depths = {0: 0}

    def expand(frontiers: Sequence[Frontier]) -> DenseLaws:
        found = []
        for frontier in frontiers:
            for number, parent in zip(frontier.nodes, frontier.parents, strict=True):
                depths[number] = depths[parent] + 1
                found.append(logits[depths[number]])
        return DenseLaws(torch.stack(found)[:, None])

    for budget in case.facts["config"]["tree_budgets"]:
        laws = DenseLaws(logits[None, :1])
        (tree,) = build_ddtree([5], laws, expand, [0], budgets=[budget], max_depth=logits.shape[0])
        assert list(tree.tokens[1:]) == case.tensors[f"tree.b{budget}.tokens"].tolist()
        assert list(tree.parents) == case.tensors[f"tree.b{budget}.parents"].tolist()


@pytest.mark.parametrize("folder", cases("medusa"))
def test_medusa_tree(folder: Path | None) -> None:
    """Static tree over the heads' logits at the last position, root from the target's own."""
    case = load(folder)
    root = int(case.tensors["heads.base_logits"][0, -1].argmax())
    laws = DenseLaws(case.tensors["heads.medusa_logits"][None, :, -1])  # [1, heads, V]
    shape = TreeShape(tuple(tuple(path) for path in case.facts["config"]["choices"]))
    assert shape == _shape(case)
    (tree,) = build_static_tree([root], laws, None, [0], shape=shape)
    assert list(tree.tokens) == case.tensors["tree.tokens"].tolist()
    _check_layout(tree, case, "tree")
    leaves = case.tensors["tree.retrieve_indices"]
    paths = torch.tensor(tree.tokens)[leaves.clamp_min(0)].masked_fill(leaves < 0, 0)
    assert torch.equal(paths, case.tensors["tree.cart_candidates"])


@pytest.mark.parametrize("folder", cases("eagle1"))
def test_eagle1_tree(folder: Path | None) -> None:
    """Static tree; laws of expanded nodes are stored in the order in which they are asked for."""
    case = load(folder)
    ids, values = case.tensors["tree.pool_top10_ids"], case.tensors["tree.pool_top10_logits"]
    vocab_size = case.facts["config"]["vocab_size"]
    logits = torch.full((ids.shape[0], vocab_size), -100.0).scatter_(1, ids, values)
    used = 1

    def expand(frontiers: Sequence[Frontier]) -> DenseLaws:
        nonlocal used
        count = sum(len(frontier.nodes) for frontier in frontiers)
        used += count
        return DenseLaws(logits[used - count : used, None])

    root = int(case.tensors["tree.tokens"][0])
    (tree,) = build_static_tree(
        [root], DenseLaws(logits[None, :1]), expand, [0], shape=_shape(case)
    )
    assert used == ids.shape[0]
    assert list(tree.tokens) == case.tensors["tree.tokens"].tolist()
    _check_layout(tree, case, "tree")


@pytest.mark.parametrize("folder", cases("eagle2", "eagle3"))
def test_dynamic_tree_layout(folder: Path | None) -> None:
    """Stored trees: layout from parents, scores that never grow along a path."""
    case = load(folder)
    keys = case.keys("tree", "parents")
    assert keys
    for key in keys:
        stored = [case.tensors[f"{key}.{part}"].tolist() for part in ("tokens", "parents")]
        scores = tuple(case.tensors[f"{key}.scores"].tolist())
        tree = CandidateTree(tuple(stored[0]), tuple(stored[1]), scores=scores)
        _check_layout(tree, case, key)
        assert all(scores[node] <= scores[tree.parents[node]] for node in range(1, len(tree)))


class _LawsOfATree:
    """Draft laws that would give a stored tree its scores.

    What is left of each law is spread over so many words beside the real ones that none of them can
    be among the best.
    """

    beside = 500_000

    def __init__(self, tree: CandidateTree, vocab_size: int) -> None:
        assert tree.scores is not None
        self._tree, self._scores, self._vocab_size = tree, tree.scores, vocab_size
        self._nodes: dict[int, int | None] = {0: 0}  # the builder's number -> node of the tree

    def propose(self) -> DenseLaws:
        return DenseLaws(self._law(0)[None, None])

    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        laws = []
        for frontier in frontiers:
            for number, token, parent in zip(
                frontier.nodes, frontier.tokens, frontier.parents, strict=True
            ):
                above = self._nodes[parent]
                children = [] if above is None else self._tree.children()[above]
                same = [child for child in children if self._tree.tokens[child] == token]
                self._nodes[number] = same[0] if same else None
                laws.append(self._law(self._nodes[number]))
        return DenseLaws(torch.stack(laws)[:, None])

    def _law(self, node: int | None) -> Tensor:
        children = [] if node is None else self._tree.children()[node]
        masses = torch.tensor(
            [self._scores[child] - self._scores[node or 0] for child in children]
        ).exp()
        left = (1 - masses.sum()).clamp_min(1e-12)
        logits = torch.full((self._vocab_size + self.beside,), float("-inf"))
        logits[self._vocab_size :] = (left / self.beside).log()
        logits[[self._tree.tokens[child] for child in children]] = masses.log()
        return logits


@pytest.mark.parametrize("folder", cases("eagle2", "eagle3"))
def test_dynamic_tree_from_its_scores(folder: Path | None) -> None:
    """The builder finds the stored tree again, node for node, from laws with the stored scores."""
    case = load(folder)
    settings = {f"tree{entry['tree']}": entry for entry in case.facts["trees"]}
    for key in case.keys("tree", "parents"):
        tokens, parents, scores = (
            case.tensors[f"{key}.{part}"].tolist() for part in ("tokens", "parents", "scores")
        )
        stored = CandidateTree(tuple(tokens), tuple(parents), scores=tuple(scores))
        laws, sizes = _LawsOfATree(stored, 512), settings[key]
        (tree,) = build_dynamic_tree(
            [tokens[0]], laws.propose(), laws.expand, [0],
            budgets=[sizes["total_token"] - 1], max_depth=sizes["depth"] + 1, top_k=sizes["top_k"],
        )  # fmt: skip
        assert (tree.tokens, tree.parents) == (stored.tokens, stored.parents)
        assert tree.scores is not None
        assert list(tree.scores) == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("folder", cases("eagle2", "eagle3"))
def test_dynamic_tree_of_width_one(folder: Path | None) -> None:
    """With top_k 1 the tree is the argmax chain, whose logits are stored step by step."""
    case = load(folder)
    target_ids, logits = case.tensors["chain.draft_ids"], case.tensors["chain.logits"]
    token_ids = torch.zeros(logits.shape[1], dtype=torch.int64)
    token_ids[logits.argmax(-1)] = target_ids  # as much of the vocabulary map as is needed
    step = 0

    def expand(frontiers: Sequence[Frontier]) -> DenseLaws:
        nonlocal step
        step += 1
        return DenseLaws(logits[None, step : step + 1], token_ids)

    laws = DenseLaws(logits[None, :1], token_ids)
    root = int(case.tensors["chain.input_ids"][0, -1])
    length = target_ids.shape[0]
    (dynamic,) = build_dynamic_tree(
        [root], laws, expand, [0], budgets=[length], max_depth=length, top_k=1
    )
    assert list(dynamic.tokens[1:]) == target_ids.tolist()
    assert dynamic.is_chain() and dynamic.scores is not None
    step = 0
    (greedy_chain,) = build_chain([root], laws, expand, [0], lengths=[length])
    assert greedy_chain.tokens == dynamic.tokens
    widths = {entry["tree"]: entry for entry in case.facts["trees"]}
    for key in case.keys("tree", "scores"):
        same = torch.equal(case.tensors[f"{key}.input_ids"], case.tensors["chain.input_ids"])
        if same and widths[int(key.removeprefix("tree"))]["top_k"] == 1:
            scores = case.tensors[f"{key}.scores"].tolist()
            shared = min(len(scores), len(dynamic))
            assert list(dynamic.scores[:shared]) == pytest.approx(scores[:shared], abs=1e-4)


@pytest.mark.parametrize("folder", cases("dspark", having="block.greedy_corrected_logits"))
def test_dspark_chain(folder: Path | None) -> None:
    case = load(folder)
    laws = DenseLaws(case.tensors["block.greedy_corrected_logits"])
    drafts = case.tensors["block.greedy_ids"][0].tolist()
    root = int(case.tensors["block.input_ids"][0, 0])
    (tree,) = build_chain([root], laws, None, [0], lengths=[len(drafts)])
    assert list(tree.tokens) == [root, *drafts]


# --- greedy rounds from stored trees and texts ----------------------------------------------------


def _rounds(case: Case, key: str) -> Iterator[CandidateTree]:
    """The trees of a stored greedy text, round by round."""
    static = _shape_parents(_shape(case)) if case.has("tree.sorted_choices") else None
    for name in (f"{key}.round_tree_tokens", f"{key}.round_tokens"):
        if not case.has(name):
            continue
        parents = case.tensors.get(f"{key}.round_parents")
        for number, tokens in enumerate(case.tensors[name].tolist()):
            above = list(static) if parents is None and static else parents[number].tolist()  # type: ignore[index]
            if name.endswith("round_tokens"):  # the root is not stored there
                tokens = [-1, *(token for token in tokens if token >= 0)]
                above = [-1, *above[: len(tokens) - 1]]
            yield CandidateTree(tuple(tokens), tuple(above))


@pytest.mark.parametrize("folder", cases("eagle1", "eagle2", "eagle3", "medusa", "ddtree"))
def test_greedy_rounds(folder: Path | None) -> None:
    """Walking the stored trees along the stored text accepts what was accepted."""
    case = load(folder)
    texts = [name.removesuffix(".accept_lengths") for name in case.tensors
             if name.startswith("gen") and name.endswith(".accept_lengths")]  # fmt: skip
    assert texts
    for key in texts:
        ids = case.tensors[f"{key}.new_ids"].tolist()
        lengths = case.tensors[f"{key}.accept_lengths"].tolist()
        nodes = case.tensors.get(f"{key}.round_accepted_nodes")
        start, num_checked = 0, 0
        for number, tree in enumerate(_rounds(case, key)):
            if start + lengths[number] >= len(ids):  # the text was cut inside this round
                break
            best = [ids[min(start + depth + 1, len(ids) - 1)] for depth in tree.depths()]
            verdict = follow(tree, best)
            assert len(verdict.path) == lengths[number], (key, number)
            assert verdict.bonus == ids[start + lengths[number]]
            if nodes is not None:
                assert list(verdict.path) == rows(nodes[number : number + 1])[0]
            start += lengths[number]
            num_checked += 1
        assert num_checked > 0


@pytest.mark.parametrize("folder", cases("dspark", "dflash"))
def test_greedy_chain_rounds(folder: Path | None) -> None:
    case = load(folder)
    texts = case.keys("gen", "round_drafts") + case.keys("thr", "round_drafts")
    assert texts
    for key in texts:
        ids = case.tensors[f"{key}.new_ids"].tolist()
        start = 0
        verified = case.tensors.get(f"{key}.proposal_lengths")
        for number, length in enumerate(case.tensors[f"{key}.accept_lengths"].tolist()):
            if start + length >= len(ids):
                break
            drafts = case.tensors[f"{key}.round_drafts"][number].tolist()
            if verified is not None:
                drafts = drafts[: int(verified[number])]
            tree = chain(ids[start], drafts)
            best = [ids[min(start + at + 1, len(ids) - 1)] for at in range(len(tree))]
            verdict = follow(tree, best)
            assert (len(verdict.path), verdict.bonus) == (length, ids[start + length])
            start += length


# --- sampled rounds from stored uniforms ----------------------------------------------------------


class _Replay:
    """Recorded uniforms for acceptance; keeps the law of the next token."""

    def __init__(self, uniforms: Tensor) -> None:
        self.recorded = RecordedUniforms(uniforms.tolist())
        self.law = torch.empty(0)

    def accept(self, probability: float) -> bool:
        return self.recorded.accept(probability)

    def choose(self, law: Tensor) -> int:
        self.law = law / law.sum()
        return int(law.argmax())


def _temperature(case: Case, key: str) -> float:
    (run,) = (run for run in case.facts["sampled_runs"] if run["key"] == key)
    return float(run["temperature"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("folder", cases("eagle1"))
def test_sampled_siblings_replay(folder: Path | None, dtype: torch.dtype) -> None:
    """EAGLE-1's tree without replacement: conditional laws, accepted path, next law."""
    case = load(folder)
    parents = _shape_parents(_shape(case))
    keys = case.keys("sampled", "uniforms")
    assert keys
    for key in keys:
        tokens = case.tensors[f"{key}.node_tokens"].tolist()
        expanded = case.tensors[f"{key}.expanded_nodes"].tolist()
        full = dict(zip(expanded, case.tensors[f"{key}.expanded_q"].to(dtype), strict=True))
        q = torch.zeros(len(tokens), next(iter(full.values())).shape[0], dtype=dtype)
        left = [1.0]
        for node in range(1, len(tokens)):
            law = full[parents[node]].clone()
            earlier = [tokens[at] for at in range(1, node) if parents[at] == parents[node]]
            law[earlier] = 0
            left.append(float(law.sum()))
            q[node] = law / law.sum()
        drawn = q[range(1, len(tokens)), tokens[1:]]
        # stored as prob / (1 - earlier mass) in float32: noise where earlier siblings had it all
        sound = torch.tensor([False, *(mass > 1e-3 for mass in left[1:])])
        stored = case.tensors[f"{key}.node_draft_prob"][sound]
        assert len(stored) > len(tokens) // 2
        torch.testing.assert_close(drawn.float()[sound[1:]], stored, atol=1e-3, rtol=0)
        temperature = _temperature(case, key)
        p = (case.tensors[f"{key}.node_target_logits"].to(dtype) / temperature).softmax(-1)
        source = _Replay(case.tensors[f"{key}.uniforms"])
        verdict = siblings(CandidateTree(tuple(tokens), parents, q), p, source)
        assert list(verdict.path) == case.tensors[f"{key}.accepted_path"].tolist()
        assert source.recorded.num_used == case.tensors[f"{key}.uniforms"].numel()
        torch.testing.assert_close(
            source.law.float(), case.tensors[f"{key}.correct_next_probs"], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("folder", cases("eagle2", "eagle3"))
def test_point_siblings_replay(folder: Path | None, dtype: torch.dtype) -> None:
    case = load(folder)
    keys = case.keys("sampled", "uniforms")
    assert keys
    for key in keys:
        tree = CandidateTree(
            tuple(case.tensors[f"{key}.node_tokens"].tolist()),
            tuple(case.tensors[f"{key}.parents"].tolist()),
        )
        temperature = _temperature(case, key)
        p = (case.tensors[f"{key}.node_target_logits"].to(dtype) / temperature).softmax(-1)
        source = _Replay(case.tensors[f"{key}.uniforms"])
        verdict = point_siblings(tree, p, source)
        assert list(verdict.path) == case.tensors[f"{key}.accepted_path"].tolist()
        assert source.recorded.num_used == case.tensors[f"{key}.uniforms"].numel()
        torch.testing.assert_close(
            source.law.float(), case.tensors[f"{key}.next_probs"], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("folder", cases("medusa"))
def test_typical_acceptance(folder: Path | None) -> None:
    case = load(folder)
    parents = _shape_parents(_shape(case))
    leaves = rows(case.tensors["tree.retrieve_indices"])
    for number, run in enumerate(case.facts["typical_runs"]):
        key = f"typical{number}"
        tree = CandidateTree(tuple(case.tensors[f"{key}.node_tokens"].tolist()), parents)
        p = (case.tensors[f"{key}.node_logits"] / run["temperature"]).softmax(-1)
        verdict = typical(
            tree,
            p,
            RecordedUniforms([0.5]),
            threshold=run["posterior_threshold"],
            alpha=run["posterior_alpha"],
        )
        assert verdict.num_accepted == int(case.tensors[f"{key}.accept_length"])
        tokens = [tree.tokens[node] for node in verdict.path]
        assert tokens == case.tensors[f"{key}.best_path_tokens"].tolist()
        best = leaves[int(case.tensors[f"{key}.best_candidate"])]
        assert list(verdict.path) == best[: len(verdict.path)]


@pytest.mark.parametrize("folder", cases("medusa", having="padmatch.node_logits"))
def test_padding_never_matches(folder: Path | None) -> None:
    """The release's candidate rows are padded with token 0; a tree has no padding to match."""
    case = load(folder)
    tokens = tuple(case.tensors["padmatch.node_tokens"].tolist())
    tree = CandidateTree(tokens, _shape_parents(_shape(case)))
    verdict = greedy(tree, case.tensors["padmatch.node_logits"])
    assert verdict.num_accepted == int(case.tensors["padmatch.correct_accept_length"])
    assert int(case.tensors["padmatch.official_accept_length"]) > verdict.num_accepted
