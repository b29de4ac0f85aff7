"""The judges of the fault matrix can say no, and the faults are what they are called."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from edge_rig import CLOCK, LIMITS, ROOT, free_endpoint
from mangle import Fault, Outbox, Pendulum, Share
from motion import BRAKING, HOLDING, SLACK, judge_stop, ratios, stretches, worst

from vla_common.clock import sleep_s
from vla_edge.core.braking import stop_step
from vla_edge.core.chunk import ActionChunk, ChunkGate, Reject
from vla_edge.core.heartbeat import HeartbeatWatch
from vla_edge.core.records import ChunkReader, EdgeMemory, fill_chunk
from vla_sim.faults import DirectionFaults, LinkFaults
from vla_sim.link import Link

T, MS = 0.01, 1_000_000


def course(v0=1.0, a0=0.0, brake=None, before=10):
    """Ticks of a stop of joint 1 from ``v0`` with acceleration ``a0``; ``brake``: replaces the speeds under braking."""
    v = [v0 - T * a0] * before + [v0]
    if brake is None:
        brake, speed, acceleration = [], v0, a0
        while not brake or speed != 0.0 or acceleration != 0.0:
            speed, acceleration = stop_step(speed, acceleration, LIMITS.acceleration[0], LIMITS.jerk[0] * T, T)
            brake.append(speed)
    speeds = [*v, *brake, 0.0]
    ticks = np.zeros(len(speeds), [("stamp_ns", "<i8"), ("state", "u1"), ("segment", "<u4"), ("position", "<f8", (8,))])
    ticks["stamp_ns"] = np.arange(len(speeds)) * 10 * MS
    ticks["position"] = LIMITS.ready
    ticks["position"][:, 0] += np.cumsum(speeds) * T
    ticks["state"][len(v):-1] = BRAKING
    ticks["state"][-1] = HOLDING
    return ticks


@pytest.mark.parametrize(("v0", "a0"), [(1.0, 0.0), (1.9, 5.0), (-1.0, 4.0), (0.004, -7.0), (0.5, -13.0)])
def test_a_right_stop_passes(v0, a0):
    stop = judge_stop(course(v0, a0), onset_ns=50 * MS)
    assert stop is not None and stop.faults == ()
    assert stop.reaction_s == pytest.approx(0.06) and 0 < stop.brake_s < 0.4 and stop.distance < 0.3


@pytest.mark.parametrize(("brake", "word"), [
    ([0.8, 0.5, 0.2, -0.1, -0.05], "reversed"),
    ([0.9, 0.7, 0.8, 0.4, 0.1], "sped up again"),
    ([1.2, 1.0, 0.6, 0.2], "more than a0"),
    ([0.99 - 0.01 * k for k in range(99)], "stopping distance"),
    ([0.99 - 0.01 * k for k in range(99)], "braked for"),
    ([0.0], "acceleration"),
])
def test_a_wrong_stop_is_named(brake, word):
    stop = judge_stop(course(brake=brake), onset_ns=50 * MS)
    assert stop is not None and any(word in fault for fault in stop.faults), stop


def test_no_stop_is_no_stop():
    ticks = course()
    assert judge_stop(ticks[:11], onset_ns=50 * MS) is None


def test_limits_are_judged_within_segments_and_over_what_arrived():
    ticks = course()
    right = worst(stretches(ticks))
    assert max(right["velocity"], right["acceleration"], right["jerk"]) <= SLACK and right["position"] <= 0
    assert ratios(ticks["position"][::2])["velocity"] > 0.99, "a hole doubles the speed"
    received = {int(tick["stamp_ns"]): tick["position"] for tick in ticks if tick["stamp_ns"] != 60 * MS}
    assert worst(stretches(ticks, received)) == pytest.approx(right, abs=0.2), "a hole is no step"
    moved = ticks.copy()
    moved["position"][-1, 3] += 0.5
    assert worst(stretches(moved))["velocity"] > 1
    moved["segment"][-1] = 1
    assert worst(stretches(moved)) == pytest.approx(right)
    moved["position"][:, 3] += 9.0
    assert worst(stretches(moved))["position"] > 0


class Sent:
    def __init__(self):
        self.payloads = []

    def put(self, payload):
        self.payloads.append(payload)


def pass_through(fault, count=6, step_ms=10):
    sent, share = Sent(), Share()
    outbox = Outbox(sent)
    for k in range(count + 30):
        if k < count:
            outbox.send(k * step_ms * MS, bytes([k] * 16), fault, share.hit(fault.share))
        outbox.flush(k * step_ms * MS)
    return sent.payloads


def test_faults_of_the_outbox():
    numbers = [bytes([k] * 16) for k in range(6)]
    assert pass_through(Fault()) == numbers
    assert pass_through(Fault("drop")) == [] and pass_through(Fault("drop", 0.5)) == numbers[::2]
    assert pass_through(Fault("delay", delay_s=0.1)) == numbers
    late = pass_through(Fault("reorder", 0.5, 0.025))
    assert sorted(late) == numbers and late != numbers
    assert sorted(pass_through(Fault("duplicate", delay_s=0.025))) == sorted(numbers * 2)
    broken = pass_through(Fault("garbage"))
    assert len(broken) == 6 and not set(broken) & set(numbers)


def test_a_pendulum_swings():
    swing, q, seen = Pendulum(np.zeros(1), np.ones(1), 0.1), np.zeros(1), []
    for _ in range(100):
        q = q + 0.01 * swing.direction(q)
        seen.append(q[0])
    assert min(seen) < -0.1 and max(seen) > 0.1 and max(map(abs, seen)) < 0.13


def test_a_heartbeat_is_reported_once_each_way():
    watch = HeartbeatWatch(1000)
    assert watch.changed("io", 0, 10, 5000) is None, "still starting"
    assert [watch.changed("io", 100, 10, now) for now in (1100, 1101, 3000)] == [None, True, None]
    assert watch.changed("policy", 2900, 10, 3000) is None
    assert [watch.changed("io", 3000, 10, now) for now in (3001, 3002)] == [False, None]
    assert watch.changed("io", 3000, 10, 9000) is True
    assert watch.changed("io", 3000, 9000, 9001) is None, "another process in its place"


@pytest.mark.parametrize("name", ["cloud_process", "motor_main"])
@pytest.mark.parametrize("as_module", [True, False])
def test_the_wall_clock_of_one_process_is_stepped_while_it_runs(tmp_path, name, as_module):
    from matrix_rig import PROCESSES

    (tmp_path / f"{name}.py").write_text("import sys, time\nfor line in sys.stdin:\n    print(time.time(), time.time_ns(), "
                                         "time.monotonic_ns(), flush=True)\n")
    wall = tmp_path / "wall"
    wall.write_bytes(bytes(8 * len(PROCESSES)))
    process = subprocess.Popen([sys.executable, *(["-m", name] if as_module else [f"{name}.py"])], cwd=tmp_path,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={
                                   **os.environ, "PYTHONPATH": str(Path(__file__).parent / "wallclock"),
                                   "VLA_TEST_WALL_CLOCK": str(wall)})

    def read():
        process.stdin.write("\n")
        process.stdin.flush()
        shown = [float(word) for word in process.stdout.readline().split()]
        ours_ns = CLOCK.wall_ns()
        return round(shown[0] - ours_ns / 1e9, -2), round((shown[1] - ours_ns) / 1e9, -2), shown[2]

    try:
        first = read()
        with wall.open("r+b") as file:
            file.seek(8 * PROCESSES.index(name.split("_")[0]))
            file.write((-3600 * 10**9).to_bytes(8, "little", signed=True))
        second = read()
    finally:
        process.kill()
        process.communicate()
    assert first[:2] == (0, 0) and second[:2] == (-3600, -3600) and 0 < second[2] - first[2] < 60e9


@pytest.mark.parametrize(("field", "value", "reject"), [
    ("width", 7, Reject.WIDTH), ("width", 9, Reject.WIDTH), ("horizon", 65, Reject.HORIZON),
    ("horizon", 2**32 - 1, Reject.HORIZON), ("horizon", 0, Reject.HORIZON)])
def test_a_chunk_record_that_says_another_size_is_refused(field, value, reject):
    memory = EdgeMemory.private(len(LIMITS))
    chunk = ActionChunk("a", 1, 0, 0, T, LIMITS.names, np.tile(LIMITS.ready, (16, 1)))
    record = memory.blank("chunk")
    fill_chunk(record, chunk)
    gate, reader = ChunkGate(LIMITS, T), ChunkReader(LIMITS.names)
    assert gate.admit(reader.chunk(record), 1, 0) is None
    record[field], record["sequence"] = value, 2
    assert gate.admit(reader.chunk(record), 1, 0) is reject


def test_a_link_may_be_given_other_faults():
    link = Link(LinkFaults(), 0)
    link.enter(0, "up", b"a")
    link.change(LinkFaults(up=DirectionFaults(loss=1.0)))
    link.enter(0, "up", b"b")
    link.enter(0, "down", b"c")
    assert [payload for _, payload, _ in link.leave(0)] == [b"a", b"c"]
    link.change(LinkFaults())
    link.enter(1, "up", b"d")
    assert [payload for _, payload, _ in link.leave(1)] == [b"d"]


def test_a_link_process_reads_its_faults_again(tmp_path):
    file = tmp_path / "faults.yaml"
    file.write_text("title: first\nlink: {}\n")
    arguments = ["-m", "vla_sim.link_main", "--listen", free_endpoint(), "--cloud", free_endpoint(), "--faults", str(file)]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *arguments], cwd=tmp_path, stdout=out, stderr=out,
                                   env={**os.environ, "PYTHONPATH": str(ROOT)})

    def wait_for(text):
        deadline_ns = CLOCK.monotonic_ns() + 60_000 * MS
        while text not in log.read_text():
            assert process.poll() is None and CLOCK.monotonic_ns() < deadline_ns, log.read_text()
            sleep_s(CLOCK, 0.02)

    try:
        wait_for("READY")
        file.write_text("title: second\nlink: {up: {lost: 1}}\n")
        process.send_signal(signal.SIGHUP)
        wait_for("faults stay as they are")
        file.write_text("title: third\nlink: {up: {loss: 1.0}}\n")
        process.send_signal(signal.SIGHUP)
        wait_for("faults are now: third")
    finally:
        process.kill()
        process.wait()
