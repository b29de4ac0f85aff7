"""Forward pass of a :class:`vla_models.llama.Llama` over paged keys and values: prompt chunks and decode rows together.

All new tokens of a step, whatever sequence they belong to, are rows of one matrix; only attention tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vla_models.llama import Llama, LlamaLayer
from vla_models.packed_linear import SMALL_ROWS, PackedLinear, padded_rows
from vla_models.paged_attention import (
    BLOCK_SIZE,
    AttentionShape,
    Span,
    blocks_for,
    choose_implementation,
    make_attention,
    plan_attention,
)

_WARM_UP_CHUNK = 20
"""More than a block, and not whole blocks."""


@dataclass(frozen=True)
class Step:
    """One forward pass. ``tokens`` are the rows: those of all ``spans`` in order, then one of each of ``decode``.

    ``logits_of`` are the rows whose logits are wanted, in that order.
    """

    tokens: Sequence[int]
    spans: Sequence[Span]
    decode: Sequence[Span]
    logits_of: Sequence[int]


class PagedLlama:
    """Inference only. Takes over the weights of ``model``; drop the model afterwards, packed weights are copies.

    ``attention`` names an implementation of :mod:`vla_models.paged_attention`; None takes the fastest that fits.
    """

    def __init__(self, model: Llama, attention: str | None = None) -> None:
        config = model.config
        assert config.head_dim is not None
        if not config.lm_head:
            raise ValueError("this LLaMA was configured without a language-model head (lm_head: false)")
        self.config = config
        self._embedding = model.embed_tokens.weight.detach()
        device, dtype = self._embedding.device, self._embedding.dtype
        self.attention_name = attention or choose_implementation(device, dtype)
        shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, model.inverse_frequencies.to(device),
            model.rotary_scale,
        )  # fmt: skip
        self._attention = make_attention(self.attention_name, shape)
        compiled, eps = self.attention_name == "numba", config.rms_norm_eps
        self._layers = [_Layer(layer, eps, compiled) for layer in model.layers]
        self._norm = _norm(model.norm.weight.detach(), eps, compiled)
        self._head = PackedLinear(self._embedding if model.lm_head is None else model.lm_head.weight)
        self._pads = self._head.packed

    @property
    def device(self) -> torch.device:
        """Where the weights are, and the pool must be."""
        return self._embedding.device

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the KV pool, [layers, num_blocks, 2, kv_heads, 16, head_dim]."""
        config = self.config
        assert config.head_dim is not None
        return (config.num_layers, num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)

    @torch.inference_mode()
    def forward(self, step: Step, pool: Tensor, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Writes the new tokens' KV into ``pool`` (see :meth:`pool_shape`) and gives f[len(logits_of), vocabulary].

        ``on_layer(i)`` is called when layer i's KV of all new tokens is in the pool.
        """
        attention = self._attention
        attention.begin(plan_attention(step.spans, step.decode))
        x = F.embedding(self._padded(step.tokens), self._embedding)
        for index, layer in enumerate(self._layers):
            attended = attention.attend(layer.qkv(layer.input_norm(x)), pool[index])
            if on_layer is not None:
                on_layer(index)
            if index == len(self._layers) - 1:  # the rest of the last layer acts on each row alone
                rows = self._padded(step.logits_of)
                x, attended = x[rows], attended[rows]
                if not len(rows):
                    return x.new_empty(0, self.config.vocab_size)
            x = layer.finish(x, attended)
        return self._head(self._norm(x))[: len(step.logits_of)]

    def warm_up(self, chunk_tokens: int, decode_rows: int) -> None:
        """Compiles what steps of up to ``decode_rows`` rows, and of chunks of ``chunk_tokens``, will need.

        Without it the first step of each size takes some milliseconds more, and the very first some seconds.
        """
        small = range(1, min(SMALL_ROWS, max(chunk_tokens, decode_rows)) + 1)
        sizes = {padded_rows(rows) for rows in (*small, chunk_tokens, decode_rows)} if self._pads else set()
        pool = self._embedding.new_zeros(self.pool_shape(blocks_for(2 * _WARM_UP_CHUNK) + 1))
        table = range(pool.shape[1])
        chunk = [0] * _WARM_UP_CHUNK
        for start in (0, _WARM_UP_CHUNK):  # the second attends to the first, which is other code
            self.forward(Step([*chunk, 0], [Span(start, _WARM_UP_CHUNK, table)], [Span(0, 1, table[-1:])], [0]), pool)
        with torch.inference_mode():
            for rows in sorted(sizes):
                self._run_products(rows)
                if rows <= padded_rows(decode_rows):
                    self._head(self._embedding.new_zeros(rows, self.config.hidden_size))

    def _run_products(self, rows: int) -> None:
        config, layer = self.config, self._layers[0]
        x = self._embedding.new_zeros(rows, config.hidden_size)
        layer.qkv(x)
        # The layer's output is as wide as its input; what attention gives need not be.
        attended = x.new_zeros(rows, self.pool_shape(0)[-1] * config.num_heads)
        layer.finish(x, attended)

    def _padded(self, rows: Sequence[int]) -> Tensor:
        """i64[padded_rows(len(rows))]: ``rows``, then zeros, where products are packed; ``rows`` elsewhere."""
        ids = np.zeros(padded_rows(len(rows)) if self._pads else len(rows), dtype=np.int64)
        ids[: len(rows)] = rows
        return torch.from_numpy(ids).to(self.device)


class _Layer:
    """The weights of one layer, packed."""

    def __init__(self, layer: LlamaLayer, eps: float, compiled: bool) -> None:
        self.input_norm = _norm(layer.input_norm.weight.detach(), eps, compiled)
        self.post_norm = _norm(layer.post_attention_norm.weight.detach(), eps, compiled)
        self.qkv = PackedLinear(layer.attention.qkv_proj.weight)
        self.out = PackedLinear(layer.attention.o_proj.weight)
        gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
        # Two products, so that silu and the product with the gate ride along instead of passing over memory again.
        self.gate, self.up = PackedLinear(gate), PackedLinear(up)
        self.down = PackedLinear(layer.mlp.down_proj.weight)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer after its attention, f[T, hidden] -> f[T, hidden]."""
        x = self.out.added_to(x, attended)
        normed = self.post_norm(x)
        return self.down.added_to(x, self.up.times(self.gate.silu(normed), normed))


Norm = Callable[[Tensor], Tensor]


def _norm(weight: Tensor, eps: float, compiled: bool) -> Norm:
    """RMSNorm over the last axis with this weight, computed in float32."""
    if not compiled:
        return lambda x: weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
    from vla_models import numba_kernels

    scale, epsilon = weight.numpy(), np.float32(eps)

    def norm(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        numba_kernels.rms_norm(x.numpy(), scale, epsilon, out.numpy())
        return out

    return norm
