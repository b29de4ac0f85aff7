"""A chunk of joint targets aligned with the motor clock, and the gate that admits it or says why not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from vla_edge.core.joint_limits import JointLimits

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ActionChunk:
    """Step k belongs to motor tick ``base_tick + 1 + k``.

    Attributes:
        session: random per start of the policy process.
        sequence: counts chunks of a session.
        base_tick: tick whose command the chunk starts from.
        observation_stamp_ns: robot's CLOCK_MONOTONIC of the observation behind it.
        period_s: time between steps.
        names: joint names in the order of the columns.
        positions: float64[H, n], rad (gripper: closure).
    """

    session: str
    sequence: int
    base_tick: int
    observation_stamp_ns: int
    period_s: float
    names: tuple[str, ...]
    positions: Array

    @property
    def first_tick(self) -> int:
        """Tick of step 0."""
        return self.base_tick + 1

    @property
    def last_tick(self) -> int:
        """Tick of the last step."""
        return self.base_tick + len(self.positions)


class Reject(str, Enum):
    """Why a chunk is refused. Values are the names shown to the operator."""

    WIDTH = "chunk_width"
    HORIZON = "chunk_horizon"
    JOINT_NAMES = "chunk_joint_names"
    PERIOD = "chunk_period"
    NOT_FINITE = "chunk_not_finite"
    OUTSIDE_LIMITS = "chunk_outside_limits"
    FUTURE_STAMP = "chunk_future_stamp"
    STALE = "chunk_stale_observation"
    FUTURE_TICK = "chunk_future_tick"
    OLDER = "chunk_older_than_newest"
    ALL_PAST = "chunk_all_past"
    BEFORE_REARM = "chunk_before_rearm"
    GAP = "chunk_gap"


REJECTS: tuple[Reject, ...] = tuple(Reject)


@dataclass(frozen=True)
class GateConfig:
    """What the gate tolerates.

    Attributes:
        max_horizon: steps.
        position_tolerance: rad (closure) beyond a position limit; the shield stops at the limit itself.
        max_observation_age_s: age of the observation behind the chunk.
        future_tolerance_s: a stamp this far in the future still counts as now.
        max_lead_ticks: how far a base tick may lie ahead of the last command; 0: never.
    """

    max_horizon: int = 64
    position_tolerance: float = 0.25
    max_observation_age_s: float = 1.0
    future_tolerance_s: float = 0.005
    max_lead_ticks: int = 0


class ChunkGate:
    """Admits chunks that are well formed, recent and newer than the newest admitted one. Never changes a chunk."""

    def __init__(self, limits: JointLimits, period_s: float, config: GateConfig | None = None) -> None:
        """Joint names, count and position limits come from the robot file."""
        self._config = config or GateConfig()
        self._names = limits.names
        self._period_s = period_s
        self._lower = limits.position_lower - self._config.position_tolerance
        self._upper = limits.position_upper + self._config.position_tolerance
        self._max_age_ns = round(self._config.max_observation_age_s * 1e9)
        self._future_ns = round(self._config.future_tolerance_s * 1e9)
        self._newest: ActionChunk | None = None
        self._not_before_tick = -(2**62)

    @property
    def newest(self) -> ActionChunk | None:
        """The newest admitted chunk since the last :meth:`restart`."""
        return self._newest

    def restart(self, tick: int) -> None:
        """After a re-arm: only chunks that start from ``tick`` or later are admitted."""
        self._not_before_tick = tick
        self._newest = None

    def admit(self, chunk: ActionChunk, next_tick: int, now_ns: int) -> Reject | None:
        """:meth:`check` a chunk and, if nothing is against it, :meth:`take` it; returns as ``check``."""
        reject = self.check(chunk, next_tick, now_ns)
        if reject is None:
            self.take(chunk)
        return reject

    def check(self, chunk: ActionChunk, next_tick: int, now_ns: int) -> Reject | None:
        """Judge a chunk; changes nothing.

        Args:
            chunk: the candidate.
            next_tick: tick of the next command to be sent.
            now_ns: robot's CLOCK_MONOTONIC.

        Returns:
            None if it can be admitted, else the first reason against it.
        """
        return self._check_form(chunk) or self._check_time(chunk, next_tick, now_ns)

    def take(self, chunk: ActionChunk) -> None:
        """A checked chunk was merged, so it is the newest from now on."""
        self._newest = chunk

    def _check_form(self, chunk: ActionChunk) -> Reject | None:
        positions = chunk.positions
        if positions.ndim != 2 or positions.shape[1] != len(self._names):
            return Reject.WIDTH
        if not 1 <= len(positions) <= self._config.max_horizon:
            return Reject.HORIZON
        if chunk.names != self._names:
            return Reject.JOINT_NAMES
        if not abs(chunk.period_s - self._period_s) <= 1e-9:
            return Reject.PERIOD
        if not np.isfinite(positions).all():
            return Reject.NOT_FINITE
        if (positions < self._lower).any() or (positions > self._upper).any():
            return Reject.OUTSIDE_LIMITS
        return None

    def _check_time(self, chunk: ActionChunk, next_tick: int, now_ns: int) -> Reject | None:
        age_ns = now_ns - chunk.observation_stamp_ns
        if age_ns < -self._future_ns:
            return Reject.FUTURE_STAMP
        if age_ns > self._max_age_ns:
            return Reject.STALE
        if chunk.first_tick > next_tick + self._config.max_lead_ticks:
            return Reject.FUTURE_TICK
        if chunk.base_tick < self._not_before_tick:
            return Reject.BEFORE_REARM
        newest = self._newest
        if newest is not None and (chunk.base_tick < newest.base_tick or
                                   (chunk.session == newest.session and chunk.sequence <= newest.sequence)):
            return Reject.OLDER
        if chunk.last_tick < next_tick:
            return Reject.ALL_PAST
        return None
