"""The state machine between what the policy wants and what the robot is sent.

States: NOMINAL (a fresh chunk covers the tick) → COASTING (only an older one does; the rest of it is followed) →
BRAKING (nothing covers the tick: the stop of :mod:`vla_edge.core.braking`) → HOLDING (at rest, latched). Only an
explicit re-arm leaves HOLDING; a fresh chunk never does. Whatever the state, one command per step is produced and every
command obeys the limits (:mod:`vla_edge.core.tracking`).

Like stop category 2 of IEC 60204-1 (a controlled stop, power stays on). It is *not* safety-rated: a robot needs its
own protective stop beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.shield_words import REARM_TEXT, REASON_TEXT, EstopInput, Rearm, Reason, State
from vla_edge.core.tracking import JointTracker

__all__ = ["REARM_TEXT", "REASON_TEXT", "EstopInput", "Rearm", "Reason", "Shield", "ShieldConfig", "State"]

Array = npt.NDArray[np.float64]


_KEPT_REASONS: Final = frozenset({Reason.ESTOP, Reason.ESTOP_INPUT, Reason.ESTOP_SILENT, Reason.SHUTDOWN})
"""A stop for one of these that a stall breaks off keeps its reason."""


@dataclass(frozen=True)
class ShieldConfig:
    """Times and tolerances of the shield.

    Attributes:
        fresh_ticks: a chunk whose base tick is at most this old keeps the state NOMINAL.
        first_chunk_ticks: how long a re-armed robot waits at rest for its first chunk before it holds again.
        measurement_max_age_s: older joint states cannot re-arm.
        outside_tolerance: rad (closure); a joint measured this far outside its limits can still re-arm, from the limit.
        stall_ticks: if the motor process did not run for longer than this many ticks, the robot may have stopped by its
            own time-out for missing commands: the stream is broken off. Must not exceed that time-out.
    """

    fresh_ticks: int = 12
    first_chunk_ticks: int = 100
    measurement_max_age_s: float = 0.1
    outside_tolerance: float = 0.02
    stall_ticks: int = 10

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ValueError: a number that cannot be.
        """
        if self.fresh_ticks < 0 or self.first_chunk_ticks < 1 or self.stall_ticks < 1:
            raise ValueError("fresh_ticks must not be negative, first_chunk_ticks and stall_ticks at least 1")
        if not (self.measurement_max_age_s > 0.0 and self.outside_tolerance >= 0.0):
            raise ValueError("measurement_max_age_s must be positive and outside_tolerance not negative")


class Shield:
    """One command per :meth:`step`; call :meth:`start` once with the first measured pose before the first step.

    Not thread-safe; owned by the motor loop. No allocation but the floats of the loop itself.

    Attributes:
        stall_ns: see ``ShieldConfig.stall_ticks``. estop_level: of the emergency stop input.
        position, velocity, acceleration: float64[n], the last command and its finite differences; views, do not write.
        state, reason: see the enums.
        segment: counts starts of the command stream; within a segment consecutive commands obey all limits. A re-arm
            that must start from a measured pose away from the last command begins a new one, and so does a stall.
        limit_interventions: steps in which limits changed the desired command.
        stops: entries into BRAKING. stalls: streams broken off because the motor process did not run.
        rest_ticks: consecutive commands so far without motion.
    """

    def __init__(self, limits: JointLimits, period_s: float, config: ShieldConfig | None = None) -> None:
        """See :class:`JointLimits` and :class:`ShieldConfig`; ``period_s`` is the tick.

        Raises:
            LimitsError: limits that do not fit the period.
        """
        limits.check_period(period_s)
        self._limits = limits
        self._config = config or ShieldConfig()
        self.stall_ns = round(self._config.stall_ticks * period_s * 1e9)
        columns = (limits.position_lower, limits.position_upper, limits.velocity, limits.acceleration, limits.jerk)
        self._joints = [JointTracker(lower, upper, velocity, acceleration, jerk, period_s) for
                        lower, upper, velocity, acceleration, jerk in zip(*(column.tolist() for column in columns),
                                                                          strict=True)]
        count = len(limits)
        self.position, self.velocity, self.acceleration = np.zeros(count), np.zeros(count), np.zeros(count)
        self.state, self.reason = State.HOLDING, Reason.NO_POSE
        self.estop_level = EstopInput.RELEASED
        self.segment = 0
        self.limit_interventions = 0
        self.stops = self.stalls = 0
        self.rest_ticks = 0
        self._wait_left = 0
        self._started = False
        self._closing = False

    @property
    def started(self) -> bool:
        """A measured pose was given, so there is something to send."""
        return self._started

    def start(self, measured: Array) -> Rearm:
        """Begin the stream: hold where the robot was measured, not armed.

        Args:
            measured: float64[n], rad (closure).

        Returns:
            ACCEPTED, or why this pose cannot be held.
        """
        verdict = self._usable(measured)
        if verdict is Rearm.ACCEPTED:
            for joint, q in zip(self._joints, measured.tolist(), strict=True):
                joint.reset(q)
            self._started = True
            self.segment += 1
            if self.reason is Reason.NO_POSE:
                self.reason = Reason.NOT_ARMED
            self._publish()
        return verdict

    def rearm_verdict(self, measured: Array | None, age_s: float) -> Rearm:
        """What :meth:`rearm` would answer now; changes nothing."""
        if self._closing:
            return Rearm.SHUTTING_DOWN
        if self.state is not State.HOLDING:
            return Rearm.NOT_HOLDING
        if self.estop_level is not EstopInput.RELEASED:
            return Rearm.ESTOP_PRESSED if self.estop_level is EstopInput.PRESSED else Rearm.ESTOP_SILENT
        verdict = self._measured_verdict(measured, age_s)
        return verdict if self._started or verdict is not Rearm.ACCEPTED else Rearm.NO_MEASUREMENT

    def rearm(self, measured: Array | None, age_s: float) -> Rearm:
        """Leave HOLDING: stand still, wait for the first chunk.

        Joints measured within their ``reentry_gap`` of the last command continue from it, so the stream stays
        continuous; others start from where they were measured, which begins a new segment.

        Args:
            measured: float64[n], newest measured pose, or None.
            age_s: age of that measurement.
        """
        verdict = self.rearm_verdict(measured, age_s)
        if verdict is not Rearm.ACCEPTED or measured is None:
            return verdict
        self.segment += self._restart_from(measured, self._limits.reentry_gap)
        self._publish()
        self.state, self.reason = State.COASTING, Reason.WAITING_FIRST_CHUNK
        self._wait_left = self._config.first_chunk_ticks
        return verdict

    def estop(self) -> None:
        """Operator's emergency stop: brake from any state and latch."""
        self._stop(Reason.ESTOP)

    def estop_input(self, level: EstopInput) -> None:
        """Level of the emergency stop input, every tick: brake and latch when it rises; no re-arm while it is not
        RELEASED. Silence stops a robot that acts; to one that holds it only forbids the re-arm."""
        before, self.estop_level = self.estop_level, level
        if level is EstopInput.PRESSED and before is not EstopInput.PRESSED:
            self._stop(Reason.ESTOP_INPUT)
        elif level is EstopInput.SILENT and before is EstopInput.RELEASED and self.state is not State.HOLDING:
            self._stop(Reason.ESTOP_SILENT)

    def stall(self, measured: Array | None, age_s: float) -> None:
        """The motor process did not run for longer than the robot waits for commands: break the stream off.

        The robot stands, or slows down, at a pose of its own; going on with the old velocity would be a jump. So the
        stream ends and a new segment begins at rest: a joint that moved where it was measured, any other as at a
        re-arm (``reentry_gap``; a joint whose gap spans its range always keeps its command). Without a usable fresh
        measurement all joints keep their last command. HOLDING, latched. A robot that was holding goes on holding.

        Args:
            measured: float64[n], newest measured pose, or None.
            age_s: age of that measurement.
        """
        if self.state is State.HOLDING:
            return
        limits = self._limits
        if measured is not None and self._measured_verdict(measured, age_s) is Rearm.ACCEPTED:
            moved = (self.velocity != 0.0) | (self.acceleration != 0.0)
            moved &= limits.reentry_gap < limits.position_upper - limits.position_lower
            self._restart_from(measured, np.where(moved, 0.0, limits.reentry_gap))
        else:
            self._restart_from(self.position, limits.reentry_gap)
        self.segment += 1
        self.stalls += 1
        self.rest_ticks = -1  # the step that follows within this tick counts it
        self._publish()
        self.state = State.HOLDING
        if self.reason not in _KEPT_REASONS:
            self.reason = Reason.MOTOR_STALLED

    def shut_down(self) -> None:
        """Brake and latch for good: no re-arm is accepted after this."""
        self._closing = True
        self._stop(Reason.SHUTDOWN)

    def step(self, desired: Array | None, desired_velocity: Array | None = None, age_ticks: int = 0) -> None:
        """Produce the next command in ``position``, ``velocity``, ``acceleration``.

        Args:
            desired: float64[n] where the policy wants the robot at this tick, or None if no chunk covers it.
            desired_velocity: float64[n] its velocity; None for zero.
            age_ticks: ticks since the base tick of the newest chunk.
        """
        if self.state is State.NOMINAL or self.state is State.COASTING:
            self._act(desired, desired_velocity, age_ticks)
        elif self.state is State.BRAKING:
            self._brake()
        self._publish()

    def _restart_from(self, measured: Array, gap: Array) -> bool:
        """Put joints measured farther than ``gap`` from their command where they were measured, all of them at rest;
        returns whether there was one."""
        away = np.abs(measured - self.position) > gap
        for joint, q, is_away in zip(self._joints, measured.tolist(), away.tolist(), strict=True):
            joint.reset(q if is_away else joint.q)
        return bool(away.any())

    def _act(self, desired: Array | None, desired_velocity: Array | None, age_ticks: int) -> None:
        if desired is None:
            self._act_without_chunk()
            return
        targets = desired.tolist()
        speeds = [0.0] * len(targets) if desired_velocity is None else desired_velocity.tolist()
        if not all(map(math.isfinite, targets)) or not all(map(math.isfinite, speeds)):
            self._stop(Reason.NOT_FINITE)
            self._brake()
            return
        if age_ticks <= self._config.fresh_ticks:
            self.state, self.reason = State.NOMINAL, Reason.FOLLOWING
        else:
            self.state, self.reason = State.COASTING, Reason.CHUNK_OLD
        self._wait_left = 0
        limited = False
        for joint, target, speed in zip(self._joints, targets, speeds, strict=True):
            joint.track(target, speed)
            limited = limited or joint.limited
        self.limit_interventions += limited

    def _act_without_chunk(self) -> None:
        if self._wait_left > 0:
            self._wait_left -= 1
            if self._wait_left == 0:
                self.state, self.reason = State.HOLDING, Reason.NO_FIRST_CHUNK
            return
        self._stop(Reason.QUEUE_EMPTY)
        self._brake()

    def _stop(self, reason: Reason) -> None:
        self.reason = Reason.SHUTDOWN if self._closing else reason
        if self.state is not State.HOLDING:
            self.stops += self.state is not State.BRAKING
            self.state = State.BRAKING

    def _brake(self) -> None:
        moving = False
        for joint in self._joints:
            joint.brake()
            moving = moving or joint.v != 0.0 or joint.a != 0.0
        if not moving:
            self.state = State.HOLDING

    def _publish(self) -> None:
        joints = self._joints
        self.position[:] = [joint.q for joint in joints]
        self.velocity[:] = [joint.v for joint in joints]
        self.acceleration[:] = [joint.a for joint in joints]
        moving = any(joint.v != 0.0 or joint.a != 0.0 for joint in joints)
        self.rest_ticks = 0 if moving else self.rest_ticks + 1

    def _measured_verdict(self, measured: Array | None, age_s: float) -> Rearm:
        if measured is None:
            return Rearm.NO_MEASUREMENT
        if not -0.005 <= age_s <= self._config.measurement_max_age_s:  # a stamp from the future is no fresher
            return Rearm.MEASUREMENT_STALE
        return self._usable(measured)

    def _usable(self, measured: Array) -> Rearm:
        if measured.shape != self.position.shape or not np.isfinite(measured).all():
            return Rearm.MEASUREMENT_NOT_FINITE
        slack = self._config.outside_tolerance
        inside = (measured >= self._limits.position_lower - slack) & (measured <= self._limits.position_upper + slack)
        return Rearm.ACCEPTED if inside.all() else Rearm.MEASUREMENT_OUTSIDE_LIMITS
