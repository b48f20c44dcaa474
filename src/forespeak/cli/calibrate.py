"""``forespeak calibrate``: confidences of a drafter that mean what they say."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from forespeak.cli import consoles
from forespeak.cli.options import ModelOptions, OutputOptions
from forespeak.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping


def calibrate(
    drafter: Annotated[
        Path,
        Argument(help="Folder of a drafter with a confidence head (DSpark).", metavar="DRAFTER"),
    ],
    *,
    data: Annotated[
        list[Path] | None,
        Option(
            help="Folder of dialogues, from `forespeak data generate`, better not those that the "
            "drafter was trained on; several times."
        ),
    ] = None,
    texts: Annotated[int, Option(help="Dialogues to look at, at most.")] = 256,
    greedy: Annotated[
        bool,
        Option(
            "--greedy", help="Calibrate to greedy acceptance; without it to that at temperature 1."
        ),
    ] = False,
    target: ModelOptions,
    output: OutputOptions,
) -> None:
    """Find the temperatures of a drafter's confidences (STS) and write them beside its weights.

    A confidence head says how likely each draft token is to be accepted, which
    decides how many are verified; heads come out of training over-confident.
    Depth by depth, from the first on, the temperature of a grid is taken whose
    running product is best calibrated. `train` does this at its end, too.

    forespeak calibrate my-dspark --data answers
    """
    if not data:
        raise OptionError("--data was not given; name a folder that `data generate` wrote.")
    from forespeak.train.atomic import full_disk_said
    from forespeak.train.calibrating import CalibrationRequest, calibrate_drafter
    from forespeak.train.request import Watchers

    asked = CalibrationRequest(
        drafter=drafter, data=data, num_texts=texts, greedy=greedy, **asdict(target)
    )
    with consoles.filling("Calibrating") as fill, full_disk_said(drafter):
        found = calibrate_drafter(
            asked,
            Watchers(note=consoles.say, on_texts=lambda done, all_: fill(done, all_, "texts")),
        )
    if output.json:
        consoles.write_json({"path": str(drafter), **found})
    else:
        consoles.out().print(_table(found))
        consoles.say(
            f"{drafter / 'sts.json'} was written, from {found['num_blocks']} blocks, and the card "
            "says so. before: without temperatures; after: on the texts that they were fitted to."
        )


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(title="Expected calibration error of the running product")
    for name in ("depth", "temperature", "before", "after"):
        table.add_column(name, justify="right")
    rows = zip(found["temperatures"], found["ece_before"], found["ece_after"], strict=True)
    for depth, (temperature, before, after) in enumerate(rows, 1):
        table.add_row(
            str(depth), f"{temperature:.2f}", f"{100 * before:.1f} %", f"{100 * after:.1f} %"
        )
    return table
