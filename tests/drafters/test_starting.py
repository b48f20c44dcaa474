"""A new drafter is written whole and can be read back, or it is refused and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from forespeak.drafters.starting import fresh_config, start_drafter, startable
from forespeak.errors import ForespeakError, OptionError
from forespeak.formats.drafters import draft_token_ids, read_drafter
from tests.tiny import tiny_config

CONFIG = tiny_config(num_layers=8, max_position_embeddings=64, eos_token_ids=())
V = CONFIG.vocab_size
LAYERS = {"mtp": "layer", "mtp_parallel": "layer"}
WITH_LAYERS = [method for method in startable() if method != "medusa"]


def refused(method: str, folder: Path, **changes: str) -> str:
    """The sentence of the refusal; nothing lies beside the folder afterwards."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    with pytest.raises(ForespeakError) as caught:
        start_drafter(method, CONFIG, folder, changes=named)
    assert not list(folder.parent.iterdir())
    return str(caught.value)


@pytest.mark.parametrize("method", startable())
@pytest.mark.parametrize("size", ["-2", "0", "83", "84", "1000000000000"])
def test_a_draft_vocabulary_that_is_no_part_of_the_targets(tmp_path: Path, method, size):
    said = refused(method, tmp_path / "new", draft_vocab_size=size)
    assert f"draft_vocab_size is {size}; allowed: 1 to 8" in said


@pytest.mark.parametrize("method", startable())
@pytest.mark.parametrize("size", [1, 2, 40, V - 2, V - 1])
def test_every_draft_vocabulary_can_be_read_back(tmp_path: Path, method: str, size: int):
    folder = tmp_path / "new"
    start_drafter(method, CONFIG, folder, changes={"draft_vocab_size": str(size)})
    checkpoint = read_drafter(folder)
    ids = draft_token_ids(checkpoint.tensors()["d2t"])
    assert checkpoint.config.draft_vocab_size == len(ids) == size
    assert 0 <= int(ids[0]) and int(ids[-1]) < V


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
         "num_kv_heads", "head_dim", "max_position_embeddings"]  # fmt: skip


@pytest.mark.parametrize("method", WITH_LAYERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", ["0", "-5", "1000000000000"])
def test_sizes_of_layers_that_cannot_be(tmp_path: Path, method: str, size: str, value: str):
    name = f"{LAYERS.get(method, 'layers')}.{size}"
    folder = tmp_path / "new"
    with pytest.raises(OptionError, match=value) as caught:
        start_drafter(method, CONFIG, folder, changes={name: value})
    assert size in str(caught.value) or "hidden size" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", WITH_LAYERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1", "1e300"])
def test_an_epsilon_that_cannot_be(tmp_path: Path, method: str, value: str):
    name = f"{LAYERS.get(method, 'layers')}__rms_norm_eps"
    assert "allowed: a number above 0" in refused(method, tmp_path / "new", **{name: value})


@pytest.mark.parametrize("method", WITH_LAYERS)
@pytest.mark.parametrize(
    "change", [("vocab_size", "84"), ("hidden_size", "48"), ("head_dim", "7"), ("num_heads", "3")]
)
def test_layers_that_contradict_the_target_or_themselves(tmp_path: Path, method, change):
    if (method, change[0]) == ("eagle3", "hidden_size"):
        return  # it may be narrower than its target
    name = f"{LAYERS.get(method, 'layers')}__{change[0]}"
    assert change[1] in refused(method, tmp_path / "new", **{name: change[1]})


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("medusa", {"vocab_size": "84"}), ("medusa", {"hidden_size": "-4"}),
        ("medusa", {"num_heads": "1025"}), ("medusa", {"num_blocks": "1000000000"}),
        ("mtp", {"vocab_size": "84"}), ("mtp", {"num_modules": "1000000000"}),
        ("mtp_parallel", {"num_heads": "1000000000"}), ("mtp_parallel", {"trunk_layer": "8"}),
        ("eagle3", {"target_hidden_size": "-5"}), ("eagle3", {"num_features": "0"}),
        ("dflash", {"num_target_layers": "7"}), ("dspark", {"markov_rank": "1000000000000"}),
        ("dflash", {"mask_token_id": "83"}),
    ],
)  # fmt: skip
def test_other_settings_that_cannot_be(tmp_path: Path, method: str, changes: dict[str, str]):
    said = refused(method, tmp_path / "new", **changes)
    assert next(iter(changes.values())).lstrip("-") in said


def test_biases_that_a_layout_cannot_say(tmp_path: Path):
    said = refused("eagle3", tmp_path / "new", layers__attention_bias="true")
    assert "layers.attention_bias is True and layers.output_bias is False" in said
    both = {"layers.attention_bias": "true", "layers.output_bias": "true"}
    made = start_drafter("eagle3", CONFIG, tmp_path / "new", changes=both)
    assert made.config.layers.attention_bias and made.config.layers.output_bias


@pytest.mark.parametrize("method", WITH_LAYERS)
@pytest.mark.parametrize("name", ["attention_bias", "qk_norm", "mlp_bias", "tie_word_embeddings"])
def test_a_switch_is_kept_or_refused(tmp_path: Path, method: str, name: str):
    key = f"{LAYERS.get(method, 'layers')}.{name}"
    try:
        made = start_drafter(method, CONFIG, tmp_path / "new", changes={key: "true"})
    except OptionError as error:
        assert name in str(error) or "read back" in str(error)
        assert not list(tmp_path.iterdir())
    else:
        assert getattr(getattr(made.config, key.split(".")[0]), name) is True


def test_a_new_folder_may_be_there_empty_and_lie_deep(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    start_drafter("eagle", CONFIG, tmp_path / "empty")
    start_drafter("eagle", CONFIG, tmp_path / "a" / "b" / "c")
    found = sorted(path.name for path in (tmp_path / "a" / "b" / "c").iterdir())
    assert found == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty"]


def test_a_place_that_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OptionError, match="cannot be written"):
        start_drafter("eagle", CONFIG, tmp_path / "file" / "new")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("order", [1, -1])
def test_settings_that_hold_together_only(order: int):
    pairs = [("num_features", "2"), ("target_layer_ids", "0,2")][::order]
    config = fresh_config("eagle3", CONFIG, dict(pairs))
    assert config.num_features == 2 and config.target_layer_ids == (0, 2)
