"""Paged attention in plain torch, on any device: blocks are gathered, then one scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vla_models.paged_attention import BLOCK_SIZE, AttentionPlan, AttentionShape
from vla_models.rope import apply_rotary, rotary_angles


class TorchPagedAttention:
    """See :class:`vla_models.paged_attention.PagedAttention`. Sequences that decode are one batched call."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._plan: AttentionPlan | None = None
        self._ready_on: torch.device | None = None

    def begin(self, plan: AttentionPlan) -> None:
        """See :class:`~vla_models.paged_attention.PagedAttention`."""
        self._plan, self._ready_on = plan, None

    def attend(self, qkv: Tensor, pool: Tensor) -> Tensor:
        """See :class:`~vla_models.paged_attention.PagedAttention`."""
        plan, shape = self._plan, self.shape
        assert plan is not None, "begin() comes first"
        if self._ready_on != qkv.device:
            self._move_to(qkv.device, plan)
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        # [T, heads, d] as [1, heads, T, d], the shape that apply_rotary takes.
        total = len(plan.positions)
        split = qkv[:total].view(total, heads + 2 * kv_heads, shape.head_dim).transpose(0, 1).unsqueeze(0)
        rotated = apply_rotary(split[:, : heads + kv_heads], self._cos, self._sin)[0].transpose(0, 1)
        q, k = rotated[:, :heads], rotated[:, heads:]
        v = split[0, heads + kv_heads :].transpose(0, 1)
        pool[self._block, 0, :, self._row] = k.to(pool.dtype)
        pool[self._block, 1, :, self._row] = v.to(pool.dtype)
        out = torch.zeros(len(qkv), heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        for span, table, mask in self._spans:
            rows = slice(span.offset, span.offset + span.count)
            out[rows] = self._attended(q[rows].unsqueeze(0), pool, table, mask)[0]
        if len(self._tables):
            queries = q[plan.decode_offset :, None]
            out[plan.decode_offset : total] = self._attended(queries, pool, self._tables, self._mask)[:, 0]
        return out.view(len(qkv), -1)

    def _move_to(self, device: torch.device, plan: AttentionPlan) -> None:
        shape = self.shape
        positions, frequencies = torch.from_numpy(plan.positions).to(device), shape.inverse_frequencies.to(device)
        self._cos, self._sin = rotary_angles(positions, frequencies, shape.rotary_scale)
        slots = torch.from_numpy(plan.slots).to(device)
        self._block, self._row = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        self._spans = []
        for span in plan.spans:
            keys = torch.arange(len(span.table) * BLOCK_SIZE, device=device)
            queries = torch.arange(span.start, span.start + span.count, device=device)
            mask = keys <= queries[:, None]
            self._spans.append((span, torch.from_numpy(span.table).to(device).unsqueeze(0), mask))
        self._tables = torch.from_numpy(plan.tables).to(device)
        keys = torch.arange(plan.tables.shape[1] * BLOCK_SIZE, device=device)
        self._mask = (keys < torch.from_numpy(plan.lengths).to(device)[:, None])[:, None, None, :]
        self._ready_on = device

    def _attended(self, q: Tensor, pool: Tensor, tables: Tensor, mask: Tensor) -> Tensor:
        """q f[B, T, H, d], tables i64[B, n], mask bool broadcastable to [B, 1, T, n * 16] -> f[B, T, H, d]."""
        shape = self.shape
        batch, blocks = tables.shape
        gathered = pool[tables]  # [B, n, 2, Hkv, 16, d]
        # Rows that were never written may hold anything, NaN too; their weight is 0 but 0 * NaN is NaN.
        kv = gathered.permute(2, 0, 3, 1, 4, 5).reshape(2, batch, shape.num_kv_heads, blocks * BLOCK_SIZE, -1)
        seen = mask.any(dim=-2)  # [n * 16] or [B, 1, n * 16]
        kv = kv.masked_fill(~seen.unsqueeze(-1), 0.0).to(q.dtype)
        groups = shape.num_heads // shape.num_kv_heads
        k, v = (part.repeat_interleave(groups, dim=1) for part in kv) if groups > 1 else kv
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)
