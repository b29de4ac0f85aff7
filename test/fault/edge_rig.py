"""A fake robot and a fake cloud around a real edge, for tests: real processes, real Zenoh, a hand-made ONNX pair."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))
from free_port import free_endpoint

from vla_common import messages, tensors, wire
from vla_common.clock import SystemClock, sleep_s
from vla_common.manifest import Camera, Context, Instruction, Manifest, hash_files, write_manifest
from vla_common.zenoh_session import open_bus
from vla_edge.config import load_limits
from vla_edge.core.records import EdgeMemory
from vla_edge.core.shared_buffer import process_start
from vla_edge.core.shield import ShieldConfig

ROOT = Path(__file__).resolve().parents[2]
ROBOT_FILE = ROOT / "config/robots/panda_2f85.yaml"
PERIOD_S = 0.01
LIMITS = load_limits(ROBOT_FILE, PERIOD_S)
TOKENS, DIM, HORIZON = 4, 8, 16
INSTRUCTION = "touch the red cube"
CLOCK = SystemClock()
HOLDING = 3
PAUSE_NS = 300_000_000
"""Whatever stands still for longer spoils what is observed meanwhile: the bus takes it for dead after 0.4 s."""
LEAST_POLLS = 100
"""A wait fails after no fewer: if this whole process was stopped, its time is over before anything could happen."""
PATIENT = ("--set", "supervisor.motor_stop_s=20", "--set", "supervisor.others_stop_s=20")
"""The end of an edge takes the time that its processes need: on a busy machine that is more than a robot's edge allows
them. Its own limit of 4 s after a request to end stays. Other values that are given later count."""


def make_model(folder: Path, horizon: int = HORIZON, joint_names: tuple[str, ...] = LIMITS.names) -> Manifest:
    """A model whose deltas are context token 0 times (step + 1) / horizon: the cloud decides where the arm goes."""
    folder.mkdir(parents=True, exist_ok=True)
    width = len(joint_names)
    f32 = TensorProto.FLOAT

    def save(name: str, nodes: list[Any], inputs: dict[str, list[int]], outputs: dict[str, list[int]],
             constants: dict[str, np.ndarray]) -> None:
        graph = helper.make_graph(
            nodes, name, [helper.make_tensor_value_info(key, f32, shape) for key, shape in inputs.items()],
            [helper.make_tensor_value_info(key, f32, shape) for key, shape in outputs.items()],
            [onnx.numpy_helper.from_array(value, key) for key, value in constants.items()])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(model)
        onnx.save(model, str(folder / name))

    token = np.array([1, 1, 1, TOKENS, DIM], dtype=np.int64)
    save("context_kv.onnx",
         [helper.make_node("Reshape", ["context", "shape"], ["k"]),
          helper.make_node("Reshape", ["context_prev", "shape"], ["v"]),
          helper.make_node("Identity", ["zeros"], ["keypoint"])],
         {"context": [1, TOKENS, DIM], "context_prev": [1, TOKENS, DIM]},
         {"k": token.tolist(), "v": token.tolist(), "keypoint": [1, 6]},
         {"shape": token, "zeros": np.zeros((1, 6), np.float32)})
    ramp = (np.arange(1, horizon + 1, dtype=np.float32) / horizon).reshape(1, horizon, 1)
    save("denoise.onnx",
         [helper.make_node("Gather", ["k", "first"], ["row"], axis=3),
          helper.make_node("Reshape", ["row", "row_shape"], ["token"]),
          helper.make_node("Mul", ["token", "ramp"], ["clean"]),
          # Every input must reach the output, or ONNX Runtime drops it from the signature.
          helper.make_node("Add", ["clean", "noise"], ["noisy"]),
          *[node for index, (source, last) in enumerate((("v", "noisy"), ("keypoint", "s0"), ("proprio", "s1"),
                                                         ("age_s", "s2"), ("dt_s", "s3")))
            for node in (helper.make_node("ReduceSum", [source], [f"r{index}"], keepdims=0),
                         helper.make_node("Mul", [f"r{index}", "nothing"], [f"z{index}"]),
                         helper.make_node("Add", [last, f"z{index}"], [f"s{index}" if index < 4 else "actions"]))]],
         {"k": token.tolist(), "v": token.tolist(), "keypoint": [1, 6], "proprio": [1, width + 1], "age_s": [1, 1],
          "dt_s": [1, 1], "noise": [1, horizon, width]}, {"actions": [1, horizon, width]},
         {"first": np.zeros(1, np.int64), "row_shape": np.array([1, 1, width], np.int64), "ramp": ramp,
          "nothing": np.zeros((), np.float32)})
    manifest = Manifest(
        name="tiny", joint_names=list(joint_names), horizon=horizon, period_s=0.01, context=Context(TOKENS, DIM),
        proprio_names=[*joint_names, "gripper_measured"], cameras=[Camera("front", 8, 8)],
        instruction=Instruction(["touch", "the", "red", "cube"], 4),
        files=hash_files(folder, ["context_kv.onnx", "denoise.onnx"]), licence="Apache-2.0", training_command="none")
    write_manifest(folder, manifest)
    return manifest


def own_children(pid: int) -> dict[str, int]:
    """Process ids of the edge's children by name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
        if parent == pid and b"-m" in command:
            found[command[command.index(b"-m") + 1].decode().removeprefix("vla_edge.").removesuffix("_main")] = int(
                entry.name)
    return found


def alive(pid: int) -> bool:
    """The process runs; one that has ended but was not waited for yet does not."""
    return process_start(pid) is not None


class PauseWatch:
    """Who stood still for longer than PAUSE_NS. ``found``: (name, begin, end in ns)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, int]] = []
        self._beats: dict[str, int] = {}

    def beat(self, name: str, now_ns: int) -> None:
        before_ns, self._beats[name] = self._beats.get(name, now_ns), now_ns
        if now_ns - before_ns > PAUSE_NS:
            self.found.append((name, before_ns, now_ns))

    def read(self, memory: EdgeMemory, *names: str) -> None:
        """Of processes of an edge, as their heartbeats tell."""
        for name in names:
            if (found := memory.read(name)) is not None:
                self.beat(name, int(found[1]["stamp_ns"]))


class Rig:
    """The robot's and the cloud's side. Joint states follow the last command; the cloud answers every observation.

    Attributes:
        direction: what the cloud's token 0 says: delta per chunk, float32[8].
        commands: (stamp_ns, position, velocity) as received. statuses, policies: ShieldStatus and PolicyStatus messages.
        policy: the newest PolicyStatus. ticks: the log of the first edge's motor process, oldest first.
        turns: how often the robot's thread went round. pauses: of that thread, io and the recorder.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.robot = f"rig{os.getpid()}"
        self.manifest = make_model(folder / "model")
        self.bus_endpoint, self.cloud_endpoint = free_endpoint(), free_endpoint()
        self.direction = np.zeros(DIM, np.float32)
        self.cloud_answers = True
        self.robot_speaks = True
        self.camera_sends = True
        self.instruction = ""
        self.position = LIMITS.ready.copy()
        self.commands: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.statuses: list[Any] = []
        self.policy: Any = None
        self.policies: list[Any] = []
        self.ticks: list[np.ndarray] = []
        self.turns = 0
        self.pauses = PauseWatch()
        self.observations: list[Any] = []
        self.log = folder / "edge.log"
        self._sequence = 0
        self._stop = threading.Event()
        self._memory: EdgeMemory | None = None
        self._tick_cursor = 0
        self.bus = open_bus(self.bus_endpoint, "router", node="rig_robot")
        self.cloud = open_bus(self.cloud_endpoint, "router", node="rig_cloud")
        self._commands_in = self.bus.queue("joint_command", self.robot, capacity=4096)
        self._status_in = self.bus.queue("shield_status", self.robot, capacity=256)
        self._policy_in = self.bus.queue("policy_status", self.robot, capacity=256)
        self._operator = self.bus.publisher("shield_command", self.robot)
        self._instruction_out = self.bus.publisher("instruction", self.robot)
        self._joints_out = self.bus.publisher("joint_states", self.robot)
        self._image_out = self.bus.publisher("image", self.robot, "front")
        self._observation_in = self.cloud.queue("observation", self.robot, capacity=8)
        self._context_out = self.cloud.publisher("context", self.robot)
        self.arguments = [sys.executable, "-m", "vla_edge.edge_main", "--bus", self.bus_endpoint, "--cloud",
                          self.cloud_endpoint, "--model", str(folder / "model"), "--robot-id", self.robot,
                          "--set", f"robot_file={ROBOT_FILE}", *PATIENT, *arguments]
        self.edge = self.start_edge()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def start_edge(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.arguments, cwd=self.folder, stdout=log, stderr=log,
                                    env={**os.environ, "PYTHONPATH": str(ROOT)})

    def _serve(self) -> None:
        while not self._stop.is_set():
            now_ns = CLOCK.monotonic_ns()
            self.pauses.beat("robot", now_ns)
            self._receive()
            self._read_ticks()
            if self.robot_speaks:
                self._joints_out.put(wire.encode(messages.new(
                    "sensor_msgs/JointState", header=wire.make_header(now_ns), name=list(LIMITS.names),
                    position=self.position, velocity=np.zeros(8))))
            if self.turns % 10 == 0 and self.camera_sends:
                self._image_out.put(wire.encode(messages.new(
                    "sensor_msgs/CompressedImage", header=wire.make_header(now_ns, "front"), format="jpeg",
                    data=b"not looked at")))
            if self.turns % 25 == 0:
                self._instruction_out.put(wire.encode(messages.new("std_msgs/String", data=self.instruction)))
            self.turns += 1
            sleep_s(CLOCK, 0.01)

    def _receive(self) -> None:
        while (received := self._commands_in.try_recv()) is not None:
            message = wire.decode("sensor_msgs/JointState", received.payload)
            self.commands.append((wire.stamp_ns(message.header), message.position, message.velocity))
            self.position = np.array(message.position)
        while (received := self._status_in.try_recv()) is not None:
            self.statuses.append(wire.decode("ShieldStatus", received.payload))
        while (received := self._policy_in.try_recv()) is not None:
            self.policy = wire.decode("PolicyStatus", received.payload)
            self.policies.append(self.policy)
        while (received := self._observation_in.try_recv()) is not None:
            message = wire.decode("Observation", received.payload)
            self.observations.append(message)
            if self.cloud_answers:
                self.answer(message)

    def _read_ticks(self) -> None:
        """The motor's log shows every command that was sent, also those that the bus lost."""
        if self._memory is None:
            try:
                self._memory, self._tick_cursor = EdgeMemory.open(self.memory_files()[0], len(LIMITS)), 0
            except (IndexError, FileNotFoundError, ValueError):  # there is none yet, or it is being made just now
                return
        self._tick_cursor, records, _ = self._memory.ticks.drain(self._tick_cursor, 1024)
        if records:
            self.ticks.append(np.frombuffer(b"".join(records), dtype=self._memory.dtypes["ticks"]))
        self.pauses.read(self._memory, "io", "recorder")

    def answer(self, observation: Any, **changes: Any) -> None:
        tokens = np.zeros((TOKENS, DIM), np.float32)
        tokens[0] = self.direction
        fields = {"session": observation.session, "sequence": observation.sequence, "model_id": "tiny",
                  "model_hash": self.manifest.model_hash,
                  "instruction_hash": wire.instruction_hash(observation.instruction), **tensors.token_fields(tokens),
                  "header": observation.header, **changes}
        self._context_out.put(wire.encode(messages.new("ContextTokens", **fields)))

    def set_out(self, speed: float = 0.05) -> None:
        """Have the cloud move the arm, back where so many moves went before that the limits are near."""
        self.direction[:7] = speed if self.position[0] < LIMITS.ready[0] + 1.0 else -speed

    def say(self, instruction: str) -> None:
        self.instruction = instruction
        self._instruction_out.put(wire.encode(messages.new("std_msgs/String", data=instruction)))

    def command(self, kind: str) -> None:
        self._sequence += 1
        message = messages.new("ShieldCommand", header=wire.make_header(CLOCK.monotonic_ns()), sequence=self._sequence)
        message.command = getattr(message, kind)
        self._operator.put(wire.encode(message))

    def wait(self, condition: Any, timeout_s: float, what: str) -> None:
        deadline_ns, polls = CLOCK.monotonic_ns() + round(timeout_s * 1e9), 0
        while not condition():
            polls += 1
            if CLOCK.monotonic_ns() > deadline_ns and polls >= LEAST_POLLS:
                status = self.statuses[-1] if self.statuses else None
                raise AssertionError(f"not within {timeout_s} s: {what}; status {status}; policy {self.policy}; log:\n"
                                     + self.log.read_text())
            sleep_s(CLOCK, 0.01)

    def insist(self, kind: str, condition: Any, what: str) -> None:
        """Give a command, and again every second, as an operator does who sees nothing come of it."""
        due_ns = 0

        def met() -> bool:
            nonlocal due_ns
            if not condition() and CLOCK.monotonic_ns() > due_ns:
                self.command(kind)
                due_ns = CLOCK.monotonic_ns() + 1_000_000_000
            return bool(condition())

        self.wait(met, 60.0, what)

    def persist(self, condition: Any, timeout_s: float, what: str) -> None:
        """Wait, and re-arm whenever that is possible: on a machine without time to spare any process may stall."""
        def met() -> bool:
            if self.state() == 3 and self.statuses[-1].rearm_ready and self._operator.sequence < 1000:
                self.command("REARM")
            return bool(condition())

        self.wait(met, timeout_s, what)

    def state(self) -> int:
        return int(self.statuses[-1].state) if self.statuses else -1

    def arm(self) -> None:
        """Re-arm as an operator does: when it is ready."""
        self.wait(lambda: self.statuses and self.statuses[-1].rearm_ready, 60.0, "ready for a re-arm")
        self.persist(lambda: self.state() == 0, 60.0, "NOMINAL after the re-arm")

    def memory_files(self) -> list[Path]:
        return [path for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob(f"vla-edge.{self.robot}.*")]

    def close(self) -> None:
        if self.edge.poll() is None:
            self.edge.terminate()
            try:
                self.edge.wait(30.0)
            except subprocess.TimeoutExpired:
                self.edge.kill()
                self.edge.wait()
        self._stop.set()
        self._thread.join(20.0)
        if self._memory is not None and not self._thread.is_alive():
            self._memory.close()
        self.bus.close()
        self.cloud.close()


def streams(positions: np.ndarray, stamps_ns: np.ndarray, ticks: np.ndarray | None = None) -> list[np.ndarray]:
    """The commands of each stream: float64[ticks, n], split where the motor process broke a stream off.

    It does so after longer than the robot waits for commands (``ShieldConfig.stall_ticks``), which a machine that is
    short of time, or whose host is, does to any process. The next stream must begin at rest: it gets ticks of rest
    before it, so that the differences show if it does not.

    ``ticks``: the motor's log. It says where a stream was broken off, also if the stamps do not, and where the bus lost
    commands: what follows such a hole is judged by itself. A re-arm that begins a new segment breaks nothing off.
    """
    if ticks is None:
        broken = 1 + np.flatnonzero(np.diff(stamps_ns) >= ShieldConfig().stall_ticks * PERIOD_S * 1e9)
        holes = np.array([], dtype=int)
    else:
        at = np.searchsorted(ticks["stamp_ns"], stamps_ns)
        is_new = np.diff(ticks["segment"][at].astype(int)) != 0
        holes = 1 + np.flatnonzero(np.diff(at) != 1)
        broken = np.setdiff1d(1 + np.flatnonzero(is_new & (ticks["state"][at[:-1]] != HOLDING)), holes)
    begins = np.union1d(broken, holes)
    parts = np.split(positions, begins)
    return [parts[0], *(np.concatenate([np.repeat(part[:1], 3 * (begin in broken), axis=0), part])
                        for begin, part in zip(begins, parts[1:], strict=True))]


def worst_ratios(rig: Rig, commands: list[tuple[int, np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Largest speed, acceleration and jerk of some of the rig's commands as received, over their limits."""
    turns = rig.turns
    rig.wait(lambda: rig.turns > turns + 1, 20.0, "the log of these commands")
    ticks = np.concatenate(rig.ticks)
    # A motor process that was killed may have sent its last command without logging it.
    commands = [command for command in commands if command[0] <= ticks["stamp_ns"][-1]]
    stamps = np.array([stamp for stamp, _, _ in commands])
    positions = np.array([position for _, position, _ in commands])
    at = np.searchsorted(ticks["stamp_ns"], stamps)
    assert (ticks["stamp_ns"][at] == stamps).all() and (ticks["position"][at] == positions).all(), "sent is not received"
    parts = streams(positions, stamps, ticks)

    def largest(order: int, limit: np.ndarray, rounding: float = 0.0) -> float:
        found = [np.abs(np.diff(rows, order, axis=0)) / PERIOD_S**order - rounding for rows in parts]
        return max(float(np.max(each / limit, initial=0.0)) for each in found)

    return {
        "position": float(np.max(np.maximum(LIMITS.position_lower - positions, positions - LIMITS.position_upper))),
        "velocity": largest(1, LIMITS.velocity),
        "acceleration": largest(2, LIMITS.acceleration),
        # A position of 3 rad is rounded to 4e-16, which a third difference turns into 2e-9 rad/s³.
        "jerk": largest(3, LIMITS.jerk, 1e-8),
    }

