"""Control messages between the gateway and a robot lane (docs/serving.md), beside those all workers have."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, field

from vla_cloud.pools.message_parts import Count, Hash, Message, Name, Row, Seconds, Text, TraceId

MAX_BATCH: Final = 64
"""Most robots of one batch of contexts."""

MAX_JPEG_BYTES: Final = 1 << 20
"""Largest image on a control link; a lane has its own, lower limit."""


class ContextRow(Row, frozen=True):
    """One robot's part of a batch: i32 token ids of its instruction, and its image as it came."""

    ids: Annotated[bytes, Meta(max_length=4 * 4096)]
    jpeg: Annotated[bytes, Meta(max_length=MAX_JPEG_BYTES)]


class ContextBatch(Message, frozen=True, tag="context_batch"):
    """To a robot lane: compute context tokens. ``number`` is repeated in the answer.

    ``traces``: of each row that is traced its trace's id, empty for the others; no list at all if none is.
    """

    number: Count
    rows: Annotated[list[ContextRow], Meta(min_length=1, max_length=MAX_BATCH)]
    traces: Annotated[list[TraceId], Meta(max_length=MAX_BATCH)] = field(default_factory=list)


class LaneReady(Message, frozen=True, tag="lane_ready"):
    """A robot lane's answer to Hello: it has loaded the backbone of this model, whose contexts are f32[tokens, dim]."""

    version: int
    worker: Name
    pid: Count
    model: Name
    model_hash: Hash
    num_tokens: Annotated[int, Meta(ge=1, le=4096)]
    dim: Annotated[int, Meta(ge=1, le=65536)]
    role: Literal["robots"] = "robots"


class ContextAnswer(Row, frozen=True):
    """One robot's context, little-endian f32[tokens, dim]; or, with a ``cause``, why there is none (``tokens`` empty).

    ``prefix_tokens_reused``: text tokens whose keys and values were cached. ``image_cached``: the image was not encoded
    again.
    """

    tokens: Annotated[bytes, Meta(max_length=8 * 1024 * 1024)]
    prefix_tokens_reused: Count = 0
    image_cached: bool = False
    cause: Annotated[str, Meta(max_length=64)] = ""
    message: Text = ""


class Contexts(Message, frozen=True, tag="contexts"):
    """The answer to a ContextBatch, row for row. ``compute_s``: from taking the batch to its answer."""

    number: Count
    rows: Annotated[list[ContextAnswer], Meta(min_length=1, max_length=MAX_BATCH)]
    compute_s: Seconds
