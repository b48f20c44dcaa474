"""Recipes: typed, unknown keys refused, printed as resolved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forespeak.errors import OptionError
from forespeak.train.recipe import (
    as_toml,
    first_difference,
    read_recipe,
    recipe_from,
    recipe_names,
)

TEXT = """
method = "eagle3"
seed = 4

[drafter]
draft_vocab_size = 8
[drafter.layers]
num_layers = 2

[objective]
steps = 3

[optimizer]
betas = [0.8, 0.9]
learning_rate = 1
"""


def write(folder: Path, text: str, name: str = "r.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_read(tmp_path: Path):
    recipe = read_recipe(write(tmp_path, TEXT))
    assert recipe.method == "eagle3" and recipe.seed == 4
    assert recipe.drafter_changes() == {"draft_vocab_size": "8", "layers.num_layers": "2"}
    assert recipe.objective == {"steps": 3}
    assert recipe.optimizer.betas == (0.8, 0.9) and recipe.optimizer.learning_rate == 1.0
    assert recipe.data.max_length == 2048


@pytest.mark.parametrize("name", recipe_names())
def test_printed_reads_back(tmp_path: Path, name):
    recipe = read_recipe(name)
    assert read_recipe(write(tmp_path, as_toml(recipe))) == recipe


def test_changes(tmp_path: Path):
    recipe = read_recipe(
        write(tmp_path, TEXT),
        {
            "seed": "5", "optimizer.name": "muon", "optimizer.betas": "[0.1, 0.2]",
            "drafter.layers.num_layers": "1", "drafter.tap_ids": "[1, 2]",
            "objective.official": "true", "data.features": '"cache"',
        },
    )  # fmt: skip
    assert recipe.seed == 5 and recipe.optimizer.name == "muon"
    assert recipe.optimizer.betas == (0.1, 0.2) and recipe.data.features == "cache"
    assert recipe.drafter["layers.num_layers"] == 1 and recipe.objective["official"] is True
    assert recipe.drafter_changes()["tap_ids"] == "1,2"


def test_extends(tmp_path: Path):
    write(tmp_path, TEXT, "base.toml")
    over = (
        'extends = "base.toml"\nseed = 9\n[drafter.layers]\nnum_heads = 3\n[optimizer]\nbetas=[0,0]'
    )
    recipe = read_recipe(write(tmp_path, over))
    assert recipe.seed == 9 and recipe.optimizer.learning_rate == 1.0
    assert recipe.drafter == {"draft_vocab_size": 8, "layers.num_layers": 2, "layers.num_heads": 3}
    assert recipe.optimizer.betas == (0.0, 0.0)
    assert read_recipe(write(tmp_path, 'extends = "medusa"')).method == "medusa"
    with pytest.raises(OptionError, match="extends itself"):
        read_recipe(write(tmp_path, 'extends = "r.toml"'))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("seed = 1", "names no method"),
        ('method = "x"\nlearning_rate = 1', "'learning_rate' is not known"),
        ('method = "x"\n[optimizer]\nlr = 1', "'optimizer.lr' is not known"),
        ('method = "x"\n[optimiser]\n', "Did you mean 'optimizer'"),
        ('method = "x"\nseed = 1.5', "whole number"),
        ('method = "x"\nseed = true', "whole number"),
        ('method = "x"\noptimizer = 3', r"a section \[optimizer\]"),
        ('method = "x"\n[optimizer]\nbetas = 0.9', "a list"),
        ('method = "x"\n[optimizer]\nbetas = [0.9]', "two numbers"),
        ('method = "x"\n[optimizer]\nname = "sgd"', "allowed: adamw, muon"),
        ('method = "x"\n[optimizer]\nlearning_rate = 0', "above 0"),
        ('method = "x"\n[schedule]\nwarmup = 2', "0 to 1"),
        ('method = "x"\n[data]\nheld_out = 1.0', "0 to below 1"),
        ('method = "x"\n[save]\nkeep = 0', "1 or more"),
        ("method = ", "not TOML"),
        ("extends = 3", "must be a recipe's name"),
    ],
)
def test_refused(tmp_path: Path, text, match):
    with pytest.raises(OptionError, match=match):
        read_recipe(write(tmp_path, text))


def test_refused_names_and_changes(tmp_path: Path):
    with pytest.raises(OptionError, match="Did you mean 'eagle3'"):
        read_recipe("eagel3")
    with pytest.raises(OptionError, match="cannot be read"):
        read_recipe(str(tmp_path / "none.toml"))
    with pytest.raises(OptionError, match="SECTION.KEY=VALUE"):
        read_recipe("medusa", {"optimizer.betas.first": "1"})
    with pytest.raises(OptionError, match="must be a whole number"):
        read_recipe("medusa", {"seed.a": "1"})
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    with pytest.raises(OptionError, match="UTF-8"):
        read_recipe(str(tmp_path / "bad.toml"))


def test_difference():
    recipe = recipe_from({"method": "medusa"}, "test")
    assert first_difference(recipe, recipe) is None
    faster = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=1.0))
    assert first_difference(recipe, faster) == "optimizer.learning_rate"
    assert first_difference(recipe, replace(recipe, drafter={"a": 1})) == "drafter.a"
