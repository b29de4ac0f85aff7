"""The edge's core and the simulated cell in lock step, in one thread and faster than real time.

    images 10 Hz ──▶ context ──delay──▶ Planner every few ticks ──planning delay──▶ memory ──▶ MotorLoop ──▶ world

Everything between context and command is the edge's own code (gate, queue, ensembler, shield, motor loop); only the
processes, the network and the clock are not: the clock is set by the loop, so that equal inputs give equal runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vla_common.clock import ManualClock
from vla_common.wire import instruction_hash
from vla_edge.config import EdgeConfig, make_queue
from vla_edge.core.chunk import ActionChunk, ChunkGate
from vla_edge.core.context_mailbox import Context, ContextMailbox, MailboxConfig
from vla_edge.core.denoiser import Denoiser
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.motor_loop import MotorLoop
from vla_edge.core.planner import MotorView, Planner, PlannerConfig
from vla_edge.core.records import EdgeMemory, Record, fill_chunk
from vla_edge.core.shield import Shield, State
from vla_sim.config import CONTROL_HZ, IMAGE_HZ
from vla_sim.judge import RUNNING
from vla_sim.world import TabletopWorld

FloatArray = npt.NDArray[np.float32]
Array = npt.NDArray[np.float64]

TICK_NS = 1_000_000_000 // CONTROL_HZ
TICKS_PER_IMAGE = CONTROL_HZ // IMAGE_HZ
EPOCH_NS = 1_000_000_000_000
SESSION = "lockstep"
MODEL_HASH = b"lockstep".ljust(32)


class ContextSource(Protocol):
    """What stands for camera, uplink and cloud. One object serves many episodes, one after the other."""

    def reset(self, instruction: str) -> None:
        """Begin an episode."""

    def tokens(self, world: TabletopWorld) -> FloatArray:
        """Context tokens float32[K, D] of what the camera sees now."""


@dataclass(frozen=True)
class Delays:
    """In ticks. `context`: from the image to the policy. `planning`: (least, most) rows of the plan in force that are
    sent while a chunk is made, drawn uniformly per chunk from `seed`."""

    context: int = 6
    planning: tuple[int, int] = (1, 2)
    seed: int = 0


@dataclass(frozen=True)
class Policy:
    """Denoiser and the shapes it was made for."""

    denoiser: Denoiser
    tokens_shape: tuple[int, int]
    horizon: int
    noise_scale: float = 0.0


@dataclass
class LockstepRun:
    """One row per tick served.

    Attributes:
        outcome: the judge's verdict, `running` if the run was ended before it.
        desired: float64[n, 8] merged plan before the shield, NaN where none was planned.
        sent: float64[n, 8] commands behind the shield.
        state: uint8[n] shield state. limited: bool[n] limits changed the desired command.
        rejects: chunks refused.
    """

    outcome: str
    desired: Array
    sent: Array
    state: npt.NDArray[np.uint8]
    limited: npt.NDArray[np.bool_]
    rejects: int


@dataclass
class _Log:
    desired: list[Array] = field(default_factory=list)
    sent: list[Array] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    interventions: list[int] = field(default_factory=list)


class LockstepEdge:
    """One episode's edge. Use :func:`run_lockstep`."""

    def __init__(self, config: EdgeConfig, limits: JointLimits, policy: Policy, instruction: str, delays: Delays,
                 world: TabletopWorld, contexts: ContextSource) -> None:
        """The robot stands at the world's pose; it is re-armed at the first tick.

        Raises:
            DenoiserError: the rule needs a prefix and the denoiser takes none.
        """
        self._config, self._delays, self._world, self._contexts = config, delays, world, contexts
        self._memory = EdgeMemory.private(len(limits))
        self._clock = ManualClock(EPOCH_NS)
        self.queue = make_queue(config, len(limits))
        period_s = config.motor.period_s
        self.motor = MotorLoop(self._memory, limits, ChunkGate(limits, period_s, config.gate), self.queue,
                               Shield(limits, period_s, config.shield), self._clock, self._apply)
        self._planner = _planner(config, limits, policy)
        self._planner.set_instruction(instruction, EPOCH_NS)
        self._instruction_hash = instruction_hash(instruction).tobytes()
        contexts.reset(instruction)
        self._rng = np.random.default_rng([delays.seed, 17])
        self._uplink: deque[tuple[int, Context]] = deque()
        self._pending: deque[tuple[int, ActionChunk]] = deque()
        self._joints, self._chunk = self._memory.blank("joints"), self._memory.blank("chunk")
        control = self._memory.blank("control")
        control["rearm"] = 1
        self._memory.write("control", control)
        self._planned_tick = -config.policy.replan_ticks
        self.log = _Log()

    def tick(self, tick: int) -> None:
        """Camera, deliveries, one motor tick, one simulated tick, then the policy if it is its turn."""
        now_ns = EPOCH_NS + tick * TICK_NS
        self._clock.advance_ns(now_ns - self._clock.monotonic_ns())
        self._observe(tick, now_ns)
        while self._pending and self._pending[0][0] <= tick:
            fill_chunk(self._chunk, self._pending.popleft()[1])
            self._memory.write("chunk", self._chunk)
        self.motor.serve(tick, now_ns, now_ns, 0)
        self._record(tick)
        self._plan(tick, now_ns)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    def _apply(self, stamp_ns: int, position: Array, velocity: Array) -> None:
        self._world.step(position)

    def _observe(self, tick: int, now_ns: int) -> None:
        joints = self._joints
        joints["sequence"], joints["stamp_ns"] = tick + 1, now_ns
        joints["position"], joints["velocity"] = self._world.joint_positions(), self._world.joint_velocities()
        self._memory.write("joints", joints)
        if tick % TICKS_PER_IMAGE == 0:
            tokens = self._contexts.tokens(self._world)
            self._uplink.append((tick + self._delays.context, Context(
                SESSION, tick + 1, now_ns, MODEL_HASH, self._instruction_hash, tokens)))
        while self._uplink and self._uplink[0][0] <= tick:
            self._planner.offer(self._uplink.popleft()[1], now_ns)

    def _plan(self, tick: int, now_ns: int) -> None:
        if tick < self._planned_tick + self._config.policy.replan_ticks:
            return
        found = self._memory.read("motor")
        if found is None:
            return
        self._planned_tick = tick
        view = _view(found[1])
        chunk = self._planner.plan(view, float(self._world.joint_positions()[-1]), now_ns)
        if chunk is not None:
            rows = int(self._rng.integers(self._delays.planning[0], self._delays.planning[1] + 1))
            self._pending.append((tick + 1 + rows, chunk))
            self._planner.finished(view, now_ns + rows * TICK_NS + TICK_NS // 2)

    def _record(self, tick: int) -> None:
        log, shield = self.log, self.motor.shield
        desired, velocity = np.full(len(shield.position), np.nan), np.zeros(len(shield.position))
        self.queue.sample(tick, desired, velocity)
        log.desired.append(desired)
        log.sent.append(shield.position.copy())
        log.state.append(int(shield.state))
        log.interventions.append(shield.limit_interventions)

    def rejects(self) -> int:
        """Chunks refused so far."""
        found = self._memory.read("motor")
        return 0 if found is None else int(found[1]["rejects"].sum())


def _view(record: Record) -> MotorView:
    return MotorView(int(record["tick"]), int(record["stamp_ns"]), record["position"], record["velocity"],
                     record["acceleration"], State(int(record["state"])), record["plan"][:int(record["plan_rows"])])


def _planner(config: EdgeConfig, limits: JointLimits, policy: Policy) -> Planner:
    mailbox = ContextMailbox(MODEL_HASH, MailboxConfig(policy.tokens_shape, max_age_s=config.policy.max_context_age_s))
    prefix_ticks = config.ensemble.prefix_ticks if config.ensemble.rule == "prefix" else None
    settings = PlannerConfig(config.motor.period_s, policy.horizon, config.policy.bridge_s,
                             noise_scale=policy.noise_scale, noise_seed=config.policy.noise_seed,
                             prefix_ticks=prefix_ticks)
    return Planner(SESSION, limits, policy.denoiser, mailbox, settings)


def run_lockstep(edge: LockstepEdge, world: TabletopWorld, last_tick: int | None = None,
                 before_tick: Callable[[int], None] | None = None) -> LockstepRun:
    """Run until the judge decides or `last_tick` was served.

    Args:
        edge: fresh, made after `world.reset`.
        world: the same one as the edge's.
        last_tick: last tick served; None: until the verdict.
        before_tick: called before each tick with its index, to disturb the world.
    """
    for tick in _ticks(last_tick):
        if world.outcome != RUNNING and last_tick is None:
            break
        if before_tick is not None:
            before_tick(tick)
        edge.tick(tick)
    log = edge.log
    run = LockstepRun(world.outcome, np.array(log.desired), np.array(log.sent), np.array(log.state, np.uint8),
                      np.diff(np.array([0, *log.interventions])) > 0, edge.rejects())
    edge.close()
    return run


def _ticks(last: int | None) -> Iterator[int]:
    tick = 0
    while last is None or tick <= last:
        yield tick
        tick += 1
