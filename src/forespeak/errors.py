"""Errors that a user meets.

Every message says what was given, what is allowed and what to do next. The command line prints
the message and exits with code 2; programmer mistakes stay ``assert``.

    ForespeakError
    ├── OptionError        an option, a setting or a combination of them is not possible
    ├── PromptError        a prompt or a prompt file cannot be used
    ├── ModelError         a model cannot be found, read or run
    │   └── CheckpointError    a file is missing, cut, corrupt or of another shape
    ├── DrafterError       a drafter does not fit its target
    ├── DataError          training data are damaged, of another target, or cannot be written
    └── TrainingError      training cannot go on, or a run cannot be taken up again
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForespeakError(Exception):
    """Base of all errors that are the input's fault and not ours."""


class OptionError(ForespeakError):
    """An option, a setting, or a combination of them is not possible."""


class PromptError(ForespeakError):
    """A prompt or a prompt file cannot be used."""


class ModelError(ForespeakError):
    """A model cannot be found, read or run."""


class CheckpointError(ModelError):
    """A file of a model is missing, cut, corrupt or has tensors of another shape."""


class DrafterError(ForespeakError):
    """A drafter does not fit its target."""


class DataError(ForespeakError):
    """Training data are damaged, made for another target, or cannot be made or written."""


class TrainingError(ForespeakError):
    """Training cannot go on, or a run cannot be taken up again."""


def shown(value: object, most: int = 80) -> str:
    """A value as it was given, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


def _is_short_for(given: str, name: str) -> bool:
    """Whether the last part of a dotted name was given by its initials, as lr is learning_rate."""
    (section, _, last), (own, _, full) = given.rpartition("."), name.rpartition(".")
    words = full.split("_")
    return section == own and len(words) > 1 and last == "".join(word[:1] for word in words)


def unknown_choice(what: str, given: str, allowed: Iterable[str]) -> str:
    """One sentence for a name that is not in a list, with the nearest name if one is near."""
    names = sorted(allowed)
    near = [name for name in names if _is_short_for(given, name)]
    near = near or difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what} {given!r} is not known; allowed: {', '.join(names)}.{hint}"
