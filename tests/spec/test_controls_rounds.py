"""Speculation in rounds against plain decoding, with all controls at once and a scripted model.

The model's logits are a function of the whole history, so any slip in what a node is given as its
history changes the text. Drafts are right, nearly right or wrong; trees are random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from forespeak.sampling import SamplingParams
from forespeak.spec.grammar import Grammar, GrammarState, GrammarTokenizer, compile_grammar
from forespeak.spec.logprobs import token_logprobs
from forespeak.spec.processors import LogitsPipeline, node_paths
from forespeak.spec.stopping import Stopper
from forespeak.spec.tree import CandidateTree
from forespeak.types import TokenLogprob
from tests.spec.grammar_cases import END_OF_TURN, EOS, random_case, vocabulary

TOKENS = vocabulary()
V = len(TOKENS)
ENDS = (EOS, END_OF_TURN)
FAVOURITES = range(40, 52)  # likely everywhere, so that texts repeat themselves
PROMPT = [40, 50, 60]


class TokenText:
    """Text of a token; broken characters are shown as such."""

    def push(self, token_id: int) -> str:
        return TOKENS[token_id].decode(errors="replace")


@dataclass
class Session:
    """One text: what the engine keeps for a row."""

    controls: SamplingParams
    grammar: Grammar | None
    words: Sequence[Sequence[int]]
    output: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: tuple[str | None, str | int | None] = (None, None)

    def __post_init__(self) -> None:
        self.pipeline = LogitsPipeline(
            self.controls, PROMPT, eos_ids=ENDS, vocab_size=V, bad_word_ids=self.words
        )
        self.state: GrammarState | None = self.grammar.start() if self.grammar else None
        self.stopper = Stopper(self.controls, eos_ids=ENDS, decoder=TokenText())

    def logits(self, path: Sequence[int]) -> Tensor:
        """The scripted model after prompt, output and path. [V]"""
        history = str([*PROMPT, *self.output, *path])
        generator = torch.Generator().manual_seed(random.Random(history).getrandbits(60))
        logits = torch.randn(V, generator=generator)
        logits[list(FAVOURITES)] += 2.5
        return logits

    def commit(self, rows: Tensor, tokens: list[int]) -> None:
        kept = self.stopper.push(tokens)
        tokens = tokens[: kept.num_kept]
        self.logprobs += token_logprobs(rows[: kept.num_kept], tokens, 2)
        self.pipeline.advance(tokens)
        for token in tokens if self.state else ():
            assert self.state
            self.state.advance(token)
        self.output += tokens
        self.text += kept.text
        self.end = (kept.finish_reason, kept.stop_reason)

    def first(self) -> None:
        """What prefill yields; in plain decoding, every step."""
        logits = self.logits([])[None]
        allowed = self.state.mask()[None] if self.state else None
        processed = self.pipeline.apply(logits, [()], allowed=allowed)
        self.commit(logits, [int(self.pipeline.best(processed)[0])])

    def round(self, tree: CandidateTree) -> int:
        """Verify a tree greedily; returns how many drafts were accepted."""
        paths = node_paths(tree)
        seen = self.state.follow(tree) if self.state else None
        logits = torch.stack([self.logits(path) for path in paths])
        processed = self.pipeline.apply(logits, paths, allowed=seen.allowed if seen else None)
        best = self.pipeline.best(processed).tolist()
        cut = seen.forbidden if seen else ()
        path = [0]
        for node in range(1, len(tree)):
            fits = tree.parents[node] == path[-1] and tree.tokens[node] == best[path[-1]]
            if fits and node not in cut:
                path.append(node)
        self.commit(logits[path], [best[node] for node in path])
        return len(path) - 1


def drafted(rng: random.Random, plain: list[int], done: int) -> CandidateTree:
    """A tree that holds some of what plain decoding would write next."""
    tokens, parents, depths = [plain[done - 1]], [-1], [0]
    for node in range(1, rng.randint(1, 9)):
        parent = node - 1 if rng.random() < 0.7 else rng.randrange(node)
        place = done + depths[parent]
        right = plain[place] if place < len(plain) else EOS
        tokens.append(right if rng.random() < 0.8 else rng.randrange(V))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return CandidateTree(tuple(tokens), tuple(parents))


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    return GrammarTokenizer.from_tokens(TOKENS, eos_ids=ENDS)


def texts(*tokens: int) -> str:
    return b"".join(TOKENS[token] for token in tokens).decode()


def random_request(rng: random.Random) -> SamplingParams:
    controls = SamplingParams(
        max_new_tokens=rng.choice([20, 41]),
        min_tokens=rng.choice([0, 9]),
        repetition_penalty=rng.choice([1.0, 1.5]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 1.1]),
        logit_bias=rng.choice([{}, {EOS: 2.5, 40: 2.0}]),
        stop=rng.choice([(), (texts(41, 45), texts(43)), (texts(44, 40), "}")]),
        stop_token_ids=rng.choice([(), (77,)]),
        bad_words=("set below",),
        logprobs=2,
    )
    case = random_case(rng) if rng.random() < 0.5 else None
    if case is None:
        return replace(controls, ignore_eos=rng.random() < 0.3)
    wanted = case.controls
    return replace(
        controls, json_schema=wanted.json_schema, regex=wanted.regex, grammar=wanted.grammar
    )


@pytest.mark.parametrize("seed", range(60))
def test_rounds_equal_plain_decoding(tokenizer, seed):
    rng = random.Random(seed)
    controls = random_request(rng)
    grammar = compile_grammar(controls, tokenizer) if controls.constraint else None
    words = [[rng.choice(FAVOURITES) for _ in range(rng.randint(2, 3))] for _ in range(30)]
    plain = Session(controls, grammar, words)
    while not plain.stopper.is_finished:
        plain.first()
    spoken = Session(controls, grammar, words)
    spoken.first()
    num_accepted = 0
    while not spoken.stopper.is_finished:
        num_accepted += spoken.round(drafted(rng, plain.output, len(spoken.output)))
    assert spoken.output == plain.output
    assert (spoken.text, spoken.end) == (plain.text, plain.end)
    assert spoken.logprobs == plain.logprobs
    assert all(entry.logprob < 0 for entry in spoken.logprobs)
    assert len(plain.output) < 20 or num_accepted > 0
