"""The io process: joint states, images, instruction and operator's commands in; observations and statuses out."""

from __future__ import annotations

import logging
import os
import secrets
from typing import Any, Final

import numpy as np

from vla_common.manifest import load_manifest
from vla_common.messages import new
from vla_common.metrics import Counters, Histogram
from vla_common.topics import topic_spec
from vla_common.wire import WireError, decode, encode, make_header, normalise_instruction, stamp_ns
from vla_common.zenoh_session import Bus, Received, open_bus
from vla_edge.child import Child, main_exit, run
from vla_edge.core.local_motion import is_home_phrase
from vla_edge.core.records import Record
from vla_edge.core.shield import REARM_TEXT, REASON_TEXT, Rearm, Reason, State

LOG = logging.getLogger(__name__)

NS: Final = 1_000_000_000
FUTURE_TOLERANCE_NS: Final = 5_000_000
POLICY_MAX_AGE_NS: Final = NS // 4
MOTOR_MAX_AGE_NS: Final = NS // 4
WATCH_PERIOD_NS: Final = 5 * NS
TICK_FIELDS: Final = ("lateness_ns", "work_ns", "missed", "state", "reason", "segment", "chunk_sequence",
                      "offered_sequence", "offered_verdict", "measured_stamp_ns", "rearms", "estops")


class IoLoop:
    """One turn polls what arrived and publishes what is due. Single-threaded: nothing here is urgent by itself."""

    def __init__(self, child: Child, cameras: list[str], bus: Bus, cloud: Bus) -> None:
        """Subscribe and announce."""
        config = child.config
        robot = config.robot_id
        self._child, self._config, self._memory, self._clock = child, config.io, child.memory, child.clock
        self._names = list(child.limits.names)
        self._joints_in = bus.latest("joint_states", robot)
        self._instruction_in = bus.latest("instruction", robot)
        self._commands_in = bus.queue("shield_command", robot, capacity=16)
        self._images_in = {camera: bus.latest("image", robot, camera) for camera in cameras}
        self._images: dict[str, Any] = {}
        self._observation_out = cloud.publisher("observation", robot)
        self._status_out, self._ticks_out = bus.publisher("shield_status", robot), bus.publisher("motor_ticks", robot)
        self._session = secrets.token_hex(8)
        self._observations = 0
        self._instruction = ""
        self._joints, self._beat = self._memory.blank("joints"), self._memory.blank("io")
        self._control = self._memory.blank("control")
        self._resume()
        self._seen_commands: dict[bytes, int] = {}
        self._lateness_s = Histogram(3000)
        self._rejects = Counters()
        self._status_due_ns = self._ticks_due_ns = self._watch_due_ns = 0
        self._logged: tuple[State, Reason, bool] | None = None

    def _resume(self) -> None:
        """Go on where a killed predecessor stopped: counts of commands, and which ticks were already published."""
        found = self._memory.read("control")
        if found is not None:
            self._control["rearm"], self._control["estop"] = found[1]["rearm"], found[1]["estop"]
        found = self._memory.read("io")
        self._cursor = int(found[1]["tick_cursor"]) if found is not None else 0
        self._beat["pid"], self._beat["session"] = os.getpid(), self._session.encode()

    def turn(self) -> None:
        """Do what is due."""
        now_ns = self._clock.monotonic_ns()
        self._take_commands()
        self._take_joints()
        self._take_instruction()
        self._take_images()
        if now_ns >= self._ticks_due_ns:
            self._ticks_due_ns = now_ns + round(NS / self._config.ticks_hz)
            self._publish_ticks(now_ns)
        if now_ns >= self._status_due_ns:
            self._status_due_ns = now_ns + round(NS / self._config.status_hz)
            self._publish_status(now_ns)
        self._beat["loops"] += 1
        self._beat["stamp_ns"], self._beat["tick_cursor"] = now_ns, self._cursor
        self._memory.write("io", self._beat)
        if now_ns >= self._watch_due_ns:
            self._watch_due_ns = now_ns + WATCH_PERIOD_NS
            self._log_rejects()

    def flush(self) -> None:
        """Publish what is left now, so that a recording ends with the robot at rest."""
        self._ticks_due_ns = self._status_due_ns = 0
        self.turn()

    def _decoded(self, type_name: str, received: Received, what: str) -> Any | None:
        try:
            return decode(type_name, received.payload)
        except WireError as error:
            self._rejects.add(f"{what}_{error.cause}")
            return None

    def _recent(self, stamp: int, now_ns: int, topic: str) -> bool:
        """Check the age on receipt: after a stall, samples that waited in buffers arrive in order and old."""
        if now_ns - stamp > topic_spec(topic).max_age_s * NS:
            self._rejects.add(f"{topic}_stale")
            return False
        if now_ns - stamp < -FUTURE_TOLERANCE_NS:
            self._rejects.add(f"{topic}_future_stamp")
            return False
        return True

    def _take_commands(self) -> None:
        changed = False
        while (received := self._commands_in.try_recv()) is not None:
            message = self._decoded("ShieldCommand", received, "shield_command")
            if message is None:
                continue
            sender = b"" if received.attachment is None else received.attachment.gid
            sequence = int(message.sequence)
            if sequence <= self._seen_commands.get(sender, -1):
                self._rejects.add("shield_command_repeated")
            elif message.command == message.ESTOP:  # whatever its age: stopping is always allowed
                self._control["estop"] += 1
                changed = True
            elif message.command != message.REARM:
                self._rejects.add("shield_command_unknown")
            elif self._recent(stamp_ns(message.header), received.received_ns, "shield_command"):
                self._control["rearm"] += 1
                changed = True
            self._seen_commands[sender] = max(sequence, self._seen_commands.get(sender, -1))
        if changed:
            self._memory.write("control", self._control)

    def _take_joints(self) -> None:
        received = self._joints_in.try_recv()
        message = None if received is None else self._decoded("sensor_msgs/JointState", received, "joint_states")
        if received is None or message is None:
            return
        stamp = stamp_ns(message.header)
        if not self._recent(stamp, received.received_ns, "joint_states"):
            return
        if list(message.name) != self._names:
            self._rejects.add("joint_states_names")
        elif message.position.size != len(self._names) or not np.isfinite(message.position).all():
            self._rejects.add("joint_states_position")
        elif stamp <= int(self._joints["stamp_ns"]):
            self._rejects.add("joint_states_out_of_order")
        else:
            self._joints["sequence"] += 1
            self._joints["stamp_ns"], self._joints["position"] = stamp, message.position
            self._joints["velocity"] = message.velocity if message.velocity.size == len(self._names) else 0.0
            self._memory.write("joints", self._joints)

    def _take_instruction(self) -> None:
        received = self._instruction_in.try_recv()
        message = None if received is None else self._decoded("std_msgs/String", received, "instruction")
        if message is not None:
            self._instruction = str(message.data)

    def _take_images(self) -> None:
        is_new = False
        for camera, subscriber in self._images_in.items():
            received = subscriber.try_recv()
            message = None if received is None else self._decoded("sensor_msgs/CompressedImage", received, "image")
            if received is None or message is None:
                continue
            if self._recent(stamp_ns(message.header), received.received_ns, "image"):
                message.header.frame_id = camera
                self._images[camera] = message
                is_new = True
        if is_new and len(self._images) == len(self._images_in):
            self._send_observation(self._clock.monotonic_ns())

    def _send_observation(self, now_ns: int) -> None:
        instruction = normalise_instruction(self._instruction)
        local = not instruction or is_home_phrase(instruction, self._child.config.policy.home_phrases)
        if local and not self._config.uplink_local_instructions:
            return
        images = [self._images[camera] for camera in self._images_in]
        # With several cameras the observation is as old as its oldest image.
        stamp = min(stamp_ns(image.header) for image in images)
        if self._joints["sequence"] == 0 or not self._recent(stamp, now_ns, "image"):
            return
        self._observation_out.put(encode(new(
            "Observation", header=make_header(stamp), session=self._session, sequence=self._observations,
            instruction=self._instruction, joint_names=self._names,
            joint_positions=np.array(self._joints["position"]), images=images)))
        self._observations += 1

    def _publish_ticks(self, now_ns: int) -> None:
        self._cursor, records, lost = self._memory.ticks.drain(self._cursor, 1024)
        if lost:
            self._rejects.add("motor_ticks_lost", lost)
        if not records:
            return
        ticks: Record = np.frombuffer(b"".join(records), dtype=self._memory.dtypes["ticks"])
        for lateness_ns in ticks["lateness_ns"]:
            self._lateness_s.record(float(lateness_ns) / NS)
        self._ticks_out.put(encode(new(
            "MotorTicks", header=make_header(now_ns), joints=len(self._names), tick=ticks["tick"],
            command=ticks["position"], **{name: ticks[name] for name in TICK_FIELDS})))

    def _publish_status(self, now_ns: int) -> None:
        found = self._memory.read("motor")
        if found is None:
            return
        motor = found[1]
        state, reason, verdict = State(int(motor["state"])), Reason(int(motor["reason"])), Rearm(int(motor["rearm"]))
        policy_ready = self._policy_ready(now_ns)
        text = REASON_TEXT[reason]
        if state is State.HOLDING and verdict is not Rearm.ACCEPTED:
            text += f"; re-arm {REARM_TEXT[verdict]}"
        elif state is State.HOLDING and not policy_ready:
            text += "; no fresh plan yet: is the cloud up and an instruction given?"
        hangs = reason is not Reason.SHUTDOWN and now_ns - int(motor["stamp_ns"]) > MOTOR_MAX_AGE_NS
        if hangs:
            text = "THE MOTOR PROCESS DOES NOT TICK: the robot is on its own time-out"
            verdict = Rearm.NOT_HOLDING
        late = self._lateness_s.summary()
        self._status_out.put(encode(new(
            "ShieldStatus", header=make_header(now_ns), state=int(state), reason=text, tick=int(motor["tick"]),
            rearm_ready=verdict is Rearm.ACCEPTED and policy_ready, joint_names=self._names,
            position=np.array(motor["position"]), velocity=np.array(motor["velocity"]),
            limit_interventions=int(motor["limited"]), missed_ticks=int(motor["missed"]),
            lateness_p50_s=late.p50, lateness_p99_s=late.p99, lateness_max_s=late.maximum if late.count else 0.0,
            chunks_accepted=int(motor["accepted"]), chunks_rejected=int(motor["rejects"].sum()),
            scheduling=motor["scheduling"].item().decode())))
        self._log_change(state, reason, hangs, text)

    def _policy_ready(self, now_ns: int) -> bool:
        found = self._memory.read("policy")
        return found is not None and bool(found[1]["ready"]) and now_ns - int(found[1]["stamp_ns"]) <= POLICY_MAX_AGE_NS

    def _log_change(self, state: State, reason: Reason, hangs: bool, text: str) -> None:
        """Log changes of the shield's state, leaving out the flicker between NOMINAL and COASTING."""
        acts = reason in (Reason.FOLLOWING, Reason.CHUNK_OLD)
        key = (State.NOMINAL, Reason.FOLLOWING, hangs) if acts else (state, reason, hangs)
        if key != self._logged:
            self._logged = key
            LOG.log(logging.ERROR if hangs else logging.INFO, "shield %s: %s", state.name, text)

    def _log_rejects(self) -> None:
        counts = {name: count for name, count in self._rejects.snapshot().items() if count}
        if counts:
            LOG.warning("refused in the last %d s: %s", WATCH_PERIOD_NS // NS,
                        ", ".join(f"{name} {count}" for name, count in counts.items()))
            self._rejects = Counters()


def body(child: Child) -> None:
    """Poll until told to stop."""
    config = child.config
    cameras = [camera.name for camera in load_manifest(config.model, verify=False).cameras]
    with open_bus(config.bus, node=f"vla_io_{config.robot_id}", allow_remote=config.allow_remote) as bus, \
            open_bus(config.cloud, node=f"vla_io_{config.robot_id}", allow_remote=config.allow_remote) as cloud:
        loop = IoLoop(child, cameras, bus, cloud)
        period_ns = round(config.io.poll_s * NS)
        due_ns = child.clock.monotonic_ns()
        while not child.stop.is_set():
            loop.turn()
            due_ns = max(due_ns + period_ns, child.clock.monotonic_ns())
            child.clock.sleep_until_ns(due_ns)
        loop.flush()


if __name__ == "__main__":
    main_exit(run("io", body))
