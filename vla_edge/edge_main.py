"""``vla edge``: the supervisor. It makes the shared memory, starts the processes, restarts what may be restarted.

The motor process is never restarted by itself: a new one would not know the command stream of the old one. If it
dies, everything stops, loudly; what holds the robot then is the robot's own command time-out.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import vla_edge
from vla_common.backoff import Backoff
from vla_common.clock import Clock, SystemClock
from vla_common.config import ConfigError
from vla_common.logging_setup import add_log_argument, setup_logging
from vla_common.manifest import ManifestError, load_manifest
from vla_common.process import StopFlag, end_with_parent, spawn, stop_all, stop_on_signals
from vla_common.span_queue import check_tracing
from vla_common.topics import topic_spec
from vla_common.zenoh_session import BusError
from vla_edge.child import EXIT_PERMANENT, arguments
from vla_edge.cloud_link import check_cloud_link
from vla_edge.config import EdgeConfig, load_edge_config, load_limits, make_queue
from vla_edge.core.health import Tick, TickWatch
from vla_edge.core.heartbeat import HeartbeatWatch
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.model_check import check_horizon, check_normalisation
from vla_edge.core.records import MAX_HORIZON, EdgeMemory
from vla_edge.core.shared_buffer import remove_leftovers
from vla_edge.robot_bus import check_robot_bus

LOG = logging.getLogger(__name__)

POLL_S: Final = 0.05
_HUNG: Final = {
    "policy": "no chunks are made, the arm stops",
    "io": "no joint states come in and no status goes out, the arm stops",
    "recorder": "nothing is recorded, the robot goes on without it"}
"""What it means when a process hangs."""
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


class Supervisor:
    """Starts and watches the processes of one edge."""

    def __init__(self, config: EdgeConfig, memory: EdgeMemory, clock: Clock, has_io: bool = True) -> None:
        """Nothing is started yet. ``has_io``: input and output are a process of their own, not this one."""
        self._config, self._memory, self._clock = config, memory, clock
        names = ["motor", "policy", *(["io"] if has_io else []), *([] if config.record is None else ["recorder"])]
        rules = config.supervisor
        self._watch = HeartbeatWatch()
        self._ticks = TickWatch(rules.motor_hang_s, clock.monotonic_ns())
        self._is_late_start_told = False
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts = {name: Backoff(rules.backoff_min_s, rules.backoff_max_s, rules.backoff_reset_s)
                          for name in names}

    def start(self, name: str) -> None:
        """Start a process by name."""
        command = [sys.executable, "-m", f"vla_edge.{name}_main", *arguments(self._config, self._memory.file.path)]
        self._children[name] = spawn(command, environment=_environment())
        self._restarts[name].started(self._clock.monotonic_ns())

    def start_all(self) -> None:
        """Start every process. Call from the main thread: the kernel ends the children with the thread that did."""
        for name in self._restarts:
            self.start(name)

    def look(self) -> bool:
        """Restart what may be restarted and say what hangs; False if the edge cannot go on without an operator."""
        code = self._children["motor"].poll()
        if code is not None:
            LOG.critical("THE MOTOR PROCESS ENDED (%s): no more commands are sent and the robot's own time-out must "
                         "hold it. Everything stops; start the edge again when the cause is found", _how(code))
            return False
        if not self._restart_ended():
            return False
        self.watch_motor()
        self._report_hung()
        return True

    def run(self, stop: StopFlag) -> int:
        """Keep the edge running until ``stop`` is set or the motor process dies.

        Returns:
            Exit code.
        """
        self.start_all()
        while not stop.wait(POLL_S):
            if not self.look():
                return EXIT_FAILED
        return EXIT_OK

    def watch_motor(self) -> None:
        """Say once that the motor process does not tick, and once that it ticks again."""
        found, now_ns = self._memory.read("motor"), self._clock.monotonic_ns()
        before = self._ticks.state
        if self._ticks.look(None if found is None else found[0], now_ns):
            if self._ticks.state is Tick.HANGS:
                LOG.critical("THE MOTOR PROCESS DOES NOT TICK: no command for more than %.2f s, the robot's own "
                             "time-out must hold it. Look into process %d; when it ticks again, re-arm",
                             self._config.supervisor.motor_hang_s, self.pid("motor"))
            elif before is Tick.HANGS:
                LOG.critical("the motor process ticks again after %.2f s", self._ticks.silent_s)
        is_late = self._ticks.state is Tick.NOT_STARTED and self._ticks.silent_s > self._config.supervisor.motor_start_s
        if is_late and not self._is_late_start_told:
            self._is_late_start_told = True
            LOG.critical("THE MOTOR PROCESS HAS NOT STARTED within %g s: nothing is sent. Look into process %d",
                         self._config.supervisor.motor_start_s, self.pid("motor"))

    def pid(self, name: str) -> int:
        """Process id, 0 if it was not started."""
        return self._children[name].pid if name in self._children else 0

    def _restart_ended(self) -> bool:
        """Start again what ended; False if a process says that the edge cannot work without an operator."""
        for name, restart in self._restarts.items():
            child, now_ns = self._children[name], self._clock.monotonic_ns()
            code = child.poll()
            if name == "motor" or code is None:
                continue
            if code == EXIT_PERMANENT:
                if name != "recorder":
                    LOG.critical("the %s process cannot work (see above): the edge stops", name)
                    return False
                if restart.due_ns is None:
                    LOG.error("the recorder is not started again (see above)")
                    restart.due_ns = now_ns
            elif restart.due_ns is None:
                delay_s = restart.ended(now_ns)
                LOG.error("the %s process ended (%s): starting it again in %.1f s", name, _how(code), delay_s)
            elif now_ns >= restart.due_ns:
                self.start(name)
        return True

    def _report_hung(self) -> None:
        """Say which process has stopped without ending; to kill it is for the operator, who may be looking into it."""
        for name, restart in self._restarts.items():
            if name == "motor":  # watched more closely
                continue
            found = self._memory.read(name)
            if found is None or self._children[name].returncode is not None:
                continue
            now_ns = self._clock.monotonic_ns()
            hangs = self._watch.changed(name, int(found[1]["stamp_ns"]), restart.started_ns, now_ns)
            if hangs:
                LOG.error("the %s process does not answer (%s): look into process %d, or kill it and it is started "
                          "again", name, _HUNG[name], self._children[name].pid)
            elif hangs is False:
                LOG.warning("the %s process answers again", name)

    def stop_motor(self) -> None:
        """End the motor process, which brakes to rest first."""
        motor = self._children.pop("motor", None)
        if motor is not None:
            stop_all([motor], self._config.supervisor.motor_stop_s)

    def stop(self) -> None:
        """The motor first, which brakes to rest; then the others, which see and record that."""
        self.stop_motor()
        rules = self._config.supervisor
        recorder = self._children.pop("recorder", None)
        stop_all(self._children.values(), rules.others_stop_s / 2)
        if recorder is not None:
            stop_all([recorder], rules.others_stop_s / 2)


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _environment() -> Mapping[str, str]:
    """One arithmetic thread per process: the policy must not take the motor clock's cores.

    The module search path lets a source tree run without being installed.
    """
    root = str(Path(vla_edge.__file__).resolve().parent.parent)
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": ":".join([root, *filter(None, [os.environ.get("PYTHONPATH", "")])])}


def check(config: EdgeConfig) -> JointLimits:
    """Everything that can be wrong before a process is started.

    Raises:
        ConfigError, ManifestError, BusError: with the remedy.
    """
    limits = load_limits(config.robot_file, config.motor.period_s)
    make_queue(config, len(limits))
    check_robot_bus(config)
    check_cloud_link(config)
    check_tracing(config.tracing)
    try:
        topic_spec("joint_command").topic(config.robot_id)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    manifest = load_manifest(config.model)
    manifest.require(limits.names, period_s=config.motor.period_s)
    ensemble = config.ensemble
    check_horizon(manifest, longest=min(config.gate.max_horizon, MAX_HORIZON),
                  replan_ticks=config.policy.replan_ticks,
                  ramp_ticks=ensemble.ramp_ticks if ensemble.rule in ("ramp", "speed_ramp") else 0,
                  prefix_ticks=ensemble.prefix_ticks if ensemble.rule == "prefix" else 0)
    check_normalisation(manifest, limits)
    return limits


def parse(argv: Sequence[str] | None) -> EdgeConfig:
    """Settings from the command line.

    Raises:
        ConfigError: see :func:`load_edge_config`.
    """
    parser = argparse.ArgumentParser(
        prog="vla edge", description="Run the robot side: motor clock, policy, input and output, recording.")
    parser.add_argument("--config", type=Path, help="settings, such as config/edge.yaml; default: built in")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override one setting, such as policy.replan_ticks=4; may be repeated")
    parser.add_argument("--bus", metavar="ENDPOINT", help="robot bus, such as tcp/127.0.0.1:7447")
    parser.add_argument("--cloud", metavar="ENDPOINT", help="cloud link, such as tcp/127.0.0.1:7448")
    parser.add_argument("--model", metavar="FOLDER", help="model folder, such as models/tabletop")
    parser.add_argument("--robot-id", metavar="ID", dest="robot_id", help="robot id in topics: letters, digits, _")
    parser.add_argument("--record", metavar="FILE.mcap", help="record all topics")
    add_log_argument(parser)
    options = parser.parse_args(argv)
    given = [f"{key}={value}" for key in ("bus", "cloud", "model", "robot_id", "record")
             if (value := getattr(options, key)) is not None]
    return load_edge_config(options.config, [*options.overrides, *given])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the edge until SIGINT or SIGTERM; returns the exit code (0 stopped, 1 failed, 2 wrong settings)."""
    setup_logging("edge")
    end_with_parent()
    try:
        config = parse(argv)
        limits = check(config)
    except (ConfigError, ManifestError, BusError) as error:
        LOG.error("%s", error)
        return EXIT_USAGE
    stop = stop_on_signals(grace_s=4.0)
    for path in remove_leftovers():
        LOG.warning("removed %s, left behind by a killed edge", path)
    try:
        memory = EdgeMemory.create(config.robot_id, len(limits))
    except OSError as error:
        LOG.error("no shared memory for the edge: %s; free some of /dev/shm", error)
        return EXIT_FAILED
    supervisor = Supervisor(config, memory, SystemClock())
    try:
        return supervisor.run(stop)
    finally:
        # First, so that nothing is left whatever keeps the rest from ending in time; who has it mapped keeps it.
        memory.file.unlink()
        supervisor.stop()
        memory.close()


if __name__ == "__main__":
    sys.exit(main())
