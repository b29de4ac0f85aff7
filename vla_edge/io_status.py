"""What the io process tells of the motor process: its ticks, and ten to twenty times a second its state in words."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Final

import numpy as np

from vla_common.messages import new
from vla_common.metrics import Counters, Histogram
from vla_common.wire import encode, make_header
from vla_edge.child import Child
from vla_edge.core.health import (
    NOT_STARTED,
    NOT_TICKING,
    RUN_OUT,
    ChunkRefusals,
    PolicyHealth,
    Tick,
    TickWatch,
    culprit,
    operator_text,
)
from vla_edge.core.records import Record
from vla_edge.core.shield import Rearm, Reason, State
from vla_edge.core.tick_trace import IoTrace
from vla_edge.robot_bus import RobotBus

LOG = logging.getLogger(__name__)

NS: Final = 1_000_000_000
HELD_MEASUREMENTS: Final = 256
"""Of 5 ms each at least: longer than ticks wait to be published."""
TICK_FIELDS: Final = ("lateness_ns", "work_ns", "missed", "state", "reason", "segment", "chunk_sequence",
                      "offered_sequence", "offered_verdict", "measured_stamp_ns", "rearms", "estops",
                      "estop_presses", "estop_input")


class MeasuredOut:
    """Publishes the joint states that decided where a command stream went on, those at a re-arm or a stall, as they
    were taken: a recording of ROS topics holds the driver's stamps and order, which a replay cannot use."""

    def __init__(self, bus: RobotBus, robot: str, names: list[str]) -> None:
        """Announce."""
        self._out, self._names = bus.publisher("measured_joints", robot), names
        self._held: deque[tuple[int, Record]] = deque(maxlen=HELD_MEASUREMENTS)
        self._before = (-1, -1)

    def take(self, instant_ns: int, position: Record) -> None:
        """A joint state that the motor process may use from now on: float64[joints], kept without a copy."""
        self._held.append((instant_ns, position))

    def publish(self, ticks: Record) -> None:
        """Those that these ticks used."""
        for rearms, segment, stamp in zip(ticks["rearms"].tolist(), ticks["segment"].tolist(),
                                          ticks["measured_stamp_ns"].tolist(), strict=True):
            if (rearms, segment) == self._before:
                continue
            self._before = (rearms, segment)
            position = next((position for instant_ns, position in self._held if instant_ns == stamp), None)
            if position is not None:
                self._out.put(encode(new("sensor_msgs/JointState", header=make_header(stamp), name=self._names,
                                         position=position)))


class StatusOut:
    """Publishes MotorTicks and ShieldStatus from the shared memory.

    Attributes:
        cursor: next tick of the log to publish.
        reason, rearm_ready: as last published; why a re-arm would be refused, and whether it would be accepted.
        cause: what keeps the robot from moving, or empty.
        measured: of the joint states that were used; only on ROS.
        cameras: set by the owner: name of what is wrong with the cameras, or empty.
        message, payload: the newest ShieldStatus, and as it was sent; None and empty before the first.
    """

    def __init__(self, child: Child, bus: RobotBus, rejects: Counters, cursor: int,
                 trace: IoTrace | None = None) -> None:
        """``rejects`` counts ticks that were overwritten before they were published."""
        self._trace, self._chunk_seen = trace, 0
        robot = child.config.robot_id
        self._memory, self._names, self._rejects = child.memory, list(child.limits.names), rejects
        self._status_out, self._ticks_out = bus.publisher("shield_status", robot), bus.publisher("motor_ticks", robot)
        self.measured = MeasuredOut(bus, robot, self._names) if child.config.is_ros else None
        self._rules = child.config.supervisor
        self._began_ns = child.clock.monotonic_ns()
        self._watch = TickWatch(self._rules.motor_hang_s, self._began_ns)
        self._refusals = ChunkRefusals()
        self._cause, self._cause_of = "", Reason.FOLLOWING
        self._lateness_s = Histogram(3000)
        self._logged: tuple[object, ...] = ()
        self.cursor = cursor
        self.reason, self.rearm_ready, self.cause, self.cameras = NOT_STARTED, False, "", ""
        self._why_stopped = ""
        self.message: Any = None
        self.payload = b""

    @property
    def tick(self) -> tuple[Tick, float, float]:
        """What the motor clock does, for how long it has been silent, and its p99 lateness; seconds."""
        return self._watch.state, self._watch.silent_s, self._lateness_s.summary().p99

    def say_why_stopped(self, why: str) -> None:
        """A stop was asked for: because of ``why``, or as an emergency if it is empty. A robot that already stands goes
        on saying why it does."""
        found = self._memory.read("motor")
        if not why or (found is not None and int(found[1]["state"]) in (State.NOMINAL, State.COASTING)):
            self._why_stopped = why

    def see_chunk(self) -> None:
        """For traces: look at the newest chunk, more often than there is one."""
        if self._trace is not None and (found := self._memory.read("chunk", self._chunk_seen)) is not None:
            self._chunk_seen, record = found
            self._trace.chunk(record)

    def publish_ticks(self, now_ns: int) -> None:
        """Every tick since the last call, each once."""
        self.cursor, records, lost = self._memory.ticks.drain(self.cursor, 1024)
        if lost:
            self._rejects.add("motor_ticks_lost", lost)
        if not records:
            return
        ticks: Record = np.frombuffer(b"".join(records), dtype=self._memory.dtypes["ticks"])
        for lateness_ns in ticks["lateness_ns"]:
            self._lateness_s.record(float(lateness_ns) / NS)
        if self.measured is not None:
            self.measured.publish(ticks)
        if self._trace is not None:
            self._trace.ticks(ticks)
        self._ticks_out.put(encode(new(
            "MotorTicks", header=make_header(now_ns), joints=len(self._names), tick=ticks["tick"],
            command=ticks["position"], **{name: ticks[name] for name in TICK_FIELDS})))

    def publish_status(self, now_ns: int, joints_age_s: float | None) -> None:
        """State and reason, whatever the motor process does or does not do.

        Args:
            now_ns: robot's CLOCK_MONOTONIC.
            joints_age_s: of the newest joint state, None if none was received.
        """
        found = self._memory.read("motor")
        self._watch.look(None if found is None else found[0], now_ns)
        if found is None:
            self._publish_not_started(now_ns)
            return
        motor = found[1]
        state, reason, verdict = State(int(motor["state"])), Reason(int(motor["reason"])), Rearm(int(motor["rearm"]))
        policy = self._policy(now_ns)
        can_plan = policy is not None and policy.can_plan
        cause = self._find_cause(reason, motor, joints_age_s, policy, now_ns)
        text = operator_text(state, reason, verdict, can_plan, cause, self._why_stopped)
        hangs = self._watch.state is Tick.HANGS and reason is not Reason.SHUTDOWN
        if hangs:
            text, verdict = f"{NOT_TICKING} ({self._watch.silent_s:.1f} s)", Rearm.NOT_HOLDING
        is_ready = verdict is Rearm.ACCEPTED and can_plan
        self.reason, self.rearm_ready, self.cause = text, is_ready, cause
        is_sending = reason is not Reason.NO_POSE
        late = self._lateness_s.summary()
        self._tell(new(
            "ShieldStatus", header=make_header(now_ns), state=int(state), reason=text, tick=int(motor["tick"]),
            rearm_ready=is_ready, joint_names=self._names if is_sending else [],
            position=np.array(motor["position"]) if is_sending else [],
            velocity=np.array(motor["velocity"]) if is_sending else [],
            limit_interventions=int(motor["limited"]), missed_ticks=int(motor["missed"]),
            lateness_p50_s=late.p50, lateness_p99_s=late.p99, lateness_max_s=late.maximum if late.count else 0.0,
            chunks_accepted=int(motor["accepted"]), chunks_rejected=int(motor["rejects"].sum()),
            scheduling=motor["scheduling"].item().decode()))
        # Leaves out the flicker between NOMINAL and COASTING; tells a cause once, when it is first found.
        acts = reason in (Reason.FOLLOWING, Reason.CHUNK_OLD)
        key = ("acts", hangs) if acts else (state, reason, hangs, bool(self._cause))
        self._log(key, logging.ERROR if hangs else logging.INFO, f"shield {state.name}: {text}")

    def _tell(self, message: Any) -> None:
        self.message, self.payload = message, encode(message)
        self._status_out.put(self.payload)

    def _publish_not_started(self, now_ns: int) -> None:
        silent_s = self._watch.silent_s
        self._tell(new("ShieldStatus", header=make_header(now_ns), state=int(State.HOLDING), tick=-1,
                       reason=f"{NOT_STARTED} ({silent_s:.1f} s)"))
        self.reason, self.rearm_ready = NOT_STARTED, False
        if silent_s > self._rules.motor_start_s:
            self._log(("not started",), logging.ERROR, NOT_STARTED)

    def _policy(self, now_ns: int) -> PolicyHealth | None:
        found = self._memory.read("policy")
        return None if found is None else PolicyHealth.of(found[1], now_ns)

    def _find_cause(self, reason: Reason, motor: Record, joints_age_s: float | None, policy: PolicyHealth | None,
                    now_ns: int) -> str:
        """What is wrong now; after chunks ran out also what was found wrong then, once it is no more."""
        refused = self._refusals.look(int(motor["accepted"]), motor["rejects"].tolist(), now_ns)
        now = culprit(joints_age_s, policy, refused, self.cameras)
        if reason not in RUN_OUT or reason is not self._cause_of:
            self._cause = ""
        self._cause_of = reason
        if reason in RUN_OUT and now:
            self._cause = now
        return now or self._cause

    def _log(self, key: tuple[object, ...], level: int, text: str) -> None:
        if key != self._logged:
            self._logged = key
            LOG.log(level, "%s", text)
