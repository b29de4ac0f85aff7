"""D's record of who may write where: the state of each reservation, and the events for the engine.

    expect ─▶ WAITING ─grant─▶ WRITING ─finish─▶ CHECKING ─▶ Arrived | Broken
                 │                │ cancel            │ cancel (the writer has promised: free at once)
                 ▼ free           ▼                   ▼ free
                              QUARANTINED ─ended, link lost─▶ WriterGone

A connector whose receiver does the writing itself (TCP) needs no quarantine: its cancel is final at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vla_cloud.kv_transfer.connector import Arrived, Broken, Cause, ReceiverCounters, Reservation, WriterGone
from vla_common.clock import NS_PER_S, Clock

MAX_TOKEN: Final = 128
Event = Arrived | Broken | WriterGone


class State(Enum):
    """Of one reservation."""

    WAITING = auto()
    WRITING = auto()
    CHECKING = auto()
    QUARANTINED = auto()


@dataclass
class Entry:
    """One reservation. ``lock`` is held while the receiver itself writes into the blocks (TCP)."""

    reservation: Reservation
    written: NDArray[np.bool_]
    """[layers, len(blocks)]: pieces seen by a receiver that does the writing."""
    state: State = State.WAITING
    link: int = -1
    granted_ns: int = 0
    orphan_until_ns: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class EventQueue:
    """Events from any thread for the engine's thread, with a descriptor that is readable while some wait."""

    def __init__(self) -> None:
        """Empty."""
        self._events: deque[object] = deque()
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, event: object) -> None:
        """Append; after close it is dropped."""
        with self._lock:
            if self._fd >= 0:
                self._events.append(event)
                os.eventfd_write(self._fd, 1)

    def take(self) -> list[object]:
        """All, in order."""
        with self._lock:
            if not self._events:
                return []
            os.eventfd_read(self._fd)
            events = list(self._events)
            self._events.clear()
            return events

    def drop(self, token: str) -> None:
        """Forget what was not taken yet of a token."""
        with self._lock:
            self._events = deque(event for event in self._events if getattr(event, "token", None) != token)

    def fileno(self) -> int:
        """For a selector."""
        return self._fd

    def close(self) -> None:
        """Safe to call twice."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Reservations:
    """All reservations of a receiver; any thread may call."""

    def __init__(self, layers: int, num_blocks: int, remote_writer: bool, clock: Clock,
                 orphan_s: float = 60.0) -> None:
        """Empty.

        Args:
            remote_writer: the peer writes into this process's memory; False if the receiver does the writing.
            orphan_s: see :meth:`link_lost`.
        """
        self._orphan_ns = round(orphan_s * NS_PER_S)
        self._layers = layers
        self._num_blocks = num_blocks
        self._remote = remote_writer
        self._clock = clock
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self.events = EventQueue()
        self.counters = ReceiverCounters()

    def expect(self, reservation: Reservation) -> None:
        """WAITING. Raises ValueError."""
        token, blocks = reservation.token, reservation.blocks
        if not 0 < len(token) <= MAX_TOKEN:
            raise ValueError(f"a transfer token has 1 to {MAX_TOKEN} characters, not {len(token)}")
        if not blocks or len(set(blocks)) != len(blocks) or not all(0 <= b < self._num_blocks for b in blocks):
            raise ValueError(f"the blocks of {token!r} are not distinct ids below {self._num_blocks}")
        with self._lock:
            if token in self._entries:
                raise ValueError(f"transfer token {token!r} is in use")
            busy = {b for entry in self._entries.values() for b in entry.reservation.blocks}
            if not busy.isdisjoint(blocks):
                raise ValueError(f"blocks {sorted(busy.intersection(blocks))[:8]} belong to another transfer: a writer "
                                 "may still touch them")
            self._entries[token] = Entry(reservation, np.zeros((self._layers, len(blocks)), bool))

    def grant(self, token: object, link: int) -> Reservation | str:
        """The reservation, now WRITING by this link; or why not."""
        with self._lock:
            entry = self._entries.get(token) if isinstance(token, str) else None
            if entry is None or entry.state is not State.WAITING:
                self.counters.late += 1
                return "no such reservation" if entry is None else "the reservation has a writer, or had one"
            entry.state, entry.link, entry.granted_ns = State.WRITING, link, self._clock.monotonic_ns()
            return entry.reservation

    def writing(self, token: object, link: int) -> Entry | None:
        """The entry if this link may write to it now; None counts as late."""
        with self._lock:
            entry = self._entries.get(token) if isinstance(token, str) else None
            if entry is None or entry.state is not State.WRITING or entry.link != link:
                self.counters.late += 1
                return None
            return entry

    def check(self, token: object, link: int, epoch: object, pieces: object) -> Entry | None:
        """A notice came: CHECKING, and the writer has promised to write no more. None: nothing to check."""
        with self._lock:
            entry = self._entries.get(token) if isinstance(token, str) else None
            if entry is None or entry.link != link or entry.state not in (State.WRITING, State.QUARANTINED):
                self.counters.late += 1
                return None
            if entry.state is State.QUARANTINED:
                self.counters.late += 1
                self._release(entry)
                return None
            entry.state = State.CHECKING
            whole = entry.written.size
            if epoch != entry.reservation.epoch:
                self.broken(entry, Cause.REFUSED, f"notice of epoch {epoch!r}, not {entry.reservation.epoch}")
            elif pieces != whole or not (self._remote or entry.written.all()):
                seen = pieces if self._remote else int(entry.written.sum())
                self.broken(entry, Cause.INCOMPLETE, f"{seen!r} of {whole} pieces were written")
            else:
                return entry
            return None

    def arrived(self, entry: Entry, event: Arrived) -> None:
        """Checked and good. Ignored if cancelled meanwhile."""
        with self._lock:
            if self._remove(entry):
                self.counters.arrived += 1
                self.counters.bytes_arrived += event.num_bytes
                self.events.put(event)

    def broken(self, entry: Entry, cause: Cause, detail: str, writer_gone: bool = True) -> None:
        """Ended without KV. Ignored if cancelled meanwhile."""
        with self._lock:
            token = entry.reservation.token
            if self._entries.get(token) is not entry or entry.state is State.QUARANTINED:
                return
            self.counters.broken += 1
            if writer_gone:
                self._remove(entry)
            else:
                entry.state = State.QUARANTINED
            self.events.put(Broken(token, cause, detail, writer_gone))

    def ended(self, token: object, link: int) -> None:
        """The writer says that nothing more is written."""
        with self._lock:
            entry = self._entries.get(token) if isinstance(token, str) else None
            if entry is None or entry.link != link:
                self.counters.late += 1
            elif entry.state is State.QUARANTINED:
                self._release(entry)
            elif entry.state is State.WRITING:
                self.broken(entry, Cause.ABORTED, "the sender gave up")

    def link_lost(self, link: int, detail: str, writer_gone: bool) -> None:
        """A sender's link ended. ``writer_gone``: so it can write no more; else that holds ``orphan_s`` from now."""
        with self._lock:
            for entry in [e for e in self._entries.values() if e.link == link]:
                if not writer_gone:
                    entry.orphan_until_ns = self._clock.monotonic_ns() + self._orphan_ns
                if entry.state is State.WRITING:
                    self.broken(entry, Cause.PEER_DEAD, detail, writer_gone)
                elif entry.state is State.QUARANTINED and writer_gone:
                    self._release(entry)

    def sweep(self) -> None:
        """Release orphans whose time is over."""
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            for entry in [e for e in self._entries.values() if e.orphan_until_ns and e.orphan_until_ns <= now_ns]:
                self._release(entry)

    @property
    def busy(self) -> bool:
        """Whether any reservation is open."""
        return bool(self._entries)

    def cancel(self, token: str) -> tuple[bool, int]:
        """``(nobody can write, link of the writer to tell or -1)``."""
        with self._lock:
            entry = self._entries.get(token)
            if entry is None:
                self.events.drop(token)
                return True, -1
            if entry.state is State.QUARANTINED:
                return False, -1
            self.counters.cancelled += 1
            writing = entry.state is State.WRITING
            if writing and self._remote:
                entry.state = State.QUARANTINED
                return False, entry.link
            del self._entries[token]
        with entry.lock:  # a receive that is under way into the blocks ends first; none begins after
            return True, entry.link if writing else -1

    def current(self, entry: Entry) -> bool:
        """Whether the entry may still be written to; asked under the entry's lock."""
        return self._entries.get(entry.reservation.token) is entry and entry.state is State.WRITING

    def writer_gone(self, token: str) -> bool:
        """Whether nobody can write to its blocks."""
        with self._lock:
            entry = self._entries.get(token)
            return entry is None or entry.state is State.WAITING

    def _release(self, entry: Entry) -> None:
        if self._remove(entry):
            self.events.put(WriterGone(entry.reservation.token))

    def _remove(self, entry: Entry) -> bool:
        token = entry.reservation.token
        if self._entries.get(token) is not entry:
            return False
        del self._entries[token]
        return True

    def close(self) -> None:
        """Drop all."""
        with self._lock:
            self._entries.clear()
            self.events.close()
