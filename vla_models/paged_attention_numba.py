"""Paged attention on a CPU in float32: decoding reads the blocks in place, prompts go through torch's flash kernel."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_models import numba_kernels as kernels
from vla_models.paged_attention import AttentionPlan, AttentionShape, PlannedSpan, blocks_for
from vla_models.rope import rotary_angles

CAUSAL_ROWS = 128
"""Rows of a chunk that are attended to at a time. The flash kernel computes whole squares, masked or not, so a chunk
is cut into strips: each strip sees all before it without a mask, and only its own square is half wasted."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class NumbaPagedAttention:
    """See :class:`vla_models.paged_attention.PagedAttention`. Scratch memory grows to the longest sequence seen."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._groups = shape.num_heads // shape.num_kv_heads
        self._plan: AttentionPlan | None = None
        self._scores = np.empty((shape.num_kv_heads, self._groups, 0), dtype=np.float32)
        self._bits = np.empty(0, dtype=np.int32)
        self._gathered = torch.empty(2, shape.num_kv_heads, 0, shape.head_dim)

    def begin(self, plan: AttentionPlan) -> None:
        """See :class:`~vla_models.paged_attention.PagedAttention`."""
        shape, half = self.shape, self.shape.head_dim // 2
        self._plan = plan
        angles = rotary_angles(torch.from_numpy(plan.positions), shape.inverse_frequencies, shape.rotary_scale)
        # The second half of each repeats the first.
        self._cos, self._sin = (np.ascontiguousarray(part[0, 0, :, :half].numpy()) for part in angles)
        total = len(plan.positions)
        self._q = torch.empty(total, shape.num_heads, shape.head_dim)
        self._q_array = self._q.numpy()
        longest = plan.tables.shape[1] * kernels.BLOCK
        if longest > len(self._bits):
            self._scores = np.empty((shape.num_kv_heads, self._groups, longest), dtype=np.float32)
            self._bits = np.empty(longest, dtype=np.int32)
        needed = max((span.start + span.count for span in plan.spans), default=0)
        if needed > self._gathered.shape[2]:
            rows = blocks_for(needed) * kernels.BLOCK
            self._gathered = torch.empty(2, shape.num_kv_heads, rows, shape.head_dim)

    def attend(self, qkv: Tensor, pool: Tensor) -> Tensor:
        """See :class:`~vla_models.paged_attention.PagedAttention`."""
        plan, shape = self._plan, self.shape
        assert plan is not None, "begin() comes first"
        heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        blocks = pool.numpy()
        total = len(plan.positions)
        split = qkv[:total].view(total, heads + 2 * kv_heads, size).numpy()
        kernels.rotate_and_store(split, self._cos, self._sin, plan.slots, blocks, self._q_array)
        out = torch.empty(len(qkv), kv_heads, self._groups, size)
        if len(qkv) > total:
            out[total:] = 0.0
        for span in plan.spans:
            self._attend_span(span, blocks, out)
        if len(plan.tables):
            queries = self._q_array[plan.decode_offset :].reshape(-1, kv_heads, self._groups, size)
            kernels.decode(
                queries, blocks, plan.tables, plan.lengths, np.float32(1.0 / math.sqrt(size)),
                self._scores, self._bits, self._bits.view(np.float32), out[plan.decode_offset : total].numpy(),
            )  # fmt: skip
        return out.view(len(qkv), heads * size)

    def _attend_span(self, span: PlannedSpan, blocks: NDArray[np.float32], out: Tensor) -> None:
        keys, values = self._gathered
        kernels.gather(blocks, span.table, span.start + span.count, keys.numpy(), values.numpy())
        kv_heads, groups, size = self.shape.num_kv_heads, self._groups, self.shape.head_dim
        rows = slice(span.offset, span.offset + span.count)
        queries = self._q[rows].view(span.count, kv_heads, groups, size)
        if span.start == 0:
            self._attend_chunk(span, queries, out[rows])
            return
        own = torch.empty_like(queries)
        own_lse = self._attend_chunk(span, queries, own).numpy()
        # All before the chunk is seen by all its rows: the query heads of a key head are just more rows, and the flash
        # kernel works the better the more rows there are.
        folded = queries.transpose(0, 1).reshape(kv_heads, 1, span.count * groups, size)
        past, past_lse = _flash_over(folded, keys, values, 0, span.start, causal=False)
        past = past.reshape(kv_heads, span.count, groups, size).transpose(1, 2)
        past_lse = past_lse.reshape(kv_heads, span.count, groups).transpose(1, 2)
        chunk = own.permute(1, 2, 0, 3).numpy()
        kernels.merge(past.numpy(), past_lse.numpy(), chunk, own_lse, out[rows].numpy(), own_lse)

    def _attend_chunk(self, span: PlannedSpan, queries: Tensor, out: Tensor) -> Tensor:
        """``queries`` f[T, Hkv, G, d] over the keys of their own chunk, into ``out``; log-sum-exps f[Hkv, G, T]."""
        keys, values = self._gathered
        lse = torch.empty(self.shape.num_kv_heads, self._groups, span.count)
        for first in range(0, span.count, CAUSAL_ROWS):
            at = slice(first, min(first + CAUSAL_ROWS, span.count))
            # A key head is a batch entry and its query heads are the heads: stride 0 repeats the key head for free.
            q = queries[at].permute(1, 2, 0, 3)
            begin, end = span.start + first, span.start + at.stop
            own, own_lse = _flash_over(q, keys, values, begin, end, causal=True)
            if first == 0:
                out[at] = own.permute(2, 0, 1, 3)
                lse[:, :, at] = own_lse
                continue
            past, past_lse = _flash_over(q, keys, values, span.start, begin, causal=False)
            kernels.merge(
                past.numpy(), past_lse.numpy(), own.numpy(), own_lse.numpy(), out[at].numpy(), lse[:, :, at].numpy()
            )
        return lse


def _flash_over(
    q: Tensor, keys: Tensor, values: Tensor, begin: int, end: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """q f[Hkv, G, T, d] over keys, values f[Hkv, S, d] of positions [begin, end): output like q, log-sum-exp."""
    shape = (q.shape[0], q.shape[1], end - begin, q.shape[3])
    k, v = (part[:, begin:end].unsqueeze(1).expand(shape) for part in (keys, values))
    return _flash(q, k, v, 0.0, causal)
