"""Random trees, random verdicts, random scripts: what must hold after every round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forespeak.engine.decode import Decoding
from forespeak.engine.proposer import DraftRequest, Proposer
from forespeak.engine.reference import decode_greedy
from forespeak.engine.settings import RuleChoice
from forespeak.engine.text import TextState, Vocabulary
from forespeak.models.base import Cache, TargetModel
from forespeak.sampling import SamplingParams
from forespeak.spec.grammar import GrammarTokenizer
from forespeak.spec.tree import CandidateTree
from forespeak.spec.verify import RULES
from forespeak.types import Observation, Segment, SpeculationConfig
from tests.engine.scripted import GREEDY, ScriptedDrafter, check_counts, write
from tests.engine.tables import TableModel
from tests.spec import grammar_cases
from tests.spec.exactness_cases import EXHAUSTIVE
from tests.tiny import random_tokens, tiny_config, tiny_decoder, tiny_int8

V = 11
ENDS = (grammar_cases.EOS, grammar_cases.END_OF_TURN)
MATCH = RuleChoice(RULES["match"], RULES["match"])
CONFIG = tiny_config(vocab_size=V, num_layers=2, eos_token_ids=())
FEW, MANY = (100, 1000) if EXHAUSTIVE else (6, 60)


class RandomTrees:
    """Proposes random trees that hold some of a known text; keeps what it observes.

    Its trees know nothing of grammars, so forbidden nodes stand anywhere in them.
    """

    def __init__(
        self, known: Sequence[int], rng: random.Random, *, vocab_size: int = V, taps: tuple = ()
    ) -> None:
        self.known, self.rng, self.taps, self._size = list(known), rng, taps, vocab_size
        self.observed: list[int] = []
        self.taps_seen: list[torch.Tensor] = []
        self.hidden_seen: list[torch.Tensor] = []

    drafter_s = 0.0

    def admit(self, row: int) -> None: ...

    def release(self, row: int) -> None: ...

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self.observed += observation.tokens
            self.hidden_seen.append(observation.hidden)
            if observation.taps is not None:
                self.taps_seen.append(observation.taps)

    def propose(self, request: DraftRequest) -> list[CandidateTree]:
        tokens, parents, depths = [request.roots[0]], [-1], [0]
        for _ in range(self.rng.randint(0, 9)):
            newest = len(tokens) - 1
            parent = newest if self.rng.random() < 0.5 else self.rng.randint(0, newest)
            if depths[parent] == request.limits[0]:
                continue
            place = len(self.observed) + depths[parent] + 1
            right = self.known[place] if place < len(self.known) else 0
            tokens.append(right if self.rng.random() < 0.7 else self.rng.randrange(self._size))
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return [CandidateTree(tuple(tokens), tuple(parents))]


@cache
def model_of(kind: str) -> TargetModel:
    return tiny_decoder(CONFIG) if kind == "float32" else tiny_int8(CONFIG)


def from_scratch(
    model: TargetModel, tokens: Sequence[int]
) -> tuple[Cache, torch.Tensor, torch.Tensor]:
    """Cache, hidden states and taps of one forward over a text."""
    fresh = model.new_cache(1, len(tokens))
    output = model.forward(
        torch.tensor(tokens), torch.arange(len(tokens)), fresh, [Segment(0, len(tokens))],
        logits_at=torch.tensor([0]), taps=(1,),
    )  # fmt: skip
    fresh.commit_all(0)
    assert output.taps is not None
    return fresh, output.hidden, output.taps


def check_equal(kind: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if kind == "int8":
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["float32", "int8"])
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 1.0]))
@settings(derandomize=True, deadline=None, max_examples=FEW)
def test_cache_and_features_equal_recomputing(kind, seed, temperature):
    """Laws 6 and 7: what is kept is old length, root and accepted; with the target's features."""
    model, rng = model_of(kind), random.Random(seed)
    prompt = random_tokens(rng.randint(1, 12), seed, V)
    known = [*prompt, *decode_greedy(model, prompt, 24)]
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed)
    text = TextState(params, prompt, Vocabulary(V, ()))
    trees = RandomTrees(known, rng, taps=(1,))
    decoding = Decoding(model, text, MATCH if temperature else GREEDY, trees)
    caches: list[Cache] = []

    def new_cache(num_rows: int, capacity: int) -> Cache:
        caches.append(type(model).new_cache(model, num_rows, capacity))
        return caches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "new_cache", new_cache)
        for _ in decoding.run(prompt):
            if text.end is None:
                written = [*prompt, *text.token_ids]
                assert trees.observed == written[:-1], "all but the bonus"
                assert caches[0].lengths == [len(written) - 1]
                assert caches[0].pending == [0]
        kept = [*prompt, *text.token_ids][: caches[0].lengths[0]]
    fresh, hidden, taps = from_scratch(model, kept)
    for found, expected in zip(caches[0].snapshot(0), fresh.snapshot(0), strict=True):  # type: ignore[attr-defined]
        check_equal(kind, found, expected)
    length = len(trees.observed)
    check_equal(kind, torch.cat(trees.hidden_seen), hidden[:length])
    check_equal(kind, torch.cat(trees.taps_seen), taps[:length])
    assert temperature or list(text.token_ids) == known[len(prompt) :]


@st.composite
def sizes(draw: st.DrawFn) -> SpeculationConfig:
    return SpeculationConfig(
        num_speculative_tokens=draw(st.integers(1, 9)),
        node_budget=draw(st.integers(1, 14)),
        tree_depth=draw(st.integers(1, 5)),
        tree_top_k=draw(st.integers(1, 5)),
    )


@given(
    seed=st.integers(0, 10**6),
    right=st.floats(0, 1),
    expansion=st.sampled_from(["none", "forward"]),
    builder=st.sampled_from(["chain", "static_tree", "dynamic_tree", "ddtree"]),
    config=sizes(),
    count=st.integers(1, 40),
    eos_ids=st.sampled_from([(), (3,), (0, 4)]),
    penalty=st.sampled_from([0.0, 0.8]),
)
@settings(derandomize=True, deadline=None, max_examples=MANY)
def test_random_scripts_write_plain_text(
    seed, right, expansion, builder, config, count, eos_ids, penalty
):
    model = TableModel(V, seed=seed, eos_ids=eos_ids)
    prompt = random_tokens(1 + seed % 9, seed, V)
    params = SamplingParams(
        max_new_tokens=count, min_tokens=count // 3, frequency_penalty=penalty, logprobs=2
    )
    plain = write(model, prompt, params).completion
    if not penalty and not eos_ids:
        assert list(plain.token_ids) == decode_greedy(model, prompt, count)
    drafter = ScriptedDrafter(
        [*prompt, *plain.token_ids], right, expansion=expansion, vocab_size=V, seed=seed
    )
    proposer = Proposer(drafter, builder, config, vocab_size=V)
    found = write(model, prompt, params, proposer).completion
    assert found.token_ids == plain.token_ids
    assert (found.finish_reason, found.logprobs) == (plain.finish_reason, plain.logprobs)
    check_counts(found)
    if right == 1 and not penalty:
        assert found.stats.num_rounds <= (count + 1) // 2


@pytest.fixture(scope="module")
def grammars() -> GrammarTokenizer:
    return GrammarTokenizer.from_tokens(grammar_cases.vocabulary(), eos_ids=ENDS)


@pytest.mark.parametrize("after", [False, True])
def test_trees_full_of_forbidden_nodes(grammars, after):
    """Verified nodes are fewer than the tree's: rows, cache and log-probabilities must be those
    of the right nodes."""
    size = grammars.vocab_size
    model = TableModel(size, seed=8, eos_ids=ENDS)
    vocabulary = Vocabulary(size, ENDS, None, grammars)
    num_forbidden = num_accepted = 0
    for seed, case in enumerate(grammar_cases.cases(31, 40 if EXHAUSTIVE else 12)):
        params = replace(
            case.controls, max_new_tokens=60, logprobs=2, logprobs_after_processors=after,
            frequency_penalty=0.4,
        )  # fmt: skip
        plain = write(model, [40], params, vocabulary=vocabulary).completion
        trees = RandomTrees([40, *plain.token_ids], random.Random(seed), vocab_size=size)
        found = write(model, [40], params, trees, vocabulary=vocabulary).completion
        assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)
        check_counts(found)
        num_forbidden += found.stats.num_forbidden
        num_accepted += found.stats.num_accepted
    assert num_forbidden > 50 and num_accepted > 50
