"""Limits of a robot's joints: position, velocity, acceleration, jerk; and the pose in which it waits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_RAMP_TICKS = 25
"""Longest ramp from zero to full acceleration, in ticks. It bounds the work of a stop's closed form per tick."""


class LimitsError(ValueError):
    """A robot file that cannot be used; the message names joint, field and remedy."""


@dataclass(frozen=True)
class JointLimits:
    """Limits per joint, in the order of ``names``; arrays are float64[n], read-only.

    Attributes:
        names: joint names; commands, measurements and chunks must carry exactly these, in this order.
        position_lower: rad (gripper: closure, 0 open .. 1 closed).
        position_upper: same unit.
        velocity: largest magnitude, rad/s (gripper: closure/s).
        acceleration: largest magnitude, rad/s² (gripper: closure/s²).
        jerk: largest magnitude, rad/s³ (gripper: closure/s³).
        ready: pose in which the robot waits for work, same units as the positions.
        reentry_gap: a joint measured closer than this to its last command continues from that command when the robot
            is re-armed; a joint farther away starts from where it was measured. Same units as the positions.
    """

    names: tuple[str, ...]
    position_lower: Array
    position_upper: Array
    velocity: Array
    acceleration: Array
    jerk: Array
    ready: Array
    reentry_gap: Array

    def __post_init__(self) -> None:
        """Check every number.

        Raises:
            LimitsError: a number is missing, not finite, out of order or not positive.
        """
        count = len(self.names)
        if count == 0 or len(set(self.names)) != count:
            raise LimitsError(f"joint names must be distinct and at least one, got {self.names}")
        for field in ("position_lower", "position_upper", "velocity", "acceleration", "jerk", "ready", "reentry_gap"):
            values = np.array(getattr(self, field), dtype=np.float64)
            if values.shape != (count,) or not np.isfinite(values).all():
                raise LimitsError(f"{field} needs {count} finite numbers, one for each of {self.names}; got {values}")
            values.setflags(write=False)
            object.__setattr__(self, field, values)
        for field in ("velocity", "acceleration", "jerk", "reentry_gap"):
            self._refuse(getattr(self, field) <= 0.0, f"{field} must be positive")
        self._refuse(self.position_lower >= self.position_upper, "lower must be below upper position limit")
        self._refuse((self.ready < self.position_lower) | (self.ready > self.position_upper),
                     "ready pose must lie inside the position limits")

    def _refuse(self, wrong: npt.NDArray[np.bool_], why: str) -> None:
        if wrong.any():
            bad = [name for name, is_wrong in zip(self.names, wrong, strict=True) if is_wrong]
            raise LimitsError(f"{why}: see {', '.join(bad)} in the robot file")

    def __len__(self) -> int:
        """Number of joints."""
        return len(self.names)

    def check_period(self, period_s: float) -> None:
        """Refuse a tick so short that ramping an acceleration takes unboundedly many ticks.

        Raises:
            LimitsError: acceleration / (jerk x period) exceeds MAX_RAMP_TICKS for some joint.
        """
        if not (math.isfinite(period_s) and period_s > 0.0):
            raise LimitsError(f"period must be positive, got {period_s} s")
        self._refuse(self.acceleration > MAX_RAMP_TICKS * self.jerk * period_s,
                     f"acceleration must be reachable within {MAX_RAMP_TICKS} ticks of {period_s} s: raise jerk or "
                     "lower acceleration")

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> JointLimits:
        """Limits from the content of a ``config/robots/*.yaml`` file.

        Args:
            data: ``joints``: list of mappings with ``name, lower, upper, velocity, acceleration, jerk, ready,
                reentry_gap``;
                ``scale``: mapping with ``velocity, acceleration, jerk``, each in (0, 1], applied to every joint that
                does not say ``scaled: false``.

        Raises:
            LimitsError: a field is missing, unknown or out of range.
        """
        _exact_keys(data, {"joints", "scale"}, {"robot"}, "robot file")
        scale = data["scale"]
        _exact_keys(scale, {"velocity", "acceleration", "jerk"}, set(), "scale")
        for name, value in scale.items():
            if not (isinstance(value, (int, float)) and 0.0 < value <= 1.0):
                raise LimitsError(f"scale.{name} must be in (0, 1], got {value!r}: it may only lower a limit")
        joints: Sequence[Mapping[str, Any]] = data["joints"]
        fields = ("lower", "upper", "velocity", "acceleration", "jerk", "ready", "reentry_gap")
        rows = []
        for joint in joints:
            _exact_keys(joint, {"name", *fields}, {"scaled"}, f"joint {joint.get('name', '?')}")
            factor = {key: float(value) if joint.get("scaled", True) else 1.0 for key, value in scale.items()}
            rows.append([float(joint[field]) * factor.get(field, 1.0) for field in fields])
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(fields)).T
        return cls(tuple(str(joint["name"]) for joint in joints), *columns)


def _exact_keys(data: Any, required: set[str], optional: set[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise LimitsError(f"{where} must be a mapping, got {type(data).__name__}")
    missing, unknown = required - set(data), set(data) - required - optional
    if missing or unknown:
        raise LimitsError(f"{where}: missing {sorted(missing)}, unknown {sorted(unknown)}; "
                          f"valid keys are {sorted(required | optional)}")
