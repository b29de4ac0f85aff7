"""Control messages between the gateway and its workers: msgpack maps with a type tag, one message per frame.

    gateway ─▶ worker   Hello  Reserve  Prefill  Generate  Abort  WriterDone  LeaseExtend  KvSnapshot  Ping  Drain
                        Shutdown
    worker  ─▶ gateway  Join  Ready  Reserved  Refused  Prefilled  PushFailed  Tokens  Finished  Aborted  KvEvents
                        Pong  Drained  Error
    gateway ─▶ lane     Hello  ContextBatch  Ping  Drain  Shutdown
    lane    ─▶ gateway  Join  LaneReady  Contexts  Pong  Drained  Error

A message about a request carries the request's id and its *attempt*: each time the gateway begins a request anew
it raises the attempt, and whatever still arrives for an older one is dropped. Every accepted piece of work ends with
exactly one message of its attempt, whether or not it was asked to end:

    Reserve    Reserved, later Finished; or Refused; or Aborted; or Error
    Prefill    Prefilled (all pushed), PushFailed, Refused, Aborted, or Error
    Generate   Finished, Refused, Aborted, or Error

``Abort`` is idempotent and always answered by ``Aborted``, also for a request the worker does not know; once a P
worker has sent any of its final messages, it writes nothing more for that attempt. Durations are seconds from the
arrival of the message, so that no two clocks are compared. Token ids travel as little-endian i32
(:func:`vla_cloud.pools.codec.pack_tokens`).

A worker opens the link and says ``Join``; the gateway says ``Hello``; the worker says ``Ready``, and again whenever
its role changes. A robot lane (docs/serving.md) says ``LaneReady``; every ``ContextBatch`` it takes is answered by one
``Contexts`` of the same number, in the order taken, unless the lane ends.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, field

from vla_cloud.core.kv_events import KvChange
from vla_cloud.kv_transfer.layout import KvLayout

# The whole protocol is to be had from here ("as": handed on).
from vla_cloud.pools.lane_messages import ContextAnswer as ContextAnswer
from vla_cloud.pools.lane_messages import ContextBatch as ContextBatch
from vla_cloud.pools.lane_messages import ContextRow as ContextRow
from vla_cloud.pools.lane_messages import Contexts as Contexts
from vla_cloud.pools.lane_messages import LaneReady as LaneReady
from vla_cloud.pools.message_parts import PROTOCOL_VERSION as PROTOCOL_VERSION
from vla_cloud.pools.message_parts import (
    Address,
    Attempt,
    Blocks,
    Count,
    Hash,
    Message,
    Name,
    Reason,
    RequestId,
    Row,
    Seconds,
    Text,
    TokenId,
)
from vla_cloud.pools.message_parts import Code as Code
from vla_cloud.pools.message_parts import Destination as Destination
from vla_cloud.pools.message_parts import Load as Load
from vla_cloud.pools.message_parts import Role as Role
from vla_cloud.pools.message_parts import Work as Work

# gateway -> worker


class Hello(Message, frozen=True, tag="hello"):
    """The gateway's first message. The worker answers with Ready, or with Error (FAILED_PRECONDITION) and ends."""

    version: int
    worker: Name


class Reserve(Message, frozen=True, tag="reserve"):
    """To D: take blocks for the prompt and the first growth, and wait for KV written by ``writer``.

    The lease runs from the arrival of this message, whether the request is queued or not, and is only ever extended.
    """

    request_id: RequestId
    attempt: Attempt
    work: Work
    writer: Name
    lease_s: Seconds


class Prefill(Message, frozen=True, tag="prefill"):
    """To P: compute the prompt, sample the first token, push both to D."""

    request_id: RequestId
    attempt: Attempt
    work: Work
    destination: Destination


class Generate(Message, frozen=True, tag="generate"):
    """To a worker that decodes: compute the prompt and go on decoding. No transfer."""

    request_id: RequestId
    attempt: Attempt
    work: Work


class Abort(Message, frozen=True, tag="abort"):
    """Stop work on this attempt at the next step (chunk) and forget it; answered by Aborted, always."""

    request_id: RequestId
    attempt: Attempt


class WriterDone(Message, frozen=True, tag="writer_done"):
    """To D: whoever was to write into this attempt's blocks never will again (it said so, or its process is dead).

    Blocks in quarantine are free then. Connectors that notice the same by themselves lose nothing by ignoring it;
    unknown attempts are ignored.
    """

    request_id: RequestId
    attempt: Attempt


class LeaseRow(Row, frozen=True):
    """One lease to extend."""

    request_id: RequestId
    attempt: Attempt


class LeaseExtend(Message, frozen=True, tag="lease_extend"):
    """To D: these reservations live at least ``lease_s`` from now; never shortened, unknown ones are ignored."""

    leases: Annotated[list[LeaseRow], Meta(max_length=65536)]
    lease_s: Seconds


class KvSnapshot(Message, frozen=True, tag="kv_snapshot"):
    """KvEvents were lost: the next ones are to begin with CLEARED and list every block of the prefix tree."""


class Ping(Message, frozen=True, tag="ping"):
    """Answered by Pong from the thread that runs the model: it tells that steps are made, not that a process exists."""

    sequence: Count


class Drain(Message, frozen=True, tag="drain"):
    """Refuse new work (UNAVAILABLE), finish what was accepted, then send Drained."""


class Shutdown(Message, frozen=True, tag="shutdown"):
    """End now; whatever is unfinished is lost."""


# worker -> gateway


class Join(Message, frozen=True, tag="join"):
    """First on every link: who connects. ``secret`` is what the gateway gave the process it started."""

    worker: Name
    secret: Annotated[str, Meta(max_length=128)]
    pid: Count


class Ready(Message, frozen=True, tag="ready"):
    """Answer to Hello: the worker can serve.

    Attributes:
        epoch: drawn at random by this process; KV notices of another epoch are void.
        address: where KV is received, opaque; empty for a worker that receives none.
        total_blocks: of the KV pool. max_model_len: prompt and answer, tokens.
        max_running: sequences decoded at once. max_waiting: requests it queues before it refuses.
        eos_token_ids: end an answer of this model. A request that is to end there names them as its stop tokens.
    """

    version: int
    worker: Name
    role: Role
    pid: Count
    epoch: Count
    address: Address
    layout: KvLayout
    total_blocks: Count
    max_model_len: Count
    vocab_size: Count
    max_running: Count
    max_waiting: Count
    eos_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = field(default_factory=list)


class Reserved(Message, frozen=True, tag="reserved"):
    """D holds blocks; see :class:`Destination`, which the gateway makes of this and Ready.

    ``cached_tokens``: at the start of the prompt, already in D's prefix tree (whole blocks); they need no push.
    """

    request_id: RequestId
    attempt: Attempt
    token: Annotated[str, Meta(min_length=1, max_length=128)]
    first_block: Count
    blocks: Blocks
    cached_tokens: Count


class Refused(Message, frozen=True, tag="refused"):
    """The work was not begun and nothing is held for it. ``retry_after_s``: 0 if waiting does not help."""

    request_id: RequestId
    attempt: Attempt
    code: Code
    message: Text
    retry_after_s: Seconds = 0.0


class Prefilled(Message, frozen=True, tag="prefilled"):
    """P has computed and pushed all KV and the completion notice; P's part is over. The first token comes from D."""

    request_id: RequestId
    attempt: Attempt
    cached_tokens: Count
    pushed_bytes: Count


class PushFailed(Message, frozen=True, tag="push_failed"):
    """P could not hand the KV over (D gone, other layout, deadline); it writes nothing more."""

    request_id: RequestId
    attempt: Attempt
    code: Code
    message: Text


class TokenRow(Row, frozen=True):
    """New tokens of one request.

    ``position`` of the first counts from the start of the prompt, so that a gap or a repeat is seen. A stop token that
    ended the answer is among the tokens. Log-probabilities are empty unless asked for.
    """

    request_id: RequestId
    attempt: Attempt
    position: Count
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)]
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[TokenId, float]]] = field(default_factory=list)


class Tokens(Message, frozen=True, tag="tokens"):
    """The tokens of one step, all requests."""

    rows: Annotated[list[TokenRow], Meta(min_length=1, max_length=65536)]


class Finished(Message, frozen=True, tag="finished"):
    """The answer is complete; follows the Tokens that hold its last token.

    ``cached_tokens``: prompt tokens not computed for this attempt, by any worker (for D: as P tells in its notice).
    """

    request_id: RequestId
    attempt: Attempt
    reason: Reason
    generated_tokens: Count
    cached_tokens: Count = 0
    preemptions: Count = 0


class Aborted(Message, frozen=True, tag="aborted"):
    """Nothing of this attempt is left here, save blocks in quarantine; nothing more is written or sent for it."""

    request_id: RequestId
    attempt: Attempt


class Error(Message, frozen=True, tag="error"):
    """Work that was begun has failed; its blocks are back. Without ``request_id``: the worker as a whole, which ends.

    UNAVAILABLE, INTERNAL and DEADLINE_EXCEEDED of a transfer may be tried again elsewhere; ``transfer`` says that KV
    did not arrive, so that the fault may be the writer's.
    """

    code: Code
    message: Text
    request_id: Annotated[str, Meta(max_length=128)] = ""
    attempt: Attempt = 0
    transfer: bool = False


class KvEventRow(Row, frozen=True):
    """One change of the prefix tree, as :class:`vla_cloud.core.kv_events.KvEvent` without its number."""

    change: KvChange
    block_hash: Hash = b""
    parent_hash: Hash = b""


class KvEvents(Message, frozen=True, tag="kv_events"):
    """Changes of the prefix tree; ``first_sequence`` is that of the first row, a gap means that events were lost."""

    first_sequence: Count
    rows: Annotated[list[KvEventRow], Meta(max_length=65536)]


class Pong(Message, frozen=True, tag="pong"):
    """Answer to Ping."""

    sequence: Count
    load: Load


class Drained(Message, frozen=True, tag="drained"):
    """Nothing accepted is left; sent once after Drain."""


ToWorker: TypeAlias = (
    Hello
    | Reserve
    | Prefill
    | Generate
    | Abort
    | WriterDone
    | LeaseExtend
    | KvSnapshot
    | ContextBatch
    | Ping
    | Drain
    | Shutdown
)
ToGateway: TypeAlias = (
    Join
    | Ready
    | Reserved
    | Refused
    | Prefilled
    | PushFailed
    | Tokens
    | Finished
    | Aborted
    | Error
    | KvEvents
    | LaneReady
    | Contexts
    | Pong
    | Drained
)
