"""Settings: every default filled in, every impossible combination refused with what is allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forespeak.drafters.table import METHODS
from forespeak.engine.llm import LLM
from forespeak.engine.settings import resolve, settled
from forespeak.engine.target import in_memory
from forespeak.errors import OptionError
from forespeak.sampling import SamplingParams
from forespeak.types import DrafterInfo, SpeculationConfig
from tests.engine.tables import TableModel


def settings(**fields: object) -> SpeculationConfig:
    return SpeculationConfig(**fields)  # type: ignore[arg-type]


def test_plain_decoding_has_no_members():
    resolved = resolve(settings())
    assert resolved.members == () and resolved.shown.method == "autoregressive"


def test_defaults_of_ngram():
    resolved = resolve(settings(method="ngram"))
    (member,) = resolved.members
    assert (member.builder, member.point_mass) == ("chain", True)
    assert resolved.shown == settings(
        method="ngram", builder="chain", draft_sampling="greedy", **METHODS["ngram"].defaults,
    )  # fmt: skip


def test_defaults_of_draft_model_by_builder():
    chain = resolve(settings(method="draft_model", drafter="x"))
    assert chain.shown == settings(
        method="draft_model", drafter="x", builder="chain", num_speculative_tokens=4,
        draft_sampling="greedy",
    )  # fmt: skip
    for builder in ("static_tree", "dynamic_tree"):
        tree = resolve(settings(method="draft_model", drafter="x", builder=builder))
        assert tree.shown == settings(
            method="draft_model", drafter="x", builder=builder, node_budget=16, tree_depth=4,
            tree_top_k=4, draft_sampling="greedy",
        )  # fmt: skip


def test_what_is_given_stays():
    asked = settings(
        method="draft_model", drafter="truncate:2", builder="static_tree", node_budget=5,
        tree_depth=2, tree_top_k=3, draft_sampling="probabilistic", rule="siblings",
    )  # fmt: skip
    resolved = resolve(asked)
    assert resolved.shown == asked
    (member,) = resolved.members
    assert (member.config.node_budget, member.config.tree_depth) == (5, 2)


def test_a_cascade_gives_each_member_what_is_its_own():
    asked = settings(
        method="ngram+draft_model", drafter="x", builder="dynamic_tree", lookup_min=3, node_budget=7
    )
    ngram, model = resolve(asked).members
    assert (ngram.builder, model.builder) == ("chain", "dynamic_tree")
    assert (ngram.config.lookup_min, ngram.config.lookup_max) == (
        3,
        METHODS["ngram"].defaults["lookup_max"],
    )
    assert ngram.config.drafter is None and ngram.config.node_budget is None
    assert (model.config.drafter, model.config.node_budget) == ("x", 7)
    assert model.config.lookup_min is None


REFUSED = [
    # unknown names
    ({"method": "ngrm"}, "ngram"),
    ({"method": "ngram+"}, "medusa, mtp, mtp_parallel, ngram"),
    ({"method": "draft_model", "drafter": "x", "builder": "tree"}, "chain, dynamic_tree, static"),
    ({"method": "draft_model", "drafter": "x", "builder": "ddtree"}, "chain, dynamic_tree, static"),
    ({"method": "draft_model", "drafter": "x", "draft_sampling": "drawn"}, "greedy, probabilistic"),
    # impossible cascades
    ({"method": "ngram+ngram"}, "different drafting methods"),
    ({"method": "autoregressive+ngram"}, "different drafting methods"),
    ({"method": "ngram+autoregressive"}, "different drafting methods"),
    ({"method": "draft_model+ngram", "drafter": "x"}, "ngram\\+draft_model"),
    # out of range
    ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to"),
    ({"method": "ngram", "num_speculative_tokens": -4}, "from 1 to"),
    ({"method": "ngram", "lookup_min": 0}, "from 1 to"),
    ({"method": "ngram", "lookup_max": -1}, "from 1 to"),
    ({"method": "ngram", "lookup_min": 60}, "lookup_min up to lookup_max"),
    ({"method": "ngram", "lookup_min": 3, "lookup_max": 2}, "lookup_min up to lookup_max"),
    ({"method": "draft_model", "drafter": "truncate:0"}, "N of 1 or more"),
    ({"method": "draft_model", "drafter": "truncate:two"}, "N of 1 or more"),
    ({"method": "draft_model", "drafter": "truncate:-1"}, "N of 1 or more"),
    *(
        ({"method": "draft_model", "drafter": "x", "builder": "static_tree", name: 0}, "from 1 to")
        for name in ("node_budget", "tree_depth", "tree_top_k")
    ),
    # without effect
    *(
        ({"method": "autoregressive", name: value}, "no setting")
        for name, value in {
            "drafter": "x", "builder": "chain", "num_speculative_tokens": 3, "node_budget": 3,
            "tree_depth": 3, "tree_top_k": 3, "lookup_min": 1, "lookup_max": 3,
            "draft_sampling": "greedy", "rule": "match",
        }.items()
    ),
    *(
        ({"method": "ngram", name: value}, "lookup_max, lookup_min, num_speculative_tokens")
        for name, value in {
            "drafter": "x", "builder": "static_tree", "node_budget": 3, "tree_depth": 3,
            "tree_top_k": 3, "draft_sampling": "probabilistic",
        }.items()
    ),
    *(
        ({"method": "draft_model", "drafter": "x", name: 3}, "num_speculative_tokens")
        for name in ("node_budget", "tree_depth", "tree_top_k", "lookup_min", "lookup_max")
    ),
    *(
        ({"method": "draft_model", "drafter": "x", "builder": builder, name: 3}, "node_budget")
        for name in ("num_speculative_tokens", "lookup_min", "lookup_max")
        for builder in ("static_tree", "dynamic_tree")
    ),
    (
        {"method": "ngram+draft_model", "drafter": "x", "builder": "ddtree"},
        "chain, dynamic_tree, static_tree",
    ),
    # trees that are chosen cannot be drawn
    (
        {
            "method": "draft_model", "drafter": "x", "builder": "dynamic_tree",
            "draft_sampling": "probabilistic",
        },
        "chain, static_tree, or draft sampling 'greedy'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "allowed"), REFUSED)
def test_refusals_name_what_is_allowed(fields, allowed):
    with pytest.raises(OptionError, match=allowed):
        resolve(settings(**fields))


def test_a_planned_method_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    planned = {"later": replace(METHODS["eagle"], name="later", available=False)}
    monkeypatch.setattr("forespeak.engine.settings.METHODS", {**METHODS, **planned})
    for name in planned:
        with pytest.raises(OptionError, match=f"{name}.*planned.*allowed"):
            resolve(settings(method=name))


CHAIN, TREE = {"drafter": "truncate:1"}, {"drafter": "truncate:1", "builder": "dynamic_tree"}
STATIC = {"drafter": "truncate:1", "builder": "static_tree"}
DRAWN = {"draft_sampling": "probabilistic"}
RULES = [
    # method, settings, rules that fit at temperature 1
    ("ngram", {}, {"match", "point_siblings", "typical"}),
    ("draft_model", CHAIN, {"match", "point_siblings", "typical"}),
    ("draft_model", TREE, {"match", "point_siblings", "typical"}),
    ("draft_model", STATIC, {"match", "point_siblings", "typical"}),
    ("draft_model", CHAIN | DRAWN, {"block", "rejection", "siblings", "match", "typical"}),
    ("draft_model", STATIC | DRAWN, {"siblings", "match", "typical"}),
    ("ngram+draft_model", CHAIN, {"match", "point_siblings", "typical"}),
    ("ngram+draft_model", CHAIN | DRAWN, {"match", "typical"}),
    ("ngram+draft_model", STATIC | DRAWN, {"match", "typical"}),
]


@pytest.mark.parametrize(("method", "fields", "fitting"), RULES)
def test_rules_that_do_not_fit_the_drafts_are_refused(method, fields, fitting):
    every = {"match", "point_siblings", "typical", "block", "rejection", "siblings"}
    target = in_memory(TableModel(8))
    for rule in sorted(every - fitting):
        with pytest.raises(OptionError, match="allowed: "):  # before the target is looked for
            LLM("a/model/that/is/nowhere", method=method, rule=rule, **fields)
    for rule in sorted(fitting):
        llm = LLM(target, method=method, rule=rule, **fields)
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=4, temperature=temperature)
            assert len(llm.generate([1, 2], params).token_ids) == 4


def test_greedy_rule_above_temperature_zero_is_refused():
    llm = LLM(in_memory(TableModel(8)), method="ngram", rule="greedy")
    assert llm.generate([1, 2], SamplingParams(max_new_tokens=3)).token_ids
    with pytest.raises(OptionError, match="match, point_siblings, typical"):
        llm.generate([1, 2], SamplingParams(temperature=1.0))


def test_unknown_rules_are_refused():
    with pytest.raises(OptionError, match="block"):
        LLM("a/model/that/is/nowhere", method="ngram", rule="blocks")


def test_settings_are_refused_before_the_target_is_opened():
    with pytest.raises(OptionError, match="from 1 to"):
        LLM("a/model/that/is/nowhere", method="ngram", num_speculative_tokens=0)


@pytest.mark.parametrize("fields", [{"dtype": "int8"}, {"device": "cpu"}, {"threads": 1}])
def test_a_loaded_target_takes_no_options_of_loading(fields):
    with pytest.raises(OptionError, match="load_target"):
        LLM(in_memory(TableModel(8)), **fields)


HUGE = 10**20
SIZES = ("num_speculative_tokens", "node_budget", "tree_depth", "tree_top_k", "lookup_max")


@pytest.mark.parametrize("value", [HUGE, 2.5, "3", True, 0])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_an_upper_end_and_are_whole_numbers(name: str, value: Any) -> None:
    """Found by fuzzing: huge ones hung, others crashed in the middle of a text."""
    builder = None if name in ("num_speculative_tokens", "lookup_max") else "dynamic_tree"
    method = "ngram" if name == "lookup_max" else "draft_model"
    drafter = None if method == "ngram" else "truncate:1"
    fields: dict[str, Any] = {name: value, "builder": builder, "drafter": drafter}
    with pytest.raises(OptionError, match="whole numbers from 1 to"):
        resolve(SpeculationConfig(method=method, **fields))


@pytest.mark.parametrize("method", [3, None, ["ngram"]])
def test_a_method_is_a_name(method: Any) -> None:
    with pytest.raises(OptionError, match="allowed: a name"):
        resolve(SpeculationConfig(method=method))


def test_a_shape_file_is_read_once(tmp_path: Path) -> None:
    """A run does not depend on a file that somebody changes or deletes meanwhile."""
    file = tmp_path / "shape.json"
    file.write_text("[[0], [1], [0, 0]]")
    target = in_memory(TableModel(20, context_length=64))
    llm = LLM(
        target, method="draft_model", drafter="truncate:1", builder="static_tree",
        tree_shape=str(file),
    )  # fmt: skip
    file.unlink()
    done = llm.generate([1, 2, 3], SamplingParams(max_new_tokens=12))
    plain = LLM(target).generate([1, 2, 3], SamplingParams(max_new_tokens=12))
    assert done.token_ids == plain.token_ids
    assert done.stats.num_drafted > done.stats.num_rounds


def test_a_cpu_has_defaults_of_its_own():
    """A tree of 59 nodes costs a CPU ten forwards; what was asked for stays."""
    info = DrafterInfo(method="eagle2", expansion="forward", needs_hidden=True)
    plain = resolve(settings(method="eagle2", drafter="x"))
    (member,) = settled(plain, [info], cpu=True).members
    assert (member.config.node_budget, member.config.tree_depth) == (16, 4)
    (member,) = settled(plain, [info]).members
    assert (member.config.node_budget, member.config.tree_depth) == (59, 6)
    given = resolve(settings(method="eagle2", drafter="x", node_budget=32))
    (member,) = settled(given, [info], cpu=True).members
    assert (member.config.node_budget, member.config.tree_depth) == (32, 4)
