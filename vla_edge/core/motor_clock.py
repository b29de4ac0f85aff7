"""Ticks of the motor clock at absolute instants ``start + k period``: no drift, no bursts."""

from __future__ import annotations


class MotorClock:
    """Arithmetic of deadlines. It reads no clock: whoever waits passes instants in.

    A tick whose deadline has passed by a whole period is not made up for: it is skipped and counted, and the next
    command is sent at the next deadline of the same grid.

    Attributes:
        missed: deadlines that passed without a command.
    """

    def __init__(self, period_ns: int, start_ns: int) -> None:
        """Tick 0 is due at ``start_ns``.

        Raises:
            ValueError: period not positive.
        """
        if period_ns <= 0:
            raise ValueError(f"period must be positive, got {period_ns} ns")
        self.period_ns = period_ns
        self.start_ns = start_ns
        self.missed = 0

    def deadline_ns(self, tick: int) -> int:
        """Instant at which a tick is due."""
        return self.start_ns + tick * self.period_ns

    def tick_at(self, now_ns: int) -> int:
        """The newest tick whose deadline is not after ``now_ns``."""
        return (now_ns - self.start_ns) // self.period_ns

    def on_wake(self, due_tick: int, now_ns: int) -> int:
        """Tick to serve after waking for ``due_tick``: that one, or a later one if whole periods were overslept."""
        tick = max(due_tick, self.tick_at(now_ns))
        self.missed += tick - due_tick
        return tick

    def after(self, tick: int, now_ns: int) -> int:
        """Tick to wait for next, after the work of ``tick`` ended at ``now_ns``: the first deadline still ahead.

        Skipped ones are counted as missed.
        """
        following = max(tick + 1, self.tick_at(now_ns) + 1)
        self.missed += following - tick - 1
        return following
