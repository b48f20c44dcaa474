"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from safetensors import SafetensorError

from forespeak.errors import TrainingError

_fcntl: ModuleType | None
try:
    import fcntl as _fcntl
except ImportError:  # Windows, where a folder cannot be opened
    _fcntl = None

PART = ".part-"
"""How names of unfinished files begin."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in place.

    Args:
        path: of the file; an old one stays until the new one is whole.
        write: gets the path to write to.

    Raises:
        OSError: it cannot be written; the old file is untouched.
    """
    part = path.with_name(PART + path.name)
    try:
        with _one_error_of_full_disks(path.parent):
            write(part)
        _flush(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json_whole(path: Path, value: object) -> None:
    """A JSON file, whole or not at all."""
    write_text_whole(path, json.dumps(value, indent=1) + "\n")


def write_text_whole(path: Path, text: str) -> None:
    """A text file in UTF-8, whole or not at all."""
    write_whole(path, lambda part: _put(part, text))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fill_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` put files into a new folder, then give it its name.

    Args:
        folder: must not exist.
        fill: gets the path of the unfinished folder.

    Raises:
        OSError: it cannot be written; nothing is left.
    """
    part = folder.with_name(PART + folder.name)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        with _one_error_of_full_disks(folder.parent):
            fill(part)
        for path in part.iterdir():
            _flush(path)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def remove_parts(folder: Path) -> None:
    """Clear away what a killed process left unfinished."""
    for path in folder.glob(f"{PART}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep a second process from writing a folder meanwhile.

    The lock is on the folder itself: it leaves no file, and is gone with a killed process. A file
    system that has no locks gives none.

    Args:
        folder: made when it is not there, and taken away again when nothing came into it.

    Raises:
        TrainingError: another process holds it, or it cannot be made.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise TrainingError(
            f"{folder} cannot be made ({error.strerror}); name another folder."
        ) from None
    try:
        with _locked(folder):
            yield
    finally:
        if made:
            with suppress(OSError):  # something is in it
                folder.rmdir()


def take_lock(handle: int) -> bool:
    """Lock an open file or folder for this process, until it is closed.

    Returns:
        False when another process holds it. True also where the system or the file system has no
        locks: nothing is kept out there.
    """
    if _fcntl is None:
        return True
    try:
        _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if _fcntl is None:  # where a folder cannot be opened either
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not take_lock(handle):
            raise TrainingError(
                f"{folder} is being written by another process; allowed: one at a time. Wait for "
                "it, or name another folder."
            )
        yield
    finally:
        os.close(handle)


@contextmanager
def full_disk_said(folder: Path) -> Iterator[None]:
    """A full disk as a sentence for people.

    Raises:
        TrainingError: in place of the system's error.
    """
    try:
        with _one_error_of_full_disks(folder):
            yield
    except OSError as error:
        if error.errno not in (*_FULL, errno.EROFS):
            raise
        raise TrainingError(
            f"{folder} cannot be written ({error.strerror}); what was there before is whole. Free "
            "some space and go on with --resume."
        ) from error


@contextmanager
def _one_error_of_full_disks(folder: Path) -> Iterator[None]:
    """torch and safetensors have errors of their own for what the system calls ENOSPC."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        text = str(error)
        if any(sign in text for sign in ("No space left", "inline_container", "iostream error")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _flush(path: Path) -> None:
    """Onto the disk, so that a power cut after the renaming loses nothing."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
