"""Pure parts of the real-time robot: the pacing of its physics and the gate for the commands it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vla_common.metrics import Counters

NS_PER_S: Final = 1_000_000_000
Array = npt.NDArray[np.float64]


class Pacer:
    """Absolute deadlines ``start + k period``; physics that falls behind catches up, within reason.

    A step that is late is made up for at once, since the simulated world should not lose time. A lag beyond
    ``max_lag_ns`` is given up instead (*slip*): the grid moves, and the world is that much behind real time.

    Attributes:
        step: index of the next step.
        slips, slipped_ns: how often and how much the grid moved.
        worst_lag_ns: largest lag seen.
    """

    def __init__(self, period_ns: int, max_lag_ns: int, start_ns: int) -> None:
        """Step 0 is due at ``start_ns``."""
        if period_ns <= 0 or max_lag_ns < period_ns:
            raise ValueError(f"period {period_ns} ns must be positive and at most max_lag {max_lag_ns} ns")
        self.period_ns = period_ns
        self.max_lag_ns = max_lag_ns
        self.step = 0
        self.slips = 0
        self.slipped_ns = 0
        self.worst_lag_ns = 0
        self._start_ns = start_ns

    def deadline_ns(self) -> int:
        """When the next step is due."""
        return self._start_ns + self.step * self.period_ns

    def begin(self, now_ns: int) -> int:
        """The next step begins now; returns by how much the grid slipped, usually 0."""
        lag_ns = max(0, now_ns - self.deadline_ns())
        self.worst_lag_ns = max(self.worst_lag_ns, lag_ns)
        slip_ns = lag_ns if lag_ns > self.max_lag_ns else 0
        if slip_ns:
            self._start_ns += slip_ns
            self.slips += 1
            self.slipped_ns += slip_ns
        self.step += 1
        return slip_ns


@dataclass(frozen=True)
class GateReport:
    """A change worth telling: commands stopped (``is_timed_out``) or came back."""

    is_timed_out: bool
    after_s: float


class CommandGate:
    """What a robot's driver does with joint commands: checks each, holds the last good one when they stop.

    Refusals are counted by name: ``wrong_names``, ``wrong_width``, ``not_finite``, ``stale``, and whatever the wire
    adds through :meth:`refuse`.
    """

    def __init__(self, names: Sequence[str], hold: Array, timeout_s: float) -> None:
        """Hold ``hold`` (rad; gripper: closure) until a command comes."""
        self.names = tuple(names)
        self.command = np.array(hold, dtype=np.float64)
        self.accepted = 0
        self.timeouts = 0
        self.refused = Counters("wrong_names", "wrong_width", "not_finite", "stale")
        self._timeout_ns = round(timeout_s * NS_PER_S)
        self._last_ns: int | None = None
        self._is_timed_out = False

    def refuse(self, cause: str) -> None:
        """Count a command that could not even be read."""
        self.refused.add(cause)

    def offer(self, message: Any, stamp_ns: int, now_ns: int) -> bool:
        """Take a ``JointState`` command unless something is wrong with it; returns whether it was taken."""
        cause = self._cause(message, stamp_ns, now_ns)
        if cause:
            self.refused.add(cause)
            return False
        self.command = np.array(message.position, dtype=np.float64)
        self.accepted += 1
        self._last_ns = now_ns
        return True

    def _cause(self, message: Any, stamp_ns: int, now_ns: int) -> str:
        if tuple(message.name) != self.names:
            return "wrong_names"
        if len(message.position) != len(self.names):
            return "wrong_width"
        if not np.isfinite(message.position).all():
            return "not_finite"
        return "stale" if now_ns - stamp_ns > self._timeout_ns else ""

    def check(self, now_ns: int) -> GateReport | None:
        """Call every tick; a report when commands have just stopped or come back."""
        if self._last_ns is None:
            return None
        silent_ns = now_ns - self._last_ns
        is_timed_out = silent_ns > self._timeout_ns
        if is_timed_out == self._is_timed_out:
            return None
        self._is_timed_out = is_timed_out
        self.timeouts += is_timed_out
        return GateReport(is_timed_out, silent_ns / NS_PER_S)

    @property
    def is_timed_out(self) -> bool:
        """True while the last position is held for want of commands."""
        return self._is_timed_out


class Due:
    """Every n-th tick, with an offset so that several such jobs do not fall on one tick."""

    def __init__(self, base_hz: float, rate_hz: float, offset: int = 0) -> None:
        """``rate_hz`` must divide ``base_hz``."""
        every = base_hz / rate_hz
        if rate_hz <= 0 or every != round(every):
            raise ValueError(f"a rate of {rate_hz:g} Hz does not divide {base_hz:g} Hz")
        self._every = round(every)
        self._offset = offset % self._every

    def __call__(self, tick: int) -> bool:
        """True when the job is due at this tick."""
        return tick % self._every == self._offset


def is_at_home(measured: Array, home: Array, tolerance_rad: float, tolerance_closure: float) -> bool:
    """True when all arm joints and the gripper (last entry) are within their tolerances of ``home``."""
    error = np.abs(measured - home)
    return bool((error[:-1] <= tolerance_rad).all() and error[-1] <= tolerance_closure)
