"""Vector micro-kernels of attention, built as those of ``simd.py``."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from forespeak.kernels.vector import (
    LANES,
    V16F,
    cgutils,
    fma,
    load,
    pointer_to,
    splat,
    store,
    vector_intrinsic,
)

KEYS_PER_TILE = 64


def _make_score_tile(num_queries: int) -> Any:
    """Scores of ``num_queries`` queries against the 64 keys of a tile.

    A tile is stored transposed, [head_dim][64], so that lanes are keys and every score is one
    chain of fused multiply-adds over the head dimension. Arguments of the result:
        queries, query_at, i: flat floats; the queries begin at query_at[i], query_at[i + 1], ...
        keys, keys_at, head_dim: the tile.
        scores, scores_at, stride: results, 64 a query, ``stride`` apart.
    """

    @vector_intrinsic
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
            places = pointer_to(context, builder, kinds[1], args[1], args[2])
            k = pointer_to(context, builder, kinds[3], args[3], args[4])
            out = pointer_to(context, builder, kinds[6], args[6], args[7])
            dim, step = args[5], args[8]

            def const(value: int) -> Any:
                return ir.Constant(dim.type, value)

            ids, parts = range(num_queries), range(KEYS_PER_TILE // LANES)
            starts = [builder.load(builder.gep(places, [const(m)])) for m in ids]
            q = [pointer_to(context, builder, kinds[0], args[0], start) for start in starts]
            zero = ir.Constant(V16F, [0.0] * LANES)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in parts] for _ in ids]
            with cgutils.for_range(builder, dim) as loop:
                row = builder.gep(k, [builder.mul(loop.index, const(KEYS_PER_TILE))])
                lanes = [
                    load(builder, builder.gep(row, [const(part * LANES)]), V16F) for part in parts
                ]
                for m in ids:
                    value = splat(builder, builder.load(builder.gep(q[m], [loop.index])))
                    for part in parts:
                        old = builder.load(totals[m][part])
                        builder.store(fma(builder, value, lanes[part], old), totals[m][part])
            for m in ids:
                row = builder.gep(out, [builder.mul(step, const(m))])
                for part in parts:
                    target = builder.gep(row, [const(part * LANES)])
                    store(builder, builder.load(totals[m][part]), target)
            return context.get_dummy_value()

        return signature, codegen

    return score_tile


score_tile_1 = _make_score_tile(1)
score_tile_4 = _make_score_tile(4)


def _make_weigh_values(num_queries: int, num_parts: int) -> Any:
    """out += sum over keys, in order, of weight * value, for some queries over the same keys.

    Arguments of the result:
        weights, weights_at, weights_stride: one weight a key; queries ``weights_stride`` apart.
        values, values_at, value_stride: 16 * num_parts floats a key.
        num_keys: how many keys, one after the other.
        out, out_at, out_stride: 16 * num_parts floats a query.
    """

    @vector_intrinsic
    def weigh_values(
        typingctx: Any,
        weights: Any,
        weights_at: Any,
        weights_stride: Any,
        values: Any,
        values_at: Any,
        value_stride: Any,
        num_keys: Any,
        out: Any,
        out_at: Any,
        out_stride: Any,
    ) -> Any:
        size = types.intp
        signature = types.void(
            weights, size, size, values, size, size, size, out, size, size
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            w = pointer_to(context, builder, kinds[0], args[0], args[1])
            v = pointer_to(context, builder, kinds[3], args[3], args[4])
            o = pointer_to(context, builder, kinds[7], args[7], args[8])
            weights_step, value_step, keys, out_step = args[2], args[5], args[6], args[9]
            ids, parts = range(num_queries), range(num_parts)

            def const(value: int) -> Any:
                return ir.Constant(keys.type, value)

            def row(pointer: Any, step: Any, m: int) -> Any:
                return builder.gep(pointer, [builder.mul(step, const(m))])

            def part_of(pointer: Any, part: int) -> Any:
                return builder.gep(pointer, [const(part * LANES)])

            outs = [[part_of(row(o, out_step, m), part) for part in parts] for m in ids]
            totals = [
                [cgutils.alloca_once_value(builder, load(builder, at, V16F)) for at in line]
                for line in outs
            ]
            lines = [row(w, weights_step, m) for m in ids]
            with cgutils.for_range(builder, keys) as loop:
                value = builder.gep(v, [builder.mul(loop.index, value_step)])
                lanes = [load(builder, part_of(value, part), V16F) for part in parts]
                for m in ids:
                    weight = splat(builder, builder.load(builder.gep(lines[m], [loop.index])))
                    for part in parts:
                        old = builder.load(totals[m][part])
                        builder.store(fma(builder, weight, lanes[part], old), totals[m][part])
            for m in ids:
                for part in parts:
                    store(builder, builder.load(totals[m][part]), outs[m][part])
            return context.get_dummy_value()

        return signature, codegen

    return weigh_values


weigh_values_16 = _make_weigh_values(1, 1)
weigh_values_64 = _make_weigh_values(1, 4)
weigh_values_64_of_4 = _make_weigh_values(4, 4)
