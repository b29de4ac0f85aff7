"""A whole edge and its cloud in one thread, on clocks that a test moves: io, policy and motor loop over shared memory, the
context service with a tiny random backbone, and message queues in the place of Zenoh. Nothing waits, nothing is random."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_cloud.config import ContextConfig
from vla_cloud.context.runner import ContextRunner
from vla_cloud.context.service import OBSERVATION, ContextService
from vla_common import messages, wire
from vla_common.clock import ManualClock, SteppedClock
from vla_common.manifest import Camera, Context, Instruction, Manifest
from vla_common.topics import data_key
from vla_common.zenoh_session import Received
from vla_edge.child import Child
from vla_edge.config import EdgeConfig, load_limits
from vla_edge.core.chunk import ActionChunk
from vla_edge.core.records import EdgeMemory
from vla_edge.core.shield import State
from vla_edge.io_main import IoLoop
from vla_edge.motor_main import build_loop
from vla_edge.policy_main import PolicyLoop, make_planner
from vla_models.llama import LlamaConfig
from vla_models.text import SPECIALS
from vla_models.vit import VitConfig
from vla_models.vlm import Vlm, VlmConfig
from vla_sim.images import encode_jpeg

ROOT = Path(__file__).resolve().parents[2]
ROBOT_FILE = ROOT / "config/robots/panda_2f85.yaml"
T, T_NS, NS = 0.01, 10_000_000, 1_000_000_000
LIMITS = load_limits(ROBOT_FILE, T)
START_NS = 1000 * NS
ROBOT, TASK, OTHER_TASK = "arm1", "touch the red cube", "touch the blue cube"
VOCABULARY = [*SPECIALS, "touch", "the", "red", "blue", "cube"]
PIXELS = 24
MANIFEST = Manifest(
    name="tiny", joint_names=list(LIMITS.names), horizon=16, period_s=T, context=Context(3, 8),
    proprio_names=[*(f"command:{name}" for name in LIMITS.names), "measured:gripper"],
    cameras=[Camera("front", PIXELS, PIXELS)], instruction=Instruction(VOCABULARY, 8), files={}, licence="Apache-2.0",
    training_command="none")
PANDA = LIMITS.names
_COUNT = itertools.count()

sys.path.insert(0, str(ROOT / "test/fault"))  # edge_rig.make_model: a model folder with tiny graphs


def chunk(base_tick: int, horizon: int = 16, sequence: int = 1, session: str = "a", value: float | None = None,
          **changes: Any) -> ActionChunk:
    """Row k holds its own tick / 1000 in every joint (or ``value``), so that a row in the wrong place shows."""
    ticks = base_tick + 1 + np.arange(horizon)
    rows = np.zeros((horizon, 8)) + (ticks.reshape(-1, 1) * 1e-3 if value is None else value)
    made = ActionChunk(session, sequence, base_tick, START_NS, T, LIMITS.names, rows)
    return replace(made, **changes)


def picture(red: int = 0, green: int = 0, blue: int = 0) -> bytes:
    """JPEG of one colour, as the simulator's camera makes it."""
    return encode_jpeg(np.full((PIXELS, PIXELS, 3), (red, green, blue), np.uint8))


class Line:
    """A publisher and its subscriber."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._bus, self._topic = bus, topic

    def put(self, payload: bytes) -> None:
        self._bus.sent[self._topic].append(payload)

    def try_recv(self) -> Received | None:
        waiting = self._bus.waiting[self._topic]
        return Received(waiting.popleft(), None, self._bus.clock.monotonic_ns(), "") if waiting else None


class Bus:
    """What the loops use of :class:`vla_common.zenoh_session.Bus`; ``waiting`` is read by them, ``sent`` is written."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.waiting: dict[str, deque[bytes]] = defaultdict(deque)
        self.sent: dict[str, list[bytes]] = defaultdict(list)

    def latest(self, topic: str, robot: str, camera: str = "") -> Line:
        return Line(self, topic)

    def queue(self, topic: str, robot: str, camera: str = "", capacity: int = 256) -> Line:
        return Line(self, topic)

    def publisher(self, topic: str, robot: str, camera: str = "") -> Line:
        return Line(self, topic)

    def take(self, topic: str) -> list[bytes]:
        """What was sent since the last call."""
        sent, self.sent[topic] = self.sent[topic], []
        return sent


def tiny_vlm(**changes: Any) -> Vlm:
    """A backbone with random weights in which every input shows in the output."""
    torch.manual_seed(0)
    vit = VitConfig(PIXELS, 6, 16, 2, 2, 32, stem=((2, 8), (3, 16)))
    llama = LlamaConfig(len(VOCABULARY), 16, 2, 2, 1, 32, lm_head=False)
    vlm = Vlm(VlmConfig(vit, llama, num_readout=3, context_dim=8, text_length=8, **changes))
    for parameter in vlm.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return vlm.eval()


class Cloud:
    """The context service on a clock of its own: another machine, so its zero is anywhere."""

    def __init__(self, start_ns: int = 5 * 10**12, manifest: Manifest = MANIFEST, **config: Any) -> None:
        self.clock = ManualClock(start_ns)
        self.vlm = tiny_vlm()
        runner = ContextRunner(self.vlm, manifest, prefix_cache_tokens=64, max_image_bytes=8192)
        self._answers: list[bytes] = []
        self.service = ContextService(runner, manifest, lambda _, payload: self._answers.append(payload), self.clock,
                                      ContextConfig(**config))

    def answer(self, observation: bytes) -> list[bytes]:
        """Contexts made from an observation (none if it is refused)."""
        key = data_key(OBSERVATION.topic(ROBOT), OBSERVATION.type_name)
        self.service.receive(Received(observation, None, self.clock.monotonic_ns(), key))
        while self.service.step():
            pass
        answers, self._answers = self._answers, []
        return answers

    @property
    def refused(self) -> dict[str, int]:
        return self.service.statistics.refused.snapshot()


class Denoiser:
    """Deltas that follow the context and the commanded pose; deterministic."""

    engine, supports_prefix = "test", False

    def encode_context(self, now: np.ndarray, previous: np.ndarray) -> Any:
        return np.tanh(now.mean(axis=0)) + 0.1 * np.tanh(previous.mean(axis=0))

    def denoise(self, handle: Any, proprio: np.ndarray, age_s: float, gap_s: float, noise: np.ndarray,
                prefix: Any = None) -> np.ndarray:
        steps = np.arange(1, len(noise) + 1, dtype=np.float32).reshape(-1, 1) / len(noise)
        direction = handle * (np.arange(8) < 7) - 0.1 * (proprio[:8] - LIMITS.ready)
        return (0.02 * steps * (direction + 0.1 * age_s + 0.1 * gap_s)).astype(np.float32)


class Edge:
    """One robot, its edge and a cloud. :meth:`run` advances time tick by tick.

    Attributes:
        robot_stamp: the stamp that the robot puts on its messages at an instant; default: that instant.
        joint_names, position: what the robot reports; position None: the last command.
        upload: what becomes of an observation; default: the cloud answers at once.
        commands: float64[n] per tick. observations, chunks: decoded messages.
    """

    def __init__(self, folder: Path, cloud: Cloud | None = None, denoiser: Any = None, **config: Any) -> None:
        self.clock = SteppedClock(START_NS)
        self.cloud = cloud or Cloud()
        self.memory = EdgeMemory.create(f"field{next(_COUNT)}", len(LIMITS), folder)
        self.child = Child(EdgeConfig(robot_file=ROBOT_FILE, **config), self.memory, LIMITS, self.clock,
                           threading.Event())
        self.bus, self.link = Bus(self.clock), Bus(self.clock)
        self.commands: list[np.ndarray] = []
        self.stamps_ns: list[int] = []
        self.motor = build_loop(self.child, self._send, "test")
        self.planner = make_planner(self.child, MANIFEST, denoiser or Denoiser(), "p")
        self.policy = PolicyLoop(self.child, self.planner, "test", self.bus, self.link)
        self.io = self.new_io()
        self.tick = 0
        self.robot_stamp: Callable[[int], int] = lambda now_ns: now_ns
        self.robot_speaks = self.camera_speaks = True
        self.joint_names: list[str] = list(LIMITS.names)
        self.position: np.ndarray | None = None
        self.image = picture(red=200, green=40, blue=40)
        self.upload: Callable[[bytes], list[bytes]] = self.cloud.answer
        self.observations: list[Any] = []
        self.chunks: list[Any] = []
        self._orders = 0

    def new_io(self) -> IoLoop:
        return IoLoop(self.child, ["front"], self.bus, self.link)

    def _send(self, stamp_ns: int, position: np.ndarray, velocity: np.ndarray) -> None:
        self.stamps_ns.append(stamp_ns)
        self.commands.append(position.copy())

    @property
    def state(self) -> State:
        return self.motor.shield.state

    def say(self, instruction: str) -> None:
        text = wire.encode(messages.new("std_msgs/String", data=instruction))
        # Both processes subscribe to the topic, each with a queue of its own.
        for loop_turn in (self.io.turn, self.policy.turn):
            self.bus.waiting["instruction"].append(text)
            loop_turn()

    def order(self, kind: str) -> None:
        self._orders += 1
        message = messages.new("ShieldCommand", header=wire.make_header(self.clock.monotonic_ns()),
                               sequence=self._orders)
        message.command = getattr(message, kind)
        self.bus.waiting["shield_command"].append(wire.encode(message))

    def context(self, payload: bytes) -> None:
        """Hand the policy a context, whoever made it."""
        self.link.waiting["context"].append(payload)

    def refused_contexts(self) -> dict[str, int]:
        """Refusals counted by the policy process."""
        return self.policy._rejects.snapshot()

    def refused_messages(self) -> dict[str, int]:
        """Refusals counted by the io process since its last report in the log."""
        return self.io._rejects.snapshot()

    def _robot(self, now_ns: int) -> None:
        stamp_ns = self.robot_stamp(now_ns)
        if self.robot_speaks:
            position = self.position if self.position is not None else (
                self.commands[-1] if self.commands else LIMITS.ready)
            self.bus.waiting["joint_states"].append(wire.encode(messages.new(
                "sensor_msgs/JointState", header=wire.make_header(stamp_ns), name=self.joint_names, position=position)))
        if self.camera_speaks and self.tick % 10 == 0:
            self.bus.waiting["image"].append(wire.encode(messages.new(
                "sensor_msgs/CompressedImage", header=wire.make_header(stamp_ns, "front"), format="jpeg",
                data=self.image)))

    def step(self) -> None:
        """One tick: the motor process, then the robot, io, cloud and policy in the rest of the period."""
        now_ns = self.clock.monotonic_ns()
        self.motor.serve(self.tick, now_ns, now_ns, 0)
        self._robot(now_ns)
        self.io.turn()
        for payload in self.link.take("observation"):
            self.observations.append(wire.decode("Observation", payload))
            for answer in self.upload(payload):
                self.context(answer)
        self.policy.turn()
        self.chunks += [wire.decode("ActionChunk", payload) for payload in self.bus.take("action_chunk")]
        self.tick += 1
        self.clock.advance_ns(T_NS)
        self.cloud.clock.advance_ns(T_NS)

    def run(self, ticks: int) -> Edge:
        for _ in range(ticks):
            self.step()
        return self

    def start(self, instruction: str = TASK) -> Edge:
        """Measured, instructed, re-armed and moving."""
        self.run(5)
        self.say(instruction)
        self.run(20)
        self.order("REARM")
        self.run(20)
        assert self.state is State.NOMINAL, (self.motor.shield.reason, self.refused_contexts(), self.refused_messages())
        return self

    def close(self) -> None:
        self.memory.file.unlink()
        self.memory.close()
