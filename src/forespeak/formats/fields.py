"""Fields of a drafter's config: typed, and none passed over that would change the numbers."""

from __future__ import annotations

from collections.abc import Collection

from forespeak.errors import CheckpointError
from forespeak.formats.drafter_files import DrafterFiles

BOOKKEEPING = frozenset(
    {
        *("architectures", "auto_map", "base_model_name_or_path", "dtype", "model_type"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version"),
        *("use_cache", "initializer_range"),
    }
)
"""Fields that any release may have and that change no drafter's numbers."""


def whole_number(
    files: DrafterFiles, key: str, *, default: int | None = None, least: int = 1
) -> int:
    """A size.

    Args:
        default: where the field is absent or null; None means that it must be there.
        least: smallest value allowed.

    Raises:
        CheckpointError: it is missing or no such number.
    """
    value = files.config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31:
        return value
    given = repr(value) if key in files.config else "missing"
    raise _wrong(files, f"{key} is {given}; it must be a whole number from {least} on")


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
    raise _wrong(files, f"{key} is {value!r}; it must be true or false")


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
                f"{files.folder / 'config.json'} has a field {key}, which a drafter of the layout "
                f"{layout} does not have; allowed: {', '.join(sorted(known))}. Remove it if it "
                "changes no number, or take a drafter of a known layout."
            )


def _wrong(files: DrafterFiles, what: str) -> CheckpointError:
    return CheckpointError(
        f"{files.folder / 'config.json'}: {what}. Get the file again from where it came from."
    )
