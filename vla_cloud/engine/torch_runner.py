"""ModelRunner over :class:`vla_models.paged_llama.PagedLlama`: checks the batch, runs it, draws the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vla_cloud.engine.allowed_tokens import forbid_others
from vla_cloud.engine.runner import Batch, BatchError, Chunk, OnLayer, Sampled
from vla_cloud.kv_transfer.layout import KvLayout, check_pool
from vla_models.chat_model import ChatModel
from vla_models.paged_attention import BLOCK_SIZE, Span, blocks_for
from vla_models.paged_llama import PagedLlama, Step
from vla_models.sampling import draw

_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class TorchRunner:
    """One chat model on one torch device; see :class:`vla_cloud.engine.runner.ModelRunner`.

    ``kv`` is the pool's memory on the host, u8[layers, num_blocks, piece], possibly shared with other processes; it is
    used in place on a CPU. None allocates ``num_blocks`` blocks here. ``max_model_len`` may lower the model's own.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        num_blocks: int = 0,
        kv: NDArray[np.uint8] | None = None,
        max_model_len: int | None = None,
        attention: str | None = None,
    ) -> None:
        """Raises ValueError for a pool of another layout, no blocks at all, or more context than the model has."""
        self._paged = PagedLlama(model.llama, attention)
        if self._paged.device.type != "cpu":
            raise ValueError(f"the pool lies in host memory, the model on {self._paged.device}: load it on the CPU")
        config = self._paged.config
        longest = config.max_position_embeddings
        if max_model_len is not None and not 1 <= max_model_len <= longest:
            raise ValueError(f"max_model_len {max_model_len}: {model.name} takes 1 to {longest} tokens")
        self._max_model_len = max_model_len or longest
        self._layout = chat_layout(model)
        if kv is None:
            kv = np.zeros((config.num_layers, num_blocks, self._layout.piece_bytes), dtype=np.uint8)
        self._kv = check_pool(self._layout, kv)
        if not kv.shape[1]:
            raise ValueError("a KV pool without blocks: give num_blocks or kv")
        dtype = model.llama.embed_tokens.weight.dtype
        self._pool = torch.from_numpy(kv).view(dtype).view(self._paged.pool_shape(kv.shape[1]))

    def warm_up(self, chunk_tokens: int, decode_rows: int) -> None:
        """Before serving: see :meth:`vla_models.paged_llama.PagedLlama.warm_up`. The pool is not touched."""
        self._paged.warm_up(chunk_tokens, decode_rows)

    @property
    def layout(self) -> KvLayout:
        """See :class:`~vla_cloud.engine.runner.ModelRunner`."""
        return self._layout

    @property
    def kv(self) -> NDArray[np.uint8]:
        """See :class:`~vla_cloud.engine.runner.ModelRunner`."""
        return self._kv

    @property
    def max_model_len(self) -> int:
        """See :class:`~vla_cloud.engine.runner.ModelRunner`."""
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        """See :class:`~vla_cloud.engine.runner.ModelRunner`."""
        return self._paged.config.vocab_size

    def run(self, batch: Batch, on_layer: OnLayer | None = None) -> list[Sampled]:
        """See :class:`~vla_cloud.engine.runner.ModelRunner`."""
        self._check(batch)
        chunks = [*batch.prefill, *batch.decode]
        if not chunks:
            return []
        ends = np.cumsum([len(chunk.token_ids) for chunk in chunks]) - 1
        asked = [(int(end), chunk) for end, chunk in zip(ends, chunks, strict=True) if chunk.sampling is not None]
        step = Step(
            tokens=[token for chunk in chunks for token in chunk.token_ids],
            spans=_spans(batch.prefill),
            decode=_spans(batch.decode),
            logits_of=[end for end, _ in asked],
        )
        logits = self._paged.forward(step, self._pool, on_layer).float().cpu().numpy()
        forbid_others(logits, [chunk.allowed for _, chunk in asked])
        return [_sample(row, chunk) for row, (_, chunk) in zip(logits, asked, strict=True)]

    def copy_blocks_out(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """See :class:`~vla_cloud.engine.runner.ModelRunner`."""
        return self._kv[:, list(blocks)]

    def copy_blocks_in(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """See :class:`~vla_cloud.engine.runner.ModelRunner`."""
        self._kv[:, list(blocks)] = data

    def _check(self, batch: Batch) -> None:
        for chunk in batch.prefill:
            self._check_chunk(chunk)
        for chunk in batch.decode:
            if len(chunk.token_ids) != 1:
                raise BatchError(chunk.request_id, f"a decode row has one token, not {len(chunk.token_ids)}")
            self._check_chunk(chunk)

    def _check_chunk(self, chunk: Chunk) -> None:
        end = chunk.start + len(chunk.token_ids)
        if not chunk.token_ids or chunk.start < 0:
            raise BatchError(chunk.request_id, f"{len(chunk.token_ids)} tokens at position {chunk.start}")
        if end > self._max_model_len:
            raise BatchError(chunk.request_id, f"{end} tokens, the longest sequence is {self._max_model_len}")
        used = chunk.block_table[: blocks_for(end)]
        if len(used) < blocks_for(end):
            raise BatchError(chunk.request_id, f"{len(used)} blocks of {BLOCK_SIZE} for {end} tokens")
        if min(used) < 0 or max(used) >= self._kv.shape[1]:
            raise BatchError(chunk.request_id, f"blocks {min(used)} .. {max(used)} of a pool of {self._kv.shape[1]}")
        if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= self.vocab_size:
            raise BatchError(chunk.request_id, f"a token outside 0 .. {self.vocab_size - 1}")


def chat_layout(model: ChatModel) -> KvLayout:
    """What KV bytes of this model mean."""
    config, dtype = model.llama.config, model.llama.embed_tokens.weight.dtype
    assert config.head_dim is not None
    return KvLayout(
        model=model.name,
        model_hash=model.weights_hash,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        dtype=_DTYPE_NAMES[dtype],
    )


def _spans(chunks: Iterable[Chunk]) -> list[Span]:
    return [Span(chunk.start, len(chunk.token_ids), chunk.block_table) for chunk in chunks]


def _sample(logits: NDArray[np.float32], chunk: Chunk) -> Sampled:
    assert chunk.sampling is not None
    needs_history = chunk.sampling.repetition_penalty != 1.0
    history = [*chunk.history, *chunk.token_ids] if needs_history else ()
    drawn = draw(logits, chunk.sampling, chunk.start + len(chunk.token_ids), history)
    return Sampled(chunk.request_id, drawn.token_id, drawn.logprob, drawn.top)
