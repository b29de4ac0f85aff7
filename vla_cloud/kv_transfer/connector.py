"""What the engine sees of a KV transfer, whichever way the bytes travel.

Life of one transfer, D being the receiver and P the sender:

1. D: ``expect(Reservation)``; its blocks belong to the transfer until Arrived, or until they are given back as below.
2. P: ``open(token, address)`` as soon as it knows; D grants the token's blocks and from then on *a writer may write*.
3. P: ``push`` per layer or per chunk, then ``finish`` with the first token; after ``Pushed`` P's own blocks are free.
4. D: ``poll`` gives Arrived after notice, epoch, count and checksum agree; only then may the blocks be read.

Any other end gives the blocks back by one rule. ``Broken.writer_gone`` or the answer of ``cancel`` says whether a
writer may still touch them: True, they are free at once; False, they go into quarantine until ``WriterGone``
for the token comes out of ``poll``, which happens when P acknowledges, or its process is dead.

All calls come from one thread (the engine's) and none of them waits for the network, except ``connect`` and ``close``.
Receivers and senders have threads of their own for the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from vla_cloud.kv_transfer.layout import KvLayout


class TransferError(RuntimeError):
    """A transfer cannot go on; another receiver or a new prefill can."""


class PeerUnreachable(TransferError):
    """No answer within the deadline, or the link was cut."""


class PeerRefused(TransferError):
    """The peer answered and will not: wrong secret, not a worker, too many links."""


class Verify(str, Enum):
    """What D checks before blocks become readable; notice, epoch, version and the count of pieces always.

    FULL: D reads all the bytes back from its own memory and compares their checksum with that of the bytes P read.
    NOTICE: trust the notice, as RDMA transfers onto a GPU do.
    """

    FULL = "full"
    NOTICE = "notice"


class Cause(str, Enum):
    """Why a transfer ended without KV."""

    LAYOUT = "layout"          # sender: the hand-shake found another layout
    UNREACHABLE = "unreachable"  # sender: no answer within the deadline, or the link was cut
    REFUSED = "refused"        # sender: D knows no such reservation (late, cancelled, other epoch), or the wrong secret
    REVOKED = "revoked"        # sender: D cancelled the reservation
    DEADLINE = "deadline"      # sender: not done in time
    PEER_DEAD = "peer_dead"    # receiver: the writer's process ended or its link was cut
    ABORTED = "aborted"        # receiver: the writer gave up
    CHECKSUM = "checksum"      # receiver: the bytes in the blocks are not those that were sent
    INCOMPLETE = "incomplete"  # receiver: the notice came but pieces are missing
    FORBIDDEN = "forbidden"    # receiver: the writer named blocks or layers outside the reservation


@dataclass(frozen=True)
class Reservation:
    """Blocks of D that one transfer must fill, all layers of each; room for growth is not part of it.

    Attributes:
        token: unguessable name, 1 to 128 characters; a token is used once.
        blocks: ids in D's pool, in the order of the sequence.
        epoch: rises with each use of blocks, so that notices of an earlier use are told apart.
    """

    token: str
    blocks: tuple[int, ...]
    epoch: int


@dataclass(frozen=True)
class Arrived:
    """All KV of the token is in its blocks, verified; they may be read. ``payload`` is what ``finish`` was given."""

    token: str
    epoch: int
    payload: bytes
    num_bytes: int
    elapsed_ns: int
    """From the grant to the verified arrival."""
    verify_ns: int = 0
    """Part of it that read the blocks back."""


@dataclass(frozen=True)
class Broken:
    """The token's transfer ended without KV: its blocks hold nothing. See the module on ``writer_gone``."""

    token: str
    cause: Cause
    detail: str
    writer_gone: bool


@dataclass(frozen=True)
class WriterGone:
    """Nobody can write to the token's blocks any more; comes once, only after an end with a writer still about."""

    token: str


@dataclass(frozen=True)
class Pushed:
    """The sender's part is done and its blocks are no longer read. ``elapsed_ns`` runs from the first push."""

    token: str
    num_bytes: int
    elapsed_ns: int


@dataclass(frozen=True)
class Failed:
    """The sender gave up; nothing more is written for the token and its local blocks are no longer read."""

    token: str
    cause: Cause
    detail: str


@dataclass
class ReceiverCounters:
    """Totals since start, for metrics."""

    arrived: int = 0
    broken: int = 0
    cancelled: int = 0
    late: int = 0
    """Signals for reservations that were cancelled, over or never made: ignored."""
    refused_links: int = 0
    forbidden: int = 0
    bytes_arrived: int = 0


class KvReceiver(Protocol):
    """D's side, over D's pool."""

    @property
    def address(self) -> str:
        """Where a sender goes, with the secret that lets it in: hand it to P over a trusted channel, log it nowhere."""
        ...

    @property
    def counters(self) -> ReceiverCounters:
        """Totals since start."""
        ...

    def expect(self, reservation: Reservation) -> None:
        """Accept a writer for these blocks. Raises ValueError: token in use, blocks outside the pool or named twice."""
        ...

    def cancel(self, token: str) -> bool:
        """End it. True: nobody can write to its blocks (also if the token is unknown). False: quarantine them."""
        ...

    def poll(self) -> list[Arrived | Broken | WriterGone]:
        """What happened since the last call, in order. Nothing comes for a token after ``cancel`` but WriterGone."""
        ...

    def writer_gone(self, token: str) -> bool:
        """Whether nobody can write to the token's blocks: as WriterGone says, without waiting for the event."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while ``poll`` has something, for a selector."""
        ...

    def close(self) -> None:
        """Cut all links and let go of the memory. Safe to call twice."""
        ...


class KvSender(Protocol):
    """P's side, over P's pool."""

    def connect(self, address: str) -> None:
        """Meet a receiver now, within the connect deadline; ``open`` does the same in the background.

        Raises:
            LayoutMismatch: names the field.
            PeerUnreachable: nobody there, or no answer in time.
            PeerRefused: wrong secret, or not one of us.
        """
        ...

    def open(self, token: str, address: str, deadline_ns: int) -> None:
        """Begin a transfer; ask D for its grant. ``deadline_ns`` (monotonic) ends it with Failed if not done."""
        ...

    def push(self, token: str, layers: range, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        """Send these layers of these blocks, each piece once; the local blocks must not change until Pushed or Failed.

        Raises:
            ValueError: layers or local blocks outside the pool, lists of different length, token not open.
        """
        ...

    def finish(self, token: str, payload: bytes) -> None:
        """All pieces were pushed: send the notice with their checksum. ``payload``: at most 64 KiB."""
        ...

    def abort(self, token: str) -> None:
        """Stop. After this returns nothing more is written for the token and its local blocks are not read.

        No event follows. Unknown tokens are ignored.
        """
        ...

    def poll(self) -> list[Pushed | Failed]:
        """What happened since the last call, in order; one event per token."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while ``poll`` has something, for a selector."""
        ...

    def close(self) -> None:
        """Abort everything and cut all links. Safe to call twice."""
        ...


__all__ = ["Arrived", "Broken", "Cause", "Failed", "KvLayout", "KvReceiver", "KvSender", "PeerRefused",
           "PeerUnreachable", "Pushed", "ReceiverCounters", "Reservation", "TransferError", "Verify", "WriterGone"]
