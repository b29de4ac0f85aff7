"""The io process: joint states, images, instruction and operator's commands in; observations and statuses out."""

from __future__ import annotations

import logging
import os
import queue
import secrets
from typing import Any, Final, Literal

import numpy as np

from vla_common.manifest import load_manifest
from vla_common.messages import new
from vla_common.metrics import Counters
from vla_common.span_queue import tracing
from vla_common.topics import topic_spec
from vla_common.tracing import Tracer
from vla_common.wire import WireError, decode, encode, make_header, normalise_instruction, stamp_ns
from vla_common.zenoh_session import Bus, Received
from vla_edge.child import Child, main_exit, run
from vla_edge.cloud_link import open_cloud_link
from vla_edge.core.arrival import Arrivals, JointReader, MonotonicStamps, ReceiveInstants
from vla_edge.core.health import Tick
from vla_edge.core.local_motion import is_home_phrase
from vla_edge.core.tick_trace import IoTrace
from vla_edge.images import Cameras
from vla_edge.io_metrics import metrics_page
from vla_edge.io_status import StatusOut
from vla_edge.robot_bus import RobotBus, open_robot_bus

LOG = logging.getLogger(__name__)

NS: Final = 1_000_000_000
WATCH_PERIOD_NS: Final = 5 * NS


class IoLoop:
    """One turn polls what arrived and publishes what is due. Single-threaded: nothing here is urgent by itself."""

    def __init__(self, child: Child, cameras: list[str], bus: RobotBus, cloud: Bus,
                 tracer: Tracer | None = None) -> None:
        """Subscribe and announce."""
        config = child.config
        robot = config.robot_id
        self._child, self._config, self._memory, self._clock = child, config.io, child.memory, child.clock
        self._names = list(child.limits.names)
        self._arrivals: Arrivals = ReceiveInstants() if config.is_ros else MonotonicStamps()
        self._joint_reader = JointReader(self._names, by_name=config.is_ros)
        self._joints_in = bus.latest("joint_states", robot)
        self._instruction_in = bus.latest("instruction", robot)
        self._commands_in = bus.queue("shield_command", robot, capacity=16)
        self._estop_in = None if config.io.estop_topic == "off" else bus.queue("estop", robot, capacity=16)
        self._observation_out, self._report_out = cloud.publisher("observation", robot), None
        if config.io.report_hz > 0.0:
            self._report_out = cloud.publisher("shield_report", robot)
        self._session = secrets.token_hex(8)
        self._observations = 0
        self._instruction = ""
        self._joints, self._beat = self._memory.blank("joints"), self._memory.blank("io")
        self._control = self._memory.blank("control")
        self._seen_commands: dict[bytes, int] = {}
        self._requests: queue.SimpleQueue[tuple[Literal["rearm", "estop"], str]] = queue.SimpleQueue()
        self.accepts_rearm = True
        self._rejects, self._rejects_told = Counters(), dict[str, int]()
        self._cameras = Cameras(config, bus, cameras, self._instant_ns, self._rejects, self._clock.monotonic_ns())
        self._trace = None if tracer is None else IoTrace(tracer, robot)
        self.out = StatusOut(child, bus, self._rejects, self._resume(), self._trace)
        self._status_due_ns = self._ticks_due_ns = self._watch_due_ns = self._report_due_ns = 0

    def _resume(self) -> int:
        """Go on where a killed predecessor stopped: counts of commands, level of the emergency stop input, and, as the
        result, which tick to publish next."""
        found = self._memory.read("control")
        if found is not None:
            self._control[...] = found[1]
        self._beat["pid"], self._beat["session"] = os.getpid(), self._session.encode()
        found = self._memory.read("io")
        return int(found[1]["tick_cursor"]) if found is not None else 0

    @property
    def instruction(self) -> str:
        """As last heard."""
        return self._instruction

    def rejects(self) -> dict[str, int]:
        """What was refused so far, by name."""
        return self._rejects.snapshot()

    @property
    def shield(self) -> Any | None:
        """The newest ShieldStatus."""
        return self.out.message

    @property
    def is_ticking(self) -> bool:
        """Whether the motor process ticks."""
        return self.out.tick[0] is Tick.TICKING

    @property
    def observations(self) -> int:
        """Sent to the cloud."""
        return self._observations

    @property
    def cameras(self) -> str:
        """What is wrong with the cameras in words, or empty."""
        return self._cameras.describe(self._clock.monotonic_ns())

    def turn(self) -> None:
        """Do what is due."""
        now_ns = self._clock.monotonic_ns()
        self._arrivals.turn(now_ns)
        self._take_commands()
        self._take_estop()
        self._take_joints()
        self._take_instruction()
        images = self._cameras.turn(self._clock.monotonic_ns())
        self.out.cameras = self._cameras.state
        if images is not None:
            self._send_observation(images)
        self.out.see_chunk()
        if now_ns >= self._ticks_due_ns:
            self._ticks_due_ns = now_ns + round(NS / self._config.ticks_hz)
            self.out.publish_ticks(now_ns)
        if now_ns >= self._status_due_ns:
            self._status_due_ns = now_ns + round(NS / self._config.status_hz)
            joints_ns = int(self._joints["stamp_ns"])
            self.out.publish_status(now_ns, None if joints_ns == 0 else (now_ns - joints_ns) / NS)
        if self._report_out is not None and now_ns >= self._report_due_ns and self.out.payload:
            self._report_due_ns = now_ns + round(NS / self._config.report_hz)
            self._report_out.put(self.out.payload)
        self._beat["loops"] += 1
        self._beat["stamp_ns"], self._beat["tick_cursor"] = now_ns, self.out.cursor
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

    def _instant_ns(self, topic: str, stamp: int, received_ns: int, camera: str = "") -> int | None:
        """From when a sample counts; None if it is too old or otherwise not to be taken, which is counted. Age is
        checked on receipt: after a stall, samples that waited in buffers arrive in order and old."""
        found = self._arrivals.instant_ns(topic + camera, stamp, received_ns, self._clock.monotonic_ns(),
                                          topic_spec(topic).max_age_s)
        if found is None:
            self._rejects.add(f"{topic}_{self._arrivals.rejected}")
        return found

    def request(self, what: Literal["rearm", "estop"], why: str = "") -> None:
        """A re-arm or a stop from another thread of this process; carried out in the next turn. ``why``: of a stop that
        is not an emergency, such as "the goal was cancelled"."""
        self._requests.put((what, why))

    def _take_commands(self) -> None:
        before = (int(self._control["rearm"]), int(self._control["estop"]))
        while not self._requests.empty():
            what, why = self._requests.get()
            self._obey(what, why)
        while (received := self._commands_in.try_recv()) is not None:
            message = self._decoded("ShieldCommand", received, "shield_command")
            if message is None:
                continue
            sender = b"" if received.attachment is None else received.attachment.gid
            sequence = int(message.sequence)
            # ROS delivers each sample once and does not tell whose it is.
            if not self._child.config.is_ros and sequence <= self._seen_commands.get(sender, -1):
                self._rejects.add("shield_command_repeated")
            elif message.command == message.ESTOP:  # whatever its age: stopping is always allowed
                self._obey("estop")
            elif message.command != message.REARM:
                self._rejects.add("shield_command_unknown")
            elif self._instant_ns("shield_command", 0 if self._child.config.is_ros else stamp_ns(message.header),
                                  received.received_ns) is not None:
                self._obey("rearm")
            self._seen_commands[sender] = max(sequence, self._seen_commands.get(sender, -1))
        if before != (int(self._control["rearm"]), int(self._control["estop"])):
            self._memory.write("control", self._control)

    def _obey(self, what: Literal["rearm", "estop"], why: str = "") -> None:
        if what == "rearm" and not self.accepts_rearm:
            self._rejects.add("rearm_not_active")
            return
        self._control[what] += 1
        if what == "estop":
            self.out.say_why_stopped(why)

    def _take_estop(self) -> None:
        """Level of the emergency stop input. The message has no stamp, so it counts from when it was received; the
        motor process judges how long it has been silent, whatever becomes of this one."""
        if self._estop_in is None:
            return
        changed = False
        while (received := self._estop_in.try_recv()) is not None:
            message = self._decoded("std_msgs/Bool", received, "estop")
            if message is None:
                continue
            is_pressed = bool(message.data)
            self._control["presses"] += is_pressed and not self._control["pressed"]
            self._control["pressed"], self._control["heard_ns"] = is_pressed, received.received_ns
            changed = True
        if changed:
            self._memory.write("control", self._control)

    def _take_joints(self) -> None:
        received = self._joints_in.try_recv()
        message = None if received is None else self._decoded("sensor_msgs/JointState", received, "joint_states")
        if received is None or message is None:
            return
        found = self._joint_reader.read(message.name, message.position, message.velocity)
        if found is None:
            self._rejects.add(f"joint_states_{self._joint_reader.rejected}")
            return
        instant_ns = self._instant_ns("joint_states", stamp_ns(message.header), received.received_ns)
        if instant_ns is None:
            return
        if instant_ns <= int(self._joints["stamp_ns"]):
            self._rejects.add("joint_states_out_of_order")
            return
        self._joints["sequence"] += 1
        self._joints["stamp_ns"] = instant_ns
        self._joints["position"], self._joints["velocity"] = found
        if self.out.measured is not None:
            self.out.measured.take(instant_ns, found[0])
        self._memory.write("joints", self._joints)

    def _take_instruction(self) -> None:
        received = self._instruction_in.try_recv()
        message = None if received is None else self._decoded("std_msgs/String", received, "instruction")
        if message is not None:
            self._instruction = str(message.data)

    def _send_observation(self, images: list[Any]) -> None:
        instruction = normalise_instruction(self._instruction)
        local = not instruction or is_home_phrase(instruction, self._child.config.policy.home_phrases)
        if local and not self._config.uplink_local_instructions:
            return
        if self._joints["sequence"] == 0:
            return
        # With several cameras the observation is as old as its oldest image.
        stamp = min(stamp_ns(image.header) for image in images)
        self._observation_out.put(encode(new(
            "Observation", header=make_header(stamp), session=self._session, sequence=self._observations,
            instruction=self._instruction, joint_names=self._names,
            joint_positions=np.array(self._joints["position"]), images=images)))
        if self._trace is not None:
            self._trace.observed(stamp, self._observations, self._clock.monotonic_ns())
        self._observations += 1

    def _log_rejects(self) -> None:
        total = self._rejects.snapshot()
        counts = {name: count - self._rejects_told.get(name, 0) for name, count in total.items()
                  if count > self._rejects_told.get(name, 0)}
        self._rejects_told = total
        if counts:
            LOG.warning("refused in the last %d s: %s", WATCH_PERIOD_NS // NS,
                        ", ".join(f"{name} {count}" for name, count in counts.items()))


def body(child: Child) -> None:
    """Poll until told to stop."""
    config = child.config
    cameras = [camera.name for camera in load_manifest(config.model, verify=False).cameras]
    with open_robot_bus(config, "vla_io", child.clock) as bus, \
            open_cloud_link(config, "vla_io", watch=True) as cloud, \
            tracing(config.tracing, "vla-io", config.robot_id, child.clock) as tracer:
        loop = IoLoop(child, cameras, bus, cloud, tracer)
        period_ns = round(config.io.poll_s * NS)
        due_ns = child.clock.monotonic_ns()
        with metrics_page(loop, config.io.metrics_listen):
            while not child.stop.is_set():
                loop.turn()
                due_ns = max(due_ns + period_ns, child.clock.monotonic_ns())
                child.clock.sleep_until_ns(due_ns)
        loop.flush()


if __name__ == "__main__":
    main_exit(run("io", body))
