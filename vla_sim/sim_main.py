"""``vla sim``: the simulated robot as a process of its own, in real time, with the operator of a list of episodes.

It hosts the robot bus, as rmw_zenohd would on a robot. When the episodes are done it says so in its task status and
stays, so that whoever started it can stop the others first; SIGTERM or SIGINT ends it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_common.clock import NS_PER_S, Clock, SystemClock
from vla_common.config import ConfigError, load_config
from vla_common.logging_setup import add_log_argument, setup_logging
from vla_common.process import StopFlag, end_with_parent, stop_on_signals
from vla_common.zenoh_session import BusError, open_bus
from vla_sim.config import CONTROL_HZ, SimConfig
from vla_sim.episodes import RunResults, plan_episodes
from vla_sim.ports import with_free_port
from vla_sim.realtime import Pacer
from vla_sim.realtime_robot import RobotConfig, SimulatedRobot
from vla_sim.run_files import write_json
from vla_sim.task_runner import RunnerConfig, TaskRunner
from vla_sim.tasks import TASKS, TaskSpec
from vla_sim.world import TabletopWorld

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodesConfig:
    """Which episodes are played."""

    count: int = 10
    seed: int = 0
    tasks: tuple[str, ...] = TASKS
    motion: str = "still"
    shuffled: bool = False


@dataclass(frozen=True)
class SimMainConfig:
    """``vla sim``.

    Attributes:
        bus: endpoint to host; port 0 picks a free one. ``ros`` or ``ros:<namespace>``: ROS 2 topics instead.
        max_lag_s: see ``Pacer``.
        niceness: scheduling priority asked for, -20 .. 19; a robot does not wait for our processor, so the simulated
            one is given precedence over ordinary processes where that is permitted.
    """

    bus: str = "tcp/127.0.0.1:7447"
    max_lag_s: float = 0.1
    niceness: int = -10
    world: SimConfig = field(default_factory=SimConfig)
    robot: RobotConfig = field(default_factory=RobotConfig)
    operator: RunnerConfig = field(default_factory=RunnerConfig)
    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)


def parse(argv: Sequence[str] | None) -> tuple[SimMainConfig, Path | None]:
    """Command line to configuration; options are short forms of ``--set``."""
    parser = argparse.ArgumentParser(prog="vla sim", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, help="YAML file of overrides")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="override, such as episodes.count=3")
    parser.add_argument("--bus", help="endpoint of the robot bus (default tcp/127.0.0.1:7447; port 0: a free one); "
                                      "ros or ros:<namespace>: ROS 2 topics")
    parser.add_argument("--robot", help="robot id in topic names (default arm1)")
    parser.add_argument("--episodes", type=int, help="number of episodes (default 10)")
    parser.add_argument("--seed", type=int, help="seed of the list of episodes (default 0)")
    parser.add_argument("--tasks", help="comma-separated: touch,pick (default both)")
    parser.add_argument("--motion", help="still, moving or both (default still)")
    parser.add_argument("--shuffled", action="store_true", help="control: the instruction names another object")
    parser.add_argument("--results", type=Path, help="write results as JSON here, after every episode")
    add_log_argument(parser)
    arguments = parser.parse_args(argv)
    named = {"bus": arguments.bus, "robot.robot": arguments.robot, "episodes.count": arguments.episodes,
             "episodes.seed": arguments.seed, "episodes.motion": arguments.motion,
             "episodes.tasks": None if arguments.tasks is None else f"[{arguments.tasks}]",
             "episodes.shuffled": True if arguments.shuffled else None}
    overrides = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}"
                 for key, value in named.items() if value is not None]
    return load_config(SimMainConfig, arguments.config, [*overrides, *arguments.set]), arguments.results


def make_runner(config: SimMainConfig) -> TaskRunner:
    """Operator of the configured episodes."""
    wanted = config.episodes
    if wanted.motion not in ("still", "moving", "both"):
        raise ConfigError(f"motion must be still, moving or both, not {wanted.motion!r}")
    mode = "shuffled" if wanted.shuffled else "normal"
    episodes = plan_episodes(wanted.count, wanted.seed, wanted.tasks, wanted.motion, mode)  # type: ignore[arg-type]
    results = RunResults(wanted.seed, mode, config.operator.timeout_s,  # type: ignore[arg-type]
                         config.operator.timeout_extended_by_outages, wanted.count)
    return TaskRunner(episodes, results, config.operator)


def make_world(config: SimConfig) -> TabletopWorld:
    """World with the arm at its ready pose. The operator keeps the time-out, so the judge's never comes."""
    world = TabletopWorld(dataclasses.replace(config, timeout_s=math.inf))
    world.reset(0, TaskSpec("touch", 0))
    world.stop_cubes()
    return world


def _try_camera(world: TabletopWorld, camera: str) -> None:
    """Make the GL context now: it takes longer than a period, and may not work at all.

    Raises:
        ConfigError: no off-screen rendering, or no such camera.
    """
    try:
        world.render(camera)
    except KeyError as error:
        raise ConfigError(f"the simulator has no camera {camera!r}: see CAMERAS in vla_sim/scene.py") from error
    except Exception as error:  # MuJoCo, EGL and OSMesa each have exceptions of their own
        raise ConfigError(f"off-screen rendering does not work ({type(error).__name__}: {error}): run 'vla doctor', "
                          "which names the missing libraries, or set MUJOCO_GL to egl or osmesa") from error


def open_robot_bus(bus: str, robot: str, clock: Clock) -> Any:
    """Host the robot bus on Zenoh, or join ROS 2 as a node named after the robot.

    Raises:
        BusError: bad endpoint or namespace, port in use, or ROS is asked for and not usable.
    """
    if bus.partition(":")[0] != "ros":
        return open_bus(bus, "router", node="vla_sim", clock=clock)
    from vla_edge.adapters.ros_bus import open_ros_bus
    from vla_edge.robot_bus import ros_prefix

    return open_ros_bus(f"vla_sim_{robot}", prefix=ros_prefix(bus), clock=clock)


def take_precedence(niceness: int) -> None:
    """Ask for the priority; without permission the simulator runs as it is and says so."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    except PermissionError:
        LOG.info("no permission for niceness %d: under load the simulated robot may fall behind real time", niceness)


class Loop:
    """Runs the robot in real time and keeps its record."""

    def __init__(self, robot: SimulatedRobot, pacer: Pacer, clock: Clock, results_path: Path | None) -> None:
        """Results are written to ``results_path`` after every episode."""
        self.robot = robot
        self.pacer = pacer
        self._clock = clock
        self._path = results_path
        self._written = -1

    def run(self, stop: StopFlag) -> None:
        """Until stopped."""
        while not stop.is_set():
            self._clock.sleep_until_ns(self.pacer.deadline_ns())
            index = self.pacer.step
            slip_ns = self.pacer.begin(self._clock.monotonic_ns())
            if slip_ns:
                LOG.warning("physics fell %.0f ms behind real time and slipped; the machine is too busy", slip_ns / 1e6)
            self.robot.tick(index)
            self._write_if_new()
        self._write_if_new(always=True)

    def _write_if_new(self, always: bool = False) -> None:
        results = self.robot.runner.results
        if self._path is None or (len(results.episodes) == self._written and not always):
            return
        self._written = len(results.episodes)
        write_json(self._path, {**results.to_json(), "robot": self.record()})

    def record(self) -> dict[str, Any]:
        """How well the robot itself kept time and what it refused."""
        gate, pacer = self.robot.gate, self.pacer
        return {"steps": pacer.step, "slips": pacer.slips, "slipped_s": pacer.slipped_ns / NS_PER_S,
                "worst_lag_s": pacer.worst_lag_ns / NS_PER_S, "commands_accepted": gate.accepted,
                "commands_refused": gate.refused.snapshot(), "command_timeouts": gate.timeouts}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    end_with_parent()
    setup_logging("sim")
    stop = stop_on_signals()
    try:
        config, results_path = parse(argv)
        runner = make_runner(config)
        endpoint = with_free_port(config.bus)
        clock = SystemClock()
        world = make_world(config.world)
        take_precedence(config.niceness)
        _try_camera(world, config.robot.camera)
        with open_robot_bus(endpoint, config.robot.robot, clock) as bus:
            robot = SimulatedRobot(world, bus, runner, config.robot, clock)
            print(f"READY {endpoint} {len(runner.episodes)} episodes", flush=True)
            gc.freeze()
            pacer = Pacer(NS_PER_S // CONTROL_HZ, round(config.max_lag_s * NS_PER_S), clock.monotonic_ns())
            Loop(robot, pacer, clock, results_path).run(stop)
        world.close()
    except (ConfigError, BusError, ValueError) as error:
        LOG.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
