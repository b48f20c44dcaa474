"""Medusa heads on disk; names and shapes inside here: ``medusa_config.py``.

Layouts that are read, for K heads of B blocks:

- ``medusa``: the official code's ``medusa_lm_head.pt`` or ``.safetensors``, names
  ``{k}.{b}.linear.weight``, ``.bias`` and ``{k}.{B}.weight``. Version 2 has no ``{k}.{B}.weight``
  and takes the target's head. ``write`` writes this one; what the official code cannot say (no
  biases, one matrix for all heads as ``lm_head.weight``, a draft vocabulary as ``d2t``) is said in
  the same files.
- ``medusa in a target``: a Medusa-2 model, the same names after ``medusa_head.`` beside the
  target's own tensors.
- ``vllm medusa``: see ``medusa_vllm.py``.

The official code builds the blocks of a head by repeating one module, so they share their weights;
files repeat them or, where a writer drops copies, hold the first only. Both are read as what they
are: B blocks, with the weights that the file gives each, the first one's where it gives no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from forespeak.errors import CheckpointError, shown
from forespeak.formats import medusa_vllm
from forespeak.formats.drafter_files import DrafterFiles, write_drafter_files
from forespeak.formats.drafters import Dialect, DrafterCheckpoint, match_tensors
from forespeak.formats.fields import MOST_PARTS, part_number, refuse_other_fields, whole_number
from forespeak.formats.medusa_config import MedusaConfig, stored_shapes, tensor_shapes

__all__ = ["CONFIGS", "DIALECTS", "MedusaConfig", "stored_shapes", "tensor_shapes", "write"]

CONFIGS = {"medusa": MedusaConfig}

_FILE = "medusa_lm_head.safetensors"
_CARRIED = "medusa_head."
_KNOWN = {
    *("medusa_num_heads", "medusa_num_layers", "version"),
    *("hidden_size", "vocab_size", "draft_vocab_size"),
}


def write(folder: Path, config: MedusaConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a drafter in the layout ``medusa``; ``tensors`` by internal names."""
    values: dict[str, object] = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        "version": "2" if config.output == "target" else "1",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    names = _names(config, "")
    stored = {names[name]: tensors[name] for name in stored_shapes(config)}
    write_drafter_files(folder, values, stored, file_name=_FILE)


def _names(config: MedusaConfig, prefix: str) -> dict[str, str]:
    """Internal name -> name in the official layout."""
    return {name: prefix + _official(name, config.num_blocks) for name in stored_shapes(config)}


def _official(name: str, num_blocks: int) -> str:
    parts = name.split(".")
    if parts[0] != "heads":
        return {"output.weight": "lm_head.weight"}.get(name, name)
    if parts[2] == "output":
        return f"{parts[1]}.{num_blocks}.weight"
    return f"{parts[1]}.{parts[3]}.linear.{parts[4]}"


# --- reading the official layouts ----------------------------------------------------------------


def _is_official(files: DrafterFiles) -> bool:
    return "0.0.linear.weight" in files.shapes


def _read_official(files: DrafterFiles) -> DrafterCheckpoint:
    refuse_other_fields(files, _KNOWN, layout="medusa")
    version = files.config.get("version")
    if version is not None and (isinstance(version, bool) or version not in ("1", "2", 1, 2)):
        raise CheckpointError(
            f"{files.folder / 'config.json'}: version is {shown(version)}; allowed: 1 (heads with "
            "matrices of logits) and 2 (with the target's). Take another release."
        )
    return _read(files, "", "medusa")


def _is_carried(files: DrafterFiles) -> bool:
    return f"{_CARRIED}0.0.linear.weight" in files.shapes


def _read_carried(files: DrafterFiles) -> DrafterCheckpoint:
    # The other fields are the target's; those of Medusa all bear its name.
    for key in files.config:
        if key.startswith("medusa") and key not in _KNOWN:
            raise CheckpointError(
                f"{files.folder / 'config.json'} has a field {key}, which Medusa heads do not have "
                "here; allowed: medusa_num_heads, medusa_num_layers. Take another release."
            )
    return _read(files, _CARRIED, "medusa in a target")


def _read(files: DrafterFiles, prefix: str, dialect: str) -> DrafterCheckpoint:
    config, notes = _config(files, prefix)
    names = _names(config, prefix)
    for head in range(config.num_heads):
        for block in range(1, config.num_blocks):
            for part in ("weight", "bias"):
                name = f"heads.{head}.blocks.{block}.{part}"
                if name in names and names[name] not in files.shapes:
                    names[name] = names[f"heads.{head}.blocks.0.{part}"]
    ignored = [name for name in files.shapes if not name.startswith(prefix)]
    return DrafterCheckpoint(
        method="medusa", dialect=dialect, origin=files.folder, config=config,
        names=match_tensors(files, names, stored_shapes(config), ignored=ignored), files=files,
        notes=tuple(notes),
    )  # fmt: skip


def _config(files: DrafterFiles, prefix: str) -> tuple[MedusaConfig, list[str]]:
    """Sizes from the tensors; configs of releases are wrong about the number of heads."""
    heads = {
        part_number(files, found[0])
        for found in _matches(files, prefix, r"(\d+)\.\d+\.linear\.weight")
    }
    count = len(heads)
    asked = whole_number(files, "medusa_num_heads", default=count)
    if heads != set(range(count)) or asked > count:
        raise CheckpointError(
            f"{files.folder} has Medusa heads {sorted(heads)}; by its config there are {asked}, "
            "numbered from 0. Get the drafter again from where it came from."
        )
    notes = []
    if asked < count:
        notes.append(f"The config says {asked} heads and the file holds {count}; all are used.")
    num_blocks, output = _blocks_and_output(files, prefix)
    hidden_size = files.rows(f"{prefix}0.0.linear.weight")
    rows = None if output is None else files.rows(output)
    # In a target's own folder the plain keys describe the target.
    reduced = None
    if not prefix and files.config.get("draft_vocab_size") is not None:
        reduced = whole_number(files, "draft_vocab_size")
    vocab_size = rows if reduced is None else None
    if files.config.get("vocab_size") is not None:
        vocab_size = whole_number(files, "vocab_size")
    if files.config.get("hidden_size") is not None:
        hidden_size = whole_number(files, "hidden_size")
    kind = "target" if output is None else "shared" if output == "lm_head.weight" else "own"
    config = MedusaConfig(
        hidden_size=hidden_size, vocab_size=vocab_size, num_heads=count, num_blocks=num_blocks,
        bias=f"{prefix}0.0.linear.bias" in files.shapes, output=kind, draft_vocab_size=reduced,
    )  # fmt: skip
    return config, notes


def _blocks_and_output(files: DrafterFiles, prefix: str) -> tuple[int, str | None]:
    """Residual blocks of a head, and the tensor that its logits come from."""
    stored = {
        part_number(files, found[0])
        for found in _matches(files, prefix, r"0\.(\d+)\.linear\.weight")
    }
    outputs = [
        part_number(files, found[0], most=MOST_PARTS)
        for found in _matches(files, prefix, r"0\.(\d+)\.weight")
    ]
    output: str | None = None
    default = max(stored) + 1
    asked = whole_number(files, "medusa_num_layers", default=default, most=MOST_PARTS)
    num_blocks = max([max(stored) + 1, *([] if stored != {0} or outputs else [asked])])
    if outputs:
        num_blocks, output = max(outputs), f"{prefix}0.{max(outputs)}.weight"
    elif not prefix and "lm_head.weight" in files.shapes:
        output = "lm_head.weight"
    if stored not in ({0}, set(range(num_blocks))) or asked != num_blocks:
        raise CheckpointError(
            f"{files.folder} has the blocks {sorted(stored)} in its Medusa heads; by its config "
            f"there are {asked}. Config and weights must belong together."
        )
    return num_blocks, output


def _matches(files: DrafterFiles, prefix: str, pattern: str) -> Iterator[tuple[str, ...]]:
    for name in files.shapes:
        if name.startswith(prefix) and (found := re.fullmatch(pattern, name[len(prefix) :])):
            yield found.groups()


DIALECTS: tuple[Dialect, ...] = (
    Dialect("medusa", _is_official, _read_official),
    Dialect("medusa in a target", _is_carried, _read_carried),
    Dialect("vllm medusa", medusa_vllm.recognises, medusa_vllm.read),
)
