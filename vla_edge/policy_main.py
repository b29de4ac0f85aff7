"""The policy process: contexts in, chunks out. It may be slow, hang or die; the motor process then brakes and holds."""

from __future__ import annotations

import logging
import os
import secrets
from typing import Any, Final

from vla_common.manifest import Manifest, load_manifest
from vla_common.messages import new
from vla_common.metrics import Counters, Histogram, RateMeter
from vla_common.span_queue import tracing
from vla_common.tensors import tokens_of
from vla_common.tracing import Tracer
from vla_common.wire import WireError, decode, encode, make_header, stamp_ns
from vla_common.zenoh_session import Bus
from vla_edge.child import Child, main_exit, run
from vla_edge.cloud_link import open_cloud_link
from vla_edge.core.chunk import REJECTS, ActionChunk
from vla_edge.core.context_mailbox import Context, ContextMailbox, MailboxConfig
from vla_edge.core.denoiser import Denoiser
from vla_edge.core.health import SKILLS, ContextStreak
from vla_edge.core.planner import MotorView, Planner, PlannerConfig
from vla_edge.core.records import MAX_HORIZON, Record, fill_chunk
from vla_edge.core.shield import State
from vla_edge.core.tick_trace import PolicyTrace
from vla_edge.engines import make_denoiser
from vla_edge.robot_bus import RobotBus, open_robot_bus

LOG = logging.getLogger(__name__)

NS: Final = 1_000_000_000
STATUS_PERIOD_NS: Final = NS // 10
MEASUREMENT_MAX_AGE_NS: Final = NS // 5
SETTLE_NS: Final = 1_000_000
"""After the tick's deadline, so that the record of that tick is there when the loop looks."""


def make_planner(child: Child, manifest: Manifest, denoiser: Denoiser, session: str) -> Planner:
    """The planner for a model, checked against the robot.

    Raises:
        ManifestError: the model is for other joints or another tick.
        DenoiserError: ensemble.rule is 'prefix' and the model takes none.
    """
    config = child.config
    manifest.require(child.limits.names, period_s=config.motor.period_s)
    mailbox = ContextMailbox(manifest.model_hash, MailboxConfig((manifest.context.num_tokens, manifest.context.dim),
                                                                max_age_s=config.policy.max_context_age_s))
    settings = PlannerConfig(config.motor.period_s, manifest.horizon, config.policy.bridge_s,
                             config.policy.home_phrases, config.policy.home_limit_share,
                             float(manifest.extra.get("noise_scale", 0.0)), config.policy.noise_seed,
                             config.ensemble.prefix_ticks if config.ensemble.rule == "prefix" else None)
    return Planner(session, child.limits, denoiser, mailbox, settings)


class PolicyLoop:
    """One turn: what arrived, a chunk if it is time for one, heartbeat, status."""

    def __init__(self, child: Child, planner: Planner, engine: str, bus: RobotBus, cloud: Bus,
                 tracer: Tracer | None = None) -> None:
        """Subscribe and announce."""
        robot = child.config.robot_id
        self._child, self._planner, self._engine = child, planner, engine
        self._trace = None if tracer is None else PolicyTrace(tracer, robot)
        self._memory, self._clock = child.memory, child.clock
        self._contexts = cloud.latest("context", robot)
        self._instructions = bus.latest("instruction", robot)
        self._chunks_out = bus.publisher("action_chunk", robot)
        self._status_out = bus.publisher("policy_status", robot)
        self._chunk_record, self._heartbeat = self._memory.blank("chunk"), self._memory.blank("policy")
        self._heartbeat["pid"] = os.getpid()
        self._seen = {"motor": 0, "joints": 0}
        self._motor: MotorView | None = None
        self._rejects_by_motor: Record | None = None
        self._closure, self._closure_ns = 0.0, 0
        self._planned_tick: int | None = None
        self._streak, self._why_not = ContextStreak(), ""
        self._rejects, self._context_rate, self._denoise_s = Counters(), RateMeter(), Histogram(1024)
        self._chunk_count = 0
        self._status_due_ns = 0

    def turn(self) -> int:
        """Do what is due; returns the instant of the next turn, ns."""
        now_ns = self._clock.monotonic_ns()
        self._receive(now_ns)
        motor = self._newest_motor()
        replan_ticks = self._child.config.policy.replan_ticks
        period_ns = round(self._child.config.motor.period_s * NS)
        is_current = motor is not None and now_ns - motor.stamp_ns <= self._child.config.policy.motor_max_age_s * NS
        if motor is not None and is_current and (
                self._planned_tick is None or motor.tick >= self._planned_tick + replan_ticks):
            self._plan(motor, now_ns)
        self._beat(now_ns)
        if now_ns >= self._status_due_ns:
            self._status_due_ns = now_ns + STATUS_PERIOD_NS
            self._publish_status(now_ns)
        if motor is None or not is_current or self._planned_tick is None:
            return now_ns + 2 * period_ns
        due_ns = motor.stamp_ns + (self._planned_tick + replan_ticks - motor.tick) * period_ns + SETTLE_NS
        return due_ns if due_ns > now_ns else now_ns + SETTLE_NS

    def _receive(self, now_ns: int) -> None:
        io = self._memory.read("io")
        if io is not None:
            self._planner.bind_session(io[1]["session"].item().decode())
        while (received := self._instructions.try_recv()) is not None:
            try:
                before = self._planner.instruction
                self._planner.set_instruction(str(decode("std_msgs/String", received.payload).data), now_ns)
                if self._planner.instruction != before:
                    self._streak.forget()
            except WireError as error:
                self._rejects.add(f"instruction_{error.cause}")
        while (received := self._contexts.try_recv()) is not None:
            try:
                context = context_of(decode("ContextTokens", received.payload))
            except WireError as error:
                self._rejects.add(f"context_{error.cause}")
                self._streak.refused(f"context_{error.cause}", now_ns)
                continue
            reject = self._planner.offer(context, received.received_ns)
            if self._trace is not None:
                self._trace.received(context.stamp_ns, context.sequence, received.received_ns,
                                     self._clock.monotonic_ns(), "" if reject is None else reject.value)
            if reject is None:
                self._context_rate.record(now_ns)
                self._streak.taken(context.stamp_ns)
            else:
                self._rejects.add(reject.value)
                self._streak.refused(reject.value, now_ns)

    def _newest_motor(self) -> MotorView | None:
        found = self._memory.read("motor", self._seen["motor"])
        if found is not None:
            self._seen["motor"], record = found
            self._rejects_by_motor = record["rejects"]
            self._motor = MotorView(int(record["tick"]), int(record["stamp_ns"]), record["position"],
                                    record["velocity"], record["acceleration"], State(int(record["state"])),
                                    record["plan"][:min(int(record["plan_rows"]), MAX_HORIZON)])
        joints = self._memory.read("joints", self._seen["joints"])
        if joints is not None:
            self._seen["joints"], record = joints
            self._closure, self._closure_ns = float(record["position"][-1]), int(record["stamp_ns"])
        return self._motor

    def _plan(self, motor: MotorView, now_ns: int) -> None:
        closure = self._closure if now_ns - self._closure_ns <= MEASUREMENT_MAX_AGE_NS else None
        began_ns = now_ns if self._trace is None else self._clock.monotonic_ns()
        chunk = self._planner.plan(motor, closure, now_ns)
        planned_ns = now_ns if self._trace is None else self._clock.monotonic_ns()
        self._planned_tick = motor.tick
        if chunk is None:
            if self._planner.why_not is not None:
                self._why_not = self._planner.why_not.value
                self._rejects.add(self._why_not)
            return
        self._why_not = ""
        fill_chunk(self._chunk_record, chunk)
        self._memory.write("chunk", self._chunk_record)
        self._planner.finished(motor, self._clock.monotonic_ns())
        self._chunk_count += 1
        self._denoise_s.record((self._clock.monotonic_ns() - now_ns) / NS)
        self._chunks_out.put(encode(chunk_message(chunk, motor.stamp_ns)))
        if self._trace is not None:
            self._trace.chunk(chunk, began_ns, planned_ns, self._clock.monotonic_ns())

    def _beat(self, now_ns: int) -> None:
        beat = self._heartbeat
        beat["loops"] += 1
        beat["stamp_ns"], beat["ready"] = now_ns, self._planner.ready(now_ns)
        beat["skill"], beat["why_not"] = SKILLS.index(self._planner.skill.value), self._why_not.encode()
        self._streak.fill(beat)
        self._memory.write("policy", beat)

    def _publish_status(self, now_ns: int) -> None:
        counts = self._rejects.snapshot()
        if self._rejects_by_motor is not None:
            counts.update({reject.value: int(count) for reject, count in
                           zip(REJECTS, self._rejects_by_motor, strict=True) if count})
        pair, summary = self._planner.pair, self._denoise_s.summary()
        self._status_out.put(encode(new(
            "PolicyStatus", header=make_header(now_ns),
            context_age_s=-1.0 if pair is None else (now_ns - pair.now.stamp_ns) / NS,
            context_rate_hz=self._context_rate.rate_hz(now_ns), denoise_s=summary.last, denoise_p50_s=summary.p50,
            denoise_p99_s=summary.p99, chunks=self._chunk_count, reject_names=list(counts),
            reject_counts=list(counts.values()), engine=self._engine)))


def context_of(message: Any) -> Context:
    """A decoded ContextTokens message for the mailbox.

    Raises:
        WireError: the tokens do not fit their own description or are not finite.
    """
    return Context(message.session, int(message.sequence), stamp_ns(message.header), message.model_hash.tobytes(),
                   message.instruction_hash.tobytes(), tokens_of(message))


def chunk_message(chunk: ActionChunk, now_ns: int) -> Any:
    """A chunk as it is recorded."""
    return new("ActionChunk", header=make_header(now_ns), session=chunk.session, sequence=chunk.sequence,
               base_tick=chunk.base_tick, period_s=chunk.period_s, observation_stamp_ns=chunk.observation_stamp_ns,
               joint_names=list(chunk.names), horizon=len(chunk.positions), positions=chunk.positions)


def body(child: Child) -> None:
    """Load the model, then plan until told to stop."""
    config = child.config
    manifest = load_manifest(config.model)
    denoiser = make_denoiser(config.model, manifest, config.policy.engine, config.policy.fp16)
    planner = make_planner(child, manifest, denoiser, secrets.token_hex(8))
    with open_robot_bus(config, "vla_policy", child.clock) as bus, \
            open_cloud_link(config, "vla_policy") as cloud, \
            tracing(config.tracing, "vla-policy", config.robot_id, child.clock) as tracer:
        LOG.info("model %s on %s", manifest.name, denoiser.engine)
        loop = PolicyLoop(child, planner, denoiser.engine, bus, cloud, tracer)
        while not child.stop.is_set():
            child.clock.sleep_until_ns(loop.turn())


if __name__ == "__main__":
    main_exit(run("policy", body))
