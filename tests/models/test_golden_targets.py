"""The stored outputs of transformers on tiny targets: logits, hidden states, greedy tokens.

Every case under ``target/`` of the reference data is run, however many there are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forespeak.models.decoder import Decoder
from forespeak.models.loading import load_checkpoint
from forespeak.types import Segment, TargetOutput
from tests.tiny import run

pytestmark = [pytest.mark.golden, pytest.mark.usefixtures("one_thread")]

_BESIDE = Path(__file__).parents[3] / "shared/golden/open"
_FOLDER = Path(os.environ.get("FORESPEAK_GOLDEN") or _BESIDE)
_CASES = sorted(_FOLDER.glob("target/*/case.json"))
_TOLERANCE = 1e-4

every_case = pytest.mark.parametrize("path", _CASES, ids=[path.parent.name for path in _CASES])


class Case:
    """One case and the target that it was run with."""

    def __init__(self, path: Path) -> None:
        self.facts: dict[str, Any] = json.loads(path.read_text())
        self.tensors: dict[str, Tensor] = load_file(path.parent / "tensors.safetensors")
        self.checkpoint = load_checkpoint(_FOLDER.parent / self.facts["target"])
        length, stored = self.tensors["input_ids"].shape[1], self.tensors["logits"].shape[1]
        step = round(length / stored)  # some cases store every so many positions only
        self.stored = torch.arange(0, length, step)
        assert len(self.stored) == stored, f"{path}: {stored} stored positions of {length}"

    def decoder(self, device: torch.device, **options: Any) -> Decoder:
        assert self.checkpoint.config is not None
        return Decoder(self.checkpoint.config, self.checkpoint.weights(), device=device, **options)


def test_there_are_cases():
    if not _FOLDER.is_dir() and "FORESPEAK_GOLDEN" not in os.environ:
        pytest.skip(f"no reference data: there is no {_FOLDER}; FORESPEAK_GOLDEN may name another")
    assert _CASES, f"{_FOLDER} has no target/*/case.json"


@every_case
@pytest.mark.parametrize("plain", [False, True], ids=["library", "plain"])
def test_logits_and_hidden_states(path: Path, plain: bool, device: torch.device):
    case = Case(path)
    decoder = case.decoder(device, plain_attention=plain)
    layers = range(decoder.config.num_layers)
    states = case.tensors["hidden_states"]  # [L + 1, B, n, H]
    assert len(states) == len(layers) + 1
    for i, tokens in enumerate(case.tensors["input_ids"]):
        out = run(decoder, tokens.tolist(), taps=layers)
        assert out.taps is not None
        at = case.stored
        _close(out.logits[at], case.tensors["logits"][i])
        _close(decoder.embed(tokens[at]), states[0, i])
        _close(out.hidden[at], states[-1, i])
        _close(out.taps[at, :-1].transpose(0, 1), states[1:-1, i])
        _close(out.taps[at, -1], case.tensors["last_layer_raw"][i])


@every_case
def test_rows_of_a_batch_in_one_forward(path: Path, device: torch.device):
    case = Case(path)
    decoder = case.decoder(device)
    ids = case.tensors["input_ids"]
    rows, n = ids.shape
    cache = decoder.new_cache(rows, n)
    positions = torch.arange(n, device=device).repeat(rows)
    segments = [Segment(row, n) for row in range(rows)]
    out = decoder.forward(ids.flatten().to(device), positions, cache, segments)
    _close(out.logits.view(rows, n, -1)[:, case.stored], case.tensors["logits"])


@every_case
def test_greedy_tokens(path: Path, device: torch.device):
    case = Case(path)
    expected = case.tensors["greedy_new_ids"].tolist()
    assert len(expected) == 48
    decoder = case.decoder(device)
    prompt = case.tensors["prompt_ids"][0].tolist()
    found, gaps = _greedy(decoder, prompt, len(expected))
    assert found == expected
    assert gaps == pytest.approx(case.tensors["greedy_top2_gap"].tolist(), abs=2 * _TOLERANCE)


def _greedy(decoder: Decoder, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens, and for each the distance of the two best logits."""
    cache = decoder.new_cache(1, 8)
    new = prompt
    found: list[int] = []
    gaps: list[float] = []
    while len(found) < count:
        start = cache.lengths[0]
        out: TargetOutput = decoder.forward(
            torch.tensor(new, device=decoder.device),
            torch.arange(start, start + len(new), device=decoder.device),
            cache,
            [Segment(0, len(new))],
            logits_at=torch.tensor([len(new) - 1], device=decoder.device),
        )
        cache.commit_all(0)
        best = out.logits[0].topk(2)
        new = [int(best.indices[0])]
        found += new
        gaps.append(float(best.values[0] - best.values[1]))
    return found, gaps


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, atol=_TOLERANCE, rtol=0)
