"""The lifecycle node between a fake ROS robot and a fake cloud: real processes, real ROS, real Zenoh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rclpy
from action_msgs.msg import GoalStatus
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.action import ActionClient
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from std_msgs.msg import String
from std_srvs.srv import Trigger
from vla_runtime.action import RunTask

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

from edge_rig import (
    CLOCK,
    DIM,
    INSTRUCTION,
    LIMITS,
    ROBOT_FILE,
    ROOT,
    TOKENS,
    alive,
    free_endpoint,
    make_model,
    own_children,
)

from vla_common import messages, tensors, wire
from vla_common.clock import sleep_s
from vla_common.zenoh_session import open_bus
from vla_edge.adapters.ros_bus import open_ros_bus

NOMINAL, COASTING, BRAKING, HOLDING = range(4)
JOINTS = len(LIMITS)
_SETTLE_S = 0.3
EVENT_S = 60.0
"""Limit of a wait for what must come: on a busy machine any process may stall for seconds."""
_ASK_AGAIN_NS = 5_000_000_000
_REARM_AGAIN_NS = 500_000_000
_TRANSITION_S = 20.0
_STOP_TIMES = {"supervisor.motor_stop_s": 1.5, "supervisor.others_stop_s": 1.5}
"""As long as the node's own limit allows: a process that stalls while it ends is not killed at once."""
_REACHED = {"configure": "inactive", "activate": "active", "deactivate": "inactive", "cleanup": "unconfigured"}
__all__ = ["BRAKING", "COASTING", "EVENT_S", "HOLDING", "INSTRUCTION", "LIMITS", "NOMINAL", "GoalStatus", "RosRig", "alive",
           "own_children", "rclpy"]


class RosRig:
    """Starts robot, cloud and node; drives the node as an operator does.

    Attributes:
        direction: what the cloud says, as in edge_rig.Rig. statuses: newest ShieldStatus messages.
        judged: how many of the commands a test has looked at so far.
        ask_rearm: how the operator re-arms, by the node's service unless a test has another way.
    """

    def __init__(self, folder: Path, robot_options: tuple[str, ...] = (), parameters: dict[str, object] | None = None,
                 output: str = "joint_state", plain: bool = False) -> None:
        """``plain``: 'vla edge' with 'bus: ros' in the place of the lifecycle node."""
        self.folder, self.robot, self.output = folder, f"rosrig{os.getpid()}", output
        self.manifest = make_model(folder / "model")
        self.direction, self.cloud_answers = np.zeros(DIM, np.float32), True
        self.observations: list[object] = []
        self.statuses: list[object] = []
        self._clients: dict[str, object] = {}
        self._results: dict[bytes, object] = {}
        self._is_closed = False
        self.judged = 0
        self.ask_rearm: Callable[[], object] = lambda: self.trigger("rearm")
        self.diagnostics: dict[str, object] = {}
        self.feedback: list[object] = []
        self.log, self.command_log = folder / "node.log", folder / "commands.bin"
        self.endpoint = free_endpoint()
        self.cloud = open_bus(self.endpoint, "router", node="rig_cloud")
        self._observation_in = self.cloud.queue("observation", self.robot, capacity=8)
        self._context_out = self.cloud.publisher("context", self.robot)
        self.bus = open_ros_bus("rig")
        self._status_in = self.bus.queue("shield_status", self.robot, capacity=50)
        self.context = Context()
        self.context.init([])
        self.node = Node("rig_operator", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, 10)
        self.words = self.node.create_publisher(String, f"/{self.robot}/instruction", 1)
        self.tasks = ActionClient(self.node, RunTask, "/vla_edge/run_task")
        raw = "bgr8" in robot_options or "16UC1" in robot_options
        topics = {"joint_state": f"/{self.robot}/joint_command", "forward_command": "/forward_position_controller/commands",
                  "joint_trajectory": "/joint_trajectory_controller/joint_trajectory"}
        self.driver = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ros_robot.py")), "--names", ",".join(LIMITS.names),
             "--position=" + ",".join(map(str, LIMITS.ready)), "--joints", "/driver/joint_states", "--images",
             f"/{self.robot}/front/image_raw" + ("" if raw else "/compressed"), "--commands", topics[output], "--output",
             output, "--log", str(self.command_log), *robot_options], env={**os.environ, "PYTHONPATH": str(ROOT)})
        given = {"cloud": self.endpoint, "model": folder / "model", "robot_id": self.robot, "robot_file": ROBOT_FILE,
                 "ros.command_output": output, "ros.image_transport": "raw" if raw else "compressed", **_STOP_TIMES, **(parameters or {})}
        self.arguments = [sys.executable, "-m", "vla_edge.ros_main", "--ros-args", "-r",
                          f"/{self.robot}/joint_states:=/driver/joint_states",
                          *(part for key, value in given.items() for part in ("-p", f"{key}:={value}"))]
        if plain:
            given |= {"bus": "ros", "ros.remap": f"[/{self.robot}/joint_states:=/driver/joint_states]"}
            self.arguments = [sys.executable, "-m", "vla_edge.edge_main",
                              *(part for key, value in given.items() for part in ("--set", f"{key}={value}"))]
        self.edge = self.start_node()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve_cloud, daemon=True)
        self._thread.start()

    def start_node(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.arguments, cwd=self.folder, stdout=log, stderr=log,
                                    env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"})

    def _serve_cloud(self) -> None:
        while not self._stop.is_set():
            while (received := self._observation_in.try_recv()) is not None:
                observation = wire.decode("Observation", received.payload)
                self.observations.append(observation)
                if self.cloud_answers:
                    tokens = np.zeros((TOKENS, DIM), np.float32)
                    tokens[0] = self.direction
                    self._context_out.put(wire.encode(messages.new(
                        "ContextTokens", header=observation.header, session=observation.session,
                        sequence=observation.sequence, model_id="tiny", model_hash=self.manifest.model_hash,
                        instruction_hash=wire.instruction_hash(observation.instruction), **tensors.token_fields(tokens))))
            sleep_s(CLOCK, 0.005)

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        self.diagnostics.update({status.name.rpartition(": ")[2]: status for status in message.status})

    # ------------------------------------------------------------------ looking

    def spin(self) -> None:
        self.executor.spin_once(timeout_sec=0.01)
        while (received := self._status_in.try_recv()) is not None:
            self.statuses.append(wire.decode("ShieldStatus", received.payload))

    def wait(self, condition: object, timeout_s: float, what: str) -> None:
        deadline_ns = CLOCK.monotonic_ns() + round(timeout_s * 1e9)
        while not condition():
            if CLOCK.monotonic_ns() > deadline_ns:
                raise AssertionError(f"not within {timeout_s} s: {what}; status {self.statuses[-1:]}; diagnostics "
                                     f"{[(k, v.message) for k, v in self.diagnostics.items()]}; log:\n{self.log.read_text()}")
            self.spin()

    def commands(self) -> np.ndarray:
        """Every command received so far: instant ns, stamp, positions, speeds."""
        width = 2 + 2 * JOINTS
        data = np.fromfile(self.command_log) if self.command_log.exists() else np.zeros(0)
        return data[:data.size // width * width].reshape(-1, width)

    def position(self) -> np.ndarray:
        rows = self.commands()
        return rows[-1, 2:2 + JOINTS] if len(rows) else np.full(JOINTS, np.nan)

    def speed(self) -> float:
        """Largest speed of any joint by the last two commands, rad/s."""
        rows = self.commands()[-2:, 2:2 + JOINTS]
        return float(np.abs(np.diff(rows, axis=0)).max() / 0.01) if len(rows) == 2 else 0.0

    def state(self) -> int:
        return int(self.statuses[-1].state) if self.statuses else -1

    def level(self, name: str) -> bytes | None:
        """Of the diagnostics of that name; None before the first."""
        return self.diagnostics[name].level if name in self.diagnostics else None

    # ------------------------------------------------------------------ the operator

    def _client(self, kind: object, name: str) -> object:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = self.node.create_client(kind, name)
            self.wait(client.service_is_ready, EVENT_S, f"service {name}")
            # The server learns of us a moment later, and Fast DDS drops an answer for which it knows no reader.
            settled_ns = CLOCK.monotonic_ns() + round(_SETTLE_S * 1e9)
            self.wait(lambda: CLOCK.monotonic_ns() >= settled_ns, EVENT_S, "some time")
        self.wait(client.service_is_ready, EVENT_S, f"service {name}")
        return client

    def call(self, kind: object, name: str, request: object) -> object:
        """For what may be asked twice: on a busy machine the server may learn of us later, and its answer be dropped."""
        client, futures, due_ns = self._client(kind, name), [], 0

        def answered() -> bool:
            nonlocal due_ns
            if CLOCK.monotonic_ns() >= due_ns:
                due_ns = CLOCK.monotonic_ns() + _ASK_AGAIN_NS
                futures.append(client.call_async(request))
            return any(future.done() for future in futures)

        self.wait(answered, EVENT_S, f"answer of {name}")
        return next(future.result() for future in futures if future.done())

    def change(self, transition: str) -> bool:
        """Asked for once; the state tells of a transition whose answer was dropped."""
        number = getattr(Transition, f"TRANSITION_{transition.upper()}")
        future = self._client(ChangeState, "/vla_edge/change_state").call_async(
            ChangeState.Request(transition=Transition(id=number)))
        late_ns = CLOCK.monotonic_ns() + round(_TRANSITION_S * 1e9)
        self.wait(lambda: future.done() or CLOCK.monotonic_ns() > late_ns, EVENT_S, f"answer to {transition}")
        return bool(future.result().success) if future.done() else self.lifecycle_state() == _REACHED[transition]

    def lifecycle_state(self) -> str:
        return str(self.call(GetState, "/vla_edge/get_state", GetState.Request()).current_state.label)

    def trigger(self, name: str) -> tuple[bool, str]:
        answer = self.call(Trigger, f"/vla_edge/{name}", Trigger.Request())
        return answer.success, answer.message

    def bring_up(self) -> None:
        assert self.change("configure") and self.change("activate"), self.log.read_text()
        self.wait(lambda: len(self.commands()) > 5 and self.statuses, EVENT_S, "commands")

    def make_active(self) -> None:
        """From whatever state a stop has left the node in, or none: an activation of a node that runs changes nothing."""
        if self.edge.poll() is not None:
            self.edge = self.start_node()
        if self.lifecycle_state() == "unconfigured":
            self.bring_up()
        elif self.lifecycle_state() == "inactive":
            assert self.change("activate"), self.log.read_text()

    def send_goal(self, instruction: str) -> object:
        self.wait(self.tasks.server_is_ready, EVENT_S, "the action server")
        future = self.tasks.send_goal_async(RunTask.Goal(instruction=instruction),
                                            feedback_callback=lambda message: self.feedback.append(message.feedback))
        self.wait(future.done, EVENT_S, "answer to the goal")
        handle = future.result()
        if handle.accepted:  # asked for at once: a node that is told to end may not answer later
            self._results[bytes(handle.goal_id.uuid)] = handle.get_result_async()
        return handle

    def result_of(self, handle: object) -> tuple[int, object]:
        future = self._results[bytes(handle.goal_id.uuid)]
        self.wait(future.done, EVENT_S, "the result")
        return future.result().status, future.result().result

    def rearm(self) -> None:
        """Re-arm, again and again: on a busy machine any process may stall for a moment."""
        answers: list[tuple[bool, str]] = []

        def armed() -> bool:
            if self.statuses and self.statuses[-1].rearm_ready:
                answers.append(self.trigger("rearm"))
            # Where the node was kept from looking in time it says "not carried out" of a re-arm that was.
            return bool(answers) and (answers[-1][0] or self.state() == NOMINAL)

        self.wait(armed, EVENT_S, f"armed {answers[-1:]}")

    def persist(self, condition: Callable[[], object], what: str) -> None:
        """Wait, and re-arm whenever that is possible: on a busy machine a stall of any process makes the shield hold."""
        due_ns = 0

        def met() -> bool:
            nonlocal due_ns
            now_ns = CLOCK.monotonic_ns()
            if self.state() == HOLDING and self.statuses[-1].rearm_ready and now_ns >= due_ns:
                due_ns = now_ns + _REARM_AGAIN_NS
                self.ask_rearm()
            return bool(condition())

        self.wait(met, EVENT_S, what)

    def start_moving(self, speed: float = 0.05, until: Callable[[], object] = lambda: True) -> object:
        """By a goal, and until that holds too; it is given again where a stall of some process has ended it."""
        self.direction[:7] = speed
        handles = [self.send_goal(INSTRUCTION)]
        assert handles[0].accepted

        def moving() -> bool:
            if self._results[bytes(handles[-1].goal_id.uuid)].done():
                handles.append(self.send_goal(INSTRUCTION))
                assert handles[-1].accepted
            return self.is_moving() and until()

        self.persist(moving, "moving")
        return handles[-1]

    def keep_moving(self, speed: float = 0.05) -> None:
        """By what is said on the topic of instructions."""
        self.direction[:7] = speed
        self.persist(self.is_moving, "moving")

    def is_moving(self) -> bool:
        """The arm has two thirds of the speed that the cloud asks for."""
        return self.state() == NOMINAL and self.speed() > 4.0 * abs(self.direction[0])

    def toggle_camera(self) -> None:
        """The robot's camera falls silent, or comes back."""
        self.driver.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for process in (self.edge, self.driver):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(6.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._stop.set()
        self._thread.join(2.0)
        self.tasks.destroy()
        self.executor.shutdown(timeout_sec=1.0)
        self.node.destroy_node()
        self.context.try_shutdown()
        self.bus.close()
        self.cloud.close()
