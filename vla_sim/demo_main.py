"""``vla demo``: cloud, edge, simulator and, with faults, a link, as separate processes on this machine; then a report.

    start ──all ready──▶ watch (live view, process faults) ──episodes done──▶ stop everything ──▶ report, video, table

Ctrl-C or SIGTERM ends every process within two seconds and skips report and video. If this process is killed, the
kernel ends its children.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from vla_common.clock import NS_PER_S, Clock, SystemClock
from vla_common.config import ConfigError, load_config
from vla_common.process import StopFlag, end_with_parent, stop_on_signals
from vla_common.zenoh_session import Bus, BusError, open_bus
from vla_sim.demo_config import DemoConfig, project_path, read_config
from vla_sim.demo_processes import DemoError, DemoProcesses, Endpoints, command_lines, how
from vla_sim.demo_reporting import make_report
from vla_sim.demo_watch import LiveState, Watcher
from vla_sim.event_log import EventLog, EventTail
from vla_sim.faults import FaultPlan
from vla_sim.process_faults import DueStep, ProcessFaultSchedule
from vla_sim.process_table import CpuSampler
from vla_sim.run_files import read_json, write_json
from vla_sim.terminal_view import draw

LOG = logging.getLogger(__name__)

POLL_S: Final = 0.05
VIEW_PERIOD_NS: Final = NS_PER_S // 4
SECOND_NS: Final = NS_PER_S
SETTLE_S: Final = 0.6  # after the last episode, for the recorder
STOP_GRACE_S: Final = 3.0
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
VERSIONS_OF: Final = ("vla-runtime", "numpy", "mujoco", "torch", "onnxruntime", "eclipse-zenoh", "rosbags", "mcap")


class Demo:
    """One run, from start to a clean end."""

    def __init__(self, config: DemoConfig, plan: FaultPlan | None, folder: Path, clock: Clock,
                 console: Console) -> None:
        """Nothing is started yet."""
        self._config, self._plan, self._folder = config, plan, folder
        self._clock, self._console = clock, console
        self._at = Endpoints.pick(with_link=plan is not None and plan.link is not None)
        self.processes = DemoProcesses(command_lines(config, plan, self._at, folder), folder / "logs", clock)
        self.state = LiveState("vla demo", plan.title if plan else "", start_ns=clock.monotonic_ns())
        self._faults = ProcessFaultSchedule(plan.processes if plan else ())
        self._events = EventLog(folder / "events.jsonl", clock)
        self._tail = EventTail(folder / "events.jsonl")
        self._cpu = CpuSampler()
        self._killed_on_purpose: set[str] = set()
        self._restart_ns: dict[str, int] = {}
        self._results_seen = 0
        self._is_live = console.is_terminal and not config.headless
        self._watcher: Watcher | None = None

    def run(self, stop: StopFlag) -> None:
        """Start, watch until the episodes are done or ``stop`` is set, end everything.

        Raises:
            DemoError, BusError: a process could not start or ended by itself.
        """
        bus: Bus | None = None
        try:
            bus = self._start(stop)
            if bus is not None:
                self._watch(stop)
        finally:
            codes = self.processes.stop()
            if bus is not None:
                bus.close()
            write_json(self._folder / "cpu.json", self._cpu.shares)
            for name, code in codes.items():
                if code not in (0, -9, -15) and name not in self._killed_on_purpose:
                    self.say(f"{name} ended with {how(code)}; see {self.processes.log_path(name)}")

    # ------------------------------------------------------------------ start

    def _start(self, stop: StopFlag) -> Bus | None:
        """Start all in order of need; None when stopped meanwhile."""
        processes, timeout_s = self.processes, self._config.start_timeout_s
        self.say(f"starting, logs in {processes.log_path('edge').parent}")
        for name in ("cloud", "sim"):  # both take seconds, so together
            processes.start(name)
        for name in ("sim", "cloud"):
            if not self._wait_ready(name, stop):
                return None
        if self._plan is not None and self._plan.link is not None:
            processes.start("link")
            if not self._wait_ready("link", stop):
                return None
        processes.start("edge")
        # The processes' own logs tell of lost connections; here such lines would tear the view.
        os.environ.setdefault("RUST_LOG", "off")
        bus = open_bus(self._at.bus, node="vla_demo", clock=self._clock)
        watcher = self._watcher = Watcher(bus, self._config.robot, self.state)

        def is_edge_ready() -> bool:
            watcher.poll(self._clock.monotonic_ns())
            return self.state.shield is not None and self.state.policy is not None

        if not processes.wait_until("edge", is_edge_ready, timeout_s, stop):
            bus.close()
            return None
        self.say(f"edge ready: {self.state.policy.engine}; motor scheduling {self.state.shield.scheduling}")
        return bus

    def _wait_ready(self, name: str, stop: StopFlag) -> bool:
        """Until the process says READY; False when stopped meanwhile."""
        is_ready = self.processes.wait_until(name, lambda: self.processes.says_ready(name),
                                             self._config.start_timeout_s, stop)
        if is_ready:
            self.say(f"{name} ready")
        return is_ready

    # ------------------------------------------------------------------ watch

    def _watch(self, stop: StopFlag) -> None:
        if not self._is_live:
            self._watch_until_done(stop, None)
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            self._watch_until_done(stop, live)

    def _watch_until_done(self, stop: StopFlag, live: Live | None) -> None:
        next_view_ns = next_second_ns = 0
        done_ns: int | None = None
        assert self._watcher is not None
        while not stop.wait(POLL_S):
            now_ns = self._clock.monotonic_ns()
            self._watcher.poll(now_ns)
            self._look_after_processes(now_ns)
            self._inject(now_ns)
            if now_ns >= next_second_ns:
                next_second_ns = now_ns + SECOND_NS
                self._every_second(now_ns)
            self._report_results()
            if live is not None and now_ns >= next_view_ns:
                next_view_ns = now_ns + VIEW_PERIOD_NS
                live.update(draw(self.state, now_ns), refresh=True)
            if self.state.task is not None and self.state.task.phase == "done":
                done_ns = now_ns if done_ns is None else done_ns
                if now_ns - done_ns > SETTLE_S * NS_PER_S:
                    return

    def _every_second(self, now_ns: int) -> None:
        assert self._watcher is not None
        self._watcher.summarise()
        self.state.cpu = self._cpu.sample(now_ns, self.processes.pids())
        for event in self._tail.read():
            if event["kind"] == "outage":
                duration_s = (event["end_ns"] - event["start_ns"]) / NS_PER_S
                ahead_s = max(0.0, (event["start_ns"] - now_ns) / NS_PER_S)
                when = f"in {ahead_s:.0f} s" if ahead_s > 1.0 else f"in episode {event['episode'] + 1}"
                self._note(f"outage of {duration_s:.1f} s {when}")

    def _look_after_processes(self, now_ns: int) -> None:
        """Simulator and edge are the robot: without them the run ends. Cloud and link come back after a moment."""
        for name in ("sim", "edge"):
            self.processes.check(name)
        for name in ("cloud", "link"):
            child = self.processes.running.get(name)
            if child is None or child.poll() is None or name in self._killed_on_purpose:
                continue
            if name not in self._restart_ns:
                self._note(f"{name} ended ({how(child.returncode)}): starting it again in "
                           f"{self._config.restart_after_s:g} s")
                self._restart_ns[name] = now_ns + round(self._config.restart_after_s * NS_PER_S)
            elif now_ns >= self._restart_ns[name]:
                del self._restart_ns[name]
                self.processes.start(name)

    def _inject(self, now_ns: int) -> None:
        task = self.state.task
        if task is not None:
            for step in self._faults.due(now_ns, task.phase, int(task.episode), task.elapsed_s):
                self._do(step)

    def _do(self, due: DueStep) -> None:
        if due.step in ("kill", "terminate"):
            self._killed_on_purpose.add(due.process)
        if due.step == "restart":
            self.processes.start(due.process)
            self._killed_on_purpose.discard(due.process)
        elif not self.processes.signal(due.process, due.step):
            self._note(f"fault: there is no {due.process} process to {due.step}")
            return
        self._events.write("process", process=due.process, step=due.step)
        self._note(f"fault: {due.process} {due.step}")

    def _report_results(self) -> None:
        task = self.state.task
        if task is None or task.successes + task.failures == self._results_seen:
            return
        results = read_json(self._folder / "results.json", {"episodes": []})
        for episode in results["episodes"][len(self.state.results):]:
            words = (f"episode {episode['index'] + 1:>3}/{self._config.episodes}  {episode['outcome']:<12} "
                     f"{episode['elapsed_s']:5.2f} s  “{episode['instruction']}”"
                     + ("  moving" if episode["moving"] else "")
                     + (f"  re-arms {episode['rearms']}" if episode["rearms"] else ""))
            self.state.results.append((episode["outcome"], words))
            if not self._is_live:
                self.say(words)
        self._results_seen = len(self.state.results)

    # ------------------------------------------------------------------ words

    def _note(self, text: str) -> None:
        self.state.events.append(text)
        if not self._is_live:
            self.say(text)

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(config: DemoConfig, plan: FaultPlan | None, started: datetime.datetime) -> dict[str, Any]:
    """``run.json``: what was run, with which versions."""
    manifest = read_json(project_path(config.model) / "manifest.json", {})
    versions = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"title": "vla demo", "started": started.isoformat(timespec="seconds"),
            "robot": config.robot, "camera": config.camera, "faults": plan.title if plan else "",
            "model": manifest.get("name", config.model.name), "episodes": config.episodes, "seed": config.seed,
            "tasks": list(config.tasks), "motion": config.motion, "shuffled": config.shuffled, "versions": versions}


def make_folder(config: DemoConfig, plan: FaultPlan | None, clock: Clock) -> Path:
    """``runs/<stamp>/`` with what the report needs to know beforehand."""
    started = datetime.datetime.fromtimestamp(clock.wall_ns() / NS_PER_S).astimezone()
    stamp = started.strftime("%Y%m%d-%H%M%S")
    folder, number = config.runs / stamp, 2
    while folder.exists():
        folder, number = config.runs / f"{stamp}-{number}", number + 1
    folder.mkdir(parents=True)
    write_json(folder / "run.json", describe(config, plan, started))
    shutil.copy(project_path(config.robot_file), folder / "robot.yaml")
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    end_with_parent()
    console, clock = Console(), SystemClock()
    try:
        config = read_config(argv)
        plan = None if config.faults is None else load_config(FaultPlan, project_path(config.faults))
        folder = make_folder(config, plan, clock)
    except (ConfigError, OSError) as error:
        console.print(f"vla demo: {error}", markup=False, highlight=False)
        return EXIT_USAGE
    stop = stop_on_signals(STOP_GRACE_S)
    demo = Demo(config, plan, folder, clock, console)
    failed = ""
    try:
        demo.run(stop)
    except (DemoError, BusError) as error:
        failed = str(error)
        demo.say(f"vla demo: {failed}")
    if stop.is_set():
        demo.say(f"interrupted; 'python -m vla_sim.report {folder}' makes a report of what there is")
        return EXIT_INTERRUPTED
    make_report(folder, config, stop, demo.say)
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
