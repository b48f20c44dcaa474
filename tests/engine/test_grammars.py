"""Random schemas, regexes and grammars through the engine, with and without speculation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forespeak.drafters.draft_model import DraftModelDrafter
from forespeak.drafters.ngram import NgramDrafter
from forespeak.engine.proposer import Cascade, Proposer, Proposing
from forespeak.engine.settings import RuleChoice
from forespeak.engine.text import Vocabulary
from forespeak.sampling import SamplingParams
from forespeak.spec.grammar import Grammar, GrammarTokenizer, compile_grammar
from forespeak.spec.verify import RULES
from forespeak.types import Completion, SpeculationConfig
from tests.engine.scripted import GREEDY, check_counts, write
from tests.engine.tables import TableModel
from tests.spec.exactness_cases import EXHAUSTIVE
from tests.spec.grammar_cases import END_OF_TURN, EOS, GrammarCase, cases, vocabulary

pytestmark = pytest.mark.slow

TOKENS = vocabulary()
V = len(TOKENS) + 5  # a model's head is often wider than its tokenizer
ID_OF = {token: number for number, token in enumerate(TOKENS)}
ENDS = (EOS, END_OF_TURN)
PROMPT = [40, 50, 60, 40, 50]
LENGTH = 200
NUM_CASES = 500 if EXHAUSTIVE else 24
MODEL = TableModel(V, seed=1, eos_ids=ENDS, likeness=0.8)
SIZES = SpeculationConfig(
    num_speculative_tokens=4, node_budget=8, tree_depth=3, tree_top_k=3, lookup_min=1, lookup_max=3
)
SAMPLED = {
    "ngram": RuleChoice(RULES["match"], RULES["match"]),
    "chain": RuleChoice(RULES["match"], RULES["block"]),
    "tree": RuleChoice(RULES["match"], RULES["siblings"]),
    "cascade": RuleChoice(RULES["point_siblings"], RULES["rejection"]),
}


def _ngram() -> Proposer:
    return Proposer(NgramDrafter(lookup_min=1, lookup_max=3), "chain", SIZES, vocab_size=V)


def _draft_model(builder: str) -> Proposer:
    drafter = DraftModelDrafter(MODEL.truncated(1), target_vocab_size=V)
    return Proposer(drafter, builder, SIZES, vocab_size=V)


PROPOSERS: dict[str, Callable[[], Proposing]] = {
    "ngram": _ngram,
    "chain": lambda: _draft_model("chain"),
    "tree": lambda: _draft_model("static_tree"),
    "cascade": lambda: Cascade([_ngram(), _draft_model("chain")]),
}


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    return GrammarTokenizer.from_tokens(TOKENS, vocab_size=V, eos_ids=ENDS)


def complete(
    params: SamplingParams, tokenizer: GrammarTokenizer, method: str | None = None
) -> Completion:
    proposer = PROPOSERS[method]() if method else None
    warm = params.temperature > 0
    rules = SAMPLED[method or "ngram"] if warm else GREEDY
    return write(
        MODEL, PROMPT, params, proposer, rules=rules, sampled_drafts=warm,
        vocabulary=Vocabulary(V, ENDS, None, tokenizer),
    ).completion  # fmt: skip


def is_beginning(grammar: Grammar, text: bytes) -> bool:
    """Whether an obedient output can begin with this text, in whatever tokens."""
    matcher = grammar.matcher.deep_copy()
    spelled = [ID_OF[bytes([byte])] for byte in text]
    return matcher.validate_tokens(spelled) == len(spelled)


def obeys(case: GrammarCase, tokenizer: GrammarTokenizer, found: Completion) -> bool:
    """Whether it finished; asserts that it parses, or that it begins what would."""
    ids = found.token_ids
    text = b"".join(TOKENS[token] for token in ids if token not in ENDS)
    if ids[-1] in ENDS:
        assert found.finish_reason == "stop"
        assert case.obeys(text.decode()), (case.controls, text)
        return True
    assert found.finish_reason == "length"
    assert len(ids) == case.controls.max_new_tokens
    assert is_beginning(compile_grammar(case.controls, tokenizer), text), (case.controls, text)
    return False


@pytest.mark.parametrize("method", PROPOSERS)
def test_greedy_texts_obey_and_are_those_of_plain_decoding(tokenizer, method):
    num_finished = num_accepted = num_forbidden = 0
    for case in cases(21, NUM_CASES, max_new_tokens=LENGTH):
        plain = complete(case.controls, tokenizer)
        found = complete(case.controls, tokenizer, method)
        assert found.token_ids == plain.token_ids
        assert found.finish_reason == plain.finish_reason
        check_counts(found)
        num_finished += obeys(case, tokenizer, found)
        num_accepted += found.stats.num_accepted
        num_forbidden += found.stats.num_forbidden
    assert num_finished >= 0.9 * NUM_CASES
    assert num_accepted > 0 and (num_forbidden > 0) == (method in ("ngram", "cascade"))


@pytest.mark.parametrize("method", [None, *PROPOSERS])
def test_sampled_texts_obey(tokenizer, method):
    num_finished = num_accepted = 0
    for seed, case in enumerate(
        cases(22, NUM_CASES, max_new_tokens=LENGTH, temperature=1.0, top_p=0.98)
    ):
        case = GrammarCase(replace(case.controls, seed=seed), case.obeys)
        found = complete(case.controls, tokenizer, method)
        num_finished += obeys(case, tokenizer, found)
        num_accepted += found.stats.num_accepted
    assert num_finished >= 0.9 * NUM_CASES
    assert (num_accepted > 0) == (method is not None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", PROPOSERS)
def test_texts_that_are_cut_short_are_beginnings(tokenizer, method, temperature):
    num_finished = 0
    for case in cases(23, NUM_CASES, max_new_tokens=5, temperature=temperature):
        num_finished += obeys(case, tokenizer, complete(case.controls, tokenizer, method))
    assert num_finished < NUM_CASES
