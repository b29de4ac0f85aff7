"""What a worker's engine needs of a model: one call per step, over a pool of KV blocks that it does not manage.

The engine decides which blocks belong to whom; a runner only reads and writes the blocks that a batch names. torch
is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from vla_cloud.core.generate import GenerateRequest, seed_of
from vla_models.sampling import SamplingRule

if TYPE_CHECKING:
    from vla_cloud.kv_transfer.layout import KvLayout

OnLayer = Callable[[int], None]
"""Called with a layer's index, in rising order, once the pool holds that layer's KV of all tokens of the batch."""


class BatchError(ValueError):
    """The batch cannot be run: a block table too short, a position past max_model_len, a token outside the vocabulary.

    Raised before any block is written. ``request_id`` names the request at fault.
    """

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(f"request {request_id}: {message}")
        self.request_id = request_id


@dataclass(frozen=True)
class Chunk:
    """Some consecutive new tokens of one request: a piece of its prompt, or the one last sampled token (decode).

    ``token_ids[i]`` stands at position ``start + i``. Position p lives in row ``p % 16`` of block
    ``block_table[p // 16]``; the KV of positions 0 .. start-1 must be there already, and the table must reach to the
    last new position. Blocks of another request may stand at its beginning (a cached prefix): only the rows of new
    positions are written.

    ``sampling`` given: sample the token that follows the last one. None: no logits are computed (a chunk before the
    last). ``history`` holds all tokens at positions 0 .. start-1, read only for a repetition penalty other than 1.
    ``allowed`` given: only tokens whose bit is set may be sampled, i32[ceil(vocabulary / 32)], token i being bit i % 32
    of word i // 32.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingRule | None = None
    history: Sequence[int] = ()
    allowed: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Batch:
    """One step: chunks of prompts and decode rows, each request at most once, blocks to be written in one chunk only.

    ``decode`` rows are chunks of exactly one token; they are attended to in one call for the whole batch.
    """

    prefill: Sequence[Chunk] = ()
    decode: Sequence[Chunk] = ()

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return sum(len(chunk.token_ids) for chunk in self.prefill) + len(self.decode)


@dataclass(frozen=True)
class Sampled:
    """The token that follows a chunk, at position ``start + len(token_ids)``.

    ``logprob`` is that of the token under the softmax of the model's own logits (of the allowed tokens, where a chunk
    names them), before penalty and temperature, and ``top_logprobs`` are the most likely (token, logprob), best
    first; None and empty unless ``sampling.logprobs`` asks.
    """

    request_id: str
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sampling_rule(request: GenerateRequest) -> SamplingRule:
    """How tokens of this request are drawn; the seed is settled here, the same on every worker."""
    asked = request.sampling
    return SamplingRule(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        repetition_penalty=asked.repetition_penalty,
        seed=seed_of(request),
        logprobs=asked.logprobs,
    )


class ModelRunner(Protocol):
    """One model over one pool of KV blocks; used by one thread at a time.

    The same request gives the same tokens however it was cut into chunks, whichever blocks it had and whoever shared
    its batch, up to float32 rounding of the logits: a sampled token depends on the logits, the seed and the position.
    """

    @property
    def layout(self) -> KvLayout:
        """What KV bytes of this runner mean: model, layers, heads, head_dim, block size, dtype."""
        ...

    @property
    def kv(self) -> NDArray[np.uint8]:
        """The pool, u8[layers, num_blocks, B], each B bytes being f[2 (k, v), kv_heads, 16, head_dim] of one block."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""
        ...

    def run(self, batch: Batch, on_layer: OnLayer | None = None) -> list[Sampled]:
        """One forward pass: writes the new tokens' KV, and samples for every chunk that has ``sampling``.

        The answers are in the order prefill, then decode, without the chunks that have none. Raises BatchError before
        it writes anything.
        """
        ...

    def copy_blocks_out(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """A copy of these blocks, u8[layers, len(blocks), bytes], for a host swap."""
        ...

    def copy_blocks_in(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Writes what copy_blocks_out gave into these blocks (others, maybe)."""
        ...
