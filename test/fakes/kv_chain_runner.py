"""A ModelRunner without a model: a hash chain in the KV bytes. For engine tests and for real worker processes in tests.

Row (layer, position) of the pool is a hash of the row before it in the same layer and of the row of the layer below
(of the token in layer 0), all *read from the pool*. The next token is a hash of every row of every layer up to the
last position, read through the block table. So one wrong, missing, foreign or stale byte in any block of a request
gives another token, and equal tokens prove equal KV. :func:`reference` computes the same without any pool.

Only numpy and vla_cloud are imported. Put this folder on sys.path: ``sys.path.insert(0, "test/fakes")``.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vla_cloud.core.block_pool import BLOCK_TOKENS
from vla_cloud.engine.runner import Batch, BatchError, Chunk, OnLayer, Sampled
from vla_cloud.kv_transfer.layout import KvLayout, check_pool
from vla_models.sampling import SamplingRule

LAYERS = 2
VOCAB = 997
NEVER_WRITTEN = 0xA5
"""Pool bytes at the start: KV of zeros would not be told from memory that nobody wrote."""


def chain_layout(layers: int = LAYERS, model_hash: str = "chain", head_dim: int = 4) -> KvLayout:
    """A layout whose rows take ``8 * head_dim`` bytes (head_dim 4: 32 bytes, 512 per block and layer; at most 8)."""
    return KvLayout("chain", model_hash, layers=layers, kv_heads=1, head_dim=head_dim)


class KvChainRunner:
    """Deterministic; see the module. ``kv`` may be shared memory (KvMemory.array); by default it is plain memory.

    ``before_run`` is called with each batch before anything is written: raise in it to imitate a broken model.
    ``token_s`` and ``step_s`` make a step take time (seconds per new token, per step). ``batches`` counts steps,
    ``computed`` new tokens.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        layout: KvLayout | None = None,
        *,
        kv: NDArray[np.uint8] | None = None,
        max_model_len: int = 512,
        vocab_size: int = VOCAB,
        before_run: Callable[[Batch], None] | None = None,
        token_s: float = 0.0,
        step_s: float = 0.0,
    ) -> None:
        self._layout = layout if layout is not None else chain_layout()
        self._row_bytes = self._layout.piece_bytes // BLOCK_TOKENS
        if kv is None:
            kv = np.empty((self._layout.layers, num_blocks, self._layout.piece_bytes), np.uint8)
        self._kv = check_pool(self._layout, kv)
        self._kv[:] = NEVER_WRITTEN
        self._rows = self._kv.reshape(self._layout.layers, self._kv.shape[1], BLOCK_TOKENS, self._row_bytes)
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self.before_run = before_run
        self.token_s = token_s
        self.step_s = step_s
        self.batches = 0
        self.computed = 0

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def kv(self) -> NDArray[np.uint8]:
        return self._kv

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def run(self, batch: Batch, on_layer: OnLayer | None = None) -> list[Sampled]:
        chunks = [*batch.prefill, *batch.decode]
        self._check(batch)
        if self.before_run is not None:
            self.before_run(batch)
        if self.token_s or self.step_s:
            time.sleep(self.step_s + self.token_s * batch.num_tokens)
        for layer in range(self._layout.layers):
            for chunk in chunks:
                self._write(layer, chunk)
            if on_layer is not None:
                on_layer(layer)
        self.batches += 1
        self.computed += batch.num_tokens
        return [self._sample(chunk, chunk.sampling) for chunk in chunks if chunk.sampling is not None]

    def copy_blocks_out(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self._kv[:, list(blocks)].copy()

    def copy_blocks_in(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        assert data.shape == (self._layout.layers, len(blocks), self._layout.piece_bytes), data.shape
        self._kv[:, list(blocks)] = data

    def _check(self, batch: Batch) -> None:
        written: set[int] = set()
        seen: set[str] = set()
        for chunk in [*batch.prefill, *batch.decode]:
            count = len(chunk.token_ids)
            end = chunk.start + count
            if chunk.request_id in seen or not count:
                raise BatchError(chunk.request_id, "twice in the batch, or an empty chunk")
            seen.add(chunk.request_id)
            if end > self._max_model_len or end > len(chunk.block_table) * BLOCK_TOKENS:
                raise BatchError(chunk.request_id, f"{len(chunk.block_table)} blocks do not reach position {end - 1}")
            if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= self._vocab_size:
                raise BatchError(chunk.request_id, f"a token is outside the vocabulary of {self._vocab_size}")
            new = set(chunk.block_table[chunk.start // BLOCK_TOKENS : (end - 1) // BLOCK_TOKENS + 1])
            if written & new:
                raise BatchError(chunk.request_id, f"blocks {sorted(written & new)} are written by two requests")
            written |= new
        for chunk in batch.decode:
            if len(chunk.token_ids) != 1:
                raise BatchError(chunk.request_id, "a decode row has one token")

    def _row(self, layer: int, table: Sequence[int], position: int) -> bytes:
        return self._rows[layer, table[position // BLOCK_TOKENS], position % BLOCK_TOKENS].tobytes()

    def _write(self, layer: int, chunk: Chunk) -> None:
        table = chunk.block_table
        row = self._row(layer, table, chunk.start - 1) if chunk.start else b""
        for offset, token in enumerate(chunk.token_ids):
            position = chunk.start + offset
            below = self._row(layer - 1, table, position) if layer else struct.pack("<i", token)
            row = _link(row, below, self._row_bytes)
            target = self._rows[layer, table[position // BLOCK_TOKENS], position % BLOCK_TOKENS]
            target[:] = np.frombuffer(row, np.uint8)

    def _sample(self, chunk: Chunk, rule: SamplingRule) -> Sampled:
        end = chunk.start + len(chunk.token_ids)
        table = list(chunk.block_table[: -(-end // BLOCK_TOKENS)])
        rows = self._rows[:, table].reshape(self._layout.layers, -1, self._row_bytes)[:, :end]
        history = [*chunk.history, *chunk.token_ids]
        return _sampled(chunk.request_id, rows.tobytes(), rule, end, history, self._vocab_size, chunk.allowed)


def reference(
    prompt: Sequence[int], count: int, rule: SamplingRule | None = None, layout: KvLayout | None = None,
    vocab_size: int = VOCAB, stop: Sequence[int] = (),
) -> list[int]:
    """The ``count`` tokens that follow the prompt (fewer if one is in ``stop``), by a plain loop without a pool."""
    layout = layout if layout is not None else chain_layout()
    rule = rule if rule is not None else SamplingRule()
    row_bytes = layout.piece_bytes // BLOCK_TOKENS
    columns: list[list[bytes]] = [[] for _ in range(layout.layers)]
    tokens = list(prompt)
    done = 0
    for _ in range(count):
        for token in tokens[done:]:
            below = struct.pack("<i", token)
            for column in columns:
                below = _link(column[-1] if column else b"", below, row_bytes)
                column.append(below)
        done = len(tokens)
        rows = b"".join(row for column in columns for row in column)
        tokens.append(_sampled("", rows, rule, len(tokens), tokens, vocab_size).token_id)
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def _link(before: bytes, below: bytes, size: int) -> bytes:
    return hashlib.blake2b(before + below, digest_size=size).digest()


def _sampled(
    request_id: str, rows: bytes, rule: SamplingRule, position: int, history: Sequence[int], vocab_size: int,
    allowed: NDArray[np.int32] | None = None,
) -> Sampled:  # fmt: skip
    digest = hashlib.blake2b(rows, digest_size=16)
    if rule.temperature > 0:
        digest.update(struct.pack("<dQq", rule.temperature, rule.seed, position))
    if rule.repetition_penalty != 1.0:
        digest.update(struct.pack(f"<d{len(history)}i", rule.repetition_penalty, *history))
    value = int.from_bytes(digest.digest(), "little")
    token = value % vocab_size
    if allowed is not None:
        kept = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), count=vocab_size, bitorder="little"))
        token = int(kept[value % len(kept)])
    if rule.logprobs is None:
        return Sampled(request_id, token)
    logprob = -math.log1p((value >> 64) % 1000)
    top = tuple(((token + i) % vocab_size, logprob - i) for i in range(rule.logprobs))
    return Sampled(request_id, token, logprob, top)
