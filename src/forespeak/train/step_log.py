"""What a run says while it goes: one JSON object a line, and a plot of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forespeak.train.atomic import write_whole

LOG, PLOT = "log.jsonl", "log.png"


class StepLog:
    """Appends to ``OUT/log.jsonl``.

    Args:
        out: the run's folder, made where it is missing.
        step: lines of later steps are dropped: their steps are about to be done again.
    """

    def __init__(self, out: Path, step: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / LOG
        kept = [record for record in read_log(out) if record["step"] <= step]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        write_whole(path, lambda part: _put(part, lines))
        self._stream = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """One line, at once."""
        finite = {name: _finite(value) for name, value in record.items()}
        self._stream.write(json.dumps(finite, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """No more lines."""
        self._stream.close()


def read_log(out: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's log; the last one may be half-written."""
    path = out / LOG
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def plot_log(out: Path) -> Path | None:
    """Draw loss and acceptance length beside the log.

    Returns:
        The picture; None where matplotlib (``forespeak[plots]``) is not installed, or nothing was
        logged.
    """
    records = read_log(out)
    if not records or find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    for axis, name, label in (
        (axes[0], "loss", "loss"),
        (axes[1], "acceptance_length", "acceptance length, teacher forcing, bonus included"),
    ):
        for kind, style in (("step", "-"), ("held_out", "o-")):
            points = [
                (r["step"], r[name])
                for r in records
                if r.get("kind") == kind and r.get(name) is not None
            ]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=kind.replace("_", " "), lw=1)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[1].set_xlabel("step")
    write_whole(out / PLOT, lambda part: figure.savefig(part, dpi=110, format="png"))
    pyplot.close(figure)
    return out / PLOT


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
