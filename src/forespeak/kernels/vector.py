"""Vector primitives, written as LLVM IR for Numba intrinsics.

Numba compiles scalar Python; whether LLVM then vectorises a loop, and in which order it sums, is
its own affair. Where the instruction or the order matters, intrinsics are built from these.
Vectors are 16 lanes of 32 bits; LLVM splits them on machines with narrower registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

cgutils: Any = _cgutils  # has no annotations

LANES = 16

_I32, _F32 = ir.IntType(32), ir.FloatType()
V16I, V16F = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


def vector_intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's decorator; callers pass what its code generator expects, not what Python sees."""
    return intrinsic(function)


def splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(V16I, [0] * LANES))


def pointer_to(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Address of ``array.flat[offset]`` of a contiguous array."""
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [offset])


def load(builder: Any, pointer: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def prefetch(builder: Any, pointer: Any) -> None:
    """Asks for the cache line at a float's address, which may lie past the end of the array."""
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    name = "llvm.prefetch.p0f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    read, keep_in_all_levels, data = _I32(0), _I32(3), _I32(1)
    builder.call(function, [pointer, read, keep_in_all_levels, data])


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""
    kind = ir.FunctionType(V16F, [V16F] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def sum_lanes(builder: Any, vector: Any) -> Any:
    """Sum of the 16 lanes, halves first."""
    undefined, width = ir.Constant(V16F, ir.Undefined), LANES
    while width > 1:
        width //= 2
        upper = ir.Constant(V16I, [(lane + width) % LANES for lane in range(LANES)])
        vector = builder.fadd(vector, builder.shuffle_vector(vector, undefined, upper))
    return builder.extract_element(vector, ir.Constant(_I32, 0))


# e**x = 2**n * e**r with n = round(x / ln 2) and r = x - n ln 2 in two parts. e**r is the
# polynomial of least relative error (2e-9) for |r| <= ln(2) / 2, highest power first.
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_POWERS = (
    *(1.383687136694789e-3, 8.374824188649654e-3, 4.166822507977486e-2, 1.6666419804096222e-1),
    *(4.9999991059303284e-1, 1.0, 1.0),
)
_LOWEST, _HIGHEST = -87.0, 88.0
# Adding it rounds to a whole number and leaves n + 127, the exponent of 2**n, in the lowest bits.
_ROUNDER = 1.5 * 2**23 + 127


def constant(value: float) -> Any:
    return ir.Constant(V16F, [float(np.float32(value))] * LANES)


def exp(builder: Any, x: Any) -> Any:
    """16 float32 exponentials to about 2e-7 relative.

    Plain arithmetic instead of the C library's, whose vector and scalar forms may differ.
    """
    low, high = constant(_LOWEST), constant(_HIGHEST)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    shifted = fma(builder, x, constant(_LOG2E), constant(_ROUNDER))
    n = builder.fsub(shifted, constant(_ROUNDER))
    r = fma(builder, n, constant(-_LN2_HIGH), x)
    r = fma(builder, n, constant(-_LN2_LOW), r)
    total = constant(_POWERS[0])
    for coefficient in _POWERS[1:]:
        total = fma(builder, total, r, constant(coefficient))
    bits = builder.shl(builder.bitcast(shifted, V16I), splat(builder, _I32(23)))
    return builder.fmul(total, builder.bitcast(bits, V16F))
