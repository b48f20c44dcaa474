"""``forespeak methods``, ``forespeak models`` and the table behind the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from forespeak.cli.methods import markdown
from forespeak.cli.options import SettingOptions
from forespeak.drafters.table import METHODS
from tests.cli.conftest import Command

NAMES = (
    "autoregressive ngram draft_model medusa mtp_parallel mtp eagle eagle2 eagle3 dflash ddtree "
    "dspark"
).split()
BUILDERS = {"chain", "static_tree", "dynamic_tree", "ddtree"}


def test_the_table_has_every_name_in_order():
    assert list(METHODS) == NAMES
    for name, entry in METHODS.items():
        assert entry.name == entry.info.method == name
        assert entry.summary and entry.needs
        assert set(entry.builders) <= BUILDERS
        assert bool(entry.builders) == (name != "autoregressive")


def test_defaults_are_settings_that_the_command_line_has():
    flags = set(vars(SettingOptions()))
    for entry in METHODS.values():
        assert set(entry.defaults) | set(entry.on_cpu) <= flags, entry.name


def test_what_this_version_has():
    available = {name for name, entry in METHODS.items() if entry.available}
    assert {"autoregressive", "ngram", "draft_model"} <= available
    assert METHODS["autoregressive"].exact and METHODS["ngram"].exact


def test_methods_json(forespeak: Command):
    records = forespeak("methods", "--json").record["methods"]
    assert [record["name"] for record in records] == NAMES
    for record in records:
        assert list(record) == [
            *(
                "name",
                "available",
                "summary",
                "paper",
                "needs",
                "builders",
                "defaults",
                "defaults_on_cpu",
                "exact",
            )
        ]


def test_methods_for_people(forespeak: Command):
    done = forespeak("methods")
    assert done.code == 0
    for name, entry in METHODS.items():
        assert name in done.out
        for key, value in entry.defaults.items():
            assert f"{key} {value}" in done.out


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORESPEAK_HOME", str(tmp_path))
    return tmp_path


def test_models_where_and_list(forespeak: Command, home: Path):
    assert forespeak("models", "where").out == f"{home}\n"
    assert forespeak("models", "where", "--json").record == {"path": str(home)}
    assert forespeak("models", "list", "--json").record == {"models": []}
    assert "forespeak models fetch smollm2-135m" in forespeak("models", "list").err


def test_models_fetch_takes_what_is_here(forespeak: Command, home: Path):
    folder = home / "mine"
    folder.mkdir()
    done = forespeak("models", "fetch", str(folder), "--json")
    assert done.record == {"name": str(folder), "path": str(folder)}


def test_models_fetch_refuses_what_is_nowhere(forespeak: Command, home: Path):
    done = forespeak("models", "fetch", "no such model")
    assert done.code == 2
    assert "There is no model 'no such model'" in done.err


def test_the_readme_has_this_table():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert markdown() in readme, "run `make docs`"
