"""Temperatures for a drafter that is there: its confidences against the target's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forespeak.errors import OptionError
from forespeak.formats.dflash_layouts import write_temperatures
from forespeak.formats.drafters import read_drafter
from forespeak.train.atomic import only_writer
from forespeak.train.batches import Collator, Order, TextSet, drawing
from forespeak.train.card import amend_records, check_records
from forespeak.train.features import LiveFeatures, Needs
from forespeak.train.objective import Batch, Objective
from forespeak.train.recipe import read_recipe
from forespeak.train.request import Request, Watchers
from forespeak.train.session import open_session

_SETTINGS = {"num_anchors": 64, "confidence": 0.0}


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """What a user asks for.

    Attributes:
        drafter: folder of a drafter with a confidence head; its ``sts.json`` is written, and what
            its provenance and card say of the calibration.
        target, dtype, device, threads: the model, in which precision and where it runs.
        data: folders of dialogues, better not those that the drafter was trained on.
        num_texts: of them, drawn by ``seed``.
        greedy: calibrate to greedy acceptance instead of that at temperature 1.
    """

    drafter: Path
    target: str
    data: Sequence[Path]
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    num_texts: int = 256
    greedy: bool = False
    seed: int = 0


def calibrate_drafter(
    asked: CalibrationRequest, watchers: Watchers | None = None
) -> dict[str, Any]:
    """Find and write the temperatures.

    Returns:
        ``temperatures``, ``ece_before``, ``ece_after`` by depth, ``num_blocks`` and ``greedy``.

    Raises:
        OptionError, DataError, ModelError: see the parts; or there is nothing to calibrate.
    """
    if asked.num_texts < 1:
        raise OptionError(f"The number of texts is {asked.num_texts}; allowed: 1 or more.")
    watchers = watchers or Watchers()
    if not getattr(read_drafter(asked.drafter).config, "confidence_head", False):
        raise OptionError(
            f"{asked.drafter} has no confidence head, so there is nothing to calibrate; DSpark "
            "drafters have one."
        )
    small = {"data.held_out": "0", "batch.tokens": "2048", "batch.micro_batches": "1"}
    recipe = read_recipe("dspark", {"seed": str(asked.seed), **small})
    recipe = replace(recipe, objective=_SETTINGS | {"calibrate_greedy": asked.greedy})
    request = Request(
        recipe=recipe, target=asked.target, data=asked.data, out=asked.drafter, dtype=asked.dtype,
        device=asked.device, threads=asked.threads, start_from=asked.drafter,
    )  # fmt: skip
    with only_writer(asked.drafter):
        check_records(asked.drafter)
        return _calibrated(asked, request, watchers)


def _calibrated(asked: CalibrationRequest, request: Request, watchers: Watchers) -> dict[str, Any]:
    session = open_session(request, watchers)
    found = session.objective.calibrate(
        _batches(session.objective, session.data, session.target.model, request, asked.num_texts,
                 watchers.on_texts)
    )  # fmt: skip
    if not found:
        raise OptionError(
            f"None of the texts of {', '.join(map(str, asked.data))} has an answer long enough to "
            "draft in; give more or longer answers."
        )
    found["calibration"]["texts"] = ", ".join(folder.name for folder in asked.data)
    write_temperatures(asked.drafter, session.objective.config.temperatures)
    amend_records(asked.drafter, found)
    calibration: dict[str, Any] = found["calibration"]
    return calibration


def _batches(
    objective: Objective,
    data: TextSet,
    model: Any,
    request: Request,
    num_texts: int,
    on_texts: Callable[[int, int], None],
) -> Iterator[tuple[Batch, torch.Generator]]:
    recipe = request.recipe
    generator = torch.Generator().manual_seed(recipe.seed)
    drawn = torch.randperm(len(data.trained), generator=generator)[:num_texts].tolist()
    numbers = [data.trained[place] for place in drawn]
    source = LiveFeatures(model, data.texts, Needs(objective.taps, objective.needs_hidden))
    collator = Collator(data, source, model.device)
    order = Order(numbers, [len(text) for text in data.texts], recipe.batch, recipe.seed)
    done = 0
    for step in range(order.num_steps(1)):
        group = order.step(step)[0]
        yield collator.batch(group), drawing(recipe.seed, step, 0)
        done += len(group)
        on_texts(done, len(numbers))
