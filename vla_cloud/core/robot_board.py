"""What is known of each robot right now, for metrics and views: bounded, and forgotten with the robot.

Written by the threads that serve robots, read by the one that shows them; a lock, as all of it is short.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

from vla_cloud.core.distribution import NS_PER_S, Buckets
from vla_common.metrics import RateMeter

ANSWER_S: Final = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
WINDOW_S: Final = 2.0
MAX_TEXT: Final = 200
MAX_CAUSES: Final = 64
_CAPACITY: Final = 256


@dataclass(frozen=True)
class Shield:
    """What a robot says of its shield; see msg/ShieldStatus.msg. ``heard_ns`` is this machine's clock."""

    state: str
    reason: str
    rearm_ready: bool
    missed_ticks: int
    limit_interventions: int
    lateness_p99_s: float
    heard_ns: int

    def row(self, now_ns: int) -> dict[str, Any]:
        """Plain values."""
        return {
            "state": self.state, "reason": self.reason, "rearm_ready": self.rearm_ready,
            "missed_ticks": self.missed_ticks, "limit_interventions": self.limit_interventions,
            "lateness_p99_s": self.lateness_p99_s, "age_s": (now_ns - self.heard_ns) / NS_PER_S,
        }  # fmt: skip


@dataclass
class _Robot:
    observed_ns: int = 0  # newest observation; 0: none yet
    answered_ns: int | None = None  # arrival of the newest observation that was answered
    observations: RateMeter = field(default_factory=lambda: RateMeter(WINDOW_S, _CAPACITY))
    contexts: RateMeter = field(default_factory=lambda: RateMeter(WINDOW_S, _CAPACITY))
    published: int = 0
    replaced: int = 0
    refused: int = 0
    shield: Shield | None = None

    @property
    def heard_ns(self) -> int:
        return max(self.observed_ns, self.shield.heard_ns if self.shield is not None else 0)


class RobotBoard:
    """Rows of at most ``max_robots`` robots; one unheard of for ``forget_after_ns`` loses its row."""

    def __init__(self, *, max_robots: int, forget_after_ns: int) -> None:
        """Nobody is known."""
        self._max_robots, self._forget_after_ns = max_robots, forget_after_ns
        self._robots: dict[str, _Robot] = {}
        self._answer_s = Buckets(ANSWER_S)
        self._lock = threading.Lock()

    def observed(self, robot: str, received_ns: int, replaced: bool) -> None:
        """An observation was taken; ``replaced``: for one that still waited. Only of robots that are served."""
        with self._lock:
            row = self._robots.get(robot)
            if row is None:
                self._make_room(received_ns)
                row = self._robots[robot] = _Robot()
            row.observed_ns = received_ns
            row.observations.record(received_ns)
            row.replaced += replaced

    def answered(self, robot: str, received_ns: int, now_ns: int) -> None:
        """A context was published; ``received_ns``: of its observation."""
        with self._lock:
            self._answer_s.add((now_ns - received_ns) / NS_PER_S)
            row = self._robots.get(robot)
            if row is not None:
                row.answered_ns = received_ns
                row.contexts.record(now_ns)
                row.published += 1

    def refused(self, robot: str) -> None:
        """An observation of a robot was refused."""
        with self._lock:
            if robot in self._robots:
                self._robots[robot].refused += 1

    def told(self, robot: str, shield: Shield) -> None:
        """A robot tells of its shield. One that sends no observations has a row while there is room."""
        with self._lock:
            self._forget(shield.heard_ns)
            if robot not in self._robots and len(self._robots) >= self._max_robots:
                return
            self._robots.setdefault(robot, _Robot()).shield = shield

    def rows(self, now_ns: int) -> list[dict[str, Any]]:
        """Plain values by robot name.

        ``context_age_s``: from the arrival of the newest observation that was answered, None if none was; it grows
        while contexts fail to come. ``observation_age_s``: since the newest observation. Rates over two seconds.
        """
        with self._lock:
            self._forget(now_ns)
            return [self._row(name, robot, now_ns) for name, robot in sorted(self._robots.items())]

    def answer_s(self) -> dict[str, Any]:
        """From an observation's arrival to its context, as ``Buckets.snapshot``."""
        with self._lock:
            return self._answer_s.snapshot()

    def _row(self, name: str, robot: _Robot, now_ns: int) -> dict[str, Any]:
        def age_s(at_ns: int | None) -> float | None:
            return (now_ns - at_ns) / NS_PER_S if at_ns else None

        return {
            "robot": name, "context_age_s": age_s(robot.answered_ns), "observation_age_s": age_s(robot.observed_ns),
            "context_rate_hz": robot.contexts.rate_hz(now_ns),
            "observation_rate_hz": robot.observations.rate_hz(now_ns), "published": robot.published,
            "replaced": robot.replaced, "refused": robot.refused,
            "shield": None if robot.shield is None else robot.shield.row(now_ns),
        }  # fmt: skip

    def _forget(self, now_ns: int) -> None:
        limit_ns = now_ns - self._forget_after_ns
        for name in [name for name, robot in self._robots.items() if robot.heard_ns < limit_ns]:
            del self._robots[name]

    def _make_room(self, now_ns: int) -> None:
        """Of those that are served, the pacer bounds the number; one that only tells of its shield gives way."""
        self._forget(now_ns)
        while len(self._robots) >= self._max_robots:
            del self._robots[min(self._robots, key=lambda name: self._robots[name].observed_ns)]
