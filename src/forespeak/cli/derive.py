"""``forespeak data derive``: prompts that stand on texts, of answers that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from forespeak.cli import consoles
from forespeak.cli.options import OutputOptions
from forespeak.errors import OptionError, shown

_MOST_DIGITS = 9


def derive(
    folders: Annotated[
        list[Path], Argument(help="Folders that `forespeak data generate` wrote.", metavar="FOLDER")
    ],
    *,
    out: Annotated[Path | None, Option(help="Prompt file to write.")] = None,
    kinds: Annotated[
        str,
        Option(
            help="How many of which kind: summary, question, translation, rewriting, and "
            "back_translation (of answers to translations).",
            show_default="summary=300, question=300, translation=200, rewriting=200",
        ),
    ] = "summary=300,question=300,translation=200,rewriting=200",
    seed: Annotated[int, Option(help="Of all draws.")] = 0,
    target: Annotated[str, Option(help="Whose tokenizer wrote the answers.")] = "smollm2-135m",
    output: OutputOptions,
) -> None:
    """Make prompts that stand on a text, of a target's own answers.

    Drafters guess badly behind kinds of prompts that they never saw. Of answers
    that are there this makes texts to sum up, passages with a question, sentences
    to translate, texts to rewrite. Let the target answer them in turn:

    forespeak data derive answers --out derived.jsonl

    forespeak data generate --prompts derived.jsonl --exclude eval.jsonl --out more

    forespeak train eagle3 --data answers --data more --out my-eagle3
    """
    if out is None:
        raise OptionError("No file was given; name the one to write with --out FILE.")
    wanted = _numbers(kinds)
    if out.exists():
        raise OptionError(f"{out} exists already; name a new file with --out, or remove that one.")
    if not out.parent.is_dir():
        raise OptionError(f"There is no folder {out.parent}; make it, or name another file.")
    from forespeak.models.loading import load_checkpoint
    from forespeak.train.derive import NEEDS, Source, check_kinds
    from forespeak.train.derive import derive as derived
    from forespeak.train.dialogues import read_dialogues, read_manifest
    from forespeak.train.journal import to_line, write_lines

    check_kinds(wanted)
    checkpoint = load_checkpoint(target)
    tokenizer, config = checkpoint.tokenizer, checkpoint.config
    if tokenizer is None:
        raise OptionError(f"{target} has no tokenizer; name the target that wrote the answers.")
    sources = []
    for folder in folders:
        read_manifest(folder).check_target(tokenizer, folder)
        for one in read_dialogues(folder, vocab_size=config.vocab_size if config else None):
            for turn, answer in zip(one.turns, one.answers, strict=True):
                sources.append(Source(turn, tokenizer.decode(answer), one.id))
    made_of = derived(sources, wanted, seed=seed)
    made = [to_line(one.record()) for one in made_of]
    write_lines(out, iter(made))
    if output.json:
        consoles.write_json({"path": str(out), "num_prompts": len(made)})
    else:
        consoles.say(f"{out}: {len(made)} prompts. Answer them with `forespeak data generate`.")
        for kind, number in wanted.items():
            there = sum(one.task == kind for one in made_of)
            if there < number:
                consoles.say(
                    f"Of kind {kind} the answers gave {there} of the {number} asked for: it needs "
                    f"{NEEDS[kind]}, and each text is used a few times at most."
                )


def _numbers(text: str) -> dict[str, int]:
    found = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        good = number.isdecimal() and len(number) < _MOST_DIGITS and int(number) > 0
        if not equals or not good or name in found:
            raise OptionError(
                f"--kinds {shown(text)} is not KIND=NUMBER joined with commas, each kind once and "
                "each number from 1 to 99999999; such as summary=300,question=300."
            )
        found[name] = int(number)
    return found
