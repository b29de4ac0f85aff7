"""The simulated robot against a bus of lists: what it says, what it takes, and that episodes never move the arm."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from vla_common.clock import SteppedClock
from vla_common.messages import new
from vla_common.process import StopFlag
from vla_common.topics import topic_spec
from vla_common.wire import decode, encode, make_header, stamp_ns
from vla_common.zenoh_session import Received
from vla_sim.config import HOME, JOINT_NAMES, SimConfig
from vla_sim.episodes import RunResults, plan_episodes
from vla_sim.realtime import Pacer
from vla_sim.realtime_robot import RobotConfig, SimulatedRobot, scene_json
from vla_sim.sim_main import Loop, make_world
from vla_sim.task_runner import RunnerConfig, TaskRunner
from vla_sim.tasks import TaskSpec
from vla_sim.world import TabletopWorld

S = 1_000_000_000
PERIOD_NS = S // 100


class Outlet:
    def __init__(self, name: str) -> None:
        self.type_name = topic_spec(name).type_name
        self.payloads: list[bytes] = []

    def put(self, payload: bytes) -> None:
        self.payloads.append(payload)

    @property
    def messages(self) -> list[Any]:
        return [decode(self.type_name, payload) for payload in self.payloads]


class Inlet:
    def __init__(self) -> None:
        self.newest: bytes | None = None

    def try_recv(self) -> Received | None:
        payload, self.newest = self.newest, None
        return None if payload is None else Received(payload, None, 0, "")


class ListBus:
    def __init__(self) -> None:
        self.out: dict[str, Outlet] = {}
        self.into: dict[str, Inlet] = {}

    def publisher(self, name: str, robot: str, camera: str = "") -> Outlet:
        return self.out.setdefault(name, Outlet(name))

    def latest(self, name: str, robot: str) -> Inlet:
        return self.into.setdefault(name, Inlet())


class Rig:
    """A robot, its bus and a clock that is 10 ms further at every tick."""

    def __init__(self, episodes: int = 2) -> None:
        self.clock, self.bus = SteppedClock(10 * S), ListBus()
        self.world = make_world(SimConfig())
        self.world.render = lambda camera: np.zeros((8, 8, 3), np.uint8)  # type: ignore[method-assign]
        self.results = RunResults(0, "normal", 8.0, False, episodes)
        self.runner = TaskRunner(plan_episodes(episodes, 1), self.results, RunnerConfig())
        self.robot = SimulatedRobot(self.world, self.bus, self.runner, RobotConfig(), self.clock)  # type: ignore[arg-type]
        self.index = 0

    def tick(self, count: int = 1, command: np.ndarray | None = None, state: int | None = None) -> None:
        for _ in range(count):
            now_ns = self.clock.monotonic_ns()
            if command is not None:
                self.bus.into["joint_command"].newest = encode(new(
                    "sensor_msgs/JointState", header=make_header(now_ns), name=list(JOINT_NAMES), position=command))
            if state is not None:
                self.bus.into["shield_status"].newest = encode(new(
                    "ShieldStatus", header=make_header(now_ns), state=state, rearm_ready=True))
            self.robot.tick(self.index)
            self.index += 1
            self.clock.advance_ns(PERIOD_NS)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_publishes_at_the_rates_of_the_table(rig: Rig) -> None:
    rig.tick(100)
    counts = {name: len(outlet.payloads) for name, outlet in rig.bus.out.items()}
    assert counts == {"joint_states": 100, "image": 10, "instruction": 2, "shield_command": 0, "task_status": 10,
                      "sim_state": 25}
    joints = rig.bus.out["joint_states"].messages[-1]
    assert tuple(joints.name) == JOINT_NAMES and joints.position == pytest.approx(np.array(HOME), abs=0.02)
    assert stamp_ns(joints.header) == 10 * S + 99 * PERIOD_NS
    image = rig.bus.out["image"].messages[0]
    assert image.format == "jpeg" and image.header.frame_id == "front" and bytes(image.data[:2]) == b"\xff\xd8"
    state = rig.bus.out["sim_state"].messages[-1]
    assert len(state.qpos) == len(rig.world.qpos()) and json.loads(state.scene)["seed"] == 0
    status = rig.bus.out["task_status"].messages[-1]
    assert (status.phase, status.instruction, status.episodes_total) == ("homing", "go home", 2)


def test_follows_commands_and_holds_when_they_stop(rig: Rig) -> None:
    target = np.array(HOME)
    target[0], target[7] = 0.2, 1.0
    rig.tick(150, command=target)
    assert rig.world.joint_positions()[0] == pytest.approx(0.2, abs=0.02)
    assert rig.world.joint_positions()[7] > 0.8
    rig.tick(100)
    assert rig.robot.gate.timeouts == 1
    assert rig.world.joint_positions()[0] == pytest.approx(0.2, abs=0.02)


def test_refuses_what_is_not_a_command_for_it(rig: Rig) -> None:
    rig.bus.into["joint_command"].newest = b"\x00\x01\x00\x00junk"
    rig.tick()
    rig.tick(command=np.full(8, np.nan))
    refused = rig.robot.gate.refused.snapshot()
    assert refused["not_finite"] == 1 and refused.get("truncated", 0) + refused.get("malformed", 0) == 1
    assert rig.robot.gate.accepted == 0


def test_operator_rearms_and_starts_the_episode_without_moving_the_arm(rig: Rig) -> None:
    rig.tick(60, command=np.array(HOME), state=3)
    rearms = rig.bus.out["shield_command"].messages
    assert [(m.command, m.sequence) for m in rearms] == [(1, 1), (1, 2)]
    rig.tick(18, command=np.array(HOME), state=0)
    before = rig.world.joint_positions()
    rig.tick(6, command=np.array(HOME), state=0)
    assert rig.runner.phase == "running"
    assert rig.world.joint_positions() == pytest.approx(before, abs=1e-3)
    episode = rig.runner.episode
    assert rig.bus.out["instruction"].messages[-1].data == episode.instruction
    rig.tick(10, command=np.array(HOME), state=0)
    assert rig.bus.out["sim_state"].messages[-1].scene == scene_json(episode)
    assert rig.bus.out["task_status"].messages[-1].seed == episode.seed


def test_a_rearranged_scene_equals_that_of_a_reset() -> None:
    for seed, spec in ((5, TaskSpec("pick", 2)), (6, TaskSpec("touch", 1, moving=True))):
        fresh, used = TabletopWorld(), TabletopWorld()
        fresh.reset(seed, spec)
        used.reset(99, TaskSpec("touch", 0, moving=True))
        for _ in range(30):
            used.step(np.array(HOME))
        arm = used.joint_positions()
        used.rearrange(seed, spec)
        assert used.joint_positions().tolist() == arm.tolist()
        assert used.present.tolist() == fresh.present.tolist() and used.outcome == "running"
        assert used.cube_positions()[used.present] == pytest.approx(fresh.cube_positions()[fresh.present])
        assert used.cube_velocities()[used.present] == pytest.approx(fresh.cube_velocities()[fresh.present])


def test_loop_keeps_time_writes_results_and_stops(tmp_path: Any) -> None:
    rig = Rig(1)
    stop = StopFlag()
    path = tmp_path / "results.json"
    ticks = 0
    tick = rig.robot.tick

    def counted(index: int) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 40:
            rig.clock.advance_ns(S // 2)  # a stall beyond what is made up for
        if ticks == 80:
            stop.set()
        tick(index)

    rig.robot.tick = counted  # type: ignore[method-assign]
    loop = Loop(rig.robot, Pacer(PERIOD_NS, S // 10, rig.clock.monotonic_ns()), rig.clock, path)
    loop.run(stop)
    data = json.loads(path.read_text())
    assert data["robot"]["steps"] == 80 and data["robot"]["slips"] == 1
    assert data["robot"]["slipped_s"] == pytest.approx(0.49, abs=0.02)
    assert data["episodes"] == []
