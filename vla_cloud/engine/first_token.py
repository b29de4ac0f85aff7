"""What travels with the completion notice from P to D: the first token, its log-probabilities, what P had cached."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from vla_cloud.engine.runner import Sampled
from vla_cloud.pools.message_parts import Count, TokenId


class FirstToken(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``epoch`` repeats the one D's process told in Ready; ``prompt_tokens`` is how many tokens P computed KV of."""

    epoch: Count
    prompt_tokens: Count
    token: TokenId
    cached_tokens: Count
    logprob: float | None = None
    top_logprobs: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=64)] = ()

    def sampled(self, request_id: str) -> Sampled:
        """As if D's own runner had drawn it."""
        return Sampled(request_id, self.token, self.logprob, self.top_logprobs)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(FirstToken)


def encode(first: FirstToken) -> bytes:
    """Payload bytes, below 2 KiB."""
    return _ENCODER.encode(first)


def decode(payload: bytes) -> FirstToken:
    """Inverse of :func:`encode`. Raises ValueError for anything else."""
    return _DECODER.decode(payload)  # DecodeError and ValidationError are ValueErrors
