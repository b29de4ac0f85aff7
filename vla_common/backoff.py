"""When a process that ended is started again: later each time, soon again after it ran for a while."""

from __future__ import annotations

from dataclasses import dataclass

from vla_common.clock import NS_PER_S


@dataclass(slots=True)
class Backoff:
    """The delay doubles from ``minimum_s`` to ``maximum_s``; a life of ``reset_s`` begins it anew."""

    minimum_s: float
    maximum_s: float
    reset_s: float
    delay_s: float = 0.0
    started_ns: int = 0
    due_ns: int | None = None

    def started(self, now_ns: int) -> None:
        """The process was started."""
        self.started_ns, self.due_ns = now_ns, None

    def ended(self, now_ns: int) -> float:
        """The process ended; returns the delay until its next start, seconds."""
        lived_s = (now_ns - self.started_ns) / NS_PER_S
        doubled_s = min(max(2.0 * self.delay_s, self.minimum_s), self.maximum_s)
        self.delay_s = self.minimum_s if lived_s >= self.reset_s else doubled_s
        self.due_ns = now_ns + round(self.delay_s * NS_PER_S)
        return self.delay_s
