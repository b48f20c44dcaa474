"""How long does building a DDTree take? Ours against the published shape of the algorithm.

    python benchmarks/trees.py [--budgets 16,64,256,1024] [--repeats 30] [--threads N] [--json]

From float32 draft logits [15, 151936] (block of 16, Qwen3's vocabulary) to tokens, parents and
mask: top-K, log-sum-exp, tree, mask. The published shape takes torch.topk and torch.logsumexp over
all rows, a Python heap of tuples, and a mask row by row; it is written here from the paper. Both
run in turns in one process, the same logits for both, new ones each repeat.

Nodes must be the same. Both sum exponentials in another order, so two nodes whose log-weights are
closer than 1e-5 may change places; such swaps are counted and shown.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forespeak.spec.builders import build_ddtree
from forespeak.types import DenseLaws

DEPTH, VOCAB_SIZE = 15, 151_936
NEAR_TIE = 1e-5


class Built(NamedTuple):
    """Nodes with the root first, their log-weights and the mask."""

    tokens: list[int]
    parents: list[int]
    weights: list[float]
    mask: Tensor


Entry = tuple[float, tuple[int, ...], int, int, int, float]


def published_shape(logits: Tensor, budget: int) -> Built:
    """DDTree as released (arXiv 2604.12989, algorithm 1). ``logits`` is [D, V]."""
    values, ids = torch.topk(logits, min(budget, logits.shape[1]), dim=-1)
    log_probs = (values - torch.logsumexp(logits, dim=-1, keepdim=True)).numpy()
    token_ids = ids.numpy()
    depth_limit, width = log_probs.shape
    tokens, parents, weights = [0], [-1], [0.0]
    first = float(log_probs[0, 0])
    heap: list[Entry] = [(-first, (0,), 0, 1, 0, first)]
    while heap and len(tokens) <= budget:
        _, ranks, parent, depth, rank, weight = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(int(token_ids[depth - 1, rank]))
        parents.append(parent)
        weights.append(weight)
        if rank + 1 < width:
            beside = (
                weight - float(log_probs[depth - 1, rank]) + float(log_probs[depth - 1, rank + 1])
            )
            entry = (-beside, (*ranks[:-1], rank + 1), parent, depth, rank + 1, beside)
            heapq.heappush(heap, entry)
        if depth < depth_limit:
            below = weight + float(log_probs[depth, 0])
            heapq.heappush(heap, (-below, (*ranks, 0), node, depth + 1, 0, below))
    mask = np.zeros((len(tokens), len(tokens)), dtype=np.bool_)
    mask[0, 0] = True
    for node in range(1, len(tokens)):
        mask[node, :node] = mask[parents[node], :node]
        mask[node, node] = True
    return Built(tokens, parents, weights, torch.from_numpy(mask))


def ours(logits: Tensor, budget: int) -> Built:
    """The package's builder. ``logits`` is [D, V]."""
    (tree,) = build_ddtree([0], DenseLaws(logits[None]), None, [0], budgets=[budget])
    return Built(list(tree.tokens), list(tree.parents), list(tree.scores or ()), tree.mask())


def swapped(one: Built, other: Built) -> int | None:
    """Positions where near-ties stand in another order; None if the trees differ by more."""
    if len(one.weights) != len(other.weights) or any(
        abs(a - b) > NEAR_TIE for a, b in zip(one.weights, other.weights, strict=True)
    ):
        return None
    paths: list[list[tuple[int, ...]]] = []
    for built in (one, other):
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(built.tokens[1:], built.parents[1:], strict=True):
            found.append((*found[parent], token))
        paths.append(found)
    differ = [at for at, (a, b) in enumerate(zip(*paths, strict=True)) if a != b]
    if not differ and not torch.equal(one.mask, other.mask):
        return None
    return len(differ)


def draft_logits(generator: torch.Generator) -> Tensor:
    """Logits of a drafter that is surer of near tokens than of far ones. [D, V]"""
    logits = torch.randn(DEPTH, VOCAB_SIZE, generator=generator) * 2
    favourites = torch.randint(VOCAB_SIZE, (DEPTH, 40), generator=generator)
    lift = torch.linspace(14, 7, DEPTH)[:, None] - torch.rand(DEPTH, 40, generator=generator) * 8
    return logits.scatter_add_(1, favourites, lift)


def timed(
    build: Callable[[Tensor, int], Built], logits: Tensor, budget: int
) -> tuple[float, Built]:
    """Milliseconds and result."""
    start = time.perf_counter()
    built = build(logits, budget)
    return (time.perf_counter() - start) * 1e3, built


def measure(budget: int, repeats: int) -> dict[str, object]:
    """Medians and quartiles of both, in milliseconds."""
    generator = torch.Generator().manual_seed(budget)
    times: dict[str, list[float]] = {"published": [], "ours": []}
    swaps: int | None = 0
    for repeat in range(repeats + 2):
        logits = draft_logits(generator)
        slow_ms, slow = timed(published_shape, logits, budget)
        fast_ms, fast = timed(ours, logits, budget)
        moved = swapped(slow, fast)
        swaps = None if swaps is None or moved is None else swaps + moved
        if repeat >= 2:  # the first ones compile and warm caches
            times["published"].append(slow_ms)
            times["ours"].append(fast_ms)
    row: dict[str, object] = {
        "budget": budget,
        "same_nodes": swaps is not None,
        "near_ties_swapped": swaps,
    }
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        row[name] = {"median_ms": middle, "quartiles_ms": [low, high]}
    ratios = [slow / fast for slow, fast in zip(times["published"], times["ours"], strict=True)]
    row["ratio"] = statistics.median(ratios)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--budgets", default="16,64,256,1024", help="node budgets, root not counted"
    )
    parser.add_argument("--repeats", type=int, default=30, help="timed pairs a budget")
    parser.add_argument(
        "--threads", type=int, default=None, help="torch threads (default: torch's)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as one last line")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(
        f"DDTree from [{DEPTH}, {VOCAB_SIZE}] float32 logits; {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {platform.machine()}; medians of {options.repeats} (quartiles)"
    )
    print(f"{'nodes':>6}  {'published ms':>24}  {'ours ms':>24}  {'ratio':>6}  same nodes")
    table = []
    for budget in (int(text) for text in options.budgets.split(",")):
        row = measure(budget, options.repeats)
        table.append(row)
        cells = []
        for name in ("published", "ours"):
            cell = row[name]
            assert isinstance(cell, dict)
            low, high = cell["quartiles_ms"]
            cells.append(f"{cell['median_ms']:.2f} ({low:.2f} to {high:.2f})")
        print(
            f"{budget:>6}  {cells[0]:>24}  {cells[1]:>24}  {row['ratio']:>5.1f}x  "
            f"{'yes' if row['same_nodes'] else 'NO'}"
            + (
                f" ({row['near_ties_swapped']} near-ties swapped)"
                if row["near_ties_swapped"]
                else ""
            )
        )
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "results": table}))
    if not all(row["same_nodes"] for row in table):
        raise SystemExit("the two forms built different trees")


if __name__ == "__main__":
    main()
