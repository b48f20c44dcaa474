"""A team of threads that walks through a forward together, with barriers of its own.

A parallel region of OpenMP for every phase of every layer means hundreds of regions a forward.
OpenMP's threads spin at the end of each, and where another process takes one of the cores for a
moment, a forward of 6 ms was seen to take a second. Here the threads meet in one region a forward;
between phases they wait at a barrier that spins for a while and then gives its core away.

All members must run at the same time, or the first barrier would never open. ``runs_as_team`` tries
that out before it is relied on.
"""

from __future__ import annotations

import os
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types

from forespeak.kernels.cache import kernel
from forespeak.kernels.vector import cgutils, pointer_to, vector_intrinsic
from forespeak.models.kernels.layout import Array

_numba: Any = numba  # leaves some names out of its annotations
_SPINS = 300_000  # some tenths of a millisecond: longer than any phase of a small forward
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_TEAM_LAYERS = ("omp", "workqueue")  # Numba's threading layers that give every member a thread


@vector_intrinsic
def _atomic_add(typingctx: Any, cells: Any, at: Any, value: Any) -> Any:
    """The value of an int64 cell before the addition, for all threads in one order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(cells, types.intp, types.int64), codegen


@vector_intrinsic
def _atomic_load(typingctx: Any, cells: Any, at: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "seq_cst", 8, typ=_I64)

    return types.int64(cells, types.intp), codegen


@vector_intrinsic
def _give_way(typingctx: Any) -> Any:
    """Let another thread have the core; does nothing where the system has no such call."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if os.name == "posix":
            kind = ir.FunctionType(_I32, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


def new_barrier() -> Array:
    """Cells of a barrier: arrivals in the first, rounds in another cache line."""
    return np.zeros(16, np.int64)


@kernel()
def meet(cells: Array, members: int) -> None:
    """Wait until all members are here. What they wrote before, all of them see after."""
    if members == 1:
        return
    rounds = _atomic_load(cells, 8)
    if _atomic_add(cells, 0, 1) == members - 1:
        _atomic_add(cells, 0, -members)
        _atomic_add(cells, 8, 1)
        return
    spins = 0
    while _atomic_load(cells, 8) == rounds:
        spins += 1
        if spins > _SPINS:
            _give_way()


@kernel(parallel=True)
def _roll_call(members: int, threads: Array) -> None:
    for member in prange(members):
        threads[member] = _numba.get_thread_id()


def runs_as_team(members: int) -> bool:
    """Whether ``members`` iterations of a parallel loop get a thread each."""
    if members == 1:
        return True
    numba.set_num_threads(members)
    threads = np.full(members, -1, np.int64)
    _roll_call(members, threads)
    return _numba.threading_layer() in _TEAM_LAYERS and len(set(threads.tolist())) == members
