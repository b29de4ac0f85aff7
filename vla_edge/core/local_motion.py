"""Motions that the robot plans itself, without the cloud: to its ready pose, and to a stand where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from vla_edge.core.braking import stop_trajectory
from vla_edge.core.joint_limits import JointLimits

Array = npt.NDArray[np.float64]

# Largest speed, acceleration and jerk of 10 x³ - 15 x⁴ + 6 x⁵ over unit distance and time.
_PEAK_SPEED: Final = 15.0 / 8.0
_PEAK_ACCELERATION: Final = 10.0 / 3.0**0.5
_PEAK_JERK: Final = 60.0


class PointToPoint:
    """Minimum-jerk motion of all joints together from rest to rest.

    Attributes:
        duration_s: the shortest at which every joint stays below ``share`` of its limits.
    """

    def __init__(self, start: Array, goal: Array, limits: JointLimits, share: float = 0.5,
                 min_duration_s: float = 0.2) -> None:
        """Plan.

        Args:
            start, goal: float64[n], rad (closure).
            limits: of the joints.
            share: fraction of velocity, acceleration and jerk limit used, in (0, 1].
            min_duration_s: even a tiny motion takes this long.
        """
        self._start, self._way = start.copy(), goal - start
        way = np.abs(self._way)
        times = (way * _PEAK_SPEED / (share * limits.velocity),
                 np.sqrt(way * _PEAK_ACCELERATION / (share * limits.acceleration)),
                 np.cbrt(way * _PEAK_JERK / (share * limits.jerk)))
        self.duration_s = max(min_duration_s, *(float(t.max()) for t in times))

    def at(self, times_s: Array) -> Array:
        """Positions float64[m, n] at times since the start; before and after it stands."""
        x = np.clip(times_s / self.duration_s, 0.0, 1.0).reshape(-1, 1)
        return np.asarray(self._start + self._way * (x**3 * (10.0 - 15.0 * x + 6.0 * x * x)))


def stand(position: Array, velocity: Array, acceleration: Array, limits: JointLimits, period_s: float,
          ticks: int) -> Array:
    """Positions float64[ticks, n] of the fastest stop from the present command, then at rest.

    Args:
        position, velocity, acceleration: float64[n], present command.
        limits, period_s: as everywhere.
        ticks: rows.
    """
    offsets, _, _ = stop_trajectory(velocity, acceleration, limits.acceleration, limits.jerk, period_s, ticks)
    return np.asarray(position + offsets[1:])


HOME_PHRASES: Final[tuple[str, ...]] = ("go home", "home", "ready", "go to the ready pose")


def is_home_phrase(normalised: str, phrases: Sequence[str] = HOME_PHRASES) -> bool:
    """The instruction asks for the ready pose."""
    return normalised in phrases
