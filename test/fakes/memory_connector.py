"""KvSender and KvReceiver within one process, without threads: nothing happens until the test calls ``Wire.pump``.

One pumped operation is a grant, one piece (a layer of a block) copied, a notice, or an acknowledged cancellation, so a
test stops a transfer at any point. The receiver is of the kind whose peer writes into its memory by itself: cancelling
a granted reservation leaves its blocks in the writer's reach until the writer acknowledges or is dead.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vla_cloud.kv_transfer.connector import (
    Arrived,
    Broken,
    Cause,
    Failed,
    PeerUnreachable,
    Pushed,
    ReceiverCounters,
    Reservation,
    WriterGone,
)


@dataclass
class _Entry:
    reservation: Reservation
    writer: MemorySender | None = None
    cancelled: bool = False


@dataclass
class _Transfer:
    token: str
    address: str
    granted: bool = False
    epoch: int = -1
    pieces: deque[tuple[int, int, int]] = field(default_factory=deque)  # layer, local block, remote block
    written: int = 0
    digest: int = 0
    payload: bytes | None = None


class Wire:
    """All ends of one test."""

    def __init__(self) -> None:
        self.receivers: dict[str, MemoryReceiver] = {}
        self.senders: list[MemorySender] = []
        self._number = 0

    def receiver(self, pool: NDArray[np.uint8]) -> MemoryReceiver:
        self._number += 1
        receiver = MemoryReceiver(f"memory:{self._number}", pool)
        self.receivers[receiver.address] = receiver
        return receiver

    def sender(self, pool: NDArray[np.uint8]) -> MemorySender:
        sender = MemorySender(self, pool)
        self.senders.append(sender)
        return sender

    def pump(self, operations: int = 1 << 30) -> int:
        """Do so many operations at most, each sender in turn; how many were done."""
        done = 0
        while done < operations:
            before = done
            for sender in list(self.senders):
                done += done < operations and sender.operate()
            if done == before:
                break
        return done


class MemorySender:
    """P's side. ``frozen`` stops its operations, ``corrupt`` flips a byte of the next piece it writes."""

    def __init__(self, wire: Wire, pool: NDArray[np.uint8]) -> None:
        self._wire = wire
        self._pool = pool
        self._transfers: dict[str, _Transfer] = {}
        self._acknowledge: deque[tuple[MemoryReceiver, str]] = deque()
        self._events: list[Pushed | Failed] = []
        self.frozen = False
        self.dead = False
        self.corrupt = False
        self.writes = 0

    def connect(self, address: str) -> None:
        if address not in self._wire.receivers:
            raise PeerUnreachable(address)

    def open(self, token: str, address: str, deadline_ns: int) -> None:
        if token in self._transfers:
            raise ValueError(f"{token!r} is open already")
        self._transfers[token] = _Transfer(token, address)

    def push(self, token: str, layers: range, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        if token not in self._transfers or len(local_blocks) != len(remote_blocks):
            raise ValueError(f"{token!r} is not open, or the lists differ")
        pairs = list(zip(local_blocks, remote_blocks, strict=True))
        self._transfers[token].pieces.extend((layer, local, remote) for layer in layers for local, remote in pairs)

    def finish(self, token: str, payload: bytes) -> None:
        if token not in self._transfers:
            raise ValueError(f"{token!r} is not open")
        self._transfers[token].payload = payload

    def abort(self, token: str) -> None:
        transfer = self._transfers.pop(token, None)
        if transfer is not None and transfer.granted and transfer.address in self._wire.receivers:
            self._acknowledge.append((self._wire.receivers[transfer.address], token))
        self._events = [event for event in self._events if event.token != token]

    def poll(self) -> list[Pushed | Failed]:
        events, self._events = self._events, []
        return events

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        for token in list(self._transfers):
            self.abort(token)

    def kill(self) -> None:
        """The process is dead: it writes nothing more, and receivers notice."""
        self.dead = True
        self._transfers.clear()
        self._acknowledge.clear()
        if self in self._wire.senders:
            self._wire.senders.remove(self)
        for receiver in self._wire.receivers.values():
            receiver.writer_died(self)

    def operate(self) -> bool:
        """One operation; False if there is none."""
        if self.frozen or self.dead:
            return False
        if self._acknowledge:
            receiver, token = self._acknowledge.popleft()
            receiver.ended(token, self)
            return True
        for transfer in list(self._transfers.values()):
            receiver = self._wire.receivers.get(transfer.address)
            if receiver is None:
                self._fail(transfer, Cause.UNREACHABLE, "no such receiver")
                return True
            if transfer.granted and receiver.is_cancelled(transfer.token, self):
                self._fail(transfer, Cause.REVOKED, "the receiver cancelled")
                receiver.ended(transfer.token, self)
                return True
            if self._advance(transfer, receiver):
                return True
        return False

    def _advance(self, transfer: _Transfer, receiver: MemoryReceiver) -> bool:
        if not transfer.granted:
            epoch = receiver.grant(transfer.token, self)
            if epoch is None:
                self._fail(transfer, Cause.REFUSED, "no such reservation")
            else:
                transfer.granted, transfer.epoch = True, epoch
        elif transfer.pieces:
            layer, local, remote = transfer.pieces.popleft()
            piece = self._pool[layer, local].copy()
            transfer.digest += zlib.crc32(piece.tobytes(), (layer << 32 | remote) & 0xFFFFFFFF)
            transfer.written += 1
            self.writes += 1
            if self.corrupt:
                piece[0] ^= 1
                self.corrupt = False
            receiver.pool[layer, remote] = piece
        elif transfer.payload is not None:
            del self._transfers[transfer.token]
            receiver.notice(transfer.token, self, transfer.epoch, transfer.written, transfer.digest, transfer.payload)
            self._events.append(Pushed(transfer.token, transfer.written * self._pool.shape[2], 1))
        else:
            return False
        return True

    def _fail(self, transfer: _Transfer, cause: Cause, detail: str) -> None:
        del self._transfers[transfer.token]
        self._events.append(Failed(transfer.token, cause, detail))


class MemoryReceiver:
    """D's side; verifies the checksum of what lies in its own pool."""

    def __init__(self, address: str, pool: NDArray[np.uint8]) -> None:
        self.address = address
        self.pool = pool
        self.counters = ReceiverCounters()
        self._entries: dict[str, _Entry] = {}
        self._events: list[Arrived | Broken | WriterGone] = []

    def expect(self, reservation: Reservation) -> None:
        busy = {block for entry in self._entries.values() for block in entry.reservation.blocks}
        if reservation.token in self._entries or busy & set(reservation.blocks) or not reservation.blocks:
            raise ValueError(f"{reservation.token!r} is in use, or a writer may still touch its blocks")
        self._entries[reservation.token] = _Entry(reservation)

    def cancel(self, token: str) -> bool:
        entry = self._entries.get(token)
        self._events = [event for event in self._events if event.token != token]
        if entry is None:
            return True
        if entry.writer is None:
            del self._entries[token]
            return True
        entry.cancelled = True
        return False

    def poll(self) -> list[Arrived | Broken | WriterGone]:
        events, self._events = self._events, []
        return events

    def writer_gone(self, token: str) -> bool:
        entry = self._entries.get(token)
        return entry is None or entry.writer is None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._entries.clear()

    def inject(self, event: Arrived | Broken | WriterGone) -> None:
        """A signal as it may come late."""
        self._events.append(event)

    def grant(self, token: str, sender: MemorySender) -> int | None:
        entry = self._entries.get(token)
        if entry is None or entry.writer is not None or entry.cancelled:
            return None
        entry.writer = sender
        return entry.reservation.epoch

    def is_cancelled(self, token: str, sender: MemorySender) -> bool:
        entry = self._entries.get(token)
        return entry is None or entry.cancelled or entry.writer is not sender

    def notice(
        self, token: str, sender: MemorySender, epoch: int, written: int, digest: int, payload: bytes
    ) -> None:
        entry = self._entries.pop(token)
        blocks = entry.reservation.blocks
        layers = self.pool.shape[0]
        found = sum(
            zlib.crc32(self.pool[layer, block].tobytes(), (layer << 32 | block) & 0xFFFFFFFF)
            for layer in range(layers)
            for block in blocks
        )
        if written != layers * len(blocks):
            self._events.append(Broken(token, Cause.INCOMPLETE, f"{written} pieces", True))
        elif found != digest:
            self._events.append(Broken(token, Cause.CHECKSUM, "other bytes", True))
        else:
            self._events.append(Arrived(token, epoch, payload, written * self.pool.shape[2], 1))

    def ended(self, token: str, sender: MemorySender) -> None:
        entry = self._entries.pop(token, None)
        if entry is None:
            return
        if entry.cancelled:
            self._events.append(WriterGone(token))
        else:
            self._events.append(Broken(token, Cause.ABORTED, "the sender gave up", True))

    def writer_died(self, sender: MemorySender) -> None:
        for token, entry in list(self._entries.items()):
            if entry.writer is sender:
                del self._entries[token]
                gone = WriterGone(token)
                self._events.append(gone if entry.cancelled else Broken(token, Cause.PEER_DEAD, "dead", True))
