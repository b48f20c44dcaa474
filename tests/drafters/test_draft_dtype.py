"""In which precision a drafter drafts: as the target serves, or as it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forespeak.drafters.base import TargetParts
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.starting import start_drafter
from forespeak.engine.llm import LLM
from forespeak.engine.settings import resolve
from forespeak.engine.target import in_memory
from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams
from forespeak.types import DenseLaws, Observation, SpeculationConfig
from tests.tiny import random_tokens, run, tiny_config, tiny_decoder, tiny_int8

pytestmark = pytest.mark.slow

CONFIG = tiny_config(num_layers=8, max_position_embeddings=128)
METHODS = ("medusa", "mtp_parallel", "mtp", "eagle", "eagle3", "dflash", "dspark")


def first_laws(method: str, folder: Path, parts: TargetParts, dtype: str | None) -> torch.Tensor:
    """Laws at depth 1 behind a prompt, [V]."""
    asked = SpeculationConfig(method=method, drafter=str(folder), draft_dtype=dtype)
    drafter = load_drafter(resolve(asked).members[0].config, parts)
    prompt = random_tokens(12, 3)
    output = run(parts.model, prompt, taps=drafter.info.taps)
    drafter.admit(0)
    drafter.observe([Observation(0, tuple(prompt), output.hidden, output.taps)])
    laws = drafter.propose([0], [5], 2)
    assert isinstance(laws, DenseLaws)
    return laws.logits[0, 0].float().log_softmax(-1)


@pytest.mark.parametrize("method", METHODS)
def test_int8_beside_an_int8_target_is_close_to_float32(tmp_path: Path, method: str):
    start_drafter(method, CONFIG, tmp_path / "drafter")
    parts = TargetParts(tiny_int8(CONFIG), threads=1)
    exact = first_laws(method, tmp_path / "drafter", parts, "float32")
    own = first_laws(method, tmp_path / "drafter", parts, None)
    asked = first_laws(method, tmp_path / "drafter", parts, "int8")
    assert torch.equal(own, asked) and not torch.equal(own, exact)
    divergence = (exact.exp() * (exact - own)).sum()
    spread = exact.max() - exact.min()  # laws that say something
    assert float(spread) > 0.5 and float(divergence) < 0.02


@pytest.mark.parametrize("method", METHODS)
def test_a_float_target_keeps_float_drafters(tmp_path: Path, method: str):
    start_drafter(method, CONFIG, tmp_path / "drafter")
    parts = TargetParts(tiny_decoder(CONFIG))
    own = first_laws(method, tmp_path / "drafter", parts, None)
    assert torch.equal(own, first_laws(method, tmp_path / "drafter", parts, "float32"))
    int8 = first_laws(method, tmp_path / "drafter", parts, "int8")
    assert not torch.equal(own, int8)
    half = first_laws(method, tmp_path / "drafter", parts, "bfloat16")
    for other in (int8, half):
        assert float((own.exp() * (own - other)).sum()) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_the_targets_whatever_drafts(tmp_path: Path, method: str, dtype: str):
    start_drafter(method, CONFIG, tmp_path / "drafter")
    target, prompt = in_memory(tiny_int8(CONFIG)), random_tokens(9, 4)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    llm = LLM(target, method=method, drafter=str(tmp_path / "drafter"), draft_dtype=dtype)
    assert llm.speculation.draft_dtype == dtype
    found, plain = llm.generate(prompt, params), LLM(target).generate(prompt, params)
    assert found.token_ids == plain.token_ids and found.stats.num_drafted > 0


def test_what_is_refused(tmp_path: Path):
    target = in_memory(tiny_int8(CONFIG))
    with pytest.raises(OptionError, match="Draft dtype 'int4' is not known"):
        LLM(target, method="eagle3", drafter="x", draft_dtype="int4")
    with pytest.raises(OptionError, match="draft_dtype"):
        LLM(target, method="ngram", draft_dtype="int8")
    with pytest.raises(OptionError, match="draft_dtype"):
        LLM(target, method="draft_model", drafter="truncate:2", draft_dtype="int8")
