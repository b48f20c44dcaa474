"""From settings to drafters: truncated targets, vocabularies compared by content, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forespeak.drafters.base import Drafter, TargetParts
from forespeak.drafters.draft_model import DraftModelDrafter
from forespeak.drafters.loader import load_drafter
from forespeak.drafters.ngram import NgramDrafter
from forespeak.engine.llm import LLM
from forespeak.engine.target import load_target
from forespeak.errors import DrafterError, ModelError, OptionError
from forespeak.models.decoder import Decoder
from forespeak.models.loading import load_checkpoint
from forespeak.models.opening import open_model
from forespeak.sampling import SamplingParams
from forespeak.types import DenseLaws, Observation, SpeculationConfig
from tests.engine.tiny_text import SIZE, characters, write_checkpoint
from tests.tiny import random_tokens, random_weights, run, tiny_config, tiny_decoder

CONFIG = tiny_config(vocab_size=SIZE, eos_token_ids=(0,))
CPU = torch.device("cpu")


def settings(drafter: str | None) -> SpeculationConfig:
    return SpeculationConfig(method="draft_model", drafter=drafter)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and draft models of the same, a permuted, a longer and no vocabulary."""
    root = tmp_path_factory.mktemp("models")
    tokens = characters()
    small = replace(CONFIG, num_layers=1)
    swapped = [*tokens]
    swapped[3], swapped[4] = swapped[4], swapped[3]
    return {
        "target": write_checkpoint(root / "target", CONFIG, tokens),
        "same": write_checkpoint(root / "same", small, tokens, seed=5),
        "padded": write_checkpoint(
            root / "padded", replace(small, vocab_size=SIZE + 7), tokens, seed=6
        ),
        "swapped": write_checkpoint(root / "swapped", small, swapped),
        "longer": write_checkpoint(
            root / "longer", replace(small, vocab_size=SIZE + 1), [*tokens, "k"]
        ),
        "silent": write_checkpoint(root / "silent", small, None),
    }


@pytest.fixture(scope="module")
def parts(folders) -> TargetParts:
    checkpoint = load_checkpoint(folders["target"])
    return TargetParts(open_model(checkpoint, dtype="float32", device=CPU), checkpoint)


def first_law(drafter: Drafter, tokens: list[int]) -> torch.Tensor:
    drafter.admit(0)
    drafter.observe([Observation(0, tuple(tokens[:-1]), torch.zeros(len(tokens) - 1, 1))])
    laws = drafter.propose([0], [tokens[-1]], 1)
    assert isinstance(laws, DenseLaws)
    return laws.logits[0, 0]


def test_truncated_targets_are_the_first_layers_with_the_target_head():
    model = tiny_decoder()
    weights = random_weights(model.config)
    tokens = random_tokens(7)
    for count in (1, 2):
        drafter = load_drafter(settings(f"truncate:{count}"), TargetParts(model))
        own = {name: weight for name, weight in weights.items() if _layer_of(name) < count}
        fresh = Decoder(replace(model.config, num_layers=count), own.items())
        expected = run(fresh, tokens).logits[-1]
        torch.testing.assert_close(first_law(drafter, tokens), expected, atol=1e-4, rtol=0)


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


@pytest.mark.parametrize(
    "name", ["truncate:0", "truncate:3", "truncate:x", "truncate:", "truncate:-1"]
)
def test_impossible_numbers_of_layers(name):
    with pytest.raises(OptionError, match="allowed"):
        load_drafter(settings(name), TargetParts(tiny_decoder()))


def test_a_draft_model_from_a_folder_drafts_for_its_target(parts, folders):
    tokens = random_tokens(6, vocab_size=SIZE)
    drafter = load_drafter(settings(str(folders["same"])), parts)
    assert isinstance(drafter, DraftModelDrafter)
    own = open_model(load_checkpoint(folders["same"]), dtype="float32", device=CPU)
    expected = run(own, tokens).logits[-1]
    torch.testing.assert_close(first_law(drafter, tokens), expected, atol=1e-4, rtol=0)


def test_a_head_padded_for_speed_has_the_same_vocabulary(parts, folders):
    drafter = load_drafter(settings(str(folders["padded"])), parts)
    assert first_law(drafter, [1, 2, 3]).shape == (SIZE,)


@pytest.mark.parametrize(("name", "count"), [("swapped", "2 of"), ("longer", "1 of")])
def test_vocabularies_are_compared_by_content(parts, folders, name, count):
    with pytest.raises(DrafterError, match="another vocabulary") as caught:
        load_drafter(settings(str(folders[name])), parts)
    assert count in str(caught.value) and "same family" in str(caught.value)


def test_a_draft_model_without_a_tokenizer_is_refused(parts, folders):
    with pytest.raises(DrafterError, match="no tokenizer"):
        load_drafter(settings(str(folders["silent"])), parts)


def test_a_target_in_memory_takes_no_draft_model_from_disk(folders):
    model = tiny_decoder(CONFIG)
    with pytest.raises(DrafterError, match="truncate:N"):
        load_drafter(settings(str(folders["same"])), TargetParts(model))


def test_no_draft_model_named():
    with pytest.raises(OptionError, match="--drafter"):
        load_drafter(settings(None), TargetParts(tiny_decoder()))


def test_a_draft_model_that_is_not_there(parts, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        load_drafter(settings(str(tmp_path / "nowhere")), parts)


def test_ngram_takes_its_lengths():
    config = SpeculationConfig(method="ngram", lookup_min=2, lookup_max=3)
    drafter = load_drafter(config, TargetParts(tiny_decoder()))
    assert isinstance(drafter, NgramDrafter)
    drafter.admit(0)
    drafter.observe([Observation(0, (1, 2, 9, 2), torch.zeros(4, 1))])
    assert drafter.propose([0], [9], 1).tokens == ((2,),)
    drafter.observe([Observation(0, (9, 5), torch.zeros(2, 1))])
    assert drafter.propose([0], [9], 1).tokens == ((),)


def test_an_unknown_method_names_those_there_are():
    with pytest.raises(OptionError, match="draft_model.*ngram"):
        load_drafter(SpeculationConfig(method="ngrams"), TargetParts(tiny_decoder()))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_texts_from_folders_equal_plain_decoding(folders, dtype):
    target = load_target(str(folders["target"]), dtype=dtype, device="cpu", threads=1)
    params = SamplingParams(max_new_tokens=24)
    plain = LLM(target).generate("abc", params)
    for name in ("same", "padded"):
        llm = LLM(target, method="draft_model", drafter=str(folders[name]))
        spoken = llm.generate("abc", params)
        assert (spoken.token_ids, spoken.text) == (plain.token_ids, plain.text)
        assert spoken.stats.num_drafted > 0
