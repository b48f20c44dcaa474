"""A tiny target and dialogues of it on disk, and requests to train for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from forespeak.train.dialogues import DIALOGUES, write_manifest
from forespeak.train.recipe import Recipe, recipe_from
from forespeak.train.request import Request
from tests.engine.tiny_text import write_checkpoint
from tests.tiny import tiny_config
from tests.train.talking import SIZE, TOKENIZER, dialogue, manifest

CONFIG = tiny_config(vocab_size=SIZE, eos_token_ids=(0,), max_position_embeddings=256, num_layers=5)


def write_target(folder: Path, *, seed: int = 0) -> Path:
    write_checkpoint(folder, CONFIG, None, seed=seed)
    TOKENIZER._backend.save_pretrained(folder)
    return folder


def write_data(folder: Path, *, count: int = 24, **changes: Any) -> Path:
    """Dialogues of which a drafter can learn something: letters in turn."""
    generator = torch.Generator().manual_seed(1)
    lines = []
    for number in range(count):
        start = int(torch.randint(8, (), generator=generator))
        length = int(torch.randint(8, 20, (), generator=generator))
        text = "".join("abcdefgh"[(start + i) % 8] for i in range(length))
        made = dialogue((text[0], text[1:]), (text[2], text[3:]), id=f"q{number}")
        lines.append(json.dumps(made.record()) + "\n")
    write_manifest(folder, manifest(**changes))
    (folder / DIALOGUES).write_text("".join(lines), encoding="utf-8")
    return folder


def tiny_recipe(method: str, **sections: Any) -> Recipe:
    table: dict[str, Any] = {
        "method": method,
        "data": {"min_supervised": 2, "held_out": 0.1},
        "batch": {"tokens": 256},
        "optimizer": {"learning_rate": 3e-3, "clip_norm": 1.0},
        "schedule": {"steps": 6},
        "compute": {"dtype": "float32"},
        "save": {"every": 3},
    }
    for name, values in sections.items():
        table[name] = table.get(name, {}) | values if isinstance(values, dict) else values
    return recipe_from(table, "test")


def request(root: Path, recipe: Recipe, **changes: Any) -> Request:
    """Target and data lie in ``root``; they are written where they are missing."""
    if not (root / "target").exists():
        write_target(root / "target")
        write_data(root / "data")
    values: dict[str, Any] = {
        "recipe": recipe, "target": str(root / "target"), "data": [root / "data"],
        "out": root / "out", "threads": 1,
    }  # fmt: skip
    return Request(**(values | changes))
