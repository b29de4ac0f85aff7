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
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.tracking import JointTracker

Array = npt.NDArray[np.float64]


class State(IntEnum):
    """Values as in msg/ShieldStatus.msg."""

    NOMINAL = 0
    COASTING = 1
    BRAKING = 2
    HOLDING = 3


class Reason(IntEnum):
    """Why the shield is in its state."""

    FOLLOWING = 0
    NOT_ARMED = 1
    WAITING_FIRST_CHUNK = 2
    CHUNK_OLD = 3
    QUEUE_EMPTY = 4
    NO_FIRST_CHUNK = 5
    ESTOP = 6
    SHUTDOWN = 7
    NOT_FINITE = 8


REASON_TEXT: Final[dict[Reason, str]] = {
    Reason.FOLLOWING: "following the policy",
    Reason.NOT_ARMED: "not armed: send a re-arm",
    Reason.WAITING_FIRST_CHUNK: "armed, waiting for the first chunk",
    Reason.CHUNK_OLD: "no fresh chunk: following the rest of the last one",
    Reason.QUEUE_EMPTY: "chunks ran out: policy or cloud too late; re-arm when contexts are fresh again",
    Reason.NO_FIRST_CHUNK: "no chunk came after the re-arm: check instruction, cloud and policy, then re-arm",
    Reason.ESTOP: "emergency stop by the operator: re-arm when the cause is gone",
    Reason.SHUTDOWN: "the edge is shutting down",
    Reason.NOT_FINITE: "a desired position was not finite: report this, then re-arm",
}


class Rearm(IntEnum):
    """Answer to a re-arm."""

    ACCEPTED = 0
    NOT_HOLDING = 1
    NO_MEASUREMENT = 2
    MEASUREMENT_STALE = 3
    MEASUREMENT_NOT_FINITE = 4
    MEASUREMENT_OUTSIDE_LIMITS = 5
    SHUTTING_DOWN = 6


REARM_TEXT: Final[dict[Rearm, str]] = {
    Rearm.ACCEPTED: "accepted",
    Rearm.NOT_HOLDING: "refused: not holding; only a robot that holds can be re-armed",
    Rearm.NO_MEASUREMENT: "refused: no joint state was received; check the robot driver",
    Rearm.MEASUREMENT_STALE: "refused: the last joint state is too old; check the robot driver and the bus",
    Rearm.MEASUREMENT_NOT_FINITE: "refused: a measured joint position is not finite",
    Rearm.MEASUREMENT_OUTSIDE_LIMITS: "refused: a joint was measured outside its limits; move it back by hand",
    Rearm.SHUTTING_DOWN: "refused: the edge is shutting down",
}


@dataclass(frozen=True)
class ShieldConfig:
    """Times and tolerances of the shield.

    Attributes:
        fresh_ticks: a chunk whose base tick is at most this old keeps the state NOMINAL.
        first_chunk_ticks: how long a re-armed robot waits at rest for its first chunk before it holds again.
        measurement_max_age_s: older joint states cannot re-arm.
        outside_tolerance: rad (closure); a joint measured this far outside its limits can still re-arm, from the limit.
    """

    fresh_ticks: int = 12
    first_chunk_ticks: int = 100
    measurement_max_age_s: float = 0.1
    outside_tolerance: float = 0.02


class Shield:
    """One command per :meth:`step`; call :meth:`start` once with the first measured pose before the first step.

    Not thread-safe; owned by the motor loop. No allocation but the floats of the loop itself.

    Attributes:
        position, velocity, acceleration: float64[n], the last command and its finite differences; views, do not write.
        state, reason: see the enums.
        segment: counts starts of the command stream; within a segment consecutive commands obey all limits. A re-arm
            that must start from a measured pose away from the last command begins a new one.
        limit_interventions: steps in which limits changed the desired command.
        stops: entries into BRAKING.
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
        columns = (limits.position_lower, limits.position_upper, limits.velocity, limits.acceleration, limits.jerk)
        self._joints = [JointTracker(lower, upper, velocity, acceleration, jerk, period_s) for
                        lower, upper, velocity, acceleration, jerk in zip(*(column.tolist() for column in columns),
                                                                          strict=True)]
        count = len(limits)
        self.position, self.velocity, self.acceleration = np.zeros(count), np.zeros(count), np.zeros(count)
        self.state, self.reason = State.HOLDING, Reason.NOT_ARMED
        self.segment = 0
        self.limit_interventions = 0
        self.stops = 0
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
            self._publish()
        return verdict

    def rearm_verdict(self, measured: Array | None, age_s: float) -> Rearm:
        """What :meth:`rearm` would answer now; changes nothing."""
        if self._closing:
            return Rearm.SHUTTING_DOWN
        if self.state is not State.HOLDING:
            return Rearm.NOT_HOLDING
        if measured is None or not self._started:
            return Rearm.NO_MEASUREMENT
        if not -0.005 <= age_s <= self._config.measurement_max_age_s:  # a stamp from the future is no fresher
            return Rearm.MEASUREMENT_STALE
        return self._usable(measured)

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
        away = np.abs(measured - self.position) > self._limits.reentry_gap
        for joint, q, is_away in zip(self._joints, measured.tolist(), away.tolist(), strict=True):
            joint.reset(q if is_away else joint.q)
        self.segment += bool(away.any())
        self._publish()
        self.state, self.reason = State.COASTING, Reason.WAITING_FIRST_CHUNK
        self._wait_left = self._config.first_chunk_ticks
        return verdict

    def estop(self) -> None:
        """Operator's emergency stop: brake from any state and latch."""
        self._stop(Reason.ESTOP)

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
        self.reason = reason
        self._wait_left = 0
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

    def _usable(self, measured: Array) -> Rearm:
        if measured.shape != self.position.shape or not np.isfinite(measured).all():
            return Rearm.MEASUREMENT_NOT_FINITE
        slack = self._config.outside_tolerance
        inside = (measured >= self._limits.position_lower - slack) & (measured <= self._limits.position_upper + slack)
        return Rearm.ACCEPTED if inside.all() else Rearm.MEASUREMENT_OUTSIDE_LIMITS
