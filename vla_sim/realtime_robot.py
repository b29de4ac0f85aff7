"""The simulated robot on the robot bus: joint states, camera and task status out, joint commands in.

One :meth:`SimulatedRobot.tick` is one control period (10 ms): newest command in, five physics steps, messages out.
Rendering comes last in a tick, so that a slow frame delays no joint state but the next one's wake-up.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from vla_common.clock import Clock
from vla_common.joint_command import JointCommandTemplate
from vla_common.messages import new
from vla_common.wire import WireError, decode, encode, make_header, stamp_ns
from vla_common.zenoh_session import Bus
from vla_sim.config import CONTROL_HZ, HOME, JOINT_NAMES
from vla_sim.episodes import Episode
from vla_sim.images import encode_jpeg
from vla_sim.realtime import CommandGate, Due, is_at_home
from vla_sim.task_runner import NS_PER_S, RunnerInput, RunnerOutput, ShieldView, TaskRunner
from vla_sim.world import TabletopWorld

LOG = logging.getLogger(__name__)

STATUS_MAX_AGE_S: Final = 0.5


@dataclass(frozen=True)
class RobotConfig:
    """The robot's own side of the bus; rates in Hz divide 100."""

    robot: str = "arm1"
    camera: str = "front"
    joint_state_hz: float = 100.0
    image_hz: float = 10.0
    state_hz: float = 25.0
    status_hz: float = 10.0
    command_timeout_s: float = 0.1
    home_tolerance_rad: float = 0.05
    home_tolerance_closure: float = 0.1
    slow_rad_s: float = 0.05


def scene_json(episode: Episode | None) -> str:
    """What a replay needs to build the scene again; the empty table is that of the first reset."""
    if episode is None:
        return json.dumps({"seed": 0, "task": "touch", "target": 0, "moving": False})
    spec = episode.spec
    return json.dumps({"seed": episode.seed, "task": spec.task, "target": spec.target, "moving": spec.moving})


class SimulatedRobot:
    """World, bus and operator of one robot. For one thread."""

    def __init__(self, world: TabletopWorld, bus: Bus, runner: TaskRunner, config: RobotConfig, clock: Clock) -> None:
        """Declare all topics; the world must have been reset."""
        self.world = world
        self.runner = runner
        self.config = config
        self.clock = clock
        self.gate = CommandGate(JOINT_NAMES, world.command(), config.command_timeout_s)
        self._joint_state = JointCommandTemplate(JOINT_NAMES)
        self._home = np.array(HOME)
        self._placed: Episode | None = None
        self._shield: Any = None
        self._rearm_sequence = 0
        self._open(bus)
        self._due_joints = Due(CONTROL_HZ, config.joint_state_hz)
        self._due_image = Due(CONTROL_HZ, config.image_hz)
        self._due_state = Due(CONTROL_HZ, config.state_hz, offset=1)
        self._due_status = Due(CONTROL_HZ, config.status_hz, offset=3)

    def _open(self, bus: Bus) -> None:
        robot = self.config.robot
        self._commands = bus.latest("joint_command", robot)
        self._statuses = bus.latest("shield_status", robot)
        self._joints_out = bus.publisher("joint_states", robot)
        self._image_out = bus.publisher("image", robot, self.config.camera)
        self._instruction_out = bus.publisher("instruction", robot)
        self._shield_out = bus.publisher("shield_command", robot)
        self._status_out = bus.publisher("task_status", robot)
        self._state_out = bus.publisher("sim_state", robot)

    def tick(self, index: int) -> None:
        """One control period."""
        self._receive_command()
        self.world.step(self.gate.command)
        now_ns = self.clock.monotonic_ns()
        if self._due_joints(index):
            self._joints_out.put(self._joint_state.pack(now_ns, self.world.joint_positions(),
                                                        self.world.joint_velocities()))
        self._operate(now_ns)
        if self._due_state(index):
            self._state_out.put(encode(new("SimState", header=make_header(now_ns), scene=scene_json(self._placed),
                                           episode=self.runner.episode.index, qpos=self.world.qpos())))
        if self._due_status(index):
            self._status_out.put(encode(self.task_status(now_ns)))
        if self._due_image(index):
            self._publish_image(now_ns)

    def _receive_command(self) -> None:
        now_ns = self.clock.monotonic_ns()
        received = self._commands.try_recv()
        if received is not None:
            try:
                message = decode("sensor_msgs/JointState", received.payload)
                self.gate.offer(message, stamp_ns(message.header), now_ns)
            except WireError as error:
                self.gate.refuse(error.cause)
        report = self.gate.check(now_ns)
        if report is not None and report.is_timed_out:
            LOG.warning("no joint command for %.2f s: holding the last position; is the motor process alive?",
                        report.after_s)
        elif report is not None:
            LOG.warning("joint commands are back")

    # ------------------------------------------------------------------ the operator

    def _operate(self, now_ns: int) -> None:
        measured = self.world.joint_positions()
        config = self.config
        seen = RunnerInput(
            now_ns,
            is_home=is_at_home(measured, self._home, config.home_tolerance_rad, config.home_tolerance_closure),
            is_slow=bool(np.abs(self.world.joint_velocities()[:-1]).max() <= config.slow_rad_s),
            shield=self._shield_view(now_ns),
            outcome=self.world.outcome)
        self._act(self.runner.step(seen), now_ns)

    def _shield_view(self, now_ns: int) -> ShieldView | None:
        received = self._statuses.try_recv()
        if received is not None:
            try:
                self._shield = decode("ShieldStatus", received.payload)
            except WireError as error:
                LOG.warning("shield status refused: %s", error)
        status = self._shield
        if status is None or now_ns - stamp_ns(status.header) > STATUS_MAX_AGE_S * NS_PER_S:
            return None
        return ShieldView(status.state == status.HOLDING, bool(status.rearm_ready))

    def _act(self, output: RunnerOutput, now_ns: int) -> None:
        if output.place is not None:
            self._placed = output.place
            self.world.rearrange(output.place.seed, output.place.spec)
        if output.instruction is not None:
            self._instruction_out.put(encode(new("std_msgs/String", data=output.instruction)))
        if output.rearm:
            self._rearm_sequence += 1
            command = new("ShieldCommand", header=make_header(now_ns), sequence=self._rearm_sequence)
            command.command = command.REARM
            self._shield_out.put(encode(command))
            LOG.info("operator: re-arm (%s)", "homing" if self.runner.phase == "homing" else "during an episode")

    def task_status(self, now_ns: int) -> Any:
        """``TaskStatus`` of this instant."""
        runner, episode = self.runner, self.runner.episode
        return new("TaskStatus", header=make_header(now_ns), episode=episode.index,
                   episodes_total=len(runner.episodes), seed=episode.seed, instruction=runner.instruction,
                   target=episode.target, task=episode.spec.task, phase=runner.phase, moving=episode.spec.moving,
                   elapsed_s=runner.elapsed_s(now_ns), successes=runner.successes, failures=runner.failures,
                   wrong_object=runner.wrong_object)

    def _publish_image(self, now_ns: int) -> None:
        rgb = self.world.render(self.config.camera)
        self._image_out.put(encode(new("sensor_msgs/CompressedImage", header=make_header(now_ns, self.config.camera),
                                       format="jpeg", data=encode_jpeg(rgb))))
