"""Two products of one block of 16 keys or values, written as vectors of 16 floats for numba's compiled loops.

LLVM turns them into whatever the CPU has (one register of AVX-512, two of AVX2, four of NEON). The compiler's own
vectoriser, given plain loops, sums every dot product across a register on its own, which costs more than the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
"""Floats in a vector, rows in a block, floats in a cache line of 64 bytes."""

_FLOAT, _BYTE, _INT = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_LOOSE = ("reassoc", "contract", "nsz")


@intrinsic
def prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Asks for the cache line at ``array.ravel()[offset]`` in the second-level cache; any offset is allowed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = builder.gep(_data(context, builder, signature, args, 0), [args[1]])
        pointer = builder.bitcast(line, _BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *[_INT] * 3])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, *(ir.Constant(_INT, value) for value in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def dot_rows(
    typingctx: Any, query: Any, first: Any, keys: Any, start: Any, size: Any, scale: Any, out: Any, at: Any
) -> Any:
    """out[at : at + 16] = scale * keys[start :].reshape(16, size) @ query[first : first + size], of raveled arrays.

    ``size`` is a multiple of 16, at least 16. Nothing is checked.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, k, result = (_data(context, builder, signature, args, i) for i in (0, 2, 6))
        q, k = builder.gep(q, [args[1]]), builder.gep(k, [args[3]])
        length = args[4]
        rows = [builder.gep(k, [builder.mul(length, ir.Constant(length.type, row))]) for row in range(LANES)]

        def body(column: Any, sums: list[Any]) -> list[Any]:
            x = _load(builder, builder.gep(q, [column]))
            parts = [_load(builder, builder.gep(row, [column])) for row in rows]
            return [_multiply_add(builder, x, part, total) for part, total in zip(parts, sums, strict=True)]

        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        total = _sum_each(builder, _loop(builder, length, [zero] * LANES, body))
        _store(builder, builder.fmul(total, _spread(builder, args[5]), flags=_LOOSE), builder.gep(result, [args[7]]))
        return context.get_dummy_value()

    integer, number = types.intp, types.float32
    return types.void(query, integer, keys, integer, integer, number, out, integer), codegen


@intrinsic
def add_rows(
    typingctx: Any, weights: Any, first: Any, values: Any, start: Any, size: Any, out: Any, at: Any
) -> Any:
    """out[at : at + size] += weights[first : first + 16] @ values[start :].reshape(16, size), of raveled arrays.

    ``size`` is a multiple of 16, at least 16. Nothing is checked.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, v, result = (_data(context, builder, signature, args, i) for i in (0, 2, 5))
        w, v, result = builder.gep(w, [args[1]]), builder.gep(v, [args[3]]), builder.gep(result, [args[6]])
        length = args[4]
        rows = [builder.gep(v, [builder.mul(length, ir.Constant(length.type, row))]) for row in range(LANES)]
        spread = [
            _spread(builder, builder.load(builder.gep(w, [ir.Constant(length.type, row)]))) for row in range(LANES)
        ]

        def body(column: Any, state: list[Any]) -> list[Any]:
            target = builder.gep(result, [column])
            sums = [_load(builder, target), ir.Constant(_VECTOR, [0.0] * LANES)]  # two: shorter chains of additions
            for row in range(LANES):
                part = _load(builder, builder.gep(rows[row], [column]))
                sums[row % 2] = _multiply_add(builder, spread[row], part, sums[row % 2])
            _store(builder, builder.fadd(*sums, flags=_LOOSE), target)
            return state

        _loop(builder, length, [], body)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(weights, integer, values, integer, integer, out, integer), codegen


def _data(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    return context.make_array(signature.args[index])(context, builder, args[index]).data


def _load(builder: Any, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    # Not llvm.fma: that is a slow library call where the CPU has no such instruction.
    return builder.fadd(builder.fmul(a, b, flags=_LOOSE), c, flags=_LOOSE)


def _spread(builder: Any, value: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_INT, 0))
    return _shuffle(builder, vector, vector, [0] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, mask: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, LANES), mask))


def _sum_each(builder: Any, vectors: list[Any]) -> Any:
    """One vector of the sums of 16 vectors, by pairs: each pass halves their number and adds two parts of each."""
    # Shuffles within quarters of a vector first: those are the cheap ones.
    quads = [list(range(first, first + 4)) for first in range(0, 2 * LANES, 4)]  # the four of a, then those of b
    both = list(zip(quads[:4], quads[4:], strict=True))
    pairs = [[(a[i], b[i]) for i in range(4)] for a, b in both]
    passes = (
        ([i for p in pairs for i in (*p[0], *p[1])], [i for p in pairs for i in (*p[2], *p[3])]),
        ([i for a, b in both for i in (*a[:2], *b[:2])], [i for a, b in both for i in (*a[2:], *b[2:])]),
        (quads[0] + quads[1] + quads[4] + quads[5], quads[2] + quads[3] + quads[6] + quads[7]),
        (quads[0] + quads[2] + quads[4] + quads[6], quads[1] + quads[3] + quads[5] + quads[7]),
    )
    for one, other in passes:
        neighbours = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            builder.fadd(_shuffle(builder, a, b, one), _shuffle(builder, a, b, other), flags=_LOOSE)
            for a, b in neighbours
        ]
    return vectors[0]


def _loop(builder: Any, length: Any, initial: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """state = body(i, state) for i = 0, 16, ... below ``length``, at least once."""
    before, inside, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(inside)
    builder.position_at_end(inside)
    index = builder.phi(length.type)
    state = [builder.phi(value.type) for value in initial]
    found = body(index, state)
    following = builder.add(index, ir.Constant(length.type, LANES))
    first = [ir.Constant(length.type, 0), *initial]
    for phi, start, later in zip([index, *state], first, [following, *found], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(later, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, length), inside, after)
    builder.position_at_end(after)
    return found
