"""What the robot should do next, as a chunk: follow the policy, go to the ready pose, or stand.

Stages 8 to 10 without processes or network. A chunk always starts from the command of the newest motor tick, so chunks
of different origin join without a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from vla_common.wire import instruction_hash, normalise_instruction
from vla_edge.core.chunk import ActionChunk
from vla_edge.core.context_mailbox import Context, ContextMailbox, ContextPair, ContextReject
from vla_edge.core.denoiser import Denoiser, DenoiserError, Prefix
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.local_motion import HOME_PHRASES, PointToPoint, is_home_phrase, stand
from vla_edge.core.prefix import PlanningDelay, make_prefix
from vla_edge.core.shield import State

Array = npt.NDArray[np.float64]

REPLAN_HOME_GAP = 0.15
"""Rad (closure): the command has left the planned way home this far, so the way is planned anew from where it is."""


class Skill(Enum):
    """Who plans for the present instruction."""

    NONE = "none"
    HOME = "home"
    POLICY = "policy"


class NoChunk(str, Enum):
    """Why no chunk was made although the robot acts. Values are the names shown to the operator."""

    NO_INSTRUCTION = "no_instruction"
    NO_CONTEXT = "no_fresh_context"
    SHAPE = "denoiser_shape"
    NOT_FINITE = "denoiser_not_finite"
    NO_MEASUREMENT = "no_fresh_joint_state"


@dataclass(frozen=True)
class MotorView:
    """The newest command: tick, its instant (robot's CLOCK_MONOTONIC), float64[n] position, velocity, acceleration.

    ``plan``, float64[m, n]: what the queue holds for the ticks after it; None or no rows: nothing.
    """

    tick: int
    stamp_ns: int
    position: Array
    velocity: Array
    acceleration: Array
    state: State
    plan: Array | None = None


@dataclass(frozen=True)
class PlannerConfig:
    """Numbers of the planner; see ``policy`` in config/edge.yaml.

    Attributes:
        period_s: tick. horizon: steps of a chunk.
        bridge_s: how long the robot stands, instead of running out of chunks, for the first context of a new
            instruction.
        home_phrases: normalised instructions served without the cloud.
        home_limit_share: fraction of the limits used on the way to the ready pose.
        noise_scale: of the denoiser's start; 0 makes it deterministic by construction.
        noise_seed: of the noise otherwise.
        prefix_ticks: the policy's chunks agree with the plan in force, of which at least so many rows are frozen; None:
            they do not know it.
    """

    period_s: float
    horizon: int
    bridge_s: float = 1.5
    home_phrases: Sequence[str] = HOME_PHRASES
    home_limit_share: float = 0.5
    noise_scale: float = 0.0
    noise_seed: int = 0
    prefix_ticks: int | None = None


class Planner:
    """Makes chunks; not thread-safe.

    Attributes:
        skill: who plans now.
        pair: context pair behind the last chunk of the policy.
        why_not: why the last call of :meth:`plan` made none; None if it did or the robot does not act.
    """

    def __init__(self, session: str, limits: JointLimits, denoiser: Denoiser, mailbox: ContextMailbox,
                 config: PlannerConfig) -> None:
        """``session`` tells chunks of this process from those of one before it.

        Raises:
            DenoiserError: a prefix is asked for and the model takes none.
        """
        if config.prefix_ticks is not None and not denoiser.supports_prefix:
            raise DenoiserError("ensemble.rule is 'prefix' but this model's denoiser takes none: set another "
                                "ensemble.rule (speed_ramp), or use a model exported with prefix inputs")
        self._session = session
        self._limits = limits
        self._denoiser = denoiser
        self._mailbox = mailbox
        self._config = config
        self._noise = np.random.default_rng(config.noise_seed)
        self._instruction = ""
        self._changed_ns = 0
        self._heard = False
        self._home: PointToPoint | None = None
        self._home_tick = 0
        self._handle: Any = None
        self._handle_of: tuple[int, int] | None = None
        self._sequence = 0
        self._delay = PlanningDelay(config.period_s, config.prefix_ticks or 1)
        self._pursued: str | None = None
        self.skill = Skill.NONE
        self.pair: ContextPair | None = None
        self.why_not: NoChunk | None = None

    @property
    def instruction(self) -> str:
        """The normalised instruction being served."""
        return self._instruction

    def set_instruction(self, text: str, now_ns: int) -> None:
        """Serve another instruction; the same one again changes nothing. An empty one ends the work."""
        normalised = normalise_instruction(text)
        if normalised == self._instruction:
            return
        self._instruction = normalised
        self._changed_ns, self._heard, self._home = now_ns, False, None
        if not normalised:
            self.skill = Skill.NONE
        else:
            self.skill = Skill.HOME if is_home_phrase(normalised, self._config.home_phrases) else Skill.POLICY
        self._mailbox.set_instruction(instruction_hash(text).tobytes() if self.skill is Skill.POLICY else None)

    def bind_session(self, session: str | None) -> None:
        """Take only contexts that answer observations of this session; None takes any."""
        self._mailbox.set_session(session)

    def offer(self, context: Context, now_ns: int) -> ContextReject | None:
        """Hand a received context to the mailbox; returns why it was refused."""
        reject = self._mailbox.offer(context, now_ns)
        self._heard = self._heard or reject is None
        return reject

    def ready(self, now_ns: int) -> bool:
        """A chunk could be made right after a re-arm."""
        if self.skill is Skill.POLICY:
            return self._mailbox.pair(now_ns) is not None
        return self.skill is Skill.HOME

    def plan(self, motor: MotorView, measured_closure: float | None, now_ns: int) -> ActionChunk | None:
        """The next chunk, or None.

        Args:
            motor: newest command.
            measured_closure: of the gripper, None without a fresh joint state.
            now_ns: robot's CLOCK_MONOTONIC.
        """
        self.why_not = None
        if motor.state is State.HOLDING or motor.state is State.BRAKING:
            self._home = None
            return None
        if self.skill is Skill.NONE:
            return self._no_chunk(NoChunk.NO_INSTRUCTION)
        if self.skill is Skill.HOME:
            return self._chunk(motor, self._way_home(motor), motor.stamp_ns)
        if measured_closure is None:
            return self._no_chunk(NoChunk.NO_MEASUREMENT)
        return self._follow_policy(motor, measured_closure, now_ns)

    def finished(self, motor: MotorView, now_ns: int) -> None:
        """The chunk planned from ``motor`` was handed to the motor process at ``now_ns``: tells how long that takes."""
        self._delay.record(motor.stamp_ns, now_ns)

    def _follow_policy(self, motor: MotorView, measured_closure: float, now_ns: int) -> ActionChunk | None:
        config = self._config
        pair = self._mailbox.pair(now_ns)
        if pair is None:
            if not self._heard and (now_ns - self._changed_ns) * 1e-9 <= config.bridge_s:
                rows = stand(motor.position, motor.velocity, motor.acceleration, self._limits, config.period_s,
                             config.horizon)
                return self._chunk(motor, rows, motor.stamp_ns)
            return self._no_chunk(NoChunk.NO_CONTEXT)
        self.pair = pair
        key = (pair.now.stamp_ns, pair.previous.stamp_ns)
        if key != self._handle_of:
            self._handle = self._denoiser.encode_context(pair.now.tokens, pair.previous.tokens)
            self._handle_of = key
        proprio = np.append(motor.position, measured_closure).astype(np.float32)
        noise = np.zeros((config.horizon, len(self._limits)), np.float32)
        if config.noise_scale > 0.0:
            noise[:] = config.noise_scale * self._noise.standard_normal(noise.shape)
        age_s = (motor.stamp_ns - pair.now.stamp_ns) * 1e-9
        frozen, prefix = self._committed(motor)
        deltas = self._denoiser.denoise(self._handle, proprio, age_s, pair.gap_s, noise, prefix)
        if deltas.shape != noise.shape:  # numpy would spread one column over all joints
            return self._no_chunk(NoChunk.SHAPE)
        if not np.isfinite(deltas).all():
            return self._no_chunk(NoChunk.NOT_FINITE)
        rows = motor.position + deltas.astype(np.float64)
        rows[:len(frozen)] = frozen
        return self._chunk(motor, rows, pair.now.stamp_ns, pursued=self._instruction)

    def _committed(self, motor: MotorView) -> tuple[Array, Prefix | None]:
        """Rows of the plan that are executed whatever the new chunk says, and the prefix made of plan and delay."""
        config = self._config
        if config.prefix_ticks is None or motor.plan is None or not len(motor.plan):
            return np.zeros((0, len(motor.position))), None
        ticks = min(self._delay.ticks, len(motor.plan), config.horizon)
        # Beyond what is committed, a plan that pursued another goal must not guide this one.
        guided = self._pursued == self._instruction
        return motor.plan[:ticks], make_prefix(motor.plan, motor.position, config.horizon, ticks, guided)

    def _way_home(self, motor: MotorView) -> Array:
        config = self._config
        ticks = motor.tick + 1 + np.arange(config.horizon, dtype=np.float64)
        if self._home is not None:
            planned = self._home.at(np.array([(motor.tick - self._home_tick) * config.period_s]))[0]
            if np.abs(planned - motor.position).max() > REPLAN_HOME_GAP:
                self._home = None
        if self._home is None:
            self._home = PointToPoint(motor.position, self._limits.ready, self._limits, config.home_limit_share)
            self._home_tick = motor.tick
        return self._home.at((ticks - self._home_tick) * config.period_s)

    def _chunk(self, motor: MotorView, rows: Array, stamp_ns: int, pursued: str | None = None) -> ActionChunk:
        self._sequence += 1
        self._pursued = pursued
        return ActionChunk(self._session, self._sequence, motor.tick, stamp_ns, self._config.period_s,
                           self._limits.names, rows)

    def _no_chunk(self, why: NoChunk) -> ActionChunk | None:
        self.why_not = why
        return None
