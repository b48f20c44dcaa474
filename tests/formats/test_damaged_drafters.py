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
