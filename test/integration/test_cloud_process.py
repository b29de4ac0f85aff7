"""A real cloud process on loopback: fake robots send observations and garbage over Zenoh, contexts come back."""

from __future__ import annotations

import io
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from free_port import free_endpoint

from vla_cloud.cloud_main import EXIT_USAGE, main
from vla_common import messages, tensors, wire
from vla_common.clock import NS_PER_S, SystemClock, sleep_s
from vla_common.manifest import Camera, Context, Instruction, Manifest, hash_files, write_manifest
from vla_common.zenoh_session import Bus, Received, open_bus
from vla_models.llama import LlamaConfig
from vla_models.model_folder import VLM, save_modules
from vla_models.text import SPECIALS
from vla_models.vit import VitConfig
from vla_models.vlm import Vlm, VlmConfig

JOINTS = ["joint1", "joint2", "gripper"]
VOCABULARY = [*SPECIALS, "touch", "the", "red", "blue", "cube"]
PERIOD_S = 0.1
REPORT_S = 0.2
START_PER_STOP = 6.0
REFUSED = {"mute": "wrong_joint_names", "foreign": "unknown_word"}
WIRE_ERRORS = ("truncated", "malformed", "checksum_mismatch")
CLOCK = SystemClock()


def write_tiny_model(folder: Path) -> None:
    torch.manual_seed(0)
    vit = VitConfig(24, 6, 16, 2, 2, 32, stem=((2, 8), (3, 16)))
    llama = LlamaConfig(len(VOCABULARY), 16, 2, 2, 1, 32, lm_head=False)
    vlm = Vlm(VlmConfig(vit, llama, num_readout=3, context_dim=8, text_length=8))
    save_modules(folder / VLM, vlm=vlm)
    write_manifest(folder, Manifest(
        name="tiny", joint_names=JOINTS, horizon=16, period_s=0.01, context=Context(3, 8), proprio_names=JOINTS,
        cameras=[Camera("external", 24, 24)], instruction=Instruction(VOCABULARY, 8), files=hash_files(folder, [VLM]),
        licence="Apache-2.0", training_command="none", extra={"vlm": vlm.config.to_dict()},
    ))  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture
def endpoint() -> str:
    return free_endpoint()


class Cloud:
    """The process. Its log goes to a file, so that it can never block on a full pipe."""

    def __init__(self, endpoint: str, model: Path, log: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "vla_cloud.cloud_main", "--listen", endpoint, "--model", str(model), *arguments]
        self.log, self._given = log, (endpoint, model, arguments)
        started_ns = CLOCK.monotonic_ns()
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        assert self.process.stdout is not None
        # Zenoh, too, writes there: of a robot that connected while the machine stood still, for one.
        line = next((line for line in self.process.stdout if line.startswith("READY ")), "")
        if not line:
            self.process.kill()
        assert line == f"READY {endpoint} model tiny\n", f"{line}{log.read_text()}"
        self.start_s = (CLOCK.monotonic_ns() - started_ns) / NS_PER_S

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Exit status and how long the end took in seconds."""
        started_ns = CLOCK.monotonic_ns()
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status, (CLOCK.monotonic_ns() - started_ns) / NS_PER_S

    def stop_quickly(self, serve: Callable[[], None]) -> str:
        """Within a second and with status 0; returns the log. A slow machine, on which the start takes long, too, may
        take longer in proportion. Where it stood still meanwhile, another cloud shows it: it is started on the same
        port, serves robots with ``serve`` as this one did, and is stopped. Four more at most."""
        cloud = self
        try:
            for number in range(5):
                limit_s = max(1.0, cloud.start_s / START_PER_STOP)
                status, seconds = cloud.stop()
                if seconds < limit_s or number == 4:
                    break
                endpoint, model, arguments = self._given
                cloud = Cloud(endpoint, model, self.log.with_suffix(f".again{number}"), *arguments)
                serve()
        finally:
            cloud.process.kill()
        log = cloud.log.read_text()
        assert status == 0, log
        assert seconds < limit_s
        return log

    def reports(self) -> list[str]:
        """Lines of statistics so far."""
        whole, _, _ = self.log.read_text().rpartition("\n")
        return [line for line in whole.splitlines() if "observations/s" in line]

    def refused(self) -> dict[str, int]:
        """Number of refusals by cause, as last reported."""
        counts = re.findall(r"(\w+)=(\d+)", (self.reports() or [""])[-1])
        return {cause: int(count) for cause, count in counts}

    def wire_errors(self) -> int:
        return sum(self.refused().get(cause, 0) for cause in WIRE_ERRORS)


class Robot:
    """Sends observations and keeps the contexts that come back."""

    def __init__(self, robot: str, endpoint: str, seed: int, **faults: object) -> None:
        self.robot, self.faults = robot, faults
        self.bus: Bus = open_bus(endpoint, node=f"edge_{robot}", isolated=True)
        self.observation = self.bus.publisher("observation", robot)
        self.context = self.bus.queue("context", robot)
        self.stamps_ns: list[int] = []
        self.sent_ns: list[int] = []
        self.contexts: list[object] = []
        self.round_trips_s: dict[int, float] = {}  # by sequence
        pixels = np.random.default_rng(seed).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG")
        self.jpeg = buffer.getvalue()

    def send(self) -> None:
        # A clock of its own, far from the cloud's: the stamp must come back as it was.
        stamp_ns = 77 * NS_PER_S + CLOCK.monotonic_ns() % NS_PER_S + len(self.stamps_ns) * NS_PER_S
        image = messages.new("sensor_msgs/CompressedImage", header=wire.make_header(stamp_ns, "external"),
                             format="jpeg", data=self.jpeg)
        fields: dict[str, object] = {
            "header": wire.make_header(stamp_ns), "session": f"of {self.robot}", "sequence": len(self.stamps_ns),
            "instruction": "touch the red cube", "joint_names": JOINTS, "joint_positions": [0.1, 0.2, 0.0],
            "images": [image],
        } | self.faults  # fmt: skip
        self.stamps_ns.append(stamp_ns)
        self.sent_ns.append(CLOCK.monotonic_ns())
        self.observation.put(wire.encode(messages.new("Observation", **fields)))

    def receive(self) -> None:
        while (received := self.context.try_recv()) is not None:
            assert isinstance(received, Received)
            context = wire.decode("ContextTokens", received.payload)
            self.contexts.append(context)
            self.round_trips_s[context.sequence] = (CLOCK.monotonic_ns() - self.sent_ns[context.sequence]) / NS_PER_S


def drive(robots: list[Robot], is_done: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Sends one observation per robot and period, and collects what comes back, until ``is_done``.

    How many periods that takes is up to the machine: what is late or meets a lost link is not answered.
    """
    give_up_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
    while not is_done():
        assert CLOCK.monotonic_ns() < give_up_ns, {robot.robot: len(robot.contexts) for robot in robots}
        for robot in robots:
            robot.send()
        sleep_s(CLOCK, PERIOD_S)
        for robot in robots:
            robot.receive()


def drive_until_answered(robots: list[Robot], more: int) -> None:
    """Until each robot that can be answered has so many more contexts."""
    wanted = {robot: len(robot.contexts) + more for robot in robots if robot.robot not in REFUSED}
    drive(robots, lambda: all(len(robot.contexts) >= count for robot, count in wanted.items()))


def send_garbage(robot: Robot, cloud: Cloud, garbage: list[bytes]) -> int:
    """Each until one more wire error is reported, as publishers drop rather than wait; returns how often it sent."""
    num_sent = 0
    for payload in garbage:
        before = cloud.wire_errors()
        for _ in range(60):
            robot.observation.put(payload)
            num_sent += 1
            if until(lambda before=before: cloud.wire_errors() > before, 10 * REPORT_S):
                break
        else:
            raise AssertionError(f"{payload[:20]!r} was not refused: {cloud.log.read_text()}")
    return num_sent


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    give_up_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
    while not condition() and CLOCK.monotonic_ns() < give_up_ns:
        sleep_s(CLOCK, 0.02)
    return condition()


@pytest.fixture
def robots(endpoint: str) -> Iterator[list[Robot]]:
    made = [
        Robot("alpha", endpoint, 1),
        Robot("beta", endpoint, 2),
        Robot("gamma", endpoint, 3, instruction="touch the blue cube"),
        Robot("mute", endpoint, 4, joint_names=JOINTS[::-1]),
        Robot("foreign", endpoint, 5, instruction="touch the green cube"),
    ]
    yield made
    for robot in made:
        robot.bus.close()


@pytest.mark.timeout(900)  # on a busy machine a start takes a minute
@pytest.mark.parametrize("compute", ["in_process", "lanes"])
def test_several_robots_garbage_kill_and_restart(
    endpoint: str, model: Path, tmp_path: Path, robots: list[Robot], compute: str
) -> None:
    arguments = ["--set", f"context.compute={compute}", "--set", f"log_period_s={REPORT_S}"]
    arguments += ["--set", "serving.supervisor.stop_s=30"]  # no lane is killed because the machine stands still
    places = 2 if compute == "lanes" else 1
    cloud = Cloud(endpoint, model, tmp_path / "first.log", *arguments)
    try:
        for robot in robots:
            robot.bus.wait_connected(60.0)
        drive_until_answered(robots, 1)  # the subscription has spread
        rng = np.random.default_rng(0)
        garbage = [b"", rng.bytes(7), rng.bytes(300), b"\x00\x01\x00\x00" + rng.bytes(2000), rng.bytes(100_000)]
        num_garbage = send_garbage(robots[0], cloud, garbage)
        drive_until_answered(robots, 20)
        drive(robots, lambda: all(cloud.refused().get(cause, 0) >= 20 for cause in REFUSED.values()))
        check_answers(robots, 20, places)
        num_reports = len(cloud.reports())
        assert until(lambda: len(cloud.reports()) > num_reports + 1, 60.0), "the last one counts all that was sent"
        check_counts(cloud, robots, range(len(garbage), num_garbage + 1))
        cloud.stop_quickly(lambda: drive_until_answered(robots, 1))
        assert ("2 lanes" in cloud.log.read_text()) == (compute == "lanes")
    finally:
        cloud.process.kill()

    # Robots stay up while the cloud is gone, and are served again as soon as it is back, without doing anything.
    for robot in robots:
        robot.receive()
        robot.contexts.clear()
    cloud = Cloud(endpoint, model, tmp_path / "second.log", *arguments)
    try:
        for robot in robots:
            robot.bus.wait_connected(60.0)
        drive_until_answered(robots, 3)
        check_answers(robots, 3, places)
        assert cloud.stop(signal.SIGKILL)[0] == -signal.SIGKILL
        with socket.socket() as again:  # the port is free at once
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(endpoint.rsplit(":", 1)[1])))
    finally:
        cloud.process.kill()


def check_answers(robots: list[Robot], least: int, places: int) -> None:
    """``places``: processes with a prefix cache of their own."""
    for robot in robots[3:]:
        assert robot.contexts == [], "an observation that cannot be answered is not answered"
    tokens = {}
    for robot in robots[:3]:
        assert len(robot.contexts) >= least
        sequences = [context.sequence for context in robot.contexts]
        assert sequences == sorted(set(sequences))
        for context in robot.contexts:
            assert wire.stamp_ns(context.header) == robot.stamps_ns[context.sequence]
            assert context.session == f"of {robot.robot}"
            assert context.model_id == "tiny"
            assert tensors.tokens_of(context).shape == (3, 8)
            assert 0 < context.compute_s <= robot.round_trips_s[context.sequence]
        reused = [context.prefix_tokens_reused for context in robot.contexts]
        assert max(reused) == 8 and sum(count != 8 for count in reused) <= places, "computed once in each place"
        assert len({tensors.tokens_of(context).tobytes() for context in robot.contexts}) < 5, "same input, same context"
        tokens[robot.robot] = tensors.tokens_of(robot.contexts[-1])
    assert not np.allclose(tokens["alpha"], tokens["beta"], atol=1e-6), "each robot gets the context of its own image"


def check_counts(cloud: Cloud, robots: list[Robot], num_garbage: range) -> None:
    log, line, refused = cloud.log.read_text(), cloud.reports()[-1], cloud.refused()
    assert cloud.wire_errors() in num_garbage, line
    for robot in robots[3:]:
        assert 20 <= refused[REFUSED[robot.robot]] <= len(robot.stamps_ns), line
    assert set(refused) <= {*WIRE_ERRORS, *REFUSED.values()}
    assert "5 robots" in line or "3 robots" in line and "lanes" in line  # lanes: refused before they count
    warnings = [line for line in log.splitlines() if "WARNING" in line]
    assert any("foreign: unknown_word: word 'green'" in line for line in warnings)
    assert len(warnings) < 10, "a refusal is logged once a robot and cause, not once a message"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "tcp/0.0.0.0:7447"], "--insecure-non-loopback"),
        (["--listen", "tls/0.0.0.0:7447"], "set tls.certificate"),
        (["--listen", "somewhere"], "not of the form"),
        (["--model", "models/no_such_model"], "no_such_model"),
        (["--set", "contxt.rate_hz=5"], "did you mean 'context'"),
        (["--set", "context.rate_hz=0"], "rate_hz must be positive"),
        (["--config", "no_such.yaml"], "no_such.yaml"),
    ],
)
def test_what_cannot_serve_is_refused_with_a_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_shipped_configuration_equals_the_defaults() -> None:
    from vla_cloud.config import CloudConfig
    from vla_common.config import load_config

    path = Path(__file__).resolve().parents[2] / "config" / "cloud.yaml"
    assert load_config(CloudConfig, path) == CloudConfig()
