"""Whatever is wrong with a drafter's files is refused in a sentence, in every family alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forespeak.drafters.inspecting import inspect_drafter
from forespeak.drafters.starting import start_drafter
from forespeak.engine.llm import LLM
from forespeak.engine.target import Target, in_memory
from forespeak.errors import CheckpointError, ForespeakError
from forespeak.formats.drafters import check_vocabulary_map, read_drafter
from forespeak.formats.layer_fields import layer_fields
from forespeak.models.config import weight_shapes
from tests.tiny import tiny_config, tiny_int8

pytestmark = pytest.mark.slow

CONFIG = tiny_config(num_layers=8, max_position_embeddings=64, eos_token_ids=())
V, H = CONFIG.vocab_size, CONFIG.hidden_size
METHODS = ("medusa", "mtp_parallel", "mtp", "eagle", "eagle3", "dflash", "dspark")
NO_WEIGHTS = (
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return in_memory(tiny_int8(CONFIG))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Makes a drafter of random weights; keywords are fields of its config."""

    def made(method: str, **changes: str) -> Path:
        folder = tmp_path / f"{method}-{len(list(tmp_path.iterdir()))}"
        start_drafter(method, CONFIG, folder, changes=changes)
        return folder

    return made


def weights_of(folder: Path) -> dict[str, Tensor]:
    [file] = folder.glob("*.safetensors")
    return load_file(file)


def put(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Puts tensors in the place of some, or beside the others."""
    [file] = folder.glob("*.safetensors")
    save_file({k: t.contiguous().clone() for k, t in (load_file(file) | tensors).items()}, file)


def settle(folder: Path, **fields: object) -> None:
    """Changes fields of the config; one that is ``...`` is taken out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def refused(folder: Path, target: Target, method: str) -> str:
    """The sentence with which the drafter is refused."""
    with pytest.raises(ForespeakError) as caught:
        LLM(target, method=method, drafter=str(folder))
    said = str(caught.value)
    assert len(said) < 700 and said.rstrip().endswith((".", ")")), said
    return said


# --- what can be a weight -------------------------------------------------------------------------

OWN_COPIES = [
    *((m, n) for m in ("eagle", "eagle3", "dflash", "dspark")
      for n in ("embed_tokens.weight", "lm_head.weight")),
    ("mtp", "model.embed_tokens.weight"), ("mtp", "lm_head.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "name"), OWN_COPIES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_own_embeddings_and_heads_are_finite(make, target, method: str, name: str, value: float):
    folder = make(method)
    own = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    own[7, 3] = value
    put(folder, {name: own})
    assert f"value in {name} that is not finite" in refused(folder, target, method)
    assert any("not finite" in problem for problem in inspect_drafter(str(folder)).problems)


@pytest.mark.parametrize("dtype", NO_WEIGHTS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_dtype_that_no_weight_has_is_refused_by_name(make, target, method, dtype):
    folder = make(method)
    name, weight = next((n, t) for n, t in weights_of(folder).items() if t.ndim == 2)
    put(folder, {name: weight.to(dtype)})
    said = refused(folder, target, method)
    if method != "mtp":  # says that the modules are quantised
        assert str(dtype).removeprefix("torch.") in said and "allowed: bfloat16" in said
    with pytest.raises(CheckpointError):
        inspect_drafter(str(folder))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_every_dtype_of_weights_is_read(make, target, method, dtype):
    folder = make(method)
    put(folder, {n: t.to(dtype) for n, t in weights_of(folder).items() if t.is_floating_point()})
    LLM(target, method=method, drafter=str(folder))
    assert str(dtype).removeprefix("torch.") in inspect_drafter(str(folder)).dtypes


@pytest.mark.parametrize(
    ("name", "odd", "words"),
    [
        (0, torch.clone, "names of tensors are text"),
        ("x", Tensor.to_sparse, "sparse"),
        ("x", lambda t: t.to("meta"), "meta"),
        ("x", lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantised"),
    ],
    ids=["key", "sparse", "meta", "quantised"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:TypedStorage")
def test_a_pickle_of_what_is_no_plain_weight(make, target, name, odd, words):
    folder = make("eagle")
    torch.save({**weights_of(folder), name: odd(torch.ones(2, 2))}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert words in refused(folder, target, "eagle")


# --- the map of a reduced vocabulary --------------------------------------------------------------


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize(
    ("offset", "words"), [(None, "d2t is all zero"), (500, "leads to the token id")]
)
def test_a_map_is_held_against_the_target_where_the_config_names_no_vocabulary(
    make, target, output, offset, words
):
    folder = make("medusa", draft_vocab_size="40", output=output)
    settle(folder, vocab_size=...)
    LLM(target, method="medusa", drafter=str(folder))
    d2t = weights_of(folder)["d2t"]
    put(folder, {"d2t": torch.zeros_like(d2t) if offset is None else d2t + offset})
    assert words in refused(folder, target, "medusa")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_a_map_of_other_than_whole_numbers(make, target, method, dtype):
    folder = make(method, draft_vocab_size="40")
    put(folder, {"d2t": weights_of(folder)["d2t"].to(dtype)})
    assert "d2t" in refused(folder, target, method)


def test_members_are_marked_with_zero_and_one():
    d2t, t2d = torch.tensor([1, 2]), torch.tensor([0, 1, 0, 1])
    check_vocabulary_map({"d2t": d2t, "t2d": t2d}, 4, Path("here"))
    with pytest.raises(CheckpointError, match="besides 0 and 1"):
        check_vocabulary_map({"d2t": d2t, "t2d": t2d * 3}, 4, Path("here"))


def test_inspect_holds_a_map_against_the_named_target(make, tmp_path):
    folder = make("medusa", draft_vocab_size="40", output="own")
    settle(folder, vocab_size=...)
    put(folder, {"d2t": weights_of(folder)["d2t"] + 500})
    assert read_drafter(folder).config.vocab_size is None
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(layer_fields(CONFIG)))
    save_file(
        {n: torch.zeros(s) for n, s in weight_shapes(CONFIG).items()},
        tmp_path / "target" / "model.safetensors",
    )
    [problem] = inspect_drafter(str(folder), str(tmp_path / "target")).problems
    assert "leads to the token id" in problem


# --- numbers that drive loops ---------------------------------------------------------------------

NINES = ["1024", "9" * 9, "9" * 12, "9" * 30, "9" * 5000]
NAMED_BY_NUMBER = [
    ("medusa", "{}.0.linear.weight"), ("medusa", "0.{}.linear.weight"), ("medusa", "0.{}.weight"),
    ("mtp", "model.mtp_layers.{}.x"), ("mtp_parallel", "heads.{}.x"), ("eagle", "layers.{}.x"),
    ("eagle3", "layers.{}.x"), ("dflash", "layers.{}.x"),
]  # fmt: skip


@pytest.mark.parametrize("digits", NINES, ids=lambda digits: f"{len(digits)} digits")
@pytest.mark.parametrize(("method", "name"), NAMED_BY_NUMBER)
def test_numbers_in_names_are_bounded(make, target, method, name, digits):
    folder = make(method)
    put(folder, {name.format(digits): torch.zeros(2, 2)})
    refused(folder, target, method)


@pytest.mark.parametrize("value", [1025, 2 * 10**9, 10**30, 10**4000, -1, 0, True, "3", [3], {}])
@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("medusa", "medusa_num_layers"), ("medusa", "medusa_num_heads"),
        ("mtp_parallel", "num_heads"), ("mtp", "num_nextn_predict_layers"),
        ("eagle", "num_hidden_layers"), ("dflash", "num_hidden_layers"),
        ("dspark", "markov_rank"), ("dflash", "block_size"),
    ],
)  # fmt: skip
def test_counts_in_a_config_are_bounded(make, target, method, key, value):
    if (key, value) == ("markov_rank", 0):
        value = -2  # no head is a size, and then its tensors are refused
    folder = make(method)
    settle(folder, **{key: value})
    refused(folder, target, method)


@pytest.mark.parametrize("key", ["num_heads", "num_hidden_layers"])
def test_counts_of_vllms_medusa_heads_are_bounded(tmp_path: Path, target, key: str):
    values = {"num_heads": 1, "num_hidden_layers": 1, "hidden_size": H, "vocab_size": V}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = {"blocks.0.layers.0.weight": torch.eye(H), "lm_heads.0.weight": torch.zeros(V, H)}
    save_file(tensors, tmp_path / "model.safetensors")
    LLM(target, method="medusa", drafter=str(tmp_path))
    settle(tmp_path, **{key: 2 * 10**9})
    assert f"{key} is 2000000000" in refused(tmp_path, target, "medusa")


# --- shapes and values that no drafter has --------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_single_number_in_the_place_of_any_tensor(make, target, method):
    folder = make(method, draft_vocab_size="40")
    sound = weights_of(folder)
    places = [n for n in sound if ".1." not in n]
    for name in [*places, "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"]:
        dtype = torch.long if name in ("d2t", "t2d") else torch.float32
        put(folder, {name: torch.zeros((), dtype=dtype)})
        refused(folder, target, method)
        [file] = folder.glob("*.safetensors")
        save_file(sound, file)


ODD = [["llama"], [["a"]], {"a": 1}, [None], 2**70, 10**400, float("nan"), float("inf"), True, "x"]


@pytest.mark.parametrize("value", ODD, ids=lambda value: f"{value!r:.10}")
@pytest.mark.parametrize(
    "key", ["model_type", "layer_types", "rms_norm_eps", "rope_theta", "num_key_value_heads"]
)
@pytest.mark.parametrize("method", ["mtp", "mtp_parallel", "eagle", "eagle3", "dflash", "dspark"])
def test_odd_values_of_layers_raise_no_other_error(make, target, method, key, value):
    folder = make(method)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    inner = values.get("transformer_layer_config", values.get("layer", values))
    (inner["rope_parameters"] if key == "rope_theta" else inner)[key] = value
    path.write_text(json.dumps(values))
    try:  # some layouts pass over some fields
        LLM(target, method=method, drafter=str(folder))
    except ForespeakError as error:
        assert len(str(error)) < 700
    else:
        assert key in ("model_type", "layer_types")


@pytest.mark.parametrize("text", ["1" + "0" * 400, "1e300", "NaN", "-1", '"x"', "null", "[1]"])
def test_odd_temperatures(make, target, text):
    folder = make("dspark")
    (folder / "sts.json").write_text(f'{{"temperatures": [{", ".join([text] * 7)}]}}')
    refused(folder, target, "dspark")


# --- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_field_is_refused_with_the_nearest_names_alone(make, target, method):
    folder = make(method)
    settle(folder, draft_vocab_sizes=3)
    if method == "mtp":
        LLM(target, method=method, drafter=str(folder))  # the fields are the target's
        return
    said = refused(folder, target, method)
    assert "has a field draft_vocab_sizes" in said and "allowed: draft_vocab_size," in said
    assert len(said) - len(str(folder)) < 420


@pytest.mark.parametrize("value", [[99], float("nan"), 3, "3", True, 1.5])
def test_an_unknown_version_of_medusa(make, target, value):
    folder = make("medusa")
    settle(folder, version=value)
    assert "version is" in refused(folder, target, "medusa")


def test_the_epsilon_of_modules_is_any_number_or_left_out(make, target):
    for value, read in ((1, 1.0), (1e-4, 1e-4), (None, 1e-6), (..., 1e-6)):
        folder = make("mtp")
        settle(folder, rms_norm_eps=value)
        assert read_drafter(folder).config.rms_norm_eps == read
        LLM(target, method="mtp", drafter=str(folder))
    for wrong in (0, -1, float("nan"), "1", [1], 10**30):
        folder = make("mtp")
        settle(folder, rms_norm_eps=wrong)
        assert "rms_norm_eps is" in refused(folder, target, "mtp")
