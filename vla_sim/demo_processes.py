"""The processes of a demo: their command lines, readiness, signals, and a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vla_common.clock import NS_PER_S, Clock, sleep_s
from vla_common.process import StopFlag, spawn
from vla_edge.core.shared_buffer import remove_leftovers
from vla_sim.demo_config import DemoConfig, project_path
from vla_sim.faults import FaultPlan
from vla_sim.ports import with_free_port
from vla_sim.process_faults import Step
from vla_sim.process_table import edge_children

ROOT: Final = Path(__file__).resolve().parent.parent
LOOPBACK: Final = "tcp/127.0.0.1:0"
POLL_S: Final = 0.05
STOP_POLL_S: Final = 0.01
EDGE_STOP_S: Final = 1.5
_ZENOH_LOG: Final = {"RUST_LOG": os.environ.get("RUST_LOG", "error,zenoh_task=off")}
ALL_STOP_S: Final = 1.8
SIGNALS: Final[dict[Step, int]] = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP,
                                   "resume": signal.SIGCONT}


class DemoError(RuntimeError):
    """The run cannot go on; the message names the process and where to look."""


@dataclass(frozen=True)
class Endpoints:
    """Of one run; ``edge_cloud`` is where the edge finds its cloud, the link's if there is one."""

    bus: str
    cloud: str
    edge_cloud: str

    @staticmethod
    def pick(with_link: bool) -> Endpoints:
        """Free ports on loopback."""
        bus, cloud = with_free_port(LOOPBACK), with_free_port(LOOPBACK)
        return Endpoints(bus, cloud, with_free_port(LOOPBACK) if with_link else cloud)


def command_lines(config: DemoConfig, plan: FaultPlan | None, at: Endpoints, folder: Path) -> dict[str, list[str]]:
    """What to start, by name, in order."""
    model = str(project_path(config.model))
    vla = [sys.executable, "-m", "vla_cli"]
    cloud = [part.replace("{bus}", at.bus) for part in config.cloud_command] or [
        *vla, "cloud", *_config_file("config/cloud.yaml"), *_sets(config.cloud)]
    lines = {"cloud": [*cloud, "--listen", at.cloud, "--model", model]}
    lines["sim"] = [*vla, "sim", "--bus", at.bus, "--results", str(folder / "results.json"), *_sets(
        [*_sim_values(config, plan), *config.sim])]
    if plan is not None and plan.link is not None and config.faults is not None:
        lines["link"] = [sys.executable, "-m", "vla_sim.link_main", "--listen", at.edge_cloud, "--cloud", at.cloud,
                         "--bus", at.bus, "--faults", str(project_path(config.faults)), "--robot", config.robot,
                         "--seed", str(config.seed), "--events", str(folder / "events.jsonl"),
                         "--report", str(folder / "link.json")]
    lines["edge"] = [*vla, "edge", *_config_file("config/edge.yaml"), "--bus", at.bus, "--cloud", at.edge_cloud,
                     "--model", model, "--robot-id", config.robot, "--record", str(folder / "recording.mcap"),
                     *_sets([f"robot_file={project_path(config.robot_file)}", *config.edge])]
    return lines


def _sim_values(config: DemoConfig, plan: FaultPlan | None) -> list[str]:
    values = [f"robot.robot={config.robot}", f"robot.camera={config.camera}", f"episodes.count={config.episodes}",
              f"episodes.seed={config.seed}", f"episodes.tasks=[{','.join(config.tasks)}]",
              f"episodes.motion={config.motion}", f"episodes.shuffled={str(config.shuffled).lower()}",
              f"operator.start_timeout_s={config.start_timeout_s}",
              f"operator.timeout_s={plan.episode_timeout_s if plan else config.episode_timeout_s}"]
    if plan is not None:
        values += [f"operator.timeout_extended_by_outages={str(plan.timeout_extended_by_outages).lower()}",
                   f"operator.homing_timeout_s={plan.homing_timeout_s}"]
    return values


def _config_file(name: str) -> list[str]:
    path = project_path(Path(name))
    return ["--config", str(path)] if path.is_file() else []


def _sets(values: list[str] | tuple[str, ...]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def environment() -> dict[str, str]:
    """Of all children: the source tree on the path, one arithmetic thread each, rendering without a display."""
    return {"PYTHONPATH": ":".join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "LP_NUM_THREADS": os.environ.get("LP_NUM_THREADS", "1"),
            "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl"), "PYTHONUNBUFFERED": "1", **_ZENOH_LOG}


class DemoProcesses:
    """Starts, watches, signals and stops. Use from the main thread: the kernel ties children to the starting thread."""

    def __init__(self, commands: dict[str, list[str]], logs: Path, clock: Clock) -> None:
        """Nothing is started yet; each process logs to a file of its name in ``logs``."""
        self._commands = commands
        self._logs = logs
        self._clock = clock
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a process, also one that has ended."""
        self.running[name] = spawn(self._commands[name], environment=environment(), log_path=self._logs / f"{name}.log")

    def log_path(self, name: str) -> Path:
        """Where a process logs."""
        return self._logs / f"{name}.log"

    def wait_until(self, name: str, is_ready: Callable[[], bool], timeout_s: float, stop: StopFlag) -> bool:
        """Wait for a process to become ready; False when stopped meanwhile.

        Raises:
            DemoError: it ended, or was not ready in time.
        """
        deadline_ns = self._clock.monotonic_ns() + round(timeout_s * NS_PER_S)
        while not is_ready():
            if stop.wait(POLL_S):
                return False
            self.check(name)
            if self._clock.monotonic_ns() > deadline_ns:
                raise DemoError(f"{name} was not ready within {timeout_s:g} s; see {self.log_path(name)}\n"
                                f"{self.last_lines(name)}")
        return True

    def says_ready(self, name: str) -> bool:
        """The process has printed its READY line."""
        path = self.log_path(name)
        return path.is_file() and b"READY " in path.read_bytes()

    def check(self, name: str) -> None:
        """Raise if a process has ended.

        Raises:
            DemoError: with its exit code and last words.
        """
        code = self.running[name].poll()
        if code is not None:
            raise DemoError(f"the {name} process ended ({how(code)}); see {self.log_path(name)}\n"
                            f"{self.last_lines(name)}")

    def last_lines(self, name: str, count: int = 4) -> str:
        """End of a process's log, indented."""
        path = self.log_path(name)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        return "\n".join(f"    {line}" for line in lines[-count:])

    def pids(self) -> dict[str, int]:
        """All living processes by name, the edge's children and this process included."""
        found = {name: child.pid for name, child in self.running.items() if child.poll() is None}
        if "edge" in found:
            found.update(edge_children(found["edge"]))
        return {**found, "demo": os.getpid()}

    def signal(self, name: str, step: Step) -> bool:
        """Send the signal of a fault step; False if there is no such process now."""
        pid = self.pids().get(name)
        if pid is None:
            return False
        try:
            os.kill(pid, SIGNALS[step])
        except ProcessLookupError:
            return False
        return True

    def stop(self) -> dict[str, int]:
        """End everything within two seconds.

        The edge brakes the robot, so the robot must outlive it; cloud and link need not. Whoever does not end in time
        is killed, with what it left behind.

        Returns:
            Exit codes by name.
        """
        inner = edge_children(self.running["edge"].pid) if "edge" in self.running else {}
        for pid in [*inner.values(), *(child.pid for child in self._alive())]:
            send(pid, signal.SIGCONT)  # a frozen process would not hear the request to end
        begin_ns = self._clock.monotonic_ns()
        for child in self._alive(but="sim"):
            child.terminate()
        self._wait(["edge"], begin_ns + round(EDGE_STOP_S * NS_PER_S))
        if "sim" in self.running:
            self.running["sim"].terminate()
        self._wait(list(self.running), begin_ns + round(ALL_STOP_S * NS_PER_S))
        late = self._alive()
        for child in late:
            send_group(child.pid, signal.SIGKILL)
        for pid in inner.values() if late else ():
            send(pid, signal.SIGKILL)
        remove_leftovers()  # of an edge that was killed
        codes = {name: child.wait() for name, child in self.running.items()}
        self.running.clear()
        return codes

    def _alive(self, but: str = "") -> list[subprocess.Popen[bytes]]:
        return [child for name, child in self.running.items() if name != but and child.poll() is None]

    def _wait(self, names: list[str], deadline_ns: int) -> None:
        """Until these have ended or the time is over."""
        while self._clock.monotonic_ns() < deadline_ns:
            if all(self.running[name].poll() is not None for name in names if name in self.running):
                return
            sleep_s(self._clock, STOP_POLL_S)


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def send_group(group: int, number: int) -> None:
    """Signal a process group that may be gone."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def how(code: int) -> str:
    """Exit code in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
