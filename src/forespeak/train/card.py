"""What goes with a drafter's weights: its provenance as JSON, and the model card made of that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forespeak.errors import CheckpointError
from forespeak.formats.weights import read_json_object
from forespeak.train.atomic import write_json_whole, write_text_whole
from forespeak.train.recipe import as_toml, recipe_from

PROVENANCE, CARD = "provenance.json", "README.md"

_ENDINGS = {
    "complete": "the whole run", "time": "the time limit came first", "signal": "stopped",
}  # fmt: skip


def write_records(folder: Path, record: Mapping[str, Any]) -> None:
    """Write provenance and card.

    Args:
        folder: of the drafter.
        record: see :func:`model_card`.

    Raises:
        OSError: the disk is full.
    """
    text = model_card(record)
    write_json_whole(folder / PROVENANCE, record)
    write_text_whole(folder / CARD, text)


def check_records(folder: Path) -> None:
    """Whether later findings can be put into provenance and card, before they are made.

    Args:
        folder: of a drafter; one without provenance is fine.

    Raises:
        CheckpointError: the provenance is damaged.
    """
    if (folder / PROVENANCE).is_file():
        record = read_json_object(folder / PROVENANCE)
        try:
            model_card(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(folder, error) from None


def amend_records(folder: Path, changes: Mapping[str, Any]) -> None:
    """Put later findings into provenance and card, where a training run wrote them.

    Args:
        folder: of a drafter; one without provenance stays as it is.
        changes: of the record.

    Raises:
        CheckpointError: the provenance is no JSON object.
        OSError: the disk is full.
    """
    if (folder / PROVENANCE).is_file():
        write_records(folder, read_json_object(folder / PROVENANCE) | dict(changes))


def beginning(folder: Path) -> dict[str, Any]:
    """What the record of a run says of the drafter that it started from.

    Args:
        folder: of that drafter.

    Returns:
        Its ``name``, and as far as its provenance says, ``progress`` and ``start_from`` of its own.

    Raises:
        CheckpointError: its provenance is damaged.
    """
    known = read_json_object(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else {}
    kept = {key: known[key] for key in ("progress", "start_from") if key in known}
    found = {"name": folder.resolve().name} | kept
    try:
        _start_lines(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, error) from None
    return found


def model_card(record: Mapping[str, Any]) -> str:
    """The text of README.md.

    Args:
        record: what provenance.json holds: ``target``, ``precision``, ``data`` (the fields of
            ``export.DataFigures``), ``ending``, ``progress``, ``num_steps``, ``held_out``,
            ``recipe``, ``num_parameters``, ``num_bytes``, the fields of ``provenance.provenance``,
            and where there are any ``start_from`` and ``calibration``.
    """
    target, data, method = record["target"], record["data"], record["recipe"]["method"]
    progress, versions = record["progress"], record.get("versions", {})
    lines = [
        f"# {method} drafter for {target}",
        "",
        f"Proposes tokens that {target} verifies: the text is the target's own, in fewer of its "
        "forwards.",
        "",
        f"    forespeak generate --target {target} --method {method} --drafter .",
        "",
        "| | |",
        "| --- | --- |",
        f"| parameters | {record['num_parameters'] / 1e6:.2f} million, "
        f"{record['num_bytes'] / 1e6:.1f} MB, bfloat16 |",
        f"| target while training | {target} in {record['precision']} |",
        f"| data | {data['trained']} dialogues of {data['folder']}, {data['supervised']} tokens to "
        f"predict; {data['held_out']} more held out |",
        f"| steps | {_steps(record)} |",
        f"| tokens seen | {progress['tokens'] / 1e6:.2f} million |",
        f"| time | {progress['seconds'] / 60:.1f} minutes on {record.get('machine', 'unknown')} |",
    ]
    lines += _start_lines(record.get("start_from"))
    lines.append(
        f"| code | forespeak {versions.get('forespeak', '?')}, commit "
        f"{record.get('commit') or 'unknown'} |"
    )
    held_out = record.get("held_out")
    if held_out is not None:
        lines.append(
            f"| held-out texts | loss {held_out['loss']:.3f}, acceptance length "
            f"{held_out['acceptance_length']:.2f} under teacher forcing, bonus included |"
        )
    lines += _calibration_lines(record.get("calibration"))
    if progress["skipped"]:
        lines.append(f"| skipped steps | {progress['skipped']}, not finite |")
    said = "`forespeak compare` measures what decoding gives."
    if held_out is not None:
        said = (
            "The acceptance length under teacher forcing is measured along the held-out texts "
            f"themselves; {said}"
        )
    lines += ["", said, "", "## Recipe", ""]
    if record.get("start_from") is not None:
        lines += [
            "Its sizes are in `config.json`: those of the drafter it started from, with more words "
            "where `--draft-vocab-size` was given.",
            "",
        ]
    lines += [
        "```toml",
        as_toml(recipe_from(record["recipe"], PROVENANCE)).rstrip(),
        "```",
        "",
        f"Command (absolute paths cut to their last name): `{record.get('command', '')}`",
        "",
        f"All of it in {PROVENANCE}.",
    ]
    return "\n".join(lines) + "\n"


def _steps(record: Mapping[str, Any]) -> str:
    step, ending = record["progress"]["step"], record["ending"]
    if ending == "time" and record["recipe"]["schedule"]["follows"] == "time":
        return f"{step}, the whole of a schedule that followed the time limit"
    return f"{step} of {record['num_steps']} ({_ENDINGS[ending]})"


def _damaged(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder / PROVENANCE} is damaged ({type(error).__name__}: {error}); take it from its "
        "source again, or delete it: a drafter works without."
    )


def _start_lines(found: Mapping[str, Any] | None) -> list[str]:
    """Where the weights came from, run by run, the last first."""
    lines = []
    while found is not None:
        said = str(found["name"])
        if "progress" in found:
            before = found["progress"]
            said += (
                f": {before['step']} steps, {before['tokens'] / 1e6:.2f} million tokens, "
                f"{before['seconds'] / 60:.1f} minutes"
            )
        lines.append(f"| started from | {said} |")
        found = found.get("start_from")
    return lines


def _calibration_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What the temperatures of the confidences bring, in percent."""
    if found is None:
        return []
    before, after = ([f"{100 * e:.1f}" for e in found[f"ece_{n}"]] for n in ("before", "after"))
    how = "greedy" if found["greedy"] else "temperature 1"
    texts = found.get("texts", "texts")
    return [
        f"| calibration error of the confidences, depth by depth | before: {', '.join(before)} %; "
        f"after: {', '.join(after)} % ({how}; fitted to {found['num_blocks']} blocks of {texts} "
        "and measured on the same) |"
    ]
