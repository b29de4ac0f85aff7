"""All processes around and of a real edge, each of which can be told, frozen, killed and started again.

    robot (hosts the bus) ── edge: motor, policy, io, recorder ── link ── cloud        rogue: writes the edge's memory

The rig itself is the operator and an observer: it joins the bus, and it reads the motor's log from the shared memory,
which shows every command that was sent even while the bus is down.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from edge_rig import (
    CLOCK,
    INSTRUCTION,
    LEAST_POLLS,
    LIMITS,
    PATIENT,
    ROBOT_FILE,
    ROOT,
    PauseWatch,
    alive,
    free_endpoint,
    make_model,
    own_children,
)

from vla_common import messages, wire
from vla_common.clock import sleep_s
from vla_common.zenoh_session import open_bus
from vla_edge.core.records import EdgeMemory

HERE = Path(__file__).parent
NOMINAL, COASTING, BRAKING, HOLDING = range(4)
MOVING = 0.2  # rad/s, of the fastest joint
PROCESSES = ("edge", "motor", "policy", "io", "recorder", "cloud", "link", "robot")
"""Order of the slots in wallclock/sitecustomize.py."""
CLEAN = "title: clean\nlink: {}\n"


@dataclass
class Seen:
    """What the observer has seen, oldest first; written by one thread, read by another."""

    commands: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    ticks: list[np.ndarray] = field(default_factory=list)
    statuses: list[tuple[int, Any]] = field(default_factory=list)
    policies: list[tuple[int, Any]] = field(default_factory=list)
    log_sizes: list[tuple[int, int]] = field(default_factory=list)
    wall_s: dict[str, float] = field(default_factory=dict)
    """Wall clock of a process, as it stamps its messages, beside ours."""


class MatrixRig:
    """Starts everything; :meth:`close` ends it."""

    def __init__(self, folder: Path, record: Path | None = None) -> None:
        """``record``: file of the recorder process; default one in ``folder``."""
        self.folder = folder
        self.robot = f"matrix{os.getpid()}"
        self.record = record or folder / "run.mcap"
        make_model(folder / "model")
        self.bus_at, self.link_at, self.cloud_at = (free_endpoint() for _ in range(3))
        self.wall = folder / "wall_clock"
        self.wall.write_bytes(bytes(8 * len(PROCESSES)))
        self.faults = folder / "link.yaml"
        self.faults.write_text(CLEAN)
        self.log = folder / "edge.log"
        self.position = LIMITS.ready.copy()
        self.recorded: tuple[Path, int] = (self.record, 0)
        """File that was written when the recorder's fault came, and when that was, ns."""
        self.seen = Seen()
        self.pauses = PauseWatch()
        """Of the observer and of io."""
        self.sequence = 0
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("robot", "cloud", "link", "edge"):
            self.start(name)
        self.bus = open_bus(self.bus_at, node="matrix_operator")
        self._operator = self.bus.publisher("shield_command", self.robot)
        self._stop = threading.Event()
        self._memory: EdgeMemory | None = None
        self._thread = threading.Thread(target=self._observe, daemon=True)
        self._thread.start()
        self.wait(lambda: self.memory_files(), 60.0, "shared memory of the edge")
        self.start("rogue")

    # -- processes ------------------------------------------------------------------------------------------------

    def start(self, name: str, *more: str) -> None:
        """Start a process (not one of the edge's own, which the edge starts); ``more`` arguments for it."""
        common = ["--robot", self.robot]
        arguments = {
            "robot": lambda: [str(HERE / "robot_process.py"), "--endpoint", self.bus_at, "--instruction", INSTRUCTION,
                              "--position", json.dumps(self.position.tolist()), *common],
            "cloud": lambda: [str(HERE / "cloud_process.py"), "--endpoint", self.cloud_at, "--model",
                              str(self.folder / "model"), *common],
            "link": lambda: ["-m", "vla_sim.link_main", "--listen", self.link_at, "--cloud", self.cloud_at, "--faults",
                             str(self.faults), *common],
            "rogue": lambda: [str(HERE / "rogue_process.py"), "--memory", str(self.memory_files()[0])],
            "edge": lambda: ["-m", "vla_edge.edge_main", "--bus", self.bus_at, "--cloud", self.link_at, "--model",
                             str(self.folder / "model"), "--robot-id", self.robot, "--record", str(self.record),
                             "--set", f"robot_file={ROBOT_FILE}", *PATIENT],
        }[name]()
        environment = {**os.environ, "PYTHONPATH": f"{HERE / 'wallclock'}:{HERE.parent}:{ROOT}", "VLA_TEST_WALL_CLOCK":
                       str(self.wall), "VLA_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        with (self.log if name == "edge" else self.folder / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen([sys.executable, *arguments, *more], cwd=self.folder, stdin=subprocess.PIPE,
                                                  stdout=log, stderr=log, env=environment)

    def pid(self, name: str) -> int:
        """Process id of any process."""
        if name in self.started:
            return self.started[name].pid
        found = None if self._memory is None else self._memory.read(name)
        if found is not None and alive(int(found[1]["pid"])):  # quicker than looking through all processes
            return int(found[1]["pid"])
        self.wait(lambda: name in own_children(self.started["edge"].pid), 60.0, f"a {name} process")
        return own_children(self.started["edge"].pid)[name]

    def signal(self, name: str, number: int) -> None:
        """Send a signal; a killed process of our own is waited for."""
        os.kill(self.pid(name), number)
        if number == signal.SIGKILL and name in self.started:
            process = self.started.pop(name)
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]

    def tell(self, name: str, **order: Any) -> None:
        """An order to the cloud, the robot or the rogue."""
        pipe = self.started[name].stdin
        assert pipe is not None
        pipe.write(json.dumps(order).encode() + b"\n")
        pipe.flush()

    def set_link(self, text: str) -> None:
        """Another fault file for the running link process."""
        self.faults.write_text(text)
        self.signal("link", signal.SIGHUP)

    def step_wall_clock(self, names: tuple[str, ...], seconds: float) -> None:
        """Set the wall clock of some processes this far from the true one."""
        with self.wall.open("r+b") as file:
            for name in names:
                file.seek(8 * PROCESSES.index(name))
                file.write(struct.pack("<q", round(seconds * 1e9)))

    # -- observer and operator --------------------------------------------------------------------------------------

    def _observe(self) -> None:
        commands = self.bus.queue("joint_command", self.robot, capacity=8192)
        statuses = self.bus.queue("shield_status", self.robot, capacity=512)
        policies = self.bus.queue("policy_status", self.robot, capacity=512)
        cursor = 0
        while not self._stop.is_set():
            self.pauses.beat("observer", CLOCK.monotonic_ns())
            while (received := commands.try_recv()) is not None:
                message = wire.decode("sensor_msgs/JointState", received.payload)
                self._compare_clocks("motor", received.attachment)
                self.seen.commands.append((wire.stamp_ns(message.header), message.position, message.velocity))
            while (received := statuses.try_recv()) is not None:
                self.seen.statuses.append((received.received_ns, wire.decode("ShieldStatus", received.payload)))
            while (received := policies.try_recv()) is not None:
                self._compare_clocks("policy", received.attachment)
                self.seen.policies.append((received.received_ns, wire.decode("PolicyStatus", received.payload)))
            self.seen.log_sizes.append((CLOCK.monotonic_ns(), self.log.stat().st_size))
            if self._memory is None and self.memory_files():
                try:
                    self._memory = EdgeMemory.open(self.memory_files()[0], len(LIMITS))
                except ValueError:  # being made just now
                    self._memory = None
            if self._memory is not None:
                cursor, records, lost = self._memory.ticks.drain(cursor, 1024)
                assert not lost
                self.pauses.read(self._memory, "io")
                if records:
                    self.seen.ticks.append(np.frombuffer(b"".join(records), dtype=self._memory.dtypes["ticks"]))
                    self.position = self.seen.ticks[-1]["position"][-1].copy()
            sleep_s(CLOCK, 0.01)

    def _compare_clocks(self, name: str, attachment: Any) -> None:
        self.seen.wall_s[name] = (attachment.source_time_ns - CLOCK.wall_ns()) / 1e9

    def last(self) -> Any:
        """The newest tick of the motor's log, or None."""
        return self.seen.ticks[-1][-1] if self.seen.ticks else None

    def state(self) -> int:
        """Of the shield, as logged; -1 before the first tick."""
        return -1 if self.last() is None else int(self.last()["state"])

    def speed(self) -> float:
        """Of the fastest joint of the newest command, rad/s."""
        return 0.0 if self.last() is None else float(np.abs(self.last()["velocity"]).max())

    def beat_ns(self, name: str) -> int:
        """When one of the edge's processes last went round its loop; 0: never."""
        found = None if self._memory is None else self._memory.read(name)
        return 0 if found is None else int(found[1]["stamp_ns"])

    def ready(self) -> bool:
        """The newest status, not older than half a second, says that a re-arm would be accepted."""
        if not self.seen.statuses:
            return False
        at_ns, status = self.seen.statuses[-1]
        return bool(status.rearm_ready) and CLOCK.monotonic_ns() - at_ns < 500_000_000

    def command(self, kind: str) -> None:
        """The operator's command."""
        self.sequence += 1
        message = messages.new("ShieldCommand", header=wire.make_header(CLOCK.monotonic_ns()), sequence=self.sequence)
        message.command = getattr(message, kind)
        self._operator.put(wire.encode(message))

    def wait(self, condition: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Raises AssertionError with the edge's state and log after the time."""
        deadline_ns, polls = CLOCK.monotonic_ns() + round(timeout_s * 1e9), 0
        while not condition():
            polls += 1
            is_over = CLOCK.monotonic_ns() > deadline_ns and polls >= LEAST_POLLS
            if self.started["edge"].poll() is not None or is_over:
                status = self.seen.statuses[-1][1] if self.seen.statuses else None
                policy = self.seen.policies[-1][1] if self.seen.policies else None
                raise AssertionError(f"not within {timeout_s} s: {what}\n{self.last()}\n{status}\n{policy}\n"
                                     + self.log.read_text()[-4000:])
            sleep_s(CLOCK, 0.01)

    def get_moving(self, timeout_s: float = 60.0) -> int:
        """Re-arm as often as an operator would until the arm moves; returns how often."""
        rearms, due_ns = 0, 0

        def moves() -> bool:
            nonlocal rearms, due_ns
            if self.state() == HOLDING and self.ready() and CLOCK.monotonic_ns() > due_ns:
                self.command("REARM")
                rearms, due_ns = rearms + 1, CLOCK.monotonic_ns() + 1_500_000_000
            return self.state() in (NOMINAL, COASTING) and self.speed() > MOVING

        self.wait(moves, timeout_s, "the arm moves")
        return rearms

    def memory_files(self) -> list[Path]:
        """Shared memory of the edge."""
        return [path for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob(f"vla-edge.{self.robot}.*")]

    def close(self) -> None:
        """End everything."""
        edge = self.started.pop("edge")
        if edge.poll() is None:
            edge.terminate()
            try:
                edge.wait(30.0)
            except subprocess.TimeoutExpired:
                edge.kill()
                edge.wait()
        edge.stdin.close()  # type: ignore[union-attr]
        for process in self.started.values():
            process.kill()
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]
        self._stop.set()
        self._thread.join(20.0)
        if self._memory is not None:
            self._memory.close()
        self.bus.close()
