"""Recorded rounds of the official implementations, as far as no network is needed.

From stored trees and texts the greedy rounds are walked; from stored uniforms the sampled rounds
are replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forespeak.spec.tree import CandidateTree, chain
from forespeak.spec.uniforms import RecordedUniforms
from forespeak.spec.verify import follow, greedy, point_siblings, siblings, typical
from tests.spec.golden_data import Case, cases, load, rows, shape_parents, static_shape

pytestmark = pytest.mark.golden


def _rounds(case: Case, key: str) -> Iterator[CandidateTree]:
    """The trees of a stored greedy text, round by round."""
    static = shape_parents(static_shape(case)) if case.has("tree.sorted_choices") else None
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
    parents = shape_parents(static_shape(case))
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
    parents = shape_parents(static_shape(case))
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
    tree = CandidateTree(tokens, shape_parents(static_shape(case)))
    verdict = greedy(tree, case.tensors["padmatch.node_logits"])
    assert verdict.num_accepted == int(case.tensors["padmatch.correct_accept_length"])
    assert int(case.tensors["padmatch.official_accept_length"]) > verdict.num_accepted
