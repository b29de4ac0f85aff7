"""What the motor process says about its plan is what it then does."""

from pathlib import Path

import numpy as np
import pytest

from vla_common.clock import ManualClock
from vla_edge.config import EdgeConfig, EnsembleConfig, load_limits, make_queue
from vla_edge.core.chunk import ActionChunk, ChunkGate
from vla_edge.core.motor_loop import MotorLoop
from vla_edge.core.records import MAX_HORIZON, EdgeMemory, fill_chunk
from vla_edge.core.shield import Shield, State

T, TICK_NS, START_NS = 0.01, 10_000_000, 10**12
LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)


class Robot:
    """A motor loop that is measured where it was commanded."""

    def __init__(self, rule="speed_ramp"):
        config = EdgeConfig(ensemble=EnsembleConfig(rule=rule))
        self.memory, self.clock, self.tick, self.sequence = EdgeMemory.private(8), ManualClock(START_NS), 0, 0
        self.position = LIMITS.ready.copy()
        self.queue = make_queue(config, 8)
        self.loop = MotorLoop(self.memory, LIMITS, ChunkGate(LIMITS, T, config.gate), self.queue,
                              Shield(LIMITS, T, config.shield), self.clock, self.send)

    def send(self, stamp_ns, position, velocity):
        self.position = position.copy()

    def control(self, **counts):
        record = self.memory.blank("control")
        for name, count in counts.items():
            record[name] = count
        self.memory.write("control", record)

    def give(self, rows, base_tick=None):
        self.sequence += 1
        record = self.memory.blank("chunk")
        base = self.tick - 1 if base_tick is None else base_tick
        fill_chunk(record, ActionChunk("a", self.sequence, base, self.clock.monotonic_ns(), T, LIMITS.names, rows))
        self.memory.write("chunk", record)

    def step(self):
        """One tick; returns the motor's record."""
        now_ns = START_NS + self.tick * TICK_NS
        self.clock.advance_ns(now_ns - self.clock.monotonic_ns())
        joints = self.memory.blank("joints")
        joints["stamp_ns"], joints["position"] = now_ns, self.position
        self.memory.write("joints", joints)
        self.loop.serve(self.tick, now_ns, now_ns, 0)
        self.tick += 1
        return self.memory.read("motor")[1]


def slow(rows, start=0.0):
    """Far below all limits, so that what is planned is sent."""
    return LIMITS.ready + start + 1e-5 * np.arange(1, rows + 1)[:, None] ** 2 / rows


@pytest.mark.parametrize("rule", ["speed_ramp", "act", "prefix"])
def test_the_plan_ahead_is_what_is_sent_next(rule):
    robot = Robot(rule)
    robot.step()
    assert robot.step()["plan_rows"] == 0  # holding
    robot.control(rearm=1)
    assert robot.step()["plan_rows"] == 0  # waiting
    robot.give(slow(16))
    record = robot.step()
    assert record["plan_rows"] == 15 and record["state"] == State.NOMINAL
    for k in range(4):
        ahead = record["plan"][:int(record["plan_rows"])].copy()
        assert len(ahead) == 15 - k
        record = robot.step()
        np.testing.assert_array_equal(record["position"], ahead[0])
        np.testing.assert_array_equal(record["plan"][:len(ahead) - 1], ahead[1:])


def test_a_plan_longer_than_the_record_is_told_as_far_as_it_fits():
    robot = Robot()
    robot.step()
    robot.control(rearm=1)
    robot.step()
    robot.give(slow(MAX_HORIZON))
    assert robot.step()["plan_rows"] == MAX_HORIZON - 1
    assert robot.memory.dtypes["motor"]["plan"].shape == (MAX_HORIZON, 8)


def test_a_robot_that_stops_has_no_plan():
    robot = Robot()
    robot.step()
    robot.control(rearm=1)
    robot.step()
    robot.give(slow(16))
    assert robot.step()["plan_rows"] == 15
    robot.control(rearm=1, estop=1)
    record = robot.step()
    assert record["state"] in (State.BRAKING, State.HOLDING) and record["plan_rows"] == 0
    for _ in range(20):
        record = robot.step()
    assert record["state"] == State.HOLDING and record["plan_rows"] == 0
    robot.control(rearm=2, estop=1)
    assert robot.step()["plan_rows"] == 0, "a re-arm forgets the plan"


def test_a_plan_that_runs_out_ends_at_zero_rows():
    robot = Robot()
    robot.step()
    robot.control(rearm=1)
    robot.step()
    robot.give(slow(3))
    assert [int(robot.step()["plan_rows"]) for _ in range(4)] == [2, 1, 0, 0]
