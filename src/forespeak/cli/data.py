"""``forespeak data``: dialogues answered by a target, the material that drafters are trained on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from forespeak.cli import consoles
from forespeak.cli.data_options import AnswerOptions, EndpointOptions, SourceOptions
from forespeak.cli.derive import derive
from forespeak.cli.engine import open_target
from forespeak.cli.groups import takes_groups
from forespeak.cli.options import OutputOptions, TargetOptions
from forespeak.errors import OptionError

if TYPE_CHECKING:
    from forespeak.engine.target import Target
    from forespeak.models.tokenizer import Tokenizer
    from forespeak.train.dialogues import Dialogue, Manifest
    from forespeak.train.generate_prompts import SelfWritten
    from forespeak.train.making import Answerer
    from forespeak.train.overlap import Exclusion
    from forespeak.train.prompt_sets import PromptSet
    from forespeak.train.talks import Limits, Outcome

_SAY_EVERY_S = 60.0
_PROMPTS_SHARE = 0.3  # of a time limit; the rest is for the answers


def data() -> typer.Typer:
    """The group of commands about training data."""
    group = typer.Typer(
        help="Make, look at, pack and unpack the dialogues that drafters are trained on.",
        no_args_is_help=False,
        rich_markup_mode="rich",
    )
    group.command("generate")(takes_groups(generate))
    group.command("derive")(takes_groups(derive))
    group.command("show")(takes_groups(show))
    group.command("pack")(takes_groups(pack))
    group.command("unpack")(takes_groups(unpack))
    return group


@dataclass(frozen=True)
class _Opened:
    """What answers, and whose template it is."""

    tokenizer: Tokenizer
    target: Target | None  # None with an endpoint
    context: int
    name: str
    dtype: str


def generate(
    *,
    out: Annotated[
        Path | None,
        Option(help="Folder to write: new, empty, or one to go on with.", rich_help_panel="Data"),
    ] = None,
    source: SourceOptions,
    answers: AnswerOptions,
    endpoint: EndpointOptions,
    target: TargetOptions,
    output: OutputOptions,
) -> None:
    """Let a target answer prompts and keep its answers, to train drafters on.

    A drafter learns to guess what its target says, so the answers must be
    the target's own. Give prompts (JSONL, one {"id", "turns": [...]} a line;
    all turns are answered in order), a data set of the Hub, or a number
    alone: then the target writes the prompts, too.

    forespeak data generate --prompts train.jsonl --exclude eval.jsonl --out mine

    forespeak data generate --self-written 5000 --exclude eval.jsonl --out own

    An interrupted run loses nothing: the same command goes on where it
    stopped and ends with the same bytes.
    """
    if out is None:
        raise OptionError("No folder was given; name the one to write with --out FOLDER.")
    begun = time.monotonic()
    deadline = answers.deadline(begun)
    source.check()
    endpoint.check(source, answers, target)
    from forespeak.train.making import Making, begin, jobs_of
    from forespeak.train.overlap import Exclusion
    from forespeak.train.prompt_sets import read_prompt_sets

    excluded = read_prompt_sets(source.exclude or [])
    exclusion = Exclusion(t for one in excluded for p in one.prompts for t in p.turns)
    sets = _prompt_sets(source)
    opened = _open_tokenizer(target) if endpoint.endpoint else _open_engine(target)
    limits = answers.limits(opened.context)
    if opened.target is not None:
        from forespeak.train.generate import picks_lockstep

        picks_lockstep(opened.target, answers.batching)  # refuses before anything is written
    planned = _manifest(opened, source, answers, endpoint, sets, excluded)
    manifest = begin(out, planned, opened.tokenizer)
    written: dict[str, int] = {}
    all_written = True
    if source.self_written is not None:
        prompts_deadline = answers.deadline(begun, share=_PROMPTS_SHARE)
        found = _self_written(opened, source, answers, exclusion, out, prompts_deadline)
        sets, all_written = [found.prompts], found.is_full
        written = {f"prompts_{name}": number for name, number in found.counts.items()}
    jobs = jobs_of(
        sets, exclusion, seed=answers.seed, temperature=answers.temperature,
        greedy_share=answers.greedy_share, limit=source.limit,
    )  # fmt: skip
    making = Making(
        out, manifest, jobs, opened.tokenizer, max_tokens_total=answers.max_tokens_total,
        written=written, all_written=all_written,
    )  # fmt: skip
    answerer = _answerer(opened, answers, endpoint, limits)
    with consoles.progress("Answering", len(jobs.jobs)) as bar:
        done = making.run(
            answerer, on_outcome=_Speed(bar, lambda: making.num_ended).note, deadline=deadline
        )
    _tell(out, done, output)


def show(
    path: Annotated[Path, Argument(help="A folder of dialogues, or a packed file.")],
    *,
    output: OutputOptions,
) -> None:
    """Say what a folder or a packed file of dialogues holds: counts, tokens, lengths, fates."""
    from forespeak.train.dialogues import read_dialogues, read_manifest
    from forespeak.train.packed import packed_dialogues, read_packed_manifest

    packed = path.is_file()
    manifest = read_packed_manifest(path) if packed else read_manifest(path)
    found = packed_dialogues(path) if packed else read_dialogues(path)
    record = summary(manifest, found)
    if output.json:
        consoles.write_json(record)
        return
    consoles.out().print(_drawn(record))
    if not manifest.complete:
        consoles.say("The run is not complete; its `forespeak data generate` goes on with it.")


def pack(
    folder: Annotated[Path, Argument(help="A folder that `forespeak data generate` completed.")],
    *,
    out: Annotated[Path | None, Option(help="File to write, such as answers.jsonl.gz.")] = None,
    output: OutputOptions,
) -> None:
    """Write dialogues as one small file for a repository: answers, and prompts by their ids.

    The text of prompt files stays out; that of prompts which the target wrote itself stays in.
    """
    if out is None:
        raise OptionError("No file was given; name the one to write with --out FILE.")
    from forespeak.train.packed import pack as write_packed

    size = write_packed(folder, out)
    if output.json:
        consoles.write_json({"path": str(out), "num_bytes": size})
    else:
        consoles.say(f"{out}: {size / 1e3:,.0f} kB. `forespeak data unpack` makes a folder of it.")


def unpack(
    file: Annotated[Path, Argument(help="A file that `forespeak data pack` wrote.")],
    *,
    out: Annotated[Path | None, Option(help="Folder to write, new or empty.")] = None,
    prompts: Annotated[
        list[Path] | None,
        Option(help="A prompt file that was answered; several times."),
    ] = None,
    dataset: Annotated[
        str | None, Option(help="The data set of the Hub that was answered.")
    ] = None,
    dataset_split: Annotated[str, Option(help="Its split.")] = "train",
    output: OutputOptions,
) -> None:
    """Join a packed file with its prompt files again and write the folder that training takes."""
    if out is None:
        raise OptionError("No folder was given; name the one to write with --out FOLDER.")
    from forespeak.train.packed import unpack as write_folder
    from forespeak.train.prompt_sets import load_dataset_prompts, read_prompt_sets

    sets = read_prompt_sets(prompts or [])
    if dataset is not None:
        sets.append(load_dataset_prompts(dataset, dataset_split))
    number = write_folder(file, out, sets)
    if output.json:
        consoles.write_json({"path": str(out), "num_dialogues": number})
    else:
        consoles.say(f"{out}: {number} dialogues. See them with `forespeak data show {out}`.")


def _prompt_sets(source: SourceOptions) -> list[PromptSet]:
    from forespeak.train.prompt_sets import load_dataset_prompts, read_prompt_sets

    if source.dataset is not None:
        with consoles.waiting(f"Loading {source.dataset}"):
            return [load_dataset_prompts(source.dataset, source.dataset_split)]
    return read_prompt_sets(source.prompts or [])


def _open_engine(options: TargetOptions) -> _Opened:
    from forespeak.train.generate import tokenizer_of

    target = open_target(options)
    return _Opened(
        tokenizer_of(target), target, target.context_length, _public(options.target),
        target.dtype_name,
    )  # fmt: skip


def _open_tokenizer(options: TargetOptions) -> _Opened:
    """Of the target, whose weights stay where they are: the endpoint has its own."""
    from forespeak.errors import ModelError
    from forespeak.models.loading import load_checkpoint

    checkpoint = load_checkpoint(options.target)
    if checkpoint.tokenizer is None:
        raise ModelError(f"{checkpoint.description} has no tokenizer; put its files beside it.")
    config = checkpoint.config
    most = options.context_length or (config.max_position_embeddings if config else None)
    if most is None:
        raise OptionError(
            f"How long a context {checkpoint.description} has cannot be told; say it with "
            "--context-length."
        )
    return _Opened(checkpoint.tokenizer, None, most, _public(options.target), "the endpoint's")


def _public(name: str) -> str:
    """A target's name without the folders of this machine."""
    return Path(name).name if Path(name).exists() else name


def _manifest(
    opened: _Opened,
    source: SourceOptions,
    answers: AnswerOptions,
    endpoint: EndpointOptions,
    sets: list[PromptSet],
    excluded: list[PromptSet],
) -> Manifest:
    from forespeak.train.dialogues import Manifest

    settings: dict[str, Any] = {
        "temperature": answers.temperature, "greedy_share": answers.greedy_share,
        "seed": answers.seed, "max_new_tokens": answers.max_new_tokens,
        "max_prompt_tokens": answers.max_prompt_tokens, "context_length": opened.context,
        "dtype": opened.dtype, "limit": source.limit,
        "max_tokens_total": answers.max_tokens_total,
    }  # fmt: skip
    if source.self_written is not None:
        settings |= {
            "self_written": source.self_written,
            "min_written_tokens": source.min_written_tokens,
            "max_written_tokens": source.max_written_tokens,
        }
    if endpoint.model is not None:
        settings["endpoint_model"] = endpoint.model
    return Manifest(
        target=opened.name, vocabulary=opened.tokenizer.vocabulary_digest(),
        template=opened.tokenizer.template_digest(), settings=settings,
        prompts=[one.origin for one in sets] or [{"name": "self-written", "sha256": ""}],
        excluded=[one.origin for one in excluded],
    )  # fmt: skip


def _self_written(
    opened: _Opened,
    source: SourceOptions,
    answers: AnswerOptions,
    exclusion: Exclusion,
    out: Path,
    deadline: float | None,
) -> SelfWritten:
    from forespeak.train.generate import Writer
    from forespeak.train.generate_prompts import PromptBounds, PromptWriter

    assert opened.target is not None and source.self_written is not None
    bounds = PromptBounds(source.min_written_tokens, source.max_written_tokens)
    writer = PromptWriter(
        Writer(opened.target, answers.rows, answers.batching), bounds=bounds, seed=answers.seed,
        exclusion=exclusion,
    )  # fmt: skip
    with consoles.progress("Writing prompts", source.self_written) as bar:
        return writer.write(
            out, source.self_written, on_kept=lambda _: bar.advance("Writing prompts"),
            deadline=deadline,
        )  # fmt: skip


def _answerer(
    opened: _Opened, answers: AnswerOptions, endpoint: EndpointOptions, limits: Limits
) -> Answerer:
    if opened.target is not None:
        from forespeak.train.generate import EngineAnswers, Writer

        writer = Writer(opened.target, answers.rows, answers.batching)
        return EngineAnswers(writer, limits=limits)
    from forespeak.train.endpoint import EndpointAnswers

    return EndpointAnswers(endpoint.settings(), opened.tokenizer, limits)


class _Speed:
    """Moves a bar and says the speed; where there is no bar, a line a minute."""

    def __init__(self, bar: consoles.Bar, num_ended: Any) -> None:
        self._bar, self._num_ended = bar, num_ended
        self._begun = self._said = time.perf_counter()
        self._tokens = 0

    def note(self, outcome: Outcome) -> None:
        """One job further."""
        self._tokens += 0 if outcome.dialogue is None else outcome.dialogue.num_tokens
        now = time.perf_counter()
        speed = f"{self._tokens / max(now - self._begun, 1e-9):.0f} tok/s"
        self._bar.advance(f"Answering, {speed}")
        if now - self._said > _SAY_EVERY_S:
            self._said = now
            consoles.say(f"{self._num_ended()} prompts, {self._tokens} tokens, {speed}", "dim")


def _tell(folder: Path, manifest: Manifest, output: OutputOptions) -> None:
    from forespeak.train.dialogues import read_dialogues

    record = summary(manifest, read_dialogues(folder))
    if output.json:
        consoles.write_json({"path": str(folder), **record})
        return
    counts = ", ".join(f"{name} {number}" for name, number in record["counts"].items())
    consoles.say(
        f"{folder}: {record['num_dialogues']} dialogues, {record['num_tokens']} answer tokens "
        f"({counts}). See more with `forespeak data show {folder}`."
    )


def summary(manifest: Manifest, dialogues: Iterable[Dialogue]) -> dict[str, Any]:
    """What there is to know: the manifest, and counts over the dialogues."""
    lengths: list[int] = []
    sources: Counter[str] = Counter()
    turns: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    greedy = 0
    for one in dialogues:
        lengths += map(len, one.answers)
        sources[one.source] += 1
        turns[len(one.answers)] += 1
        reasons.update(one.finish_reasons)
        greedy += one.temperature == 0
    lengths.sort()
    shares = {"shortest": 0.0, "median": 0.5, "p90": 0.9, "longest": 1.0}
    places = {name: round(share * (len(lengths) - 1)) for name, share in shares.items()}
    return {
        **{k: v for k, v in asdict(manifest).items() if k not in ("vocabulary", "template")},
        "num_dialogues": sum(turns.values()),
        "num_greedy": greedy,
        "num_answers": len(lengths),
        "num_tokens": sum(lengths),
        "answer_tokens": {name: lengths[at] for name, at in places.items()} if lengths else {},
        "finish_reasons": dict(reasons),
        "dialogues_by_turns": {str(number): count for number, count in sorted(turns.items())},
        "dialogues_by_source": dict(sources),
    }


def _drawn(record: dict[str, Any]) -> Table:
    table = Table(show_header=False, pad_edge=False, box=None)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in record.items():
        table.add_row(Text(name.replace("_", " ")), Text(", ".join(_words(value))))
    return table


def _words(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{n} {'none' if v is None else v}" for n, v in value.items())
    elif isinstance(value, list | tuple):
        yield from (f"{one['name']} {one['sha256'][:12]}".strip() for one in value)
    else:
        yield str(value)
