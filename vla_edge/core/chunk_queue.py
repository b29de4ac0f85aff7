"""The trajectory ahead, one row per motor tick, in two buffers: one is read while the other is written; then swap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vla_edge.core.chunk import ActionChunk, Reject
from vla_edge.core.ensembler import CAPACITY, MergeRule

Array = npt.NDArray[np.float64]


class ChunkQueue:
    """Holds what is planned for ticks ``first_tick .. last_tick``.

    A chunk contributes only its part from the next tick on; the newest chunk decides how far the plan reaches. Order
    and repetition of chunks are the gate's business (:class:`vla_edge.core.chunk.ChunkGate`). A refused chunk changes
    nothing. Not thread-safe.
    """

    def __init__(self, joints: int, rule: MergeRule, period_s: float, capacity: int = CAPACITY) -> None:
        """Reserve memory for ``capacity`` ticks of ``joints`` values; ``rule`` belongs to this queue alone."""
        self._buffers = [np.zeros((capacity, joints)), np.zeros((capacity, joints))]
        self._active = 0
        self._rule = rule
        self._capacity = capacity
        self._inverse_period = 1.0 / period_s
        self.first_tick = 0
        self.last_tick = -1

    @property
    def empty(self) -> bool:
        """Nothing is planned."""
        return self.last_tick < self.first_tick

    def clear(self) -> None:
        """Forget the plan and, with it, what the rule remembers."""
        self._rule.reset()
        self.first_tick, self.last_tick = 0, -1

    def covers(self, tick: int) -> bool:
        """The plan has a row for this tick."""
        return self.first_tick <= tick <= self.last_tick

    def insert(self, chunk: ActionChunk, next_tick: int, still_since_tick: int | None = None) -> Reject | None:
        """Merge an admitted chunk.

        Args:
            chunk: passed the gate.
            next_tick: tick of the next command to be sent.
            still_since_tick: the command has not changed since this tick, None if it moves. A first chunk that starts
                from that unchanged command lost nothing by coming late, so it starts with its first step now.

        Returns:
            None, or why the chunk was refused: ALL_PAST; GAP: it would leave one after the present plan, or it reaches
            further ahead than the queue's memory.
        """
        first = chunk.first_tick
        if not self.covers(next_tick) and still_since_tick is not None and still_since_tick <= chunk.base_tick:
            first = max(first, next_tick)
        last = first + len(chunk.positions) - 1
        start = max(first, next_tick)
        if last < next_tick:
            return Reject.ALL_PAST
        planned = self.covers(next_tick)
        if start > (self.last_tick if planned else next_tick - 1) + 1 or last - next_tick + 2 > self._capacity:
            return Reject.GAP
        self._merge(chunk.positions[start - first:], start, last, next_tick)
        return None

    def _merge(self, new: Array, start: int, last: int, next_tick: int) -> None:
        source, target = self._buffers[self._active], self._buffers[1 - self._active]
        # One past row is kept: the velocity at the last planned tick is a backward difference.
        planned = self.covers(next_tick)
        first = max(self.first_tick, next_tick - 1) if planned else start
        kept = start - first
        if kept:
            target[:kept] = source[first - self.first_tick:start - self.first_tick]
        overlap = max(0, min(self.last_tick, last) - start + 1) if planned else 0
        offset = start - self.first_tick
        old = source[offset:offset + overlap] if overlap else source[:0]
        self._rule.merge(start, old, new, target[kept:last - first + 1])
        self._active = 1 - self._active
        self.first_tick, self.last_tick = first, last

    def sample(self, tick: int, position: Array, velocity: Array) -> bool:
        """Copy the plan for a tick.

        Args:
            tick: motor tick.
            position: float64[n], overwritten; velocity: float64[n], overwritten with the plan's finite difference.

        Returns:
            False if the plan does not cover the tick; then nothing is written.
        """
        if not self.covers(tick):
            return False
        rows = self._buffers[self._active]
        at = tick - self.first_tick
        position[:] = rows[at]
        if tick < self.last_tick:
            np.subtract(rows[at + 1], rows[at], out=velocity)
        elif at > 0:
            np.subtract(rows[at], rows[at - 1], out=velocity)
        else:
            velocity[:] = 0.0
        velocity *= self._inverse_period
        return True

    def ahead(self, tick: int, out: Array) -> int:
        """Copy the plan from a tick on.

        Args:
            tick: motor tick of row 0 of ``out``.
            out: float64[m, n]; as many rows are overwritten as are planned and fit.

        Returns:
            Number of rows written; 0 if the plan does not cover the tick.
        """
        if not self.covers(tick):
            return 0
        at = tick - self.first_tick
        count = min(len(out), self.last_tick - tick + 1)
        out[:count] = self._buffers[self._active][at:at + count]
        return count
