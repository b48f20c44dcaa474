"""How methods are written: names, builders and sizes."""

from __future__ import annotations

import pytest

from forespeak.drafters.naming import Part, names_of, parts_of
from forespeak.engine.settings import resolve
from forespeak.errors import OptionError
from forespeak.types import SpeculationConfig


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("eagle3", [Part("eagle3")]),
        ("eagle3:5", [Part("eagle3", None, 5)]),
        ("medusa:static_tree", [Part("medusa", "static_tree")]),
        ("medusa:static_tree:32", [Part("medusa", "static_tree", 32)]),
        ("ngram+mtp:1", [Part("ngram"), Part("mtp", None, 1)]),
    ],
)
def test_what_is_read(written: str, parts: list[Part]):
    assert list(parts_of(written)) == parts
    assert names_of(written) == [part.name for part in parts]


@pytest.mark.parametrize(
    "written",
    [
        "a:",
        "a::3",
        "a:0",
        "a:chain:x",
        "a:1:2",
        "a:b:1:2",
        "a:-5",
        "a:5x",
        "a:5.0",
        "a:" + 5000 * "9",
    ],
)
def test_what_cannot_be_read(written: str):
    with pytest.raises(OptionError, match=r"cannot be read; allowed: NAME, NAME:SIZE"):
        parts_of(written)


def asked(method: str, **more: object) -> SpeculationConfig:
    return SpeculationConfig(method=method, drafter="x", **more)  # type: ignore[arg-type]


def test_a_size_is_a_chains_length_or_a_trees_nodes():
    (chain,) = resolve(asked("eagle3:5")).members
    assert (chain.builder, chain.config.num_speculative_tokens) == ("chain", 5)
    (tree,) = resolve(asked("eagle2:32")).members
    assert (tree.builder, tree.config.node_budget, tree.config.tree_depth) == (
        "dynamic_tree",
        32,
        6,
    )
    (static,) = resolve(asked("medusa:static_tree:20")).members
    assert (static.builder, static.config.node_budget) == ("static_tree", 20)
    (other,) = resolve(asked("eagle3:20", builder="dynamic_tree")).members
    assert (other.builder, other.config.node_budget) == ("dynamic_tree", 20)


def test_a_builder_for_all_is_not_the_builder_of_a_part_that_has_one_only():
    lookup, drafter = resolve(asked("ngram:5+eagle3:20", builder="dynamic_tree")).members
    assert lookup.config.num_speculative_tokens == 5
    assert drafter.config.node_budget == 20


def test_each_of_a_cascade_has_its_own():
    lookup, drafter = resolve(asked("ngram:5+eagle3:1")).members
    assert lookup.config.num_speculative_tokens == 5
    assert drafter.config.num_speculative_tokens == 1
    lookup, drafter = resolve(asked("ngram+eagle3:1", num_speculative_tokens=3)).members
    assert lookup.config.num_speculative_tokens == 3
    assert drafter.config.num_speculative_tokens == 1


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("eagle3:5", {"num_speculative_tokens": 4}, "num_speculative_tokens=4 has no effect"),
        ("eagle2:30", {"node_budget": 31}, "node_budget=31 has no effect"),
        ("eagle3:chain", {"builder": "dynamic_tree"}, "builder=dynamic_tree has no effect"),
        ("eagle3:ddtree", {}, "Method eagle3 does not take builder ddtree; allowed: chain"),
        ("eagle3:dynamic-tree", {}, "Did you mean 'dynamic_tree'"),
        ("ngram+eagle3:dynamic_tree", {"builder": "chain"}, "builder=chain has no effect"),
        ("ngram:7+eagle3:1", {"num_speculative_tokens": 7}, "num_speculative_tokens=7 has no"),
        ("autoregressive:3", {}, "drafts nothing"),
        ("ngram+ngram:2", {}, "names a method twice"),
        ("eagle3:9999", {}, "allowed: whole numbers from 1 to 256"),
    ],
)
def test_what_is_refused(method: str, more: dict[str, object], message: str):
    config = SpeculationConfig(method=method, **more)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=message):
        resolve(config)


def test_what_is_said_twice_alike_is_no_conflict():
    (member,) = resolve(asked("eagle3:5", num_speculative_tokens=5)).members
    assert member.config.num_speculative_tokens == 5
