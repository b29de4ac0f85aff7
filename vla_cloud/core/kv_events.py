"""News of a worker's prefix tree for a router: which blocks it holds, in numbered events of bounded backlog."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class KvChange(enum.Enum):
    """What happened to a block."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # forget everything of this worker; a list of what it holds may follow


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One change. ``sequence`` rises by 1 per event; a gap means lost events: ask for a snapshot.

    ``block_hash`` and ``parent_hash`` are chained SHA-256 (``prefix_key.block_hashes``), empty for CLEARED.
    """

    sequence: int
    change: KvChange
    block_hash: bytes = b""
    parent_hash: bytes = b""


class KvEventLog:
    """Events not drained yet. When nobody drains, the backlog is replaced by CLEARED and what is held at the drain."""

    def __init__(self, held: Callable[[], Iterable[tuple[bytes, bytes]]], backlog: int = 65536) -> None:
        """``held`` lists (block hash, parent hash) of all stored blocks, parents first."""
        self._held = held
        self._backlog = backlog
        self._pending: deque[tuple[KvChange, bytes, bytes]] = deque()
        self._overflowed = False
        self._next = 0

    def note(self, change: KvChange, block_hash: bytes = b"", parent_hash: bytes = b"") -> None:
        """Add one event."""
        if self._overflowed:
            return
        if len(self._pending) >= self._backlog:
            self._pending.clear()
            self._overflowed = True
            return
        self._pending.append((change, block_hash, parent_hash))

    def snapshot(self) -> None:
        """Let the next drain begin with CLEARED and list everything held: for a router that has lost events."""
        self._pending.clear()
        self._overflowed = True

    def drain(self) -> list[KvEvent]:
        """All events since the last drain, numbered."""
        changes: Iterable[tuple[KvChange, bytes, bytes]] = self._pending
        if self._overflowed:
            held = [(KvChange.STORED, block_hash, parent_hash) for block_hash, parent_hash in self._held()]
            changes = [(KvChange.CLEARED, b"", b""), *held]
        events = [KvEvent(self._next + i, *change) for i, change in enumerate(changes)]
        self._next += len(events)
        self._pending.clear()
        self._overflowed = False
        return events
