"""Time. The only file that reads a clock or sleeps; everything else is handed a :class:`Clock`.

Control uses the monotonic clock alone: the wall clock jumps when NTP or an operator sets it.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol, runtime_checkable

NS_PER_S = 1_000_000_000


@runtime_checkable
class Clock(Protocol):
    """A source of time and a way to wait for it."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary instant; never goes back, and equal in all processes of a host."""

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Return at or after the deadline of :meth:`monotonic_ns`; at once if it has passed."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970 UTC, for logs, file names and ROS source stamps only."""


class SystemClock:
    """The host's clocks."""

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC in nanoseconds."""
        return time.monotonic_ns()

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Sleep to an absolute deadline; wakes late by the scheduler's latency, never early."""
        while (remaining_ns := deadline_ns - time.monotonic_ns()) > 0:
            time.sleep(remaining_ns / NS_PER_S)

    def wall_ns(self) -> int:
        """Wall clock in nanoseconds."""
        return time.time_ns()


class ManualClock:
    """A clock that moves when a test says so; waiters in other threads wake when it reaches their deadline."""

    def __init__(self, start_ns: int = 0, wall_ns: int = 1_700_000_000 * NS_PER_S) -> None:
        """Start at ``start_ns``; the wall clock is ``wall_ns`` at monotonic 0."""
        self._now_ns = start_ns
        self._wall_at_zero_ns = wall_ns
        self._changed = threading.Condition()

    def monotonic_ns(self) -> int:
        """The set time."""
        with self._changed:
            return self._now_ns

    def wall_ns(self) -> int:
        """The set wall time."""
        return self._wall_at_zero_ns + self.monotonic_ns()

    def advance_ns(self, delta_ns: int) -> None:
        """Move forward; negative values raise ValueError, as a monotonic clock never goes back."""
        if delta_ns < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-delta_ns} ns")
        with self._changed:
            self._now_ns += delta_ns
            self._changed.notify_all()

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Wait until another thread has advanced the clock to the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._now_ns >= deadline_ns)


class SteppedClock(ManualClock):
    """A manual clock whose sleeps advance it: a single-threaded test runs a loop at full speed."""

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Jump to the deadline."""
        self.advance_ns(max(0, deadline_ns - self.monotonic_ns()))


def sleep_s(clock: Clock, duration_s: float) -> None:
    """Sleep for a duration on the given clock."""
    clock.sleep_until_ns(clock.monotonic_ns() + round(duration_s * NS_PER_S))
