"""Keeps the index in step with each worker's numbered events: lost ones are noticed, and a list of all is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from vla_cloud.core.kv_events import KvChange
from vla_cloud.core.router.prefix_index import KvRow, PrefixIndex
from vla_common.clock import NS_PER_S
from vla_common.metrics import Counters


class _Source:
    __slots__ = ("next", "lost", "asked_ns")

    def __init__(self) -> None:
        self.next = 0
        self.lost = False  # events are missing: only a CLEARED makes what follows it whole
        self.asked_ns: int | None = None


class EventFeed:
    """Events in, per worker; says when a snapshot is to be asked for.

    After a gap the index keeps what it knew of the worker, as a guess, until the snapshot: CLEARED and all that is held
    (:class:`vla_cloud.core.kv_events.KvEventLog`). Events that come before it are counted in and not applied.
    """

    def __init__(self, index: PrefixIndex, retry_s: float, counters: Counters | None = None) -> None:
        """Counts ``event_gaps``, ``events_repeated``, ``events_ignored``, ``snapshots_asked``, ``snapshots_taken``."""
        self.counters = Counters() if counters is None else counters
        self._index, self._retry_ns = index, round(retry_s * NS_PER_S)
        self._sources: dict[str, _Source] = {}

    def add(self, worker: str, capacity: int) -> None:
        """A worker whose events begin with number 0; nothing changes if it is known."""
        self._index.add(worker, capacity)
        self._sources.setdefault(worker, _Source())

    def remove(self, worker: str) -> None:
        """It is gone, and all it held."""
        self._index.remove(worker)
        self._sources.pop(worker, None)

    def take(self, worker: str, first_sequence: int, rows: Sequence[KvRow], now_ns: int) -> bool:
        """Apply events; ``first_sequence`` is the number of the first row.

        Returns:
            True: ask the worker for a snapshot.
        """
        source = self._sources.get(worker)
        if source is None:
            self.counters.add("events_ignored", len(rows))
            return False
        end = first_sequence + len(rows)
        if first_sequence > source.next:
            self.counters.add("event_gaps")
            source.lost = True
        elif first_sequence < source.next:
            self.counters.add("events_repeated", min(len(rows), source.next - first_sequence))
            rows = rows[source.next - first_sequence :]
        source.next = max(end, source.next)
        if source.lost:
            if not any(row.change is KvChange.CLEARED for row in rows):
                self.counters.add("events_ignored", len(rows))
                return self._is_due(source, now_ns)
            source.lost, source.asked_ns = False, None
            self.counters.add("snapshots_taken")
        self._index.apply(worker, rows)
        return False

    def _is_due(self, source: _Source, now_ns: int) -> bool:
        if source.asked_ns is not None and now_ns - source.asked_ns < self._retry_ns:
            return False
        source.asked_ns = now_ns
        self.counters.add("snapshots_asked")
        return True
