"""The best-first heap of DDTree, compiled. Importing this file loads numba.

An entry is a prefix that could be the next node: its weight, its parent's node index, its depth
(1 below the root) and its rank within the law of that depth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forespeak.kernels.cache import kernel

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]


class Nodes(NamedTuple):
    """Nodes in the order they were taken, [N + 1] each; index 0 is the root."""

    parents: Ints
    depths: Ints
    ranks: Ints
    weights: Doubles


class Entries(NamedTuple):
    """Prefixes that were ever in the heap, and the heap of their indices."""

    weights: Doubles
    parents: Ints
    depths: Ints
    ranks: Ints
    heap: Ints


@kernel(nogil=True)
def _rank_path(nodes: Nodes, parent: Any, depth: Any, rank: Any) -> Any:
    path = np.empty(depth, np.int64)
    path[depth - 1] = rank
    for place in range(depth - 2, -1, -1):
        path[place], parent = nodes.ranks[parent], nodes.parents[parent]
    return path


@kernel(nogil=True)
def _ranks_before(nodes: Nodes, entries: Entries, one: Any, two: Any) -> Any:
    """Order of the heap among equal weights: the smaller rank path, as Python compares tuples."""
    ranks = _rank_path(nodes, entries.parents[one], entries.depths[one], entries.ranks[one])
    others = _rank_path(nodes, entries.parents[two], entries.depths[two], entries.ranks[two])
    for place in range(min(len(ranks), len(others))):
        if ranks[place] != others[place]:
            return ranks[place] < others[place]
    return len(ranks) < len(others)


@kernel(nogil=True)
def _push(
    nodes: Nodes,
    entries: Entries,
    size: Any,
    new: Any,
    weight: Any,
    parent: Any,
    depth: Any,
    rank: Any,
) -> None:
    """Adds entry ``new`` to a heap of ``size`` entries."""
    entries.weights[new], entries.parents[new] = weight, parent
    entries.depths[new], entries.ranks[new] = depth, rank
    heap, weights, at = entries.heap, entries.weights, size
    while at > 0:
        above = heap[(at - 1) // 2]
        if weights[above] > weight or (
            weights[above] == weight and not _ranks_before(nodes, entries, new, above)
        ):
            break
        heap[at] = above
        at = (at - 1) // 2
    heap[at] = new


@kernel(nogil=True)
def _pop(nodes: Nodes, entries: Entries, size: Any) -> Any:
    """Takes the first entry out of a heap of ``size`` entries."""
    heap, weights = entries.heap, entries.weights
    first, last, at = heap[0], heap[size - 1], 0
    size -= 1
    while 2 * at + 1 < size:
        place = 2 * at + 1
        child = heap[place]
        if place + 1 < size:
            other = heap[place + 1]
            if weights[other] > weights[child] or (
                weights[other] == weights[child] and _ranks_before(nodes, entries, other, child)
            ):
                place, child = place + 1, other
        if weights[last] > weights[child] or (
            weights[last] == weights[child] and _ranks_before(nodes, entries, last, child)
        ):
            break
        heap[at] = child
        at = place
    heap[at] = last
    return first


@kernel(nogil=True)
def best_first(log_probs: Floats, widths: Ints, nodes: Nodes, capacity: int) -> tuple[int, int]:
    """The most probable prefixes under one law a depth, most probable first.

    DDTree (arXiv 2604.12989) with the arithmetic of its release: the weight of a sibling is that of
    the one before it minus and plus their log-probabilities, in float64.

    Args:
        log_probs: [D, K] of the best tokens of each depth, best first.
        widths: [D] how many of the K are there.
        nodes: room for N + 1, written from the root on.
        capacity: tokens that each law has; a width below it means that more could be had.

    Returns:
        (number of nodes without root, depth): depth is 0 when the tree is done, else the depth
        whose law must be read further than its width before the tree can go on.
    """
    max_depth = log_probs.shape[0]
    budget = nodes.parents.shape[0] - 1
    room = 2 * budget + 1
    entries = Entries(
        np.empty(room, np.float64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
    )
    nodes.parents[0], nodes.depths[0], nodes.ranks[0], nodes.weights[0] = -1, 0, 0, 0.0
    _push(nodes, entries, 0, 0, np.float64(log_probs[0, 0]), 0, 1, 0)
    num_entries, size, count = 1, 1, 0
    while size > 0 and count < budget:
        entry = _pop(nodes, entries, size)
        size -= 1
        weight, parent = entries.weights[entry], entries.parents[entry]
        depth, rank = entries.depths[entry], entries.ranks[entry]
        if weight == -np.inf:
            break  # only impossible tokens are left
        count += 1
        nodes.parents[count], nodes.depths[count] = parent, depth
        nodes.ranks[count], nodes.weights[count] = rank, weight
        if rank + 1 < widths[depth - 1]:
            here, after = log_probs[depth - 1, rank], log_probs[depth - 1, rank + 1]
            sibling = weight - np.float64(here) + np.float64(after)
            _push(nodes, entries, size, num_entries, sibling, parent, depth, rank + 1)
            num_entries += 1
            size += 1
        elif rank + 1 < capacity and count < budget:
            return count, depth
        if depth < max_depth:
            child = weight + np.float64(log_probs[depth, 0])
            _push(nodes, entries, size, num_entries, child, count, depth + 1, 0)
            num_entries += 1
            size += 1
    return count, 0
