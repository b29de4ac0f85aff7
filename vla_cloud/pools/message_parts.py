"""What control messages are made of: bounded types, the bases, and the parts that several messages have in common."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct, field

from vla_cloud.core.generate import ImageSpan, Priority, SamplingParams
from vla_cloud.core.grammar_spec import Grammar

PROTOCOL_VERSION: Final = 3
"""Raised on any change of these messages; a worker of another version ends before it is given work."""

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Largest encoded message either side accepts: a prompt of a million tokens takes 4 MB."""

MAX_TOKENS: Final = 1 << 20
"""Most tokens of one prompt."""

Role: TypeAlias = Literal["prefill", "decode", "both"]
Code: TypeAlias = Literal[
    "INVALID_ARGUMENT",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "FAILED_PRECONDITION",
    "INTERNAL",
]
"""Names of gRPC status codes, with their meanings."""
Reason: TypeAlias = Literal["stop", "length"]

RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Address = Annotated[str, Meta(max_length=16384)]  # NIXL agent metadata is binary, base64 here
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Attempt = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
TokenBytes = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
Blocks = Annotated[list[Count], Meta(max_length=MAX_TOKENS)]
Hash = Annotated[bytes, Meta(max_length=64)]
TraceId = Annotated[bytes, Meta(max_length=16)]


class Message(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages: immutable, unknown fields are refused."""


class Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the parts of messages that repeat: msgpack arrays, without field names."""


class Work(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be computed, the same for every worker that takes part.

    Attributes:
        prompt: i32 token ids: the client's prompt and the tokens already streamed.
        sampling: ``max_new_tokens`` counts from the end of this ``prompt``; ``seed`` is always given, so that a token
            depends on the logits, the seed and its absolute position only, on whichever worker.
        streamed: how many tokens at the end of ``prompt`` were streamed before (0 in a first attempt).
        time_left_s: until the request's deadline.
        salt: of the tenant; part of every prefix key.
        grammar: what the streamed tokens and the further ones must look like together.
        trace: id of the request's trace; empty: it is not traced.
    """

    prompt: TokenBytes
    sampling: SamplingParams
    time_left_s: Seconds
    streamed: Count = 0
    priority: Priority = Priority.NORMAL
    salt: Hash = b""
    images: Annotated[list[ImageSpan], Meta(max_length=1024)] = field(default_factory=list)
    grammar: Grammar | None = None
    trace: TraceId = b""


class Destination(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a P worker pushes KV: the blocks that a D worker has reserved.

    ``blocks[i]`` takes prompt block ``first_block + i``; blocks before that are cached on D. ``token`` and ``epoch``
    must be repeated in the completion notice. ``deadline_s`` bounds the push, from the end of prefill.
    """

    worker: Name
    address: Address
    token: Annotated[str, Meta(max_length=128)]
    epoch: Count
    first_block: Count
    blocks: Blocks
    deadline_s: Seconds


class Load(Row, frozen=True):
    """What a worker is doing.

    ``active_tokens``: uncached prompt tokens still to compute, plus tokens of running sequences that are held in its
    pool. ``free_blocks`` includes what the prefix tree would give up (``cached_blocks``). ``running`` includes
    ``reserved`` and ``to_push``, ``waiting`` includes ``preempted``. ``leases``: that run; ``awaited_writers``:
    transfers whose blocks are in quarantine. The rest counts from the start of the worker, see
    :class:`vla_cloud.engine.totals.Totals`.
    """

    total_blocks: Count
    free_blocks: Count
    quarantined_blocks: Count
    active_tokens: Count
    running: Count
    waiting: Count
    cached_blocks: Count = 0
    reserved: Count = 0
    to_push: Count = 0
    preempted: Count = 0
    leases: Count = 0
    awaited_writers: Count = 0
    preemptions: Count = 0
    leases_expired: Count = 0
    computed_tokens: Count = 0
    cached_tokens: Count = 0
    transfers: Count = 0
    transfer_bytes: Count = 0
    transfer_s: Annotated[float, Meta(ge=0.0)] = 0.0
    transfer_failures: Annotated[dict[Name, Count], Meta(max_length=64)] = field(default_factory=dict)
