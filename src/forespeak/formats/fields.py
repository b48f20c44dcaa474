"""Fields of a drafter's config: typed, and none passed over that would change the numbers."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from forespeak.errors import CheckpointError, shown
from forespeak.formats.drafter_files import DrafterFiles
from forespeak.models.config import Fields

MOST_PARTS = 1024
"""Heads, modules or blocks that a drafter can have; a damaged number must not make millions."""

BOOKKEEPING = frozenset(
    {
        *("architectures", "auto_map", "base_model_name_or_path", "dtype", "model_type"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version"),
        *("use_cache", "initializer_range"),
    }
)
"""Fields that any release may have and that change no drafter's numbers."""


def whole_number(
    files: DrafterFiles,
    key: str,
    *,
    default: int | None = None,
    least: int = 1,
    most: int = 2**31 - 1,
) -> int:
    """A size.

    Args:
        default: where the field is absent or null; None means that it must be there.
        least, most: values allowed.

    Raises:
        CheckpointError: it is missing or no such number.
    """
    value = files.config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    allowed = f"from {least} on" if most >= 2**31 - 1 else f"from {least} to {most}"
    given = shown(value) if key in files.config else "missing"
    raise _wrong(files, f"{key} is {given}; it must be a whole number {allowed}")


def part_number(files: DrafterFiles, digits: str, *, most: int = MOST_PARTS - 1) -> int:
    """The number of a head, module or block in the name of a tensor.

    Args:
        digits: as in the name.
        most: the highest that is allowed.

    Raises:
        CheckpointError: it is above that.
    """
    if len(digits) > len(str(most)) or int(digits) > most:
        raise CheckpointError(
            f"{files.folder} has tensors of a part with the number {digits:.20}; allowed: 0 to "
            f"{most}. Get the drafter again from where it came from."
        )
    return int(digits)


def positive(files: DrafterFiles, key: str, *, default: float) -> float:
    """A number above 0; absent or null means the default.

    Raises:
        CheckpointError: it is something else.
    """
    return Fields(files.config, str(files.folder / "config.json")).number(key, default=default)


def switch(files: DrafterFiles, key: str, *, default: bool) -> bool:
    """A field that is true or false; absent or null means the default.

    Raises:
        CheckpointError: it is something else.
    """
    value = files.config.get(key)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise _wrong(files, f"{key} is {shown(value)}; it must be true or false")


def nearest(given: str, known: Collection[str]) -> str:
    """Up to ten of the names that are known, those like the given one first."""
    near = difflib.get_close_matches(given[:80], known, n=3, cutoff=0.5)
    listed = [*near, *(name for name in sorted(known) if name not in near)]
    rest = len(listed) - 10
    return ", ".join(listed[:10]) + (f" and {rest} more" if rest > 0 else "")


def refuse_other_fields(files: DrafterFiles, known: Collection[str], *, layout: str) -> None:
    """Refuse fields that a layout does not have: what they ask for would not happen.

    Args:
        known: those of the layout; ``BOOKKEEPING`` and names that begin with an underscore are
            allowed besides.
        layout: its name, for the message.

    Raises:
        CheckpointError: there is another one.
    """
    for key in files.config:
        if key not in known and key not in BOOKKEEPING and not key.startswith("_"):
            raise CheckpointError(
                f"{files.folder / 'config.json'} has a field {key:.80}, which a drafter of the "
                f"layout {layout} does not have; allowed: {nearest(key, known)}. Remove it if it "
                "changes no number, or take a drafter of a known layout."
            )


def _wrong(files: DrafterFiles, what: str) -> CheckpointError:
    return CheckpointError(
        f"{files.folder / 'config.json'}: {what}. Get the file again from where it came from."
    )
