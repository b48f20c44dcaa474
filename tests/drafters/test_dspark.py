"""DSpark against the formulas: heads of each kind in trees, estimates, thresholds, refusals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forespeak.drafters.dspark import DSparkDrafter
from forespeak.engine.llm import LLM
from forespeak.engine.target import in_memory
from forespeak.errors import DrafterError, OptionError
from forespeak.sampling import SamplingParams
from forespeak.spec.builders import build_ddtree
from forespeak.types import DenseLaws, Frontier
from tests.drafters.block_cases import TARGET, Case, V, block_config
from tests.drafters.naive_block import chance, corrections
from tests.tiny import random_tokens, tiny_decoder

pytestmark = pytest.mark.slow

HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {"markov_rank": 6},
    "gated": {"markov_rank": 6, "markov_head_type": "gated"},
    "rnn": {"markov_rank": 6, "markov_head_type": "rnn"},
}
ESTIMATES: dict[str, dict[str, Any]] = {
    "none": {},
    "joined": {"confidence_head": True, "confidence_with_markov": True},
    "calibrated": {
        "confidence_head": True, "confidence_with_markov": True,
        "temperatures": (0.5, 1.5, 2.0, 3.0),
    },
    "states alone": {"confidence_head": True},
}  # fmt: skip
CASES = [
    *[(kind, "calibrated", {"block_size": 4, "sample_from_anchor": True}) for kind in HEADS],
    *[(kind, "joined", {"block_size": 5}) for kind in HEADS],
    ("vanilla", "none", {"block_size": 4, "sample_from_anchor": True, "draft_vocab_size": 50}),
    ("rnn", "states alone", {"block_size": 5, "draft_vocab_size": 50}),
]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=0)


class Naive:
    """Laws and estimates by the formulas, for one round of one row."""

    def __init__(self, case: Case, text: list[int], root: int) -> None:
        self.case, self.root = case, root
        self.states = case.states(text, root)

    def law(self, path: tuple[int, ...]) -> Tensor:
        case, whole = self.case, (self.root, *path)
        law = case.head(self.states[case.first + len(path)])
        kind = case.config.markov_head_type
        return law + corrections(case.weights, self.states, whole, case.first, kind)

    def chance(self, path: tuple[int, ...]) -> float:
        case, temperatures = self.case, self.case.config.temperatures
        temperature = temperatures[len(path)] if temperatures else 1.0
        return chance(case.weights, self.states, (self.root, *path), case.first, temperature)


class Checker:
    """Compares what a drafter says with the formulas."""

    def __init__(self, case: Case) -> None:
        self.case, self.count = case, 0

    def check(self, laws: DenseLaws, asked: list[tuple[Naive, tuple[int, ...]]]) -> None:
        assert laws.logits.shape[:2] == (len(asked), 1) and laws.logits.dtype == torch.float32
        estimates = laws.confidences
        assert (estimates is not None) == self.case.config.confidence_head
        for at, (naive, path) in enumerate(asked):
            close(laws.logits[at, 0], naive.law(path))
            if estimates is not None:
                assert estimates[at, 0].item() == pytest.approx(naive.chance(path), abs=1e-5)
            self.count += 1


@pytest.mark.parametrize(("kind", "estimates", "changes"), CASES)
def test_trees(
    kind: str, estimates: str, changes: dict[str, Any], tmp_path: Path, device: torch.device
) -> None:
    """Random trees over rows of different lengths, some of them a call, rows that come and go."""
    config = block_config(**HEADS[kind], **ESTIMATES[estimates], **changes)
    case = Case(tmp_path, config, method="dspark", model=tiny_decoder(TARGET, device=device))
    assert case.drafter.info.expansion == "head" and case.drafter.info.max_depth == 4
    rng, texts, checker = random.Random(kind + estimates), {}, Checker(case)
    for number in range(6):
        for row in range(3):
            if row not in texts:
                case.drafter.admit(row)
                texts[row] = [rng.randrange(V) for _ in range(rng.choice([1, 7]))]
                case.drafter.observe([case.observation(row, texts[row], 0)])
        rows = sorted(rng.sample(range(3), rng.randint(1, 3)))
        roots = [rng.randrange(V) for _ in rows]
        naive = {row: Naive(case, texts[row], root) for row, root in zip(rows, roots, strict=True)}
        checker.check(case.drafter.propose(rows, roots, 4), [(naive[row], ()) for row in rows])
        nodes: dict[int, dict[int, tuple[int, ...]]] = {row: {0: ()} for row in rows}
        for level in range(1, 4):
            frontiers, asked = grown(nodes, rng.sample(rows, rng.randint(1, len(rows))), level, rng)
            if frontiers:
                checker.check(case.drafter.expand(frontiers), [(naive[r], p) for r, p in asked])
        for row, root in zip(rows, roots, strict=True):
            tokens = [root, *rng.choice(list(nodes[row].values()))]
            case.drafter.observe([case.observation(row, tokens, len(texts[row]))])
            texts[row] += tokens
        if number % 3 == 2:
            case.drafter.release(1)
            del texts[1]
    assert checker.count > 20


def grown(
    nodes: dict[int, dict[int, tuple[int, ...]]], rows: list[int], level: int, rng: random.Random
) -> tuple[list[Frontier], list[tuple[int, tuple[int, ...]]]]:
    """New nodes of one depth below random ones, and their rows and paths."""
    frontiers, asked = [], []
    for row in rows:
        above = [node for node, path in nodes[row].items() if len(path) == level - 1]
        made = []
        for _ in range(rng.randint(1, 3) if above else 0):
            parent, node = rng.choice(above), max(nodes[row]) + rng.randint(1, 3)
            token = rng.randrange(V)
            nodes[row][node] = (*nodes[row][parent], token)
            made.append((node, token, parent))
            asked.append((row, nodes[row][node]))
        if made:
            frontiers.append(Frontier(row, *map(tuple, zip(*made, strict=True))))
    return frontiers, asked


@pytest.mark.parametrize("kind", HEADS)
def test_ddtree_of_conditional_laws(kind: str, tmp_path: Path) -> None:
    """The best prefixes of all there are, by scores from the formulas."""
    config = block_config(**HEADS[kind], block_size=3, sample_from_anchor=True)
    case = Case(tmp_path, config, method="ddtree")
    assert case.drafter.info.expansion == "head"
    text, root = random_tokens(6), 7
    case.drafter.admit(0)
    case.drafter.observe([case.observation(0, text, 0)])
    laws = case.drafter.propose([0], [root], 3)
    (tree,) = build_ddtree([root], laws, case.drafter.expand, [0], budgets=[12], max_depth=3)
    naive = Naive(case, text, root)
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(3):
        below = {
            (*path, token): scores[path] + log
            for path in level
            for token, log in enumerate(naive.law(path).log_softmax(-1).tolist())
        }
        level = sorted(below, key=lambda path: -below[path])[:12]
        scores |= below
    best = sorted(scores, key=lambda path: -scores[path])[1:13]
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == set(best)
    assert tree.scores == pytest.approx([scores[path] for path in paths], abs=1e-3)


def test_without_heads_it_is_dflash(tmp_path: Path) -> None:
    """A DFlash checkpoint, and one whose sequential head has rank 0."""
    plain = Case(tmp_path / "a", block_config(), method="dspark")
    bare = Case(tmp_path / "b", block_config(confidence_head=True), method="dspark")
    flash = Case(tmp_path / "c", block_config())
    assert not isinstance(plain.drafter, DSparkDrafter)
    assert isinstance(bare.drafter, DSparkDrafter)
    laws = []
    for case in (plain, bare, flash):
        for name in ("fc.weight", "norm.weight"):
            assert torch.equal(case.weights[name], flash.weights[name])
        case.drafter.admit(0)
        case.drafter.observe([case.observation(0, random_tokens(6), 0)])
        laws.append(case.drafter.propose([0], [3], 9))
        assert case.drafter.info.expansion == "none"
    assert torch.equal(laws[0].logits, laws[2].logits)
    assert torch.equal(laws[1].logits, laws[2].logits)
    estimates = laws[1].confidences
    assert estimates is not None and laws[0].confidences is None
    naive = Naive(bare, random_tokens(6), 3)
    path = tuple(random_tokens(4))
    expected = [naive.chance(path[:depth]) for depth in range(4)]
    close(estimates[0], torch.tensor(expected))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dspark", {}),
        ("dspark", {"confidence_threshold": 0.5}),
        ("dspark", {"builder": "dynamic_tree", "node_budget": 8, "tree_top_k": 3}),
        ("dspark", {"builder": "static_tree", "node_budget": 6, "tree_depth": 3}),
        ("ddtree", {"node_budget": 6}),
    ],
)
def test_texts_are_plain_decoding(
    kind: str, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    config = block_config(**HEADS[kind], confidence_head=True, sample_from_anchor=True)
    target = in_memory(Case(tmp_path, config).model)
    params = SamplingParams(max_new_tokens=99, ignore_eos=True)
    prompt = random_tokens(100)
    plain = LLM(target).generate(prompt, params)
    found = LLM(target, method=method, drafter=str(tmp_path), **options).generate(prompt, params)
    assert found.token_ids == plain.token_ids and len(found.token_ids) == 28
    assert found.stats.num_drafted > 0


def test_thresholds_shorten_chains(tmp_path: Path) -> None:
    config = block_config(
        **HEADS["vanilla"], **ESTIMATES["calibrated"], block_size=4, sample_from_anchor=True
    )
    target = in_memory(Case(tmp_path, config).model)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    drafted = []
    for threshold in (None, 0.4, 0.7):
        llm = LLM(
            target, method="dspark", drafter=str(tmp_path), confidence_threshold=threshold
        )  # fmt: skip
        drafted.append(llm.generate([1, 2, 3], params).stats.num_drafted)
    assert drafted[0] > drafted[1] > drafted[2]


def test_a_threshold_needs_a_confidence_head(tmp_path: Path) -> None:
    config = block_config(**HEADS["vanilla"], sample_from_anchor=True)
    with pytest.raises(DrafterError, match="no confidence head; allowed: 0"):
        Case(tmp_path, config, method="dspark", threshold=0.5)


def test_deeper_trees_than_the_block(tmp_path: Path) -> None:
    config = block_config(**HEADS["vanilla"], sample_from_anchor=True)
    target = in_memory(Case(tmp_path, config).model)
    for options in ({"builder": "dynamic_tree", "tree_depth": 6}, {"num_speculative_tokens": 6}):
        with pytest.raises(OptionError, match="1 to 5"):
            LLM(target, method="dspark", drafter=str(tmp_path), **options)
