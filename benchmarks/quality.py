"""How near int8 is to float32 on real answers: KL divergence and top-1 agreement.

    python benchmarks/quality.py [--prompts FILE] [--limit 20] [--json]

The int8 target answers each prompt greedily; prompt and answer then go through both precisions
("teacher-forced"), and their laws of every answer token are compared. The reference is float32
with the weights of the checkpoint, so all of int8's loss counts: weights and activations.
Exit code 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from forespeak.bench.prompts import read_prompts
from forespeak.models.base import TargetModel
from forespeak.models.decoder import Decoder
from forespeak.models.int8_decoder import Int8Decoder
from forespeak.models.loading import Checkpoint, load_checkpoint
from forespeak.types import Segment

MOST_KL = 0.01  # nat a token
LEAST_AGREEMENT = 0.95
ROOT = Path(__file__).parents[1]
PROMPT_FILES = (
    ROOT.parent / "shared/data/eval/spec_bench_dev.jsonl",
    ROOT / "src/forespeak/cli/demo_prompts.jsonl",
)


@dataclass(frozen=True)
class Quality:
    """Means over all answer tokens of all prompts."""

    num_prompts: int
    num_tokens: int
    kl: float
    agreement: float

    @property
    def holds(self) -> bool:
        return self.kl <= MOST_KL and self.agreement >= LEAST_AGREEMENT


def segment_of(tokens: Sequence[int]) -> list[Segment]:
    return [Segment(0, len(tokens))]


def greedy_answer(
    model: TargetModel, prompt: Sequence[int], num_tokens: int, stops: Sequence[int]
) -> list[int]:
    """At most ``num_tokens`` tokens after the prompt, an ending one included."""
    cache = model.new_cache(1, len(prompt) + num_tokens)
    new, start = list(prompt), 0
    answer: list[int] = []
    while len(answer) < num_tokens and (not answer or answer[-1] not in stops):
        positions = torch.arange(start, start + len(new))
        last = torch.tensor([len(new) - 1])
        out = model.forward(torch.tensor(new), positions, cache, segment_of(new), logits_at=last)
        cache.commit_all(0)
        start += len(new)
        new = [int(out.logits[0].argmax())]
        answer += new
    return answer


def answer_logits(model: TargetModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Logits [n, V] from which each of the n answer tokens is predicted."""
    tokens = [*prompt, *answer[:-1]]
    asked = torch.arange(len(prompt) - 1, len(tokens))
    cache = model.new_cache(1, len(tokens))
    positions = torch.arange(len(tokens))
    out = model.forward(torch.tensor(tokens), positions, cache, segment_of(tokens), logits_at=asked)
    return out.logits


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nat of each row of logits, in float64."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def compare(
    reference: TargetModel,
    other: TargetModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    stops: Sequence[int] = (),
) -> Quality:
    """``other`` against ``reference`` on greedy answers of ``other``."""
    kl, same = [], []
    for prompt in prompts:
        answer = greedy_answer(other, prompt, num_tokens, stops)
        true, near = (answer_logits(model, prompt, answer) for model in (reference, other))
        kl.append(divergence(true, near))
        same.append(true.argmax(-1) == near.argmax(-1))
    all_kl, all_same = torch.cat(kl), torch.cat(same).double()
    return Quality(len(prompts), len(all_kl), float(all_kl.mean()), float(all_same.mean()))


def chat_prompts(checkpoint: Checkpoint, path: Path, limit: int, longest: int) -> list[list[int]]:
    """Token ids of ``limit`` prompts spread over a file, none above ``longest`` tokens."""
    assert checkpoint.tokenizer is not None, "the target has no tokenizer"
    rendered = [
        checkpoint.tokenizer.render_chat([{"role": "user", "content": prompt.turns[0]}])
        for prompt in read_prompts(path)
    ]
    fitting = [ids for ids in rendered if len(ids) <= longest]
    step = max(1, len(fitting) // limit)
    return fitting[::step][:limit]


def default_prompts() -> Path:
    """The evaluation prompts beside the repository, or the demonstration's where they are not."""
    return next(path for path in PROMPT_FILES if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, default=default_prompts())
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--longest-prompt", type=int, default=400, help="tokens; longer: passed by")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="last line is one JSON object")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(options.target)
    assert checkpoint.config is not None, "int8 runs on the built-in decoder's families only"
    reference = Decoder(checkpoint.config, checkpoint.weights())
    int8 = Int8Decoder(checkpoint.config, checkpoint.weights(), threads=options.threads)
    prompts = chat_prompts(checkpoint, options.prompts, options.limit, options.longest_prompt)
    found = compare(
        reference, int8, prompts, options.max_new_tokens, checkpoint.config.eos_token_ids
    )
    print(f"{checkpoint.description}: int8 against float32, {options.prompts.name}")
    print(f"  answers {found.num_prompts}, answer tokens {found.num_tokens}")
    print(f"  mean KL          {found.kl:.5f} nat a token   (bound: at most {MOST_KL})")
    agreement = f"{found.agreement:.4f}".ljust(21)
    print(f"  top-1 agreement  {agreement} (bound: at least {LEAST_AGREEMENT})")
    print("  within the bounds" if found.holds else "  BEYOND THE BOUNDS")
    if options.json:
        bounds = {"most_kl": MOST_KL, "least_agreement": LEAST_AGREEMENT, "holds": found.holds}
        print(json.dumps({"target": options.target} | asdict(found) | bounds))
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
