"""Grammar states against fresh replays, and random models held inside random grammars."""

from __future__ import annotations

import builtins
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams
from forespeak.spec.grammar import Grammar, GrammarState, GrammarTokenizer, compile_grammar
from forespeak.spec.processors import LogitsPipeline, node_paths
from forespeak.spec.tree import CandidateTree, chain
from tests.spec.grammar_cases import END_OF_TURN, EOS, PADDING, cases, is_valid, vocabulary

TOKENS = vocabulary()
V = len(TOKENS) + 5  # a model's head is often wider than its tokenizer
ID_OF = {token: number for number, token in enumerate(TOKENS)}


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    return GrammarTokenizer.from_tokens(TOKENS, vocab_size=V, eos_ids=(EOS, END_OF_TURN))


def text_of(tokens: Sequence[int]) -> bytes:
    return b"".join(TOKENS[t] for t in tokens if t not in (EOS, END_OF_TURN))


def compiled(tokenizer: GrammarTokenizer, **fields: Any) -> Grammar:
    return compile_grammar(SamplingParams(**fields), tokenizer)


def replayed(grammar: Grammar, tokens: Sequence[int]) -> GrammarState | None:
    """The slow way: a fresh state fed with the whole history; None where it does not fit."""
    state = grammar.start()
    for token in tokens:
        if not state.mask()[token]:
            return None
        state.advance(token)
    return state


def is_beginning(grammar: Grammar, text: bytes) -> bool:
    """Whether an obedient output can begin with this text, in whatever tokens."""
    matcher = grammar.matcher.deep_copy()
    spelled = [ID_OF[bytes([byte])] for byte in text]
    return matcher.validate_tokens(spelled) == len(spelled)


def random_walk(
    state: GrammarState, rng: random.Random, num_tokens: int
) -> tuple[list[int], list[GrammarState]]:
    walked: list[int] = []
    copies = [state.fork()]
    for _ in range(num_tokens):
        token = rng.choice(state.mask().nonzero()[:, 0].tolist())
        state.advance(token)
        walked.append(token)
        copies.append(state.fork())
    return walked, copies


def random_tree(rng: random.Random, state: GrammarState, num_nodes: int) -> CandidateTree:
    """A tree of mostly allowed tokens below a root that is committed already."""
    tokens, parents = [PADDING], [-1]
    states: dict[int, GrammarState] = {0: state.fork()}
    for node in range(1, num_nodes):
        parent = rng.randrange(node)
        token = rng.randrange(V)
        if parent in states and rng.random() < 0.8:
            token = rng.choice(states[parent].mask().nonzero()[:, 0].tolist())
            states[node] = states[parent].fork()
            states[node].advance(token)
        tokens.append(token)
        parents.append(parent)
    return CandidateTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("seed", range(25))
def test_trees_equal_a_fresh_replay_of_each_path(tokenizer, seed):
    rng = random.Random(seed)
    for case in cases(seed, 2):
        grammar = compile_grammar(case.controls, tokenizer)
        state = grammar.start()
        committed, _ = random_walk(state, rng, rng.randrange(8))
        tree = random_tree(rng, state, rng.randint(1, 12))
        before = state.mask()
        seen = state.follow(tree)
        assert torch.equal(state.mask(), before)
        for node, path in enumerate(node_paths(tree)):
            fresh = replayed(grammar, [*committed, *path])
            assert (node in seen.forbidden) == (fresh is None)
            if fresh is not None:
                assert torch.equal(seen.allowed[node], fresh.mask())
            else:
                assert seen.allowed[node].nonzero()[:, 0].tolist() == [EOS, END_OF_TURN]


@pytest.mark.parametrize("seed", range(10))
def test_rollback_and_fork_equal_a_fresh_replay(tokenizer, seed):
    rng = random.Random(seed)
    for case in cases(100 + seed, 2):
        grammar = compile_grammar(case.controls, tokenizer)
        state = grammar.start()
        walked, copies = random_walk(state, rng, 12)
        for num_back in (1, 3, 5):
            state.rollback(num_back)
            del walked[len(walked) - num_back :]
            fresh = replayed(grammar, walked)
            assert fresh is not None
            assert torch.equal(state.mask(), fresh.mask())
            assert torch.equal(state.mask(), copies[len(walked)].mask())
            assert state.is_accepting == fresh.is_accepting
            assert state.is_finished == fresh.is_finished
            more, _ = random_walk(state, rng, 2)
            walked += more
            copies[len(walked) - 2 :] = [state.fork(), state.fork(), state.fork()]
            copies[len(walked) - 1].rollback(1)
            copies[len(walked) - 2].rollback(2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("max_new_tokens", "least_share"), [(200, 0.9), (5, 0.0)])
def test_a_random_model_stays_inside_the_grammar(
    tokenizer, temperature, max_new_tokens, least_share
):
    """Finished outputs obey, truncated ones are beginnings of obedient ones."""
    generator = torch.Generator().manual_seed(3)
    number, num_finished = 40, 0
    fields = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    for case in cases(11, number, **fields):
        grammar = compile_grammar(case.controls, tokenizer)
        state = grammar.start()
        pipeline = LogitsPipeline(case.controls, eos_ids=(EOS, END_OF_TURN), vocab_size=V)
        output: list[int] = []
        while len(output) < case.controls.max_new_tokens and not state.is_finished:
            logits = torch.randn(1, V, generator=generator)
            law = pipeline.law(pipeline.apply(logits, [()], allowed=state.mask()[None]))
            token = int(torch.multinomial(law[0], 1, generator=generator))
            state.advance(token)
            pipeline.advance([token])
            output.append(token)
        text = text_of(output)
        if state.is_finished:
            num_finished += 1
            assert output[-1] in (EOS, END_OF_TURN)
            assert case.obeys(text.decode()), (case.controls, text)
        else:
            assert is_beginning(grammar, text), (case.controls, text)
    assert least_share * number <= num_finished
    assert max_new_tokens > 5 or num_finished < number


def ends(state: GrammarState) -> tuple[bool, bool]:
    return state.is_accepting, state.is_finished


def test_end_of_sequence_only_where_the_output_is_complete(tokenizer):
    state = compiled(tokenizer, regex="ab?").start()
    assert state.mask().nonzero()[:, 0].tolist() == sorted([ID_OF[b"a"], ID_OF[b"ab"]])
    assert ends(state) == (False, False)
    state.advance(ID_OF[b"a"])
    assert state.mask().nonzero()[:, 0].tolist() == [EOS, END_OF_TURN, ID_OF[b"b"]]
    state.advance(ID_OF[b"b"])
    assert state.mask().nonzero()[:, 0].tolist() == [EOS, END_OF_TURN]
    assert ends(state) == (True, False)
    state.advance(END_OF_TURN)
    assert ends(state) == (True, True)
    state.advance(EOS)
    assert state.mask().nonzero()[:, 0].tolist() == [EOS, END_OF_TURN]
    state.rollback(3)
    assert ends(state) == (True, False)
    assert state.mask()[ID_OF[b"b"]]


def test_forbidden_nodes_take_their_descendants_along(tokenizer):
    state = compiled(tokenizer, regex="abc").start()
    state.advance(ID_OF[b"a"])
    a, b, c = (ID_OF[x] for x in (b"a", b"b", b"c"))
    tree = CandidateTree((a, b, c, c, c, EOS, a), (-1, 0, 1, 0, 3, 2, 5))
    assert state.follow(tree).forbidden == {3, 4, 6}
    assert state.follow(chain(a, [])).forbidden == frozenset()


def test_the_end_is_taken_where_nothing_else_is_left(tokenizer):
    state = compiled(tokenizer, regex="ab").start()
    state.advance(EOS)
    assert ends(state) == (False, True)
    assert state.mask().nonzero()[:, 0].tolist() == [EOS, END_OF_TURN]


def test_json_object_and_bounded_white_space(tokenizer):
    grammar = compiled(tokenizer, json_object=True)
    for text in ('{"a": [1, {"b": null}]}', "{\n    }", "{" + " " * 40):
        assert is_beginning(grammar, text.encode())
    for text in ("[", '{"a" 1', "{" + " " * 41):
        assert not is_beginning(grammar, text.encode())


def test_tokens_that_are_not_text_are_never_allowed(tokenizer):
    state = compiled(tokenizer, regex="[^x]*").start()
    assert not state.mask()[[PADDING, *range(len(TOKENS), V)]].any()


def test_a_tokenizer_file_is_read(tokenizer):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    built = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<end>", special=True)])
    end = len(words)
    assert built.token_to_id("<end>") == end
    read = GrammarTokenizer.from_json(built.to_str(), vocab_size=end + 3, eos_ids=[end])
    state = compiled(read, regex="abcé").start()
    for token in built.encode("abcé").ids:
        assert state.mask()[token] and len(state.mask()) == end + 3
        state.advance(token)
    assert state.mask().nonzero()[:, 0].tolist() == [end]
    with pytest.raises(OptionError, match="cannot read this model's tokenizer"):
        GrammarTokenizer.from_json("{}", vocab_size=5, eos_ids=[0])


INVALID = [
    ({"regex": "a("}, "regex cannot be used: unclosed group"),
    ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"json_schema": "{"}, "json_schema is no JSON"),
    ({"json_schema": "[1]"}, "allowed: a JSON object"),
    ({"json_schema": '{"type": "strin"}'}, "Invalid type: strin"),
    ({"json_schema": '{"not": {}}'}, 'Unimplemented keys: ["not"]'),
]


@pytest.mark.parametrize(("fields", "reason"), INVALID, ids=[str(fields) for fields, _ in INVALID])
def test_invalid_grammars_are_refused_with_the_reason(tokenizer, fields, reason):
    with pytest.raises(OptionError) as caught:
        compiled(tokenizer, **fields)
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message


def test_without_an_end_or_without_the_library_a_sentence_says_so(monkeypatch):
    with pytest.raises(OptionError, match="end-of-sequence"):
        GrammarTokenizer.from_tokens(TOKENS, eos_ids=())
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OptionError, match=r"pip install 'forespeak\[grammar\]'"):
        GrammarTokenizer.from_tokens(TOKENS, eos_ids=(EOS,))


def test_the_judge_of_schemas_judges():
    schema = {"type": "integer", "minimum": 0, "maximum": 3}
    assert is_valid(schema, 3)
    assert not any(is_valid(schema, value) for value in (4, True, 2.0, "3", None))
    assert not is_valid({"enum": [1]}, True)
    assert json.loads('"é"') == "é"
