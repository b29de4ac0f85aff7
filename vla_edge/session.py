"""Supervisor and io in one process, in front of motor and policy: what a node of another framework needs of an edge.

It knows nothing of that framework. The main thread makes, watches and ends it; io runs in a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from vla_common.clock import NS_PER_S, Clock, sleep_s
from vla_common.manifest import load_manifest
from vla_common.messages import new
from vla_common.process import StopFlag
from vla_common.span_queue import tracing
from vla_common.wire import WireError, decode, encode
from vla_edge.child import Child
from vla_edge.cloud_link import open_cloud_link
from vla_edge.config import EdgeConfig
from vla_edge.core.diagnosis import Finding, clock_finding, inputs_finding, policy_finding, shield_finding
from vla_edge.core.health import PolicyHealth
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.records import EdgeMemory, Record
from vla_edge.core.shared_buffer import remove_leftovers
from vla_edge.core.shield import REARM_TEXT, Rearm, State
from vla_edge.core.task_goal import GoalView
from vla_edge.edge_main import Supervisor
from vla_edge.io_main import IoLoop
from vla_edge.io_metrics import metrics_page
from vla_edge.robot_bus import open_robot_bus

LOG = logging.getLogger(__name__)

ANSWER_S: Final = 0.4
POLL_S: Final = 0.005
RECORD_S: Final = 0.05
"""Time for the recorder to hear the last messages."""
INSTRUCTION_PERIOD_NS: Final = NS_PER_S // 4


class EdgeSession:
    """One run of the edge's processes. Its methods are for the main thread.

    Attributes:
        limits: of the robot. memory: shared with the children.
    """

    def __init__(self, config: EdgeConfig, limits: JointLimits, clock: Clock) -> None:
        """Make the shared memory and join both networks; nothing runs yet.

        Raises:
            OSError: no shared memory. BusError: a bus cannot be opened. ManifestError: no model.
        """
        for path in remove_leftovers():
            LOG.warning("removed %s, left behind by a killed edge", path)
        self._config, self._clock, self.limits = config, clock, limits
        cameras = [camera.name for camera in load_manifest(config.model, verify=False).cameras]
        self.memory = EdgeMemory.create(config.robot_id, len(limits))
        self._flag = StopFlag()
        self._buses: list[Any] = []
        self._exits = ExitStack()
        self._supervisor = Supervisor(config, self.memory, clock, has_io=False)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="vla-io")
        self._io_failed = self._is_running = False
        try:
            bus = open_robot_bus(config, "vla_io", clock)
            self._buses.append(bus)
            cloud = open_cloud_link(config, "vla_io", watch=True)
            self._buses.append(cloud)
            tracer = self._exits.enter_context(tracing(config.tracing, "vla-io", config.robot_id, clock))
            self._io = IoLoop(Child(config, self.memory, limits, clock, self._flag), cameras, bus, cloud, tracer)
            self._io.accepts_rearm = False
            self._instruction_out = bus.publisher("instruction", config.robot_id)
            self._judge_in = bus.latest("task_status", config.robot_id)
        except Exception:
            self._release()
            raise
        self._judged = ("", "")
        self._said: str | None = None
        self._say_due_ns = 0

    def start(self) -> None:
        """Start io and the children. Call from the main thread, see :func:`vla_common.process.spawn`."""
        self._is_running = True
        self._supervisor.start_all()
        self._thread.start()

    def _serve(self) -> None:
        """The io thread."""
        period_ns = round(self._config.io.poll_s * NS_PER_S)
        due_ns = self._clock.monotonic_ns()
        try:
            with metrics_page(self._io, self._config.io.metrics_listen):
                while not self._flag.is_set():
                    self._io.turn()
                    due_ns = max(due_ns + period_ns, self._clock.monotonic_ns())
                    self._clock.sleep_until_ns(due_ns)
            self._io.flush()
        except Exception:
            self._io_failed = True
            LOG.exception("io failed: no joint states come in and the robot stops")

    def look(self) -> str:
        """Watch the children and repeat the instruction; call some ten times a second.

        Returns:
            What ended for good, so that the edge cannot go on; else empty.
        """
        if self._io_failed:
            return "io failed"
        if not self._supervisor.look():
            return "the motor process ended or a process cannot work; the log says why"
        now_ns = self._clock.monotonic_ns()
        if self._said is not None and now_ns >= self._say_due_ns:
            self._say_due_ns = now_ns + INSTRUCTION_PERIOD_NS
            self._instruction_out.put(encode(new("std_msgs/String", data=self._said)))
        if (received := self._judge_in.try_recv()) is not None:
            try:
                status = decode("TaskStatus", received.payload)
                self._judged = (str(status.instruction), str(status.phase))
            except WireError as error:
                LOG.debug("task status refused: %s", error)
        return ""

    def pid(self, name: str) -> int:
        """Process id of a child, 0 without one."""
        return self._supervisor.pid(name)

    # ------------------------------------------------------------------ the operator

    def accept_rearms(self, accept: bool) -> None:
        """Whether re-arms are carried out, by whatever way they come. Stops always are."""
        self._io.accepts_rearm = accept

    def rearm(self) -> tuple[bool, str]:
        """Re-arm; whether it was carried out, and why not in words."""
        if not self._io.accepts_rearm:
            return False, "refused: the node is not active"
        motor, policy = self.motor, self.policy()
        verdict = Rearm.NO_MEASUREMENT if motor is None else Rearm(int(motor["rearm"]))
        if verdict is not Rearm.ACCEPTED:
            return False, REARM_TEXT[verdict]
        if policy is None or not policy.can_plan:
            return False, f"refused: {self._io.out.reason}"
        self._io.request("rearm")
        if self._wait(lambda motor: int(motor["state"]) in (State.NOMINAL, State.COASTING), ANSWER_S):
            return True, "armed"
        return False, f"not carried out: {self._io.out.reason}"

    def estop(self) -> tuple[bool, str]:
        """Stop, damped, and hold; whether the motor process took it."""
        self._io.request("estop")
        if self._wait(lambda motor: int(motor["state"]) in (State.BRAKING, State.HOLDING), ANSWER_S):
            return True, "braking; the robot will hold until it is re-armed"
        return False, "THE MOTOR PROCESS DOES NOT ANSWER: use the robot's own stop"

    def stop_damped(self, timeout_s: float, why: str) -> bool:
        """Stop and wait until the robot holds at rest; False if it does not within the time. ``why`` is what the status
        then says, such as "the goal was cancelled"."""
        self._io.request("estop", why)
        if self.motor is None:  # it has not begun, so nothing moves
            return True
        rests = self._wait(lambda motor: int(motor["state"]) == State.HOLDING and not np.any(motor["velocity"]),
                           timeout_s)
        if not rests:
            LOG.error("the robot did not come to rest within %g s", timeout_s)
        return rests

    def say(self, instruction: str | None) -> None:
        """Give an instruction and repeat it from now on; None: leave the topic to others."""
        if instruction is None and self._said:
            self._instruction_out.put(encode(new("std_msgs/String", data="")))
        self._said, self._say_due_ns = instruction, 0
        self._judged = ("", "")

    def _wait(self, condition: Callable[[Record], bool], timeout_s: float) -> bool:
        """Until the motor's record, written after now, meets a condition."""
        found = self.memory.read("motor")
        first = (found[0] if found else 0) + 2  # the tick under way may have looked before the request
        deadline_ns = self._clock.monotonic_ns() + round(timeout_s * NS_PER_S)
        while self._clock.monotonic_ns() < deadline_ns:
            found = self.memory.read("motor")
            if found is not None and found[0] > first and condition(found[1]):
                return True
            sleep_s(self._clock, POLL_S)
        return False

    # ------------------------------------------------------------------ what there is to tell

    @property
    def reason(self) -> str:
        """Why the robot does what it does, in words."""
        return self._io.out.reason

    @property
    def motor(self) -> Record | None:
        """The motor's newest record."""
        found = self.memory.read("motor")
        return None if found is None else found[1]

    def policy(self) -> PolicyHealth | None:
        """The policy process as its heartbeat tells."""
        found = self.memory.read("policy")
        return None if found is None else PolicyHealth.of(found[1], self._clock.monotonic_ns())

    def goal_view(self) -> GoalView:
        """What a goal is judged by."""
        motor = self.motor
        return GoalView(
            self._clock.monotonic_ns(), State.HOLDING if motor is None else State(int(motor["state"])), self.reason,
            None if motor is None else motor["position"], None if motor is None else motor["velocity"],
            self._io.instruction, self._judged, 0 if motor is None else int(motor["stops"]))

    def findings(self) -> list[Finding]:
        """For diagnostics."""
        motor, out = self.motor, self._io.out
        tick, silent_s, late_s = out.tick
        joints = self.memory.read("joints")
        age_s = None if joints is None else (self._clock.monotonic_ns() - int(joints[1]["stamp_ns"])) / NS_PER_S
        return [shield_finding(motor, out.reason), clock_finding(motor, tick, silent_s, late_s),
                policy_finding(self.policy(), out.cause), inputs_finding(age_s, self._io.rejects(), self._io.cameras)]

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """The motor first, which brakes to rest; then io, which has seen it, and the other children. Within three
        seconds; safe to call twice."""
        if self._is_running:
            self._is_running = False
            self._io.accepts_rearm = False
            self.memory.file.unlink()
            self._supervisor.stop_motor()
            self._flag.set()
            self._thread.join(1.0)  # its last turn publishes the motor's last ticks
            sleep_s(self._clock, RECORD_S)
            self._supervisor.stop()
        self._release()

    def _release(self) -> None:
        self._flag.set()
        while self._buses:
            self._buses.pop().close()
        self._exits.close()
        self.memory.file.unlink()
        if not self._thread.is_alive():
            self.memory.close()
