"""From what a user asked of a method to settings with every default filled in, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forespeak.drafters.naming import Part, check_part, parts_of
from forespeak.drafters.table import BUILDER_SETTINGS, METHODS, MethodEntry, Setting, settings_under
from forespeak.engine.shapes import read_shape
from forespeak.errors import OptionError, unknown_choice
from forespeak.spec.tree import CandidateTree
from forespeak.spec.verify import Draft, Rule, Shape, select_rule
from forespeak.types import DrafterInfo, SpeculationConfig

_DRAWN_BUILDERS = ("chain", "static_tree")  # the others choose their nodes by the laws
_SHAPED = ("node_budget", "tree_depth", "tree_top_k")  # what a given tree shape decides
RECURSION_STATES = ("normed", "raw")
DRAFT_DTYPES = ("float32", "bfloat16", "int8")
DRAFT_SAMPLING = ("greedy", "probabilistic")
# Beyond these a round costs more than it can ever bring, and trees no longer fit into memory.
_MOST = {
    "num_speculative_tokens": 256,
    "node_budget": 4096,
    "tree_depth": 256,
    "tree_top_k": 256,
    "lookup_min": 64,
    "lookup_max": 64,
}


@dataclass(frozen=True)
class Member:
    """One method of a cascade, resolved."""

    config: SpeculationConfig
    builder: str
    point_mass: bool
    asked: frozenset[str] = frozenset()  # settings that the user gave; the others are defaults


@dataclass(frozen=True)
class Resolved:
    """A configuration with its defaults.

    Attributes:
        shown: for people: what was asked, and the defaults where there is one method only.
        members: the methods in order; none for plain decoding.
    """

    shown: SpeculationConfig
    members: tuple[Member, ...]


def resolve(asked: SpeculationConfig) -> Resolved:
    """Fill in the defaults.

    Raises:
        OptionError: an unknown method or builder, a setting that no method takes, or one out of
            range.
    """
    if not isinstance(asked.method, str):
        raise OptionError(
            f"method is {asked.method!r}; allowed: a name such as ngram, or names joined with +."
        )
    parts = parts_of(asked.method)
    names = [part.name for part in parts]
    entries = [_entry(name) for name in names]
    for part, entry in zip(parts, entries, strict=True):
        check_part(part, entry)
    _refuse_impossible_cascade(asked.method, names)
    if asked.draft_sampling not in (None, *DRAFT_SAMPLING):
        raise OptionError(unknown_choice("Draft sampling", asked.draft_sampling, DRAFT_SAMPLING))
    members = [
        _member(entry, _own(part, entry, asked))
        for part, entry in zip(parts, entries, strict=True)
        if entry.builders
    ]
    _refuse_overruled(asked, parts, members)
    _refuse_without_effect(asked, members, entries)
    sampling = asked.draft_sampling or "greedy"
    shown = members[0].config if len(members) == 1 else asked
    shown = replace(shown, method=asked.method, draft_sampling=sampling, rule=asked.rule)
    if sampling == "probabilistic":
        _check_drawn(members)
    return Resolved(shown, tuple(members))


class RuleChoice:
    """The rule for each kind of tree a method makes: chosen tokens, or drawn from q."""

    def __init__(self, point: Rule, sampled: Rule) -> None:
        self.point, self.sampled = point, sampled

    def of(self, tree: CandidateTree) -> Rule:
        return self.point if tree.q is None else self.sampled


def refuse_missing_drafter(resolved: Resolved) -> None:
    """Say early that a method needs a model of its own.

    Raises:
        OptionError: none was given.
    """
    for member in resolved.members:
        entry = METHODS[member.config.method]
        if entry.info.trained and not entry.carried and member.config.drafter is None:
            raise OptionError(
                f"Method {entry.name} needs {entry.needs}, and none was given; name one with "
                "--drafter (in Python drafter=): a folder"
                + (", a GGUF file or a Hub id." if "truncate" in entry.needs else " or a Hub id.")
            )


def choose_rules(resolved: Resolved, temperature: float) -> RuleChoice:
    """The rules of a method at a temperature.

    Raises:
        OptionError: a rule was named that cannot verify every tree this method makes.
    """
    members, name = resolved.members, resolved.shown.rule
    shape: Shape = "chain" if all(m.builder == "chain" for m in members) else "tree"
    drawn = resolved.shown.draft_sampling == "probabilistic"
    makes: set[Draft] = {"sampled" if drawn and not m.point_mass else "point" for m in members}

    def pick(draft: Draft) -> Rule:
        wanted = name if draft in makes or not members else None
        try:
            return select_rule(wanted, draft=draft, shape=shape, temperature=temperature)
        except OptionError as error:
            if draft == "point" and len(makes) > 1:
                raise OptionError(
                    f"{error} (Look-up's draft tokens are always chosen and never drawn, so a rule "
                    "for this cascade must verify both kinds: match does.)"
                ) from None
            raise

    return RuleChoice(point=pick("point"), sampled=pick("sampled"))


def _entry(name: str) -> MethodEntry:
    available = [key for key, entry in METHODS.items() if entry.available]
    if name not in METHODS:
        raise OptionError(unknown_choice("Method", name, available))
    if not METHODS[name].available:
        raise OptionError(
            f"Method {name!r} is planned and not in this version; allowed: {', '.join(available)}. "
            "See `forespeak methods`."
        )
    return METHODS[name]


def _refuse_impossible_cascade(method: str, names: list[str]) -> None:
    if len(names) == 1:
        return
    if len(set(names)) < len(names) or any(not METHODS[name].builders for name in names):
        raise OptionError(
            f"Cascade {method!r} names a method twice or one that drafts nothing; allowed: "
            "different drafting methods joined with +, such as ngram+draft_model."
        )
    never = [name for name in names[:-1] if not METHODS[name].info.point_mass]
    if never:
        raise OptionError(
            f"In cascade {method!r} nothing after {never[0]!r} would ever be asked, because "
            f"{never[0]!r} always has a proposal; put look-up first, such as ngram+{never[0]}."
        )


def _own(part: Part, entry: MethodEntry, asked: SpeculationConfig) -> SpeculationConfig:
    """What is asked of one method: its own builder and size go before those for all."""
    builder = part.builder or asked.builder
    asked = replace(asked, builder=builder)
    size = {} if part.size is None else {part.size_setting(entry, builder): part.size}
    return replace(asked, **size)  # type: ignore[arg-type]


def _refuse_overruled(
    asked: SpeculationConfig, parts: Sequence[Part], members: Sequence[Member]
) -> None:
    """What is given for all must reach one that does not say its own, or be what they say."""
    for name in ("builder", "num_speculative_tokens", "node_budget"):
        value = getattr(asked, name)
        takers = [
            (part.builder if name == "builder" else part.size, getattr(member.config, name))
            for part, member in zip(parts, members, strict=False)  # plain decoding has no member
            if name in _own_settings(member)
        ]
        said = [of_member for own, of_member in takers if own is not None]
        if value is not None and len(said) == len(takers) and any(one != value for one in said):
            raise OptionError(
                f"{name}={value} has no effect on {asked.method}, which says its own; leave one of "
                "the two out."
            )


def _own_settings(member: Member) -> set[str]:
    entry = METHODS[member.config.method]
    names = set(settings_under(entry, member.builder))
    return names | {"builder"} if len(entry.builders) > 1 else names


def _member(entry: MethodEntry, asked: SpeculationConfig) -> Member:
    builder = entry.builders[0]
    if asked.builder is not None and len(entry.builders) > 1:
        if asked.builder not in entry.builders:
            raise OptionError(
                unknown_choice(f"Builder for {entry.name}", asked.builder, entry.builders)
            )
        builder = asked.builder
    values: dict[str, Setting | None] = {}
    for name in _settings_of(entry, builder):
        given = getattr(asked, name)
        values[name] = entry.defaults.get(name) if given is None else given
        _check_size(name, values[name])
    _check_shape(values, asked)
    _check_lookup(values)
    _check_drafter(values, entry)
    _check_threshold(values)
    _check_recursion(values)
    _check_draft_dtype(values)
    config = SpeculationConfig(method=entry.name, builder=builder, **values)  # type: ignore[arg-type]
    given = frozenset(name for name in values if getattr(asked, name) is not None)
    return Member(config, builder, entry.info.point_mass, given)


def on_cpu(member: Member) -> Member:
    """Its defaults on a CPU; what the user gave stays, and so does a tree of a given shape."""
    entry = METHODS[member.config.method]
    if member.config.tree_shape is not None:
        return member
    takes = set(_settings_of(entry, member.builder)) - member.asked
    free = {name: value for name, value in entry.on_cpu.items() if name in takes}
    return replace(member, config=replace(member.config, **free))  # type: ignore[arg-type]


def settle(member: Member, info: DrafterInfo) -> Member:
    """Fill in and check what only the drafter itself can say: how deep it goes.

    Raises:
        OptionError: more was asked for than it has.
    """
    most = info.max_depth
    sizes = [name for name in BUILDER_SETTINGS[member.builder] if name in _DEPTHS]
    changes: dict[str, int] = {}
    for name in sizes:
        value = getattr(member.config, name)
        if value is None and (name != "tree_depth" or member.config.tree_shape is None):
            assert most is not None, f"{member.config.method}: no default for {name}"
            changes[name] = most
        elif value is not None and most is not None and value > most:
            if name in member.asked:
                raise OptionError(
                    f"{name} is {value}; allowed: 1 to {most}, the draft tokens that this drafter "
                    "gives in a round. Ask for fewer or choose another drafter."
                )
            changes[name] = most
    if member.config.tree_shape is not None:
        deepest = read_shape(member.config.tree_shape).depth
        if most is not None and deepest > most:
            raise OptionError(
                f"The tree shape {member.config.tree_shape!r} is {deepest} deep; allowed: up to "
                f"{most}, the draft tokens that this drafter gives in a round."
            )
    return replace(member, config=replace(member.config, **changes))  # type: ignore[arg-type]


def settled(resolved: Resolved, infos: Sequence[DrafterInfo], *, cpu: bool = False) -> Resolved:
    """All members settled with what their drafters say, and where they run.

    Raises:
        OptionError: see :func:`settle`.
    """
    members = tuple(on_cpu(member) if cpu else member for member in resolved.members)
    members = tuple(settle(m, i) for m, i in zip(members, infos, strict=True))
    shown = resolved.shown
    if len(members) == 1:
        shown = replace(
            members[0].config, method=shown.method, draft_sampling=shown.draft_sampling,
            rule=shown.rule,
        )  # fmt: skip
    return Resolved(shown, members)


_DEPTHS = ("num_speculative_tokens", "tree_depth")


def _settings_of(entry: MethodEntry, builder: str) -> tuple[str, ...]:
    names = settings_under(entry, builder)
    return (*names, "drafter") if entry.info.trained else names


def _check_shape(values: dict[str, Setting | None], asked: SpeculationConfig) -> None:
    """A given shape decides budget, depth and breadth, so those must not be given beside it."""
    shape = values.get("tree_shape")
    if shape is None:
        return
    beside = [name for name in _SHAPED if getattr(asked, name) is not None]
    if beside:
        raise OptionError(
            f"{beside[0]}={getattr(asked, beside[0])} has no effect beside tree_shape {shape!r}, "
            "which decides it; leave one of the two out."
        )
    read_shape(str(shape))  # refuses a bad one now
    for name in _SHAPED:
        values[name] = None


def _check_threshold(values: dict[str, Setting | None]) -> None:
    value = values.get("confidence_threshold")
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < 1:  # type: ignore[operator]
        raise OptionError(
            f"confidence_threshold is {value!r}; allowed: from 0 (verify all) to below 1. Choose "
            "one of these."
        )


def _check_recursion(values: dict[str, Setting | None]) -> None:
    value = values.get("recursion_state")
    if value is not None and value not in RECURSION_STATES:
        raise OptionError(unknown_choice("Recursion state", str(value), RECURSION_STATES))


def _check_draft_dtype(values: dict[str, Setting | None]) -> None:
    value = values.get("draft_dtype")
    if value is not None and value not in DRAFT_DTYPES:
        raise OptionError(unknown_choice("Draft dtype", str(value), DRAFT_DTYPES))


def _check_size(name: str, value: Setting | None) -> None:
    most = _MOST.get(name)
    if most is None or value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise OptionError(
            f"{name} is {value!r}; allowed: whole numbers from 1 to {most}. Choose one of these."
        )


def _check_lookup(values: dict[str, Setting | None]) -> None:
    least, most = values.get("lookup_min"), values.get("lookup_max")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        raise OptionError(
            f"lookup_min is {least} and lookup_max is {most}; allowed: lookup_min up to "
            "lookup_max. Lower the one or raise the other."
        )


def _check_drafter(values: dict[str, Setting | None], entry: MethodEntry) -> None:
    name = values.get("drafter")
    if name is not None and not isinstance(name, str):
        raise OptionError(
            f"drafter is {name!r}; allowed: a folder, a GGUF file, a Hub id or truncate:N, as text."
        )
    if isinstance(name, str) and name.startswith("truncate:"):
        if "truncate" not in entry.needs:
            raise OptionError(
                f"Drafter {name!r} is for draft_model; method {entry.name} needs {entry.needs}. "
                "Name a folder or a Hub id."
            )
        number = name.removeprefix("truncate:")
        if not number.isdigit() or int(number) < 1:
            raise OptionError(
                f"Drafter {name!r} has no number of layers; allowed: truncate:N with N of 1 or "
                "more, below the target's number of layers, such as truncate:10."
            )


def _refuse_without_effect(
    asked: SpeculationConfig, members: list[Member], entries: list[MethodEntry]
) -> None:
    """Law 9: a setting is honoured or refused."""
    taken = {"method"}
    for member, entry in zip(members, [e for e in entries if e.builders], strict=True):
        taken |= set(_settings_of(entry, member.builder))
        taken |= (
            {"builder"} if len(entry.builders) > 1 or asked.builder in entry.builders else set()
        )
        taken |= {"draft_sampling"} if not member.point_mass else set()
        taken |= {"rule"}
    for name, value in vars(asked).items():
        if value is not None and name not in taken:
            shown = members[0].builder if len(members) == 1 else "these builders"
            place = f"{asked.method} under {shown}" if members else asked.method
            raise OptionError(
                f"{name}={value} has no effect on {place}; allowed: "
                f"{', '.join(sorted(taken - {'method'})) or 'no setting'}. Leave it out."
            )


def _check_drawn(members: list[Member]) -> None:
    for member in members:
        if not member.point_mass and member.builder not in _DRAWN_BUILDERS:
            raise OptionError(
                f"Draft sampling 'probabilistic' and builder {member.builder!r} exclude each other "
                f"(it chooses nodes by their probability); allowed: {', '.join(_DRAWN_BUILDERS)}, "
                "or draft sampling 'greedy'."
            )
