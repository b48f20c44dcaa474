"""The public names of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import forespeak

SOURCE = Path(forespeak.__file__)


def test_all_is_sorted_and_whole():
    assert set(forespeak._HOME) | {"__version__"} == set(forespeak.__all__)
    assert dir(forespeak) == sorted(forespeak.__all__)


def test_all_equals_what_type_checkers_see():
    """The names under TYPE_CHECKING, the lazy table and ``__all__`` cannot drift apart."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == forespeak._HOME


@pytest.mark.parametrize("name", sorted(forespeak.__all__))
def test_each_public_name_is_there(name: str):
    assert getattr(forespeak, name) is not None


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'LLLM'"):
        getattr(forespeak, "LLLM")  # noqa: B009
