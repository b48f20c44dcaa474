"""Vector micro-kernels for CPU, written as LLVM IR through Numba intrinsics.

Built from the primitives of ``forespeak.kernels.vector``, because the order of a sum and the
instruction matter:

    dot_tile(m)     int8 product of m activation rows with 16 output channels
    exp_tile        16 exponentials, as plain arithmetic
    gate_tile       silu(gate) * up
    score_tile(n)   n queries against 64 keys (simd_attention.py)
    weigh_values    sum of value vectors with given weights, key after key (simd_attention.py)

Every function does, for one row, the same operations in the same order whatever the other rows
are. That is what makes a token's logits independent of its neighbours, bit for bit (law 1).
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types

from forespeak.kernels.vector import (
    LANES,
    V16F,
    V16I,
    cgutils,
    constant,
    exp,
    load,
    pointer_to,
    splat,
    store,
    vector_intrinsic,
)

BLOCK = 32  # activations that share one scale

_I32 = ir.IntType(32)


def has_int8_product() -> bool:
    """Whether this CPU has the 512-bit u8 x s8 dot product (AVX-512 VNNI)."""
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on some platforms
        return False
    return bool(features.get("avx512vnni") and features.get("avx512f"))


def _dot4_vnni(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    kind = ir.FunctionType(V16I, [V16I] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, weights, inputs])


def _dot4_portable(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """The same sums on any machine: unsigned bytes of weights times signed bytes of inputs."""
    byte_mask = splat(builder, ir.Constant(_I32, 255))
    sign = splat(builder, ir.Constant(_I32, 24))
    for byte in range(4):
        down = splat(builder, ir.Constant(_I32, 8 * byte))
        up = splat(builder, ir.Constant(_I32, 24 - 8 * byte))
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

    @vector_intrinsic
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
                return pointer_to(context, builder, kinds[index], args[index], args[index + 1])

            weights, inputs = at(1), at(3)
            starts = pointer_to(context, builder, kinds[6], args[6], args[8])
            scales = pointer_to(context, builder, kinds[7], args[7], args[8])
            x_step, blocks, out_step = args[5], args[9], args[14]

            def const(value: int) -> Any:
                return ir.Constant(blocks.type, value)

            zero = ir.Constant(V16F, [0.0] * LANES)
            totals = [cgutils.alloca_once_value(builder, zero) for _ in range(num_rows)]
            rows = [builder.gep(inputs, [builder.mul(x_step, const(m))]) for m in range(num_rows)]
            with cgutils.for_range(builder, blocks) as loop:
                block = loop.index
                cells = [builder.add(block, builder.mul(blocks, const(m))) for m in range(num_rows)]
                sums = [splat(builder, builder.load(builder.gep(starts, [cell]))) for cell in cells]
                weight_block = builder.gep(weights, [builder.mul(block, const(LANES * BLOCK))])
                x_block = builder.mul(block, const(BLOCK))
                for quad in range(BLOCK // 4):
                    quad_at = builder.gep(weight_block, [const(4 * LANES * quad)])
                    w = load(builder, quad_at, V16I, align=64)
                    for m in range(num_rows):
                        x_at = builder.add(x_block, const(4 * quad))
                        v = splat(builder, load(builder, builder.gep(rows[m], [x_at]), _I32))
                        sums[m] = dot4(builder, sums[m], w, v)
                for m in range(num_rows):
                    s = splat(builder, builder.load(builder.gep(scales, [cells[m]])))
                    term = builder.fmul(builder.sitofp(sums[m], V16F), s)
                    builder.store(builder.fadd(builder.load(totals[m]), term), totals[m])
            channels = load(builder, at(10), V16F)
            outputs = at(12)
            for m in range(num_rows):
                target = builder.gep(outputs, [builder.mul(out_step, const(m))])
                value = builder.fmul(builder.load(totals[m]), channels)
                summed = builder.fadd(load(builder, target, V16F), value)
                store(builder, builder.select(args[15], summed, value), target)
            return context.get_dummy_value()

        return signature, codegen

    return dot_tile


# Each number of rows reads a tile of weights once: a second pass costs as much as two more rows.
dot_tile_1 = _make_dot_tile(1)
dot_tile_2 = _make_dot_tile(2)
dot_tile_3 = _make_dot_tile(3)
dot_tile_4 = _make_dot_tile(4)
dot_tile_5 = _make_dot_tile(5)
dot_tile_6 = _make_dot_tile(6)
dot_tile_7 = _make_dot_tile(7)
dot_tile_8 = _make_dot_tile(8)


@vector_intrinsic
def exp_tile(typingctx: Any, x: Any, x_at: Any, shift: Any) -> Any:
    """x[x_at : x_at + 16] = exp(x - shift), in place."""
    signature = types.void(x, types.intp, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
        shifted = builder.fsub(load(builder, pointer, V16F), splat(builder, args[2]))
        store(builder, exp(builder, shifted), pointer)
        return context.get_dummy_value()

    return signature, codegen


@vector_intrinsic
def gate_tile(
    typingctx: Any, gate: Any, gate_at: Any, up: Any, up_at: Any, out: Any, out_at: Any
) -> Any:
    """out = silu(gate) * up for 16 values."""
    size = types.intp
    signature = types.void(gate, size, up, size, out, size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        x = load(builder, pointer_to(context, builder, kinds[0], args[0], args[1]), V16F)
        y = load(builder, pointer_to(context, builder, kinds[2], args[2], args[3]), V16F)
        negative = builder.fsub(constant(0.0), x)
        divisor = builder.fadd(constant(1.0), exp(builder, negative))
        value = builder.fmul(builder.fdiv(x, divisor), y)
        store(builder, value, pointer_to(context, builder, kinds[4], args[4], args[5]))
        return context.get_dummy_value()

    return signature, codegen
