"""``forespeak init``: a drafter of random weights, to train or to try the machinery with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from forespeak.cli import consoles
from forespeak.cli.options import DEFAULT_TARGET, OutputOptions
from forespeak.drafters.table import METHODS
from forespeak.errors import OptionError

_STARTABLE = ", ".join(name for name, entry in METHODS.items() if entry.starts)


def init(
    method: Annotated[str, Argument(help=f"The method whose drafter to start: {_STARTABLE}.")],
    *,
    target: Annotated[
        str, Option(help="Name, folder, GGUF file or Hub id ORG/NAME of the model to draft for.")
    ] = DEFAULT_TARGET,
    out: Annotated[Path | None, Option(help="Folder to write; must be given.")] = None,
    set_: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="A field of the drafter's config, such as draft_vocab_size=8192 or "
            "layers.num_layers=2; several times. A wrong one lists all.",
        ),
    ] = None,
    seed: Annotated[int, Option(help="Seed of the weights.")] = 0,
    output: OutputOptions,
) -> None:
    """Write a drafter of random weights for a target: what training starts from."""
    if out is None:
        raise OptionError("No folder was given; name the one to write with --out FOLDER.")
    changes = dict(_change(text) for text in set_ or ())
    with consoles.waiting(f"Starting a drafter for {target}"):
        from forespeak.drafters.inspecting import target_config
        from forespeak.drafters.starting import fresh_config, start_drafter, startable

        if method not in startable():
            fresh_config(method, None, {})  # type: ignore[arg-type]  # refuses with the list
        checkpoint = start_drafter(method, target_config(target), out, changes=changes, seed=seed)
    if output.json:
        consoles.write_json(
            {
                "method": method,
                "path": str(out),
                "num_parameters": checkpoint.num_parameters,
            }
        )
        return
    consoles.say(
        f"{out}: {checkpoint.num_parameters / 1e6:.1f} million random weights for {method} on "
        f"{target}. The drafter proposes noise until it is trained; see it with "
        f"`forespeak inspect {out}`."
    )


def _change(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise OptionError(f"--set {text!r} is not KEY=VALUE; such as --set draft_vocab_size=8192.")
    return name.strip(), value.strip()
