"""One internal form for every dialect of drafter checkpoints.

A family (one file of this folder: ``medusa.py``, ``eagle.py``, ...) has a config dataclass, the
names and shapes of the tensors that its network has, and its dialects: the layouts in which
releases and engines store such a drafter. A dialect translates names and settings; what it does not
know it refuses.

    folder --DrafterFiles--> dialect --DrafterCheckpoint--> drafters/<method>.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forespeak.errors import CheckpointError, DrafterError, shown
from forespeak.formats.drafter_files import DrafterFiles, Shape, open_drafter_files
from forespeak.formats.weights import WEIGHT_DTYPES, check_weight, dtype_name
from forespeak.models.config import ModelConfig

D2T, T2D = "d2t", "t2d"
"""A reduced draft vocabulary: target id of draft id i is i + d2t[i]; t2d marks the members."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes that tables of ids and offsets may be stored in."""


class FamilyConfig(Protocol):
    """What the config of every family says."""

    @property
    def hidden_size(self) -> int | None:
        """Width of the target's states; None where it follows from nothing but the tensors."""

    @property
    def vocab_size(self) -> int | None:
        """The target's vocabulary, where the checkpoint says."""

    @property
    def draft_vocab_size(self) -> int | None:
        """Vd of a reduced draft vocabulary, None for the whole."""

    @property
    def max_positions(self) -> int | None:
        """Tokens of context that it can serve, None for any number."""

    @property
    def context_values(self) -> int:
        """Numbers that its caches keep for each token of context."""

    def facts(self) -> dict[str, str]:
        """Sizes and conventions for people, such as ``{"draft tokens a round": "up to 7"}``."""

    def check_target(self, target: ModelConfig) -> None:
        """Refuse a target that lacks what the drafter reads, such as a tapped layer.

        Raises:
            DrafterError: saying what.
        """


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter on disk, translated.

    Attributes:
        method: the method whose drafter it is, such as ``eagle3``; others may read the same weights
            in another way (``ddtree`` those of ``dflash``).
        dialect: the layout it is stored in, for people.
        origin: the folder.
        config: the family's config dataclass.
        names: internal tensor name -> name in the files.
        files: where the tensors are.
        changes: internal name -> what is done to a tensor when it is read, where layouts differ.
        notes: what a user should know, one sentence each.
        target_vocab_size: of the target it is opened for, where that is known.
    """

    method: str
    dialect: str
    origin: Path
    config: Any
    names: Mapping[str, str]
    files: DrafterFiles
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    target_vocab_size: int | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under their internal names, as stored (but for ``changes``).

        Raises:
            CheckpointError: a file is damaged, a weight is none or not finite, or the vocabulary
                map is impossible.
        """
        stored = self.files.read(self.names.values())
        found = {
            name: self.changes.get(name, _same)(stored[file_name])
            for name, file_name in self.names.items()
        }
        for name, tensor in found.items():
            if name not in (D2T, T2D):
                check_weight(tensor, self.names[name], self.origin)
        if D2T in found:
            vocab_size = self.config.vocab_size or self.target_vocab_size
            check_vocabulary_map(found, vocab_size, self.origin)
        return found

    @property
    def num_parameters(self) -> int:
        """Numbers stored, index tables not counted."""
        total = 0
        for name, file_name in self.names.items():
            if name not in (D2T, T2D):
                total += int(torch.Size(self.files.shapes[file_name]).numel())
        return total


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Dialect:
    """One layout.

    Attributes:
        name: for people, such as ``speculators``.
        recognises: whether a folder is of this layout, from config and tensor names alone.
        read: translate it; raises CheckpointError with what is wrong.
    """

    name: str
    recognises: Callable[[DrafterFiles], bool]
    read: Callable[[DrafterFiles], DrafterCheckpoint]


# Method -> the module of its family, loaded when needed. A family has
#   DIALECTS: tuple[Dialect, ...]
#   CONFIGS: Mapping[str, type], the config class of each method that can be started from nothing
#   write(folder, config, tensors), in its canonical dialect
FAMILIES: dict[str, str] = {
    "medusa": "forespeak.formats.medusa",
    "mtp_parallel": "forespeak.formats.mtp_parallel",
    "mtp": "forespeak.formats.mtp",
    "eagle": "forespeak.formats.eagle",
    "eagle2": "forespeak.formats.eagle",
    "eagle3": "forespeak.formats.eagle3",
    "dflash": "forespeak.formats.dflash",
    "ddtree": "forespeak.formats.dflash",
    "dspark": "forespeak.formats.dflash",
}


def dialects(modules: Sequence[str] | None = None) -> list[Dialect]:
    """The dialects of some families, or of all."""
    found: list[Dialect] = []
    for module in dict.fromkeys(FAMILIES.values() if modules is None else modules):
        found += import_module(module).DIALECTS
    return found


def read_drafter(folder: Path, *, modules: Sequence[str] | None = None) -> DrafterCheckpoint:
    """Recognise and translate a drafter.

    Args:
        folder: it lies there.
        modules: families to try; None tries all that there are.

    Raises:
        CheckpointError: it is damaged, of an unknown layout, or not as its layout promises.
    """
    files = open_drafter_files(folder)
    known = dialects(modules)
    for dialect in known:
        if dialect.recognises(files):
            return dialect.read(files)
    first = ", ".join(sorted(files.shapes)[:4])[:200]
    raise CheckpointError(
        f"{folder} is no drafter that is known here (its tensors begin with {first}; config.json "
        f"says architectures {shown(files.config.get('architectures'))}); known layouts: "
        f"{', '.join(dialect.name for dialect in known)}. Name a folder of one of these."
    )


def is_known_drafter(folder: Path, *, modules: Sequence[str] | None = None) -> bool:
    """Whether some layout recognises a folder.

    Args:
        folder, modules: see :func:`read_drafter`.

    Raises:
        CheckpointError: its files are missing or damaged.
    """
    files = open_drafter_files(folder)
    return any(dialect.recognises(files) for dialect in dialects(modules))


def match_tensors(
    files: DrafterFiles,
    names: Mapping[str, str],
    expected: Mapping[str, Shape],
    *,
    optional: Mapping[str, Shape] | None = None,
    ignored: Sequence[str] = (),
) -> dict[str, str]:
    """Check that a folder holds exactly the tensors that it should, in their shapes.

    Args:
        files: the folder.
        names: internal name -> name in the files, for every tensor that may be there.
        expected: internal name -> shape of those that must be there.
        optional: of those that may be left out.
        ignored: names or prefixes (ending in a dot) of tensors that are no part of the drafter.

    Returns:
        internal name -> name in the files, of those that are there.

    Raises:
        CheckpointError: naming the tensor that is missing, unknown, or of another shape or kind.
    """
    found: dict[str, str] = {}
    for name, shape in {**expected, **(optional or {})}.items():
        stored = names[name]
        if stored not in files.shapes:
            if name in expected:
                raise CheckpointError(
                    f"{files.folder} lacks the tensor {stored}, of shape {list(shape)}; by its "
                    "config it must have it. Get the drafter again from where it came from."
                )
            continue
        if files.shapes[stored] != tuple(shape):
            raise CheckpointError(
                f"{files.folder} has {stored} of shape {list(files.shapes[stored])}; by its config "
                f"it is {list(shape)}. Config and weights must belong together."
            )
        _check_dtype(files, name, stored)
        found[name] = stored
    taken = set(found.values())
    for stored in files.shapes:
        skipped = any(stored == i or (i.endswith(".") and stored.startswith(i)) for i in ignored)
        if stored not in taken and not skipped:
            raise CheckpointError(
                f"{files.folder} has a tensor {stored:.120}, which a drafter of this layout has no "
                "place for; its weights would be lost. It may be of another method or a newer "
                "release."
            )
    return found


def _check_dtype(files: DrafterFiles, name: str, stored: str) -> None:
    """Refuse numbers that are no weights, and maps that are no whole numbers."""
    allowed = {D2T: INTEGERS, T2D: (torch.bool, *INTEGERS)}.get(name, WEIGHT_DTYPES)
    dtype = files.dtypes[stored]
    if dtype not in allowed:
        raise CheckpointError(
            f"{files.folder} has {stored} as {dtype_name(dtype)}; allowed: "
            f"{', '.join(map(dtype_name, allowed))}. Quantised weights must be dequantised first, "
            "or take another release."
        )


def check_vocabulary_map(
    tensors: Mapping[str, Tensor], vocab_size: int | None, origin: Path
) -> None:
    """Refuse a draft vocabulary that cannot be.

    Raises:
        CheckpointError: it is all zero, out of range, not ascending, or at odds with t2d.
    """
    d2t = tensors[D2T]
    if d2t.is_floating_point() or d2t.dtype == torch.bool or d2t.ndim != 1:
        raise CheckpointError(
            f"{origin}: d2t is {dtype_name(d2t.dtype)} of shape {list(d2t.shape)}; expected is a "
            "list of whole numbers. Export the drafter again with its map."
        )
    ids = draft_token_ids(d2t)
    size = len(ids)
    if vocab_size is not None and size < vocab_size and not bool(d2t.any()):
        raise CheckpointError(
            f"{origin}: d2t is all zero, so its {size} draft tokens would be the first {size} ids "
            "of the target; the map was never filled. Export the drafter again with its map."
        )
    if vocab_size is not None and bool(((ids < 0) | (ids >= vocab_size)).any()):
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise CheckpointError(
            f"{origin}: d2t leads to the token id {wrong}; allowed: 0 to {vocab_size - 1}. d2t "
            "holds offsets (target id = draft id + d2t), not ids."
        )
    if bool((ids[1:] <= ids[:-1]).any()):
        raise CheckpointError(
            f"{origin}: d2t leads to token ids that do not rise, so two draft ids may mean one "
            "token. d2t holds offsets (target id = draft id + d2t), not ids."
        )
    members = tensors.get(T2D)
    if members is not None and bool(((members != 0) & (members != 1)).any()):
        raise CheckpointError(
            f"{origin}: t2d has values besides 0 and 1; it says of each token of the target "
            "whether it is a member. Export the drafter again with its map."
        )
    if members is not None and not torch.equal(members.nonzero()[:, 0].to(ids.dtype), ids):
        raise CheckpointError(
            f"{origin}: t2d marks other tokens than d2t leads to; the two must agree. Export the "
            "drafter again with its map."
        )


def draft_token_ids(d2t: Tensor) -> Tensor:
    """[Vd] target ids from [Vd] offsets."""
    return torch.arange(len(d2t)) + d2t.long()


def check_fits(
    checkpoint: DrafterCheckpoint, *, hidden_size: int, vocab_size: int, context_length: int
) -> None:
    """Refuse a drafter of another target.

    Raises:
        DrafterError: another hidden size or vocabulary, or fewer positions than are served.
    """
    config = checkpoint.config
    if config.hidden_size is not None and config.hidden_size != hidden_size:
        raise DrafterError(
            f"The drafter {checkpoint.origin} is for a target of hidden size {config.hidden_size}; "
            f"this one has {hidden_size}. Choose the drafter that was trained for this target."
        )
    if config.vocab_size is not None and config.vocab_size != vocab_size:
        raise DrafterError(
            f"The drafter {checkpoint.origin} is for a vocabulary of {config.vocab_size} tokens; "
            f"this target has {vocab_size}. Choose the drafter that was trained for this target."
        )
    if config.max_positions is not None and config.max_positions < context_length:
        raise DrafterError(
            f"The drafter {checkpoint.origin} knows positions up to {config.max_positions}; the "
            f"target is served with a context of {context_length}. Serve fewer tokens (in Python "
            f"load_target(..., context_length={config.max_positions})), or raise "
            "max_position_embeddings in the drafter's config if it was trained for more."
        )
