"""Vector micro-kernels for CPU, written as LLVM IR through Numba intrinsics.

Numba compiles scalar Python; whether LLVM then vectorises a loop, and in which order it sums, is
its own affair. Where the order of a sum or the instruction matters we build the vector code here:

    dot_tile(m)     int8 product of m activation rows with 16 output channels
    score_tile(n)   n queries against 64 keys
    weigh_values    sum of value vectors with given weights, key after key
    exp_tile        16 exponentials, as plain arithmetic
    gate_tile       silu(gate) * up

Every function does, for one row, the same operations in the same order whatever the other rows
are. That is what makes a token's logits independent of its neighbours, bit for bit (law 1).
Vectors are 16 lanes of 32 bits; LLVM splits them on machines with narrower registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

cgutils: Any = _cgutils  # has no annotations

LANES = 16
BLOCK = 32  # activations that share one scale
KEYS_PER_TILE = 64

_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_V16I, _V16F = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's decorator; callers pass what its code generator expects, not what Python sees."""
    return intrinsic(function)


def has_int8_product() -> bool:
    """Whether this CPU has the 512-bit u8 x s8 dot product (AVX-512 VNNI)."""
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on some platforms
        return False
    return bool(features.get("avx512vnni") and features.get("avx512f"))


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_V16I, [0] * LANES))


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Address of ``array.flat[offset]`` of a contiguous array."""
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [offset])


def _load(builder: Any, pointer: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""
    kind = ir.FunctionType(_V16F, [_V16F] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def _dot4_vnni(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    kind = ir.FunctionType(_V16I, [_V16I] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, weights, inputs])


def _dot4_portable(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """The same sums on any machine: unsigned bytes of weights times signed bytes of inputs."""
    byte_mask = _splat(builder, ir.Constant(_I32, 255))
    sign = _splat(builder, ir.Constant(_I32, 24))
    for byte in range(4):
        down = _splat(builder, ir.Constant(_I32, 8 * byte))
        up = _splat(builder, ir.Constant(_I32, 24 - 8 * byte))
        unsigned = builder.and_(builder.lshr(weights, down), byte_mask)
        signed = builder.ashr(builder.shl(inputs, up), sign)
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


def _make_dot_tile(num_rows: int) -> Any:
    """Product of ``num_rows`` rows with one tile of 16 output channels.

    Arguments of the result, all offsets in elements:
        portable: None for the VNNI instruction, anything else for plain arithmetic. The choice is
            made by type, so the instruction is never compiled where it does not exist.
        weight, weight_at: uint8 (value + 128), layout [K/4][16][4] from ``weight_at``.
        x, x_at, x_stride: int8 rows of K values.
        start, scale, block_at, num_blocks: per row and block of 32, int32 ``-128 * sum(x)`` (undoes
            the offset of the weights) and the float32 scale; rows are ``num_blocks`` apart.
        channel_scale, channel_at: float32 scales of the 16 channels.
        out, out_at, out_stride: float32 [.., 16] results.
        add: whether to add to ``out`` (a residual) or to overwrite it.

    Per row: sum over blocks, in order, of float(integer dot) * scale, each product and each sum
    rounded to float32 (no fused multiply-add, so any language gives the same bits).
    """

    @_intrinsic
    def dot_tile(
        typingctx: Any,
        portable: Any,
        weight: Any,
        weight_at: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        start: Any,
        scale: Any,
        block_at: Any,
        num_blocks: Any,
        channel_scale: Any,
        channel_at: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
        add: Any,
    ) -> Any:
        size = types.intp
        signature = types.void(
            portable, weight, size, x, size, size, start, scale, size, size,
            channel_scale, size, out, size, size, types.boolean,
        )  # fmt: skip
        dot4 = _dot4_vnni if isinstance(portable, types.NoneType) else _dot4_portable

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args

            def at(index: int) -> Any:
                return _pointer(context, builder, kinds[index], args[index], args[index + 1])

            weights, inputs = at(1), at(3)
            starts = _pointer(context, builder, kinds[6], args[6], args[8])
            scales = _pointer(context, builder, kinds[7], args[7], args[8])
            x_step, blocks, out_step = args[5], args[9], args[14]

            def const(value: int) -> Any:
                return ir.Constant(blocks.type, value)

            zero = ir.Constant(_V16F, [0.0] * LANES)
            totals = [cgutils.alloca_once_value(builder, zero) for _ in range(num_rows)]
            rows = [builder.gep(inputs, [builder.mul(x_step, const(m))]) for m in range(num_rows)]
            with cgutils.for_range(builder, blocks) as loop:
                block = loop.index
                cells = [builder.add(block, builder.mul(blocks, const(m))) for m in range(num_rows)]
                sums = [
                    _splat(builder, builder.load(builder.gep(starts, [cell]))) for cell in cells
                ]
                weight_block = builder.gep(weights, [builder.mul(block, const(LANES * BLOCK))])
                x_block = builder.mul(block, const(BLOCK))
                for quad in range(BLOCK // 4):
                    quad_at = builder.gep(weight_block, [const(4 * LANES * quad)])
                    w = _load(builder, quad_at, _V16I, align=64)
                    for m in range(num_rows):
                        x_at = builder.add(x_block, const(4 * quad))
                        v = _splat(builder, _load(builder, builder.gep(rows[m], [x_at]), _I32))
                        sums[m] = dot4(builder, sums[m], w, v)
                for m in range(num_rows):
                    s = _splat(builder, builder.load(builder.gep(scales, [cells[m]])))
                    term = builder.fmul(builder.sitofp(sums[m], _V16F), s)
                    builder.store(builder.fadd(builder.load(totals[m]), term), totals[m])
            channels = _load(builder, at(10), _V16F)
            outputs = at(12)
            for m in range(num_rows):
                target = builder.gep(outputs, [builder.mul(out_step, const(m))])
                value = builder.fmul(builder.load(totals[m]), channels)
                summed = builder.fadd(_load(builder, target, _V16F), value)
                _store(builder, builder.select(args[15], summed, value), target)
            return context.get_dummy_value()

        return signature, codegen

    return dot_tile


dot_tile_1 = _make_dot_tile(1)
dot_tile_2 = _make_dot_tile(2)
dot_tile_4 = _make_dot_tile(4)
dot_tile_8 = _make_dot_tile(8)


def _make_score_tile(num_queries: int) -> Any:
    """Scores of ``num_queries`` queries against the 64 keys of a tile.

    A tile is stored transposed, [head_dim][64], so that lanes are keys and every score is one
    chain of fused multiply-adds over the head dimension. Arguments of the result:
        queries, query_at, i: flat floats; the queries begin at query_at[i], query_at[i + 1], ...
        keys, keys_at, head_dim: the tile.
        scores, scores_at, stride: results, 64 a query, ``stride`` apart.
    """

    @_intrinsic
    def score_tile(
        typingctx: Any,
        queries: Any,
        query_at: Any,
        i: Any,
        keys: Any,
        keys_at: Any,
        head_dim: Any,
        scores: Any,
        scores_at: Any,
        stride: Any,
    ) -> Any:
        size = types.intp
        signature = types.void(queries, query_at, size, keys, size, size, scores, size, size)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            places = _pointer(context, builder, kinds[1], args[1], args[2])
            k = _pointer(context, builder, kinds[3], args[3], args[4])
            out = _pointer(context, builder, kinds[6], args[6], args[7])
            dim, step = args[5], args[8]

            def const(value: int) -> Any:
                return ir.Constant(dim.type, value)

            ids, parts = range(num_queries), range(KEYS_PER_TILE // LANES)
            starts = [builder.load(builder.gep(places, [const(m)])) for m in ids]
            q = [_pointer(context, builder, kinds[0], args[0], start) for start in starts]
            zero = ir.Constant(_V16F, [0.0] * LANES)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in parts] for _ in ids]
            with cgutils.for_range(builder, dim) as loop:
                row = builder.gep(k, [builder.mul(loop.index, const(KEYS_PER_TILE))])
                lanes = [
                    _load(builder, builder.gep(row, [const(part * LANES)]), _V16F) for part in parts
                ]
                for m in ids:
                    value = _splat(builder, builder.load(builder.gep(q[m], [loop.index])))
                    for part in parts:
                        old = builder.load(totals[m][part])
                        builder.store(_fma(builder, value, lanes[part], old), totals[m][part])
            for m in ids:
                row = builder.gep(out, [builder.mul(step, const(m))])
                for part in parts:
                    target = builder.gep(row, [const(part * LANES)])
                    _store(builder, builder.load(totals[m][part]), target)
            return context.get_dummy_value()

        return signature, codegen

    return score_tile


score_tile_1 = _make_score_tile(1)
score_tile_4 = _make_score_tile(4)


def _make_weigh_values(num_parts: int) -> Any:
    """out[16 * num_parts] += sum over keys, in order, of weights[key] * values[key]."""

    @_intrinsic
    def weigh_values(
        typingctx: Any,
        weights: Any,
        weights_at: Any,
        values: Any,
        values_at: Any,
        value_stride: Any,
        num_keys: Any,
        out: Any,
        out_at: Any,
    ) -> Any:
        size = types.intp
        signature = types.void(weights, size, values, size, size, size, out, size)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            w = _pointer(context, builder, kinds[0], args[0], args[1])
            v = _pointer(context, builder, kinds[2], args[2], args[3])
            o = _pointer(context, builder, kinds[6], args[6], args[7])
            stride, keys = args[4], args[5]

            def part_of(pointer: Any, part: int) -> Any:
                return builder.gep(pointer, [ir.Constant(keys.type, part * LANES)])

            parts = range(num_parts)
            totals = [
                cgutils.alloca_once_value(builder, _load(builder, part_of(o, part), _V16F))
                for part in parts
            ]
            with cgutils.for_range(builder, keys) as loop:
                weight = _splat(builder, builder.load(builder.gep(w, [loop.index])))
                row = builder.gep(v, [builder.mul(loop.index, stride)])
                for part in parts:
                    value = _load(builder, part_of(row, part), _V16F)
                    total = _fma(builder, weight, value, builder.load(totals[part]))
                    builder.store(total, totals[part])
            for part in parts:
                _store(builder, builder.load(totals[part]), part_of(o, part))
            return context.get_dummy_value()

        return signature, codegen

    return weigh_values


weigh_values_16 = _make_weigh_values(1)
weigh_values_64 = _make_weigh_values(4)


# e**x = 2**n * e**r with n = round(x / ln 2) and r = x - n ln 2 in two parts, by Taylor's sum in r.
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_TAYLOR = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_LOWEST, _HIGHEST = -87.0, 88.0


def _constant(value: float) -> Any:
    return ir.Constant(_V16F, [float(np.float32(value))] * LANES)


def _exp(builder: Any, x: Any) -> Any:
    """16 float32 exponentials to about 2e-7 relative.

    Plain arithmetic instead of the C library's, whose vector and scalar forms may differ.
    """
    low, high = _constant(_LOWEST), _constant(_HIGHEST)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    kind = ir.FunctionType(_V16F, [_V16F])
    round_ = cgutils.get_or_insert_function(builder.module, kind, "llvm.rint.v16f32")
    n = builder.call(round_, [builder.fmul(x, _constant(_LOG2E))])
    r = _fma(builder, n, _constant(-_LN2_HIGH), x)
    r = _fma(builder, n, _constant(-_LN2_LOW), r)
    total = _constant(_TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        total = _fma(builder, total, r, _constant(coefficient))
    bias = _splat(builder, ir.Constant(_I32, 127))
    exponent = builder.add(builder.fptosi(n, _V16I), bias)
    power = builder.bitcast(builder.shl(exponent, _splat(builder, ir.Constant(_I32, 23))), _V16F)
    return builder.fmul(total, power)


@_intrinsic
def exp_tile(typingctx: Any, x: Any, x_at: Any, shift: Any) -> Any:
    """x[x_at : x_at + 16] = exp(x - shift), in place."""
    signature = types.void(x, types.intp, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        shifted = builder.fsub(_load(builder, pointer, _V16F), _splat(builder, args[2]))
        _store(builder, _exp(builder, shifted), pointer)
        return context.get_dummy_value()

    return signature, codegen


@_intrinsic
def gate_tile(
    typingctx: Any, gate: Any, gate_at: Any, up: Any, up_at: Any, out: Any, out_at: Any
) -> Any:
    """out = silu(gate) * up for 16 values."""
    size = types.intp
    signature = types.void(gate, size, up, size, out, size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        x = _load(builder, _pointer(context, builder, kinds[0], args[0], args[1]), _V16F)
        y = _load(builder, _pointer(context, builder, kinds[2], args[2], args[3]), _V16F)
        negative = builder.fsub(_constant(0.0), x)
        divisor = builder.fadd(_constant(1.0), _exp(builder, negative))
        value = builder.fmul(builder.fdiv(x, divisor), y)
        _store(builder, value, _pointer(context, builder, kinds[4], args[4], args[5]))
        return context.get_dummy_value()

    return signature, codegen
