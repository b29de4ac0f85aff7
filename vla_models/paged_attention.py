"""Attention of a LLaMA over keys and values in fixed-size blocks: what a step asks, and who can do it.

One layer's pool is f[num_blocks, 2 (k, v), kv_heads, 16, head_dim]. Position p of a sequence lies in row p % 16 of
block table[p // 16]. Two implementations of one meaning, held to it by test/conformance/test_paged_attention.py:

* ``torch`` -- any device and dtype: gathers the blocks and calls scaled_dot_product_attention.
* ``numba`` -- float32 on a CPU: decoding reads keys and values where they lie.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_SIZE = 16

IMPLEMENTATIONS = ("torch", "numba")


@dataclass(frozen=True)
class Span:
    """``count`` new tokens of one sequence at positions ``start`` ..., with the sequence's blocks in order."""

    start: int
    count: int
    table: Sequence[int]


@dataclass(frozen=True)
class PlannedSpan:
    """A Span of more than one row with its place in the batch; ``table`` i64[blocks], cut to what it needs."""

    offset: int
    start: int
    count: int
    table: NDArray[np.int64]


@dataclass(frozen=True)
class AttentionPlan:
    """One step. Rows of the batch are the tokens of ``spans`` in order, then one row per decoding sequence.

    ``positions``, ``slots`` i64[T]: a new token's position and the pool row (block * 16 + position % 16) it goes to.
    ``tables`` i64[B, blocks], filled up with block 0, and ``lengths`` i64[B], tokens to attend to with the new one.
    """

    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    spans: tuple[PlannedSpan, ...]
    decode_offset: int
    tables: NDArray[np.int64]
    lengths: NDArray[np.int64]


class PagedAttention(Protocol):
    """Attention of one model, used by one thread. :meth:`begin` once a step, then :meth:`attend` once a layer."""

    def begin(self, plan: AttentionPlan) -> None:
        """Prepares what all layers of this step share."""
        ...

    def attend(self, qkv: Tensor, pool: Tensor) -> Tensor:
        """Rotates queries and keys, writes the new keys and values into the layer's ``pool``, and attends.

        ``qkv`` f[T, (H + 2 Hkv) * head_dim], ``pool`` f[num_blocks, 2, Hkv, 16, head_dim], only the rows in
        ``plan.slots`` are written; gives f[T, H * head_dim]. A row sees positions 0 .. its own of its sequence.
        T may be more than the plan has: rows after the plan's belong to no sequence and give zeros.
        """
        ...


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a model and its rotary frequencies f32[head_dim / 2], in radians per position.

    ``rotary_scale`` multiplies the rotated queries and keys (YaRN's attention factor).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    inverse_frequencies: Tensor
    rotary_scale: float = 1.0


def plan_attention(spans: Sequence[Span], decode: Sequence[Span]) -> AttentionPlan:
    """The plan of a step. ``decode`` are spans of one token each; tables must reach to the last new position."""
    planned, positions, slots, offset = [], [], [], 0
    for span in spans:
        table = np.asarray(span.table[: blocks_for(span.start + span.count)], dtype=np.int64)
        where = np.arange(span.start, span.start + span.count, dtype=np.int64)
        positions.append(where)
        slots.append(table[where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE)
        planned.append(PlannedSpan(offset, span.start, span.count, table))
        offset += span.count
    lengths = np.array([span.start + 1 for span in decode], dtype=np.int64)
    width = blocks_for(int(lengths.max())) if len(decode) else 0
    tables = np.zeros((len(decode), width), dtype=np.int64)
    for row, span in enumerate(decode):
        used = blocks_for(span.start + 1)
        tables[row, :used] = span.table[:used]
    if len(decode):
        last = lengths - 1
        positions.append(last)
        slots.append(tables[np.arange(len(decode)), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE)
    return AttentionPlan(
        np.concatenate(positions), np.concatenate(slots), tuple(planned), offset, tables, lengths
    )


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def choose_implementation(device: torch.device, dtype: torch.dtype) -> str:
    """The faster implementation that can serve this device and dtype."""
    if device.type == "cpu" and dtype == torch.float32 and importlib.util.find_spec("numba") is not None:
        return "numba"
    return "torch"


def make_attention(name: str, shape: AttentionShape) -> PagedAttention:
    """The implementation called ``name``.

    Raises:
        ValueError: no such implementation.
        ModuleNotFoundError: ``numba`` is asked for and not installed.
    """
    if name == "torch":
        from vla_models.paged_attention_torch import TorchPagedAttention

        return TorchPagedAttention(shape)
    if name == "numba":
        from vla_models.paged_attention_numba import NumbaPagedAttention

        return NumbaPagedAttention(shape)
    raise ValueError(f"paged attention {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
