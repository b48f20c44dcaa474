"""Time of one forward over 1 to 64 rows, beside what reading the memory alone would take.

    python benchmarks/forward.py [--dtype int8 --dtype float32] [--threads N] [--json]

The floor is (bytes of weights + bytes of cached keys and values) / read bandwidth, the bandwidth
measured here by a streaming read of a buffer far larger than the caches on as many threads. Logits
of all rows are computed, as verification needs them. Run it on an otherwise idle machine: a second
busy process ruins these numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange

from forespeak.models.base import TargetModel
from forespeak.models.decoder import Decoder
from forespeak.models.int8_decoder import Int8Decoder
from forespeak.models.kv_cache import KVCache
from forespeak.models.loading import Checkpoint, load_checkpoint
from forespeak.types import Segment

DTYPES = ("int8", "bfloat16", "float32")
ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 300  # committed tokens in the cache
MOST_OVER_FLOOR, MOST_8_OVER_1 = 2.0, 1.5  # what int8 aims at
_BUFFER_BYTES = 1 << 30


@dataclass(frozen=True)
class Timing:
    """One forward, in milliseconds. ``spread``: (third - first quartile) / median of repeats."""

    dtype: str
    rows: int
    median_ms: float
    min_ms: float
    spread: float
    floor_ms: float
    over_floor: float
    over_one_row: float


@njit(parallel=True, fastmath=True)
def _read(buffer: Any, threads: int) -> Any:
    """Sum of a buffer, each thread its own stretch of it."""
    total = np.int64(0)
    for part in prange(threads):
        first, last = len(buffer) * part // threads, len(buffer) * (part + 1) // threads
        inner = np.int64(0)
        for value in buffer[first:last]:  # an index would keep the loop from being vectorised
            inner += value
        total += inner
    return total


def read_bandwidth(threads: int) -> float:
    """Bytes a second, the best of several reads."""
    numba.set_num_threads(threads)
    buffer = np.ones(_BUFFER_BYTES // 8, np.int64)
    assert _read(buffer, threads) == len(buffer)
    return float(buffer.nbytes / min(_times(lambda: _read(buffer, threads), 16)))


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def _arrays(value: object) -> Iterator[Any]:
    """Every tensor and array inside a model's fields."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _arrays(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item)


def weight_bytes(model: TargetModel) -> int:
    """What a forward reads of the model: everything but the embedding, of which it reads rows."""
    stored = {
        array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data: array.nbytes
        for name, value in vars(model).items()
        if name not in ("_embedding", "_rope")
        for array in _arrays(value)
    }
    return sum(stored.values())


def cache_bytes(cache: KVCache, length: int) -> int:
    return (cache.keys.nbytes + cache.values.nbytes) // cache.capacity * length


def build(checkpoint: Checkpoint, dtype: str, threads: int) -> TargetModel:
    assert checkpoint.config is not None, "this measures the built-in decoder only"
    if dtype == "int8":
        return Int8Decoder(checkpoint.config, checkpoint.weights(), threads=threads)
    return Decoder(checkpoint.config, checkpoint.weights(), dtype=getattr(torch, dtype))


def prepared(model: TargetModel) -> KVCache:
    """A cache of one row with the context committed."""
    cache = model.new_cache(1, CONTEXT + max(ROWS))
    assert isinstance(cache, KVCache)
    tokens = torch.arange(CONTEXT) * 31 % model.config.vocab_size
    model.forward(
        tokens, torch.arange(CONTEXT), cache, [Segment(0, CONTEXT)], logits_at=torch.tensor([0])
    )
    cache.commit_all(0)
    return cache


def measure(model: TargetModel, bandwidth: float, repeats: int) -> list[Timing]:
    """Sizes take turns, so that a slow moment of the machine meets all of them."""
    cache = prepared(model)

    def forward(rows: int) -> None:
        tokens, positions = torch.arange(rows), torch.arange(CONTEXT, CONTEXT + rows)
        model.forward(tokens, positions, cache, [Segment(0, rows)])
        cache.truncate(0, CONTEXT)

    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for turn in range(repeats + 2):
        for rows in ROWS:
            found = _times(lambda rows=rows: forward(rows), 3)  # type: ignore[misc]
            if turn >= 2:  # the first turns warm up
                times[rows] += found[1:]  # the first of three finds another size's scratch
    floors = {r: (weight_bytes(model) + cache_bytes(cache, CONTEXT + r)) / bandwidth for r in ROWS}
    return [_timing(model.dtype_name, rows, times, floors[rows]) for rows in ROWS]


def _timing(dtype: str, rows: int, times: dict[int, list[float]], floor: float) -> Timing:
    own = times[rows]
    middle, one = statistics.median(own), statistics.median(times[1])
    low, _, high = statistics.quantiles(own, n=4)
    return Timing(
        dtype, rows, middle * 1e3, min(own) * 1e3, (high - low) / middle,
        floor * 1e3, middle / floor, middle / one,
    )  # fmt: skip


def _print(timings: Sequence[Timing]) -> None:
    print(f"\n{timings[0].dtype}")
    print("  rows   median ms   min ms   spread   floor ms   x floor   x 1 row")
    for t in timings:
        print(
            f"  {t.rows:4d} {t.median_ms:11.2f} {t.min_ms:8.2f} {t.spread:8.0%} {t.floor_ms:10.2f}"
            f" {t.over_floor:9.2f} {t.over_one_row:9.2f}"
        )


def _verdict(timings: Sequence[Timing]) -> dict[str, float]:
    by_rows = {t.rows: t for t in timings if t.dtype == "int8"}
    if not by_rows:
        return {}
    one, eight = by_rows[1].over_floor, by_rows[8].over_one_row
    print(f"\nint8, 1 row over the floor: {one:.2f} (aim: at most {MOST_OVER_FLOOR})")
    print(f"int8, 8 rows over 1 row:    {eight:.2f} (aim: at most {MOST_8_OVER_1})")
    return {"int8_1_over_floor": one, "int8_8_over_1": eight}


def main() -> int:
    most = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="repeatable; default all")
    parser.add_argument("--threads", type=int, default=most, help=f"1 to {most} here")
    parser.add_argument("--repeats", type=int, default=10, help="turns of two timed forwards each")
    parser.add_argument("--json", action="store_true", help="last line is one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint = load_checkpoint(options.target)
    bandwidth = read_bandwidth(options.threads)
    print(f"{checkpoint.description}, {CONTEXT} tokens of context, {options.threads} threads")
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    timings: list[Timing] = []
    for dtype in options.dtype or DTYPES:
        found = measure(build(checkpoint, dtype, options.threads), bandwidth, options.repeats)
        _print(found)
        timings += found
    verdict = _verdict(timings)
    if options.json:
        facts = {"target": options.target, "threads": options.threads, "context": CONTEXT}
        rows = [asdict(t) for t in timings]
        print(json.dumps(facts | {"bandwidth": bandwidth, "rows": rows} | verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
