"""Every method of the table that needs a checkpoint, through every builder it takes.

Drafters have random weights (``forespeak init`` makes them), so that most drafts are rejected;
those of the reference data, in ``tests/drafters``, are accepted now and then, scripted ones always.
A new method is one row of ``ROWS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from forespeak.drafters.base import Drafter
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.starting import start_drafter
from forespeak.drafters.table import METHODS
from forespeak.engine.llm import LLM
from forespeak.engine.reference import decode_greedy
from forespeak.engine.target import Target, in_memory
from forespeak.errors import DrafterError
from forespeak.models.base import TargetModel
from forespeak.sampling import SamplingParams
from forespeak.types import DenseLaws, Observation, SpeculationConfig
from tests.engine.scripted import check_counts
from tests.engine.test_sampling import chi_square
from tests.spec.exactness_cases import EXHAUSTIVE
from tests.tiny import random_tokens, run, tiny_config, tiny_decoder, tiny_int8

pytestmark = pytest.mark.slow

CONTEXT = 128
CONFIG = tiny_config(num_layers=6, max_position_embeddings=CONTEXT, eos_token_ids=())
V = CONFIG.vocab_size
MAKERS: dict[str, Callable[[], TargetModel]] = {
    "float32": lambda: tiny_decoder(CONFIG),
    "int8": lambda: tiny_int8(CONFIG),
}
# Method -> (method whose drafter it reads, settings of a small one).
ROWS: dict[str, tuple[str, dict[str, str]]] = {
    "medusa": ("medusa", {"num_heads": "4"}),
    "mtp_parallel": ("mtp_parallel", {"num_heads": "4"}),
    "mtp": ("mtp", {}),
    "eagle": ("eagle", {}),
    "eagle2": ("eagle", {}),
    "eagle3": ("eagle3", {"draft_vocab_size": "50"}),
    "dflash": ("dflash", {"block_size": "6"}),
    "ddtree": ("dflash", {"block_size": "6"}),
    "dspark": ("dspark", {"block_size": "5", "draft_vocab_size": "60"}),
}
TRAINED = [name for name, entry in METHODS.items() if entry.info.trained and name != "draft_model"]
PAIRS = [(name, builder) for name in TRAINED for builder in METHODS[name].builders]
SIZES = {"node_budget": 9, "tree_depth": 3, "tree_top_k": 3}
PROMPTS = [(5,), tuple(random_tokens(9, 3)), (7, 8, 9) * 6]
LONG = tuple(random_tokens(100, 8))


def test_every_trained_method_has_a_row() -> None:
    assert set(TRAINED) == set(ROWS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of random weights for each method."""
    root = tmp_path_factory.mktemp("drafters")
    for name, (method, changes) in ROWS.items():
        start_drafter(method, CONFIG, root / name, changes=changes, seed=7)
    return {name: root / name for name in ROWS}


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def target_of(kind: str) -> Target:
    return in_memory(MAKERS[kind]())


@cache
def plain_text(kind: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(decode_greedy(target_of(kind).model, prompt, count))


def settings_of(name: str, builder: str, folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"method": name, "drafter": str(folder)}
    if len(METHODS[name].builders) > 1:
        settings["builder"] = builder
    if builder == "chain":
        return settings
    names = ("node_budget", "tree_depth") if builder == "ddtree" else tuple(SIZES)
    return settings | {key: SIZES[key] for key in names}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("name", "builder"), PAIRS)
def test_greedy_is_plain_decoding(
    name: str, builder: str, kind: str, folders: dict[str, Path]
) -> None:
    llm = LLM(target_of(kind), **settings_of(name, builder, folders[name]))
    for prompt in PROMPTS:
        done = llm.generate(list(prompt), SamplingParams(max_new_tokens=24))
        assert done.token_ids == plain_text(kind, prompt, 24)
        check_counts(done)
        assert done.stats.num_drafted > 0


@pytest.mark.parametrize(("name", "builder"), PAIRS)
def test_up_to_the_context_limit(name: str, builder: str, folders: dict[str, Path]) -> None:
    """Asked for more than the context holds, from a prompt of one token and a long one."""
    llm = LLM(target_of("int8"), **settings_of(name, builder, folders[name]))
    for prompt in (PROMPTS[0], LONG):
        done = llm.generate(list(prompt), SamplingParams(max_new_tokens=500))
        assert done.finish_reason == "length"
        assert done.token_ids == plain_text("int8", prompt, CONTEXT - len(prompt))


@pytest.mark.parametrize("name", TRAINED)
def test_behind_look_up(name: str, folders: dict[str, Path]) -> None:
    """Where nothing matches the learned drafter drafts, with all that it missed meanwhile."""
    llm = LLM(target_of("int8"), method=f"ngram+{name}", drafter=str(folders[name]))
    for prompt in PROMPTS:
        done = llm.generate(list(prompt), SamplingParams(max_new_tokens=40))
        assert done.token_ids == plain_text("int8", prompt, 40)
        check_counts(done)


CONTROLS = {
    "penalties": SamplingParams(
        max_new_tokens=24, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.6
    ),
    "bias": SamplingParams(max_new_tokens=24, logit_bias={7: 3.0, 11: -50.0, 30: 2.0}),
    "allowed": SamplingParams(max_new_tokens=24, allowed_token_ids=(3, 9, 27, 41, 80)),
    "drawn": SamplingParams(max_new_tokens=24, temperature=0.9, top_k=12, top_p=0.9, seed=3),
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(("name", "builder"), PAIRS)
def test_controls_and_log_probabilities(
    name: str, builder: str, control: str, folders: dict[str, Path]
) -> None:
    """By the rule ``match`` even a drawn text is the very one that plain decoding draws."""
    params = replace(CONTROLS[control], logprobs=3)
    plain = LLM(target_of("int8")).generate(list(PROMPTS[1]), params)
    llm = LLM(target_of("int8"), **settings_of(name, builder, folders[name]), rule="match")
    done = llm.generate(list(PROMPTS[1]), params)
    assert done.token_ids == plain.token_ids
    assert done.logprobs is not None and plain.logprobs is not None
    for one, other in zip(done.logprobs, plain.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("name", TRAINED)
def test_an_end_anywhere(name: str, folders: dict[str, Path]) -> None:
    prompt = PROMPTS[1]
    text = plain_text("int8", prompt, 24)
    llm = LLM(target_of("int8"), **settings_of(name, METHODS[name].builders[0], folders[name]))
    for token in dict.fromkeys(text):
        end = text.index(token) + 1
        done = llm.generate(
            list(prompt), SamplingParams(max_new_tokens=24, stop_token_ids=(token,))
        )
        assert done.token_ids == text[:end]


def opened(name: str, folder: Path, num_rows: int) -> Drafter:
    config = SpeculationConfig(method=name, drafter=str(folder))
    return load_drafter(config, target_of("float32").parts, num_rows=num_rows)


def shown(drafter: Drafter, row: int, tokens: tuple[int, ...], chunks: list[int]) -> None:
    """A drafter observes verified tokens in chunks of these sizes."""
    output, at = run(target_of("float32").model, tokens, taps=drafter.info.taps), 0
    for size in chunks:
        part = slice(at, at + size)
        taps = None if output.taps is None else output.taps[part]
        drafter.observe([Observation(row, tokens[part], output.hidden[part], taps)])
        at += size
    assert at == len(tokens)


def first_laws(drafter: Drafter, rows: list[int], roots: list[int]) -> torch.Tensor:
    laws = drafter.propose(rows, roots, 3)
    assert isinstance(laws, DenseLaws) and laws.logits.dtype == torch.float32
    assert bool(torch.isfinite(laws.logits).all())
    return laws.logits


@pytest.mark.parametrize("name", TRAINED)
def test_rows_together_chunks_and_a_second_life(name: str, folders: dict[str, Path]) -> None:
    """Laws do not depend on other rows, on how a prompt was cut, or on who had the row before."""
    texts = [tuple(random_tokens(n, n)) for n in (1, 17, 6)]
    roots = [3, 4, 5]
    alone = []
    for text, root in zip(texts, roots, strict=True):
        drafter = opened(name, folders[name], 1)
        drafter.admit(0)
        shown(drafter, 0, text, [len(text)])
        alone.append(first_laws(drafter, [0], [root])[0])
    together = opened(name, folders[name], 3)
    for row, text in enumerate(texts):
        together.admit(row)
        shown(together, row, text[::-1], [len(text)])  # somebody else's text
    first_laws(together, [0, 1, 2], roots)
    for row, text in enumerate(texts):
        together.release(row)
        together.admit(row)
        shown(together, row, text, [1] * len(text) if row == 1 else [len(text)])
    found = first_laws(together, [2, 0, 1], [roots[2], roots[0], roots[1]])
    for place, row in enumerate((2, 0, 1)):
        torch.testing.assert_close(found[place], alone[row], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", TRAINED)
def test_two_observations_of_a_row_in_one_call(name: str, folders: dict[str, Path]) -> None:
    text = tuple(random_tokens(12, 4))
    output = run(target_of("float32").model, text, taps=opened(name, folders[name], 1).info.taps)

    def part(first: int, last: int) -> Observation:
        taps = None if output.taps is None else output.taps[first:last]
        return Observation(0, text[first:last], output.hidden[first:last], taps)

    laws = []
    for calls in ([[part(0, 12)]], [[part(0, 5), part(5, 6), part(6, 12)]]):
        drafter = opened(name, folders[name], 1)
        drafter.admit(0)
        for observations in calls:
            drafter.observe(observations)
        laws.append(first_laws(drafter, [0], [3]))
    torch.testing.assert_close(laws[1], laws[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", TRAINED)
def test_a_drafter_of_another_method_is_called_by_its_own(
    name: str, folders: dict[str, Path]
) -> None:
    reads = {name, ROWS[name][0], *METHODS[name].reads}
    for other in ("medusa", "mtp_parallel", "mtp", "eagle", "eagle3", "dflash", "dspark"):
        if other in reads or {name, other} <= {"dflash", "dspark"}:
            continue
        with pytest.raises(DrafterError, match=f"is of method {other}, and method {name} was"):
            opened(name, folders[other], 1)


# Sampling against exact probabilities, with a target small enough to enumerate.

EOS = 0
SMALL = tiny_config(
    num_layers=6, vocab_size=8, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1,
    max_position_embeddings=64, eos_token_ids=(EOS,),
)  # fmt: skip
SMALL_ROWS = {
    **ROWS,
    "eagle3": ("eagle3", {"draft_vocab_size": "6"}),
    "dspark": ("dspark", {"block_size": "5", "draft_vocab_size": "7"}),
}
DRAWN = {"draft_sampling": "probabilistic"}
SAMPLED: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {**DRAWN, "rule": "block"}),
    ("medusa", {"builder": "ddtree", **{k: SIZES[k] for k in ("node_budget", "tree_depth")}}),
    ("mtp_parallel", {**DRAWN, "builder": "static_tree", **SIZES, "rule": "siblings"}),
    ("mtp", {**DRAWN, "rule": "rejection"}),
    ("eagle", {**DRAWN, "builder": "static_tree", **SIZES, "rule": "siblings"}),
    ("eagle2", {"node_budget": 9, "tree_depth": 4, "rule": "point_siblings"}),
    ("eagle3", {**DRAWN, "rule": "block"}),
    ("dflash", {**DRAWN, "rule": "rejection"}),
    ("ddtree", {"node_budget": 9}),
    ("dspark", {**DRAWN, "rule": "block", "confidence_threshold": 0.45}),
    ("dspark", {"builder": "dynamic_tree", **SIZES}),
]
NUM_DRAWS = 20_000 if EXHAUSTIVE else 400
NUM_COUNTED = 3
PROMPT = [1, 2, 3, 1, 4, 1, 2]


@cache
def small_target() -> Target:
    return in_memory(tiny_decoder(SMALL, seed=6))


@cache
def expected_law() -> dict[tuple[int, ...], float]:
    """Probability of each beginning of a text: three tokens, or fewer up to end-of-sequence."""
    law: dict[tuple[int, ...], float] = {}

    def descend(path: tuple[int, ...], mass: float) -> None:
        if len(path) == NUM_COUNTED or EOS in path:
            law[path] = mass
            return
        logits = run(small_target().model, [*PROMPT, *path]).logits[-1]
        for token, share in enumerate(logits.double().softmax(-1).tolist()):
            descend((*path, token), mass * share)

    descend((), 1.0)
    return law


@pytest.mark.parametrize(("name", "options"), SAMPLED)
def test_texts_follow_the_law_of_the_target(
    name: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method, changes = SMALL_ROWS[name]
    start_drafter(method, SMALL, tmp_path / name, changes=changes, seed=7)
    llm = LLM(small_target(), method=name, drafter=str(tmp_path / name), **options)
    found: dict[tuple[int, ...], int] = {}
    num_accepted = num_drafted = 0
    for seed in range(NUM_DRAWS):
        params = SamplingParams(max_new_tokens=NUM_COUNTED + 2, temperature=1.0, seed=seed)
        done = llm.generate(PROMPT, params)
        start = done.token_ids[:NUM_COUNTED]
        found[start] = found.get(start, 0) + 1
        num_accepted += done.stats.num_accepted
        num_drafted += done.stats.num_drafted
    p_value = chi_square(found, expected_law(), least_cells=90 if EXHAUSTIVE else 15)
    if EXHAUSTIVE:
        with capsys.disabled():  # for the log that is kept
            print(f"\n{name:12} {options} {NUM_DRAWS} texts, p = {p_value:.4f}", end="")  # noqa: T201
    assert p_value > 1e-3
    assert 0 < num_accepted < num_drafted
