"""Every method on the embedded target at the end of its context: is the text plain decoding's?

    python scripts/long_context.py [--drafters FOLDER] [--methods a,b] [--tokens 64]

The prompt fills the context but for the tokens that are asked for, so that the last rounds meet
the limit. Drafters that are not in FOLDER get random weights: then nearly every draft is rejected,
which is what a check of caches and positions wants. int8, so the texts must be equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from forespeak.drafters.starting import start_drafter
from forespeak.drafters.table import METHODS
from forespeak.engine.llm import LLM, Target, load_target
from forespeak.sampling import SamplingParams

SENTENCE = "The keeper of the lighthouse wrote down the hour, the wind and the ships that passed. "


def prompt_ids(target: Target, count: int) -> list[int]:
    """A story of ``count`` tokens whose numbers change, so that it never quite repeats."""
    ids: list[int] = []
    night = 1
    while len(ids) < count:
        ids += target.encode(f"Night {night}. {SENTENCE}", raw=True)
        night += 1
    return ids[:count]


def drafter_for(name: str, given: Path | None, spare: Path, target: Target) -> str | None:
    """Folder of the method's drafter, made where there is none; None where it needs none."""
    entry = METHODS[name]
    if name == "draft_model":
        return "truncate:6"
    if not entry.info.trained:
        return None
    for method in (name, *entry.reads):
        if given is not None and (given / method / "config.json").is_file():
            return str(given / method)
    method = next(method for method in (name, *entry.reads) if METHODS[method].starts)
    folder = spare / method
    if not folder.exists():
        start_drafter(method, target.model.config, folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drafters", type=Path, help="folder of drafters named by method")
    parser.add_argument("--methods", help="names joined with commas (default: all)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens left after the prompt")
    options = parser.parse_args()
    names = options.methods.split(",") if options.methods else list(METHODS)[1:]
    target = load_target(dtype="int8", device="cpu")
    ids = prompt_ids(target, target.context_length - options.tokens)
    params = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    start = time.perf_counter()
    plain = LLM(target).generate(ids, params).token_ids
    print(f"context {target.context_length}, prompt {len(ids)}: plain decoding took "
          f"{time.perf_counter() - start:.0f} s")  # fmt: skip
    wrong = []
    with tempfile.TemporaryDirectory() as spare:
        for name in names:
            drafter = drafter_for(name, options.drafters, Path(spare), target)
            start = time.perf_counter()
            done = LLM(target, method=name, drafter=drafter).generate(ids, params)
            same = done.token_ids == plain
            wrong += [] if same else [name]
            print(f"{name:13} {'same text' if same else 'ANOTHER TEXT'}, {done.stats.num_rounds} "
                  f"rounds, acceptance length {done.stats.acceptance_length:.2f} (with bonus), "
                  f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
    if wrong:
        sys.exit(f"other texts than plain decoding's: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
