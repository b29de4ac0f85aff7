"""Loops over paged keys and values, compiled by numba for one core; all arrays float32, C-contiguous unless said.

Sums over a head may be taken in any order (``fastmath``) so that they become vector instructions; NaN and infinity keep
their meaning, so a broken model shows up as NaN and not as a wrong token.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from vla_models.numba_vectors import LANES, add_rows, dot_rows, prefetch

_FAST = {"reassoc", "contract", "nsz", "arcp"}
_OPTIONS = {"cache": True, "nogil": True, "boundscheck": False, "error_model": "numpy"}

BLOCK = 16
_LOG2E = np.float32(1.4426950408889634)


@njit(fastmath=_FAST, **_OPTIONS)
def rms_norm(x, weight, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row, f32[T, size]."""
    size = x.shape[1]
    for row in range(x.shape[0]):
        total = np.float32(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[row, i] = (x[row, i] * scale) * weight[i]


@njit(fastmath=_FAST, **_OPTIONS)
def rotate_and_store(qkv, cos, sin, slots, pool, q_out):
    """Rotates queries into ``q_out`` [T, H, d] and keys into the pool, and copies values there.

    ``qkv`` [T, H + 2 Hkv, d]; ``cos``, ``sin`` [T, d / 2]; ``slots`` i64[T]; ``pool`` [N, 2, Hkv, 16, d].
    """
    heads, kv_heads = q_out.shape[1], pool.shape[2]
    half = qkv.shape[2] // 2
    for t in range(qkv.shape[0]):
        block, row = slots[t] // BLOCK, slots[t] % BLOCK
        for h in range(heads):
            for i in range(half):
                a, b, c, s = qkv[t, h, i], qkv[t, h, half + i], cos[t, i], sin[t, i]
                q_out[t, h, i] = a * c - b * s
                q_out[t, h, half + i] = b * c + a * s
        for h in range(kv_heads):
            for i in range(half):
                a, b, c, s = qkv[t, heads + h, i], qkv[t, heads + h, half + i], cos[t, i], sin[t, i]
                pool[block, 0, h, row, i] = a * c - b * s
                pool[block, 0, h, row, half + i] = b * c + a * s
            for i in range(2 * half):
                pool[block, 1, h, row, i] = qkv[t, heads + kv_heads + h, i]


@njit(**_OPTIONS)
def gather(pool, table, length, keys, values):
    """Copies the first ``length`` positions of a sequence into ``keys``, ``values`` [Hkv, >= length, d]."""
    for index in range(table.shape[0]):
        first = index * BLOCK
        rows = min(BLOCK, length - first)
        for h in range(pool.shape[2]):
            for row in range(rows):
                for i in range(pool.shape[4]):
                    keys[h, first + row, i] = pool[table[index], 0, h, row, i]
                    values[h, first + row, i] = pool[table[index], 1, h, row, i]


@njit(fastmath=_FAST, **_OPTIONS)
def merge(a, lse_a, b, lse_b, out, lse):
    """One attention over two sets of keys from an attention over each: softmax weights from the log-sum-exps.

    ``a``, ``b`` [Hkv, G, T, d] and ``lse_*``, ``lse`` [Hkv, G, T] of any strides; ``out`` [T, Hkv, G, d], apart from
    ``a`` and ``b``; ``lse``, that of the whole, may be ``lse_b``.
    """
    one = np.float32(1.0)
    for t in range(out.shape[0]):
        for h in range(out.shape[1]):
            for g in range(out.shape[2]):
                x, y = lse_a[h, g, t], lse_b[h, g, t]
                weight = one / (one + np.exp(y - x))
                lse[h, g, t] = max(x, y) + np.log(one + np.exp(-abs(x - y)))
                for i in range(out.shape[3]):
                    out[t, h, g, i] = b[h, g, t, i] + weight * (a[h, g, t, i] - b[h, g, t, i])


@njit(fastmath=_FAST, **_OPTIONS)
def _softmax_in_place(x, bits, powers, length):
    """x[:length] = softmax(x[:length]); ``bits`` int32 and ``powers`` are one scratch of as many elements.

    exp(y) = 2^n 2^f with a polynomial on f in [-1/2, 1/2] (Taylor series of exp up to degree 7, relative error below
    3e-7): loops without calls, which a vector unit can run. NaN stays NaN; below exp(-87) the result is about 1e-38.
    """
    top = x[0]
    for i in range(length):
        top = max(top, x[i])
    for i in range(length):
        y = max((x[i] - top) * _LOG2E, np.float32(-126.0))
        whole = np.floor(y + np.float32(0.5))
        f = (y - whole) * np.float32(0.6931471805599453)
        p = np.float32(1.0 / 5040.0)
        p = p * f + np.float32(1.0 / 720.0)
        p = p * f + np.float32(1.0 / 120.0)
        p = p * f + np.float32(1.0 / 24.0)
        p = p * f + np.float32(1.0 / 6.0)
        p = p * f + np.float32(0.5)
        p = p * f + np.float32(1.0)
        p = p * f + np.float32(1.0)
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        x[i] = p + (x[i] - x[i])
    total = np.float32(0.0)
    for i in range(length):
        x[i] *= powers[i]
        total += x[i]
    inverse = np.float32(1.0) / total
    for i in range(length):
        x[i] *= inverse


@njit(**_OPTIONS)
def _fetch(pool, first, part, parts):
    """Asks for part ``part`` of ``parts`` of the 16 * d floats from ``first`` on; see :func:`decode`."""
    size = pool.shape[4]
    for line in range(part * size // parts, (part + 1) * size // parts):
        prefetch(pool, first + line * LANES)


@njit(fastmath=_FAST, **_OPTIONS)
def _scores_of_block(q, row, pool, piece, ahead, scale, scores, first):
    """scores[g, first : first + 16] = scale * keys @ q[row, g], keys being the piece of that number in the pool."""
    groups, size = q.shape[1], q.shape[2]
    if size % LANES == 0:
        for g in range(groups):
            _fetch(pool, ahead * BLOCK * size, g, groups)
            start = (row * groups + g) * size
            dot_rows(q, start, pool, piece * BLOCK * size, size, scale, scores, g * scores.shape[1] + first)
        return
    keys = pool.reshape(-1, BLOCK, size)[piece]
    for g in range(groups):
        for i in range(BLOCK):
            total = np.float32(0.0)
            for j in range(size):
                total += q[row, g, j] * keys[i, j]
            scores[g, first + i] = total * scale


@njit(fastmath=_FAST, **_OPTIONS)
def _add_values_of_block(weights, first, rows, pool, piece, ahead, out, row):
    """out[row, g] += weights[g, first : first + rows] @ values[:rows]; later rows are not read."""
    groups, size = out.shape[1], out.shape[2]
    if size % LANES == 0 and rows == BLOCK:
        for g in range(groups):
            _fetch(pool, ahead * BLOCK * size, g, groups)
            start = (row * groups + g) * size
            add_rows(weights, g * weights.shape[1] + first, pool, piece * BLOCK * size, size, out, start)
        return
    values = pool.reshape(-1, BLOCK, size)[piece]
    for g in range(groups):
        for i in range(rows):
            weight = weights[g, first + i]
            for j in range(size):
                out[row, g, j] += weight * values[i, j]


@njit(fastmath=_FAST, **_OPTIONS)
def decode(q, pool, tables, lengths, scale, scores, bits, powers, out):
    """One query row per sequence over its blocks, read where they lie.

    ``q``, ``out`` [B, Hkv, G, d]; ``pool`` [N, 2, Hkv, 16, d]; ``tables`` i64[B, n]; ``lengths`` i64[B]; scratch:
    ``scores`` [Hkv, G, >= n * 16], ``bits`` i32[>= n * 16] and ``powers``, the same memory as float32.

    Bound by memory: while a block is worked on, the next is fetched into the second-level cache, some lines before each
    query head. The hardware follows addresses within a page only, and a fetch into the first level would hold its few
    line buffers (measured on Zen 4: 14 GB/s, 8 into the first level, 7 without; all of a block at once is slower).
    """
    kv_heads, groups, size = q.shape[1], q.shape[2], q.shape[3]
    queries, sums = q.reshape(-1, groups, size), out.reshape(-1, groups, size)
    for b in range(q.shape[0]):
        length = lengths[b]
        blocks = (length + BLOCK - 1) // BLOCK
        # One block's keys of all heads are one piece of memory, and so are its values: two passes in rising addresses.
        for index in range(blocks):
            piece = tables[b, index] * 2 * kv_heads
            ahead = tables[b, min(index + 1, blocks - 1)] * 2 * kv_heads
            for h in range(kv_heads):
                row = b * kv_heads + h
                _scores_of_block(queries, row, pool, piece + h, ahead + h, scale, scores[h], index * BLOCK)
        for h in range(kv_heads):
            for g in range(groups):
                _softmax_in_place(scores[h, g], bits, powers, length)
        out[b] = np.float32(0.0)
        for index in range(blocks):
            piece = (tables[b, index] * 2 + 1) * kv_heads
            ahead = (tables[b, min(index + 1, blocks - 1)] * 2 + 1) * kv_heads
            rows = min(BLOCK, length - index * BLOCK)
            for h in range(kv_heads):
                row = b * kv_heads + h
                _add_values_of_block(scores[h], index * BLOCK, rows, pool, piece + h, ahead + h, sums, row)
