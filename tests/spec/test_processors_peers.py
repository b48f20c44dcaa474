"""The processors against transformers' own, where the meanings agree, and the golden filters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from forespeak.sampling import SamplingParams
from forespeak.spec.processors import LogitsPipeline

GOLDEN = Path(
    os.environ.get("FORESPEAK_GOLDEN")
    or Path(__file__).resolve().parents[3] / "shared" / "golden" / "open"
)
V = 60
PROMPT = [3, 7, 7, 12]
OUTPUT = [5, 9, 5]

PEERS: list[tuple[dict[str, Any], Any]] = [
    ({"temperature": 0.6}, TemperatureLogitsWarper(0.6)),
    ({"top_k": 7}, TopKLogitsWarper(7)),
    ({"top_p": 0.7}, TopPLogitsWarper(0.7)),
    ({"min_p": 0.13}, MinPLogitsWarper(0.13)),
    ({"typical_p": 0.6}, TypicalLogitsWarper(0.6)),
    ({"repetition_penalty": 1.4}, RepetitionPenaltyLogitsProcessor(1.4)),
    ({"repetition_penalty": 0.7}, RepetitionPenaltyLogitsProcessor(0.7)),
]


@pytest.mark.parametrize(("fields", "peer"), PEERS, ids=[str(fields) for fields, _ in PEERS])
def test_transformers_agrees(fields, peer):
    generator = torch.Generator().manual_seed(0)
    controls = SamplingParams(**{"temperature": 1.0, **fields})
    for _ in range(30):
        logits = torch.randn(1, V, generator=generator, dtype=torch.float64) * 3
        path = torch.randint(V, (3,), generator=generator).tolist()
        pipeline = LogitsPipeline(controls, PROMPT, eos_ids=(1,), vocab_size=V)
        pipeline.advance(OUTPUT)
        ours = pipeline.law(pipeline.apply(logits, [path]))
        theirs = peer(torch.tensor([[*PROMPT, *OUTPUT, *path]]), logits.clone()).softmax(-1)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_transformers_agrees_on_bad_words_in_the_output():
    words = [[4], [5, 9], [9, 5, 6]]
    peer = NoBadWordsLogitsProcessor(words)
    pipeline = LogitsPipeline(SamplingParams(), [], eos_ids=(1,), vocab_size=V, bad_word_ids=words)
    pipeline.advance(OUTPUT)
    logits = torch.randn(3, V)
    for row, path in enumerate([(), (5,), (9,)]):
        ours = pipeline.apply(logits[row : row + 1], [path])
        theirs = peer(torch.tensor([[*OUTPUT, *path]]), logits[row : row + 1].clone())
        assert torch.equal(ours, theirs)


def filter_cases() -> list[Path]:
    """Case folders that hold logit filters."""
    files = sorted((GOLDEN / "verification").glob("case_*/case.json"))
    return [f.parent for f in files if "warps" in json.loads(f.read_text())["results"]]


@pytest.mark.golden
def test_golden_filters():
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden data at {GOLDEN}; set FORESPEAK_GOLDEN to its folder")
    cases = filter_cases()
    assert cases, f"{GOLDEN} holds no case of logit filters"
    for folder in cases:
        warps = json.loads((folder / "case.json").read_text())["results"]["warps"]
        tensors = load_file(folder / "tensors.safetensors")
        logits = tensors["warp.logits"]
        assert warps
        for number, fields in enumerate(warps):
            pipeline = LogitsPipeline(
                SamplingParams(**fields), eos_ids=(), vocab_size=logits.shape[1]
            )
            laws = pipeline.law(pipeline.apply(logits, [(), ()]))
            stored = torch.stack([tensors[f"warp{number}.p"], tensors[f"warp{number}.q"]])
            torch.testing.assert_close(laws, stored, rtol=0, atol=1e-9)
