"""What can happen to a chat request in the gateway, and what the gateway is to do: the words of request_life.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Events. ``worker`` and ``attempt`` say who speaks of which attempt.


@dataclass(frozen=True, slots=True)
class Placed:
    """Workers were chosen; ``prefill`` None: ``decode`` does both, without a transfer."""

    prefill: str | None
    decode: str


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """No worker can take it now. ``reason`` is for the client."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """D holds blocks."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker did not begin and holds nothing. ``retry_after_s`` is its own guess."""

    worker: str
    attempt: int
    code: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """P has pushed everything."""

    worker: str
    attempt: int
    cached_tokens: int
    pushed_bytes: int


@dataclass(frozen=True, slots=True)
class PushFailed:
    """P could not hand the KV over."""

    worker: str
    attempt: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TokensCame:
    """``position`` of the first, counted from the start of the prompt."""

    worker: str
    attempt: int
    position: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class WorkerFinished:
    """The answer is complete: ``reason`` stop or length, ``generated`` tokens in this attempt."""

    worker: str
    attempt: int
    reason: str
    generated: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """Nothing of the attempt is left on the worker, and it writes nothing more for it."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Work that was begun failed; ``transfer``: because KV did not arrive."""

    worker: str
    attempt: int
    code: str
    message: str
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """No more messages from or to this worker; its process may still run and write."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDead:
    """The worker's process has ended: it writes nothing any more."""

    worker: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client went away or asked to stop."""


@dataclass(frozen=True, slots=True)
class EndHere:
    """What was streamed is the whole answer (a stop string was seen)."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The gateway ends it: shutting down, or the client does not read."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at ``next_wake_ns``."""


Event: TypeAlias = (
    Placed | NotPlaced | Reserved | Refused | Prefilled | PushFailed | TokensCame | WorkerFinished | Aborted | Failed
    | WorkerLost | WorkerDead | Cancel | EndHere | GiveUp | Tick
)  # fmt: skip


# Actions, to be done in order.


@dataclass(frozen=True, slots=True)
class NeedPlace:
    """Choose workers now and answer with Placed or NotPlaced. ``prefer_prefill``: has this prompt in its cache."""

    exclude: frozenset[str]
    prefer_prefill: str | None = None


@dataclass(frozen=True, slots=True)
class SendReserve:
    """To D; ``writer`` is the P that is to fill the blocks."""

    worker: str
    attempt: int
    writer: str


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """To P, with the blocks that D reserved."""

    worker: str
    attempt: int
    decode: str


@dataclass(frozen=True, slots=True)
class SendGenerate:
    """To a worker that does both."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Stop this attempt there."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SendWriterDone:
    """To D: nobody writes into this attempt's blocks any more."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens for the client."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The answer is complete. ``cached_tokens``: of the client's prompt, not computed for the first token."""

    reason: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with this error; a gRPC status name. ``retry_after_s`` 0: waiting does not help."""

    code: str
    message: str
    retry_after_s: float = 0.0


Action: TypeAlias = (
    NeedPlace | SendReserve | SendPrefill | SendGenerate | SendAbort | SendWriterDone | Emit | End | Fail
)
