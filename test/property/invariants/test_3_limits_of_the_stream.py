"""Invariant 3: the stream as sent keeps position, velocity, acceleration and jerk limits, by finite differences of
consecutive commands, in every state and across every transition, through the whole motor loop and under every rule.

Where a segment begins (a re-arm or a stall away from the last command) the robot stands at its first command.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import SIZES, Day, T, days, report, rule_names

from vla_edge.core import shield as shield_module
from vla_edge.core import tracking
from vla_edge.core.shield import State

# A position of 3 rad is rounded to 4e-16; differences of such numbers over T, T² and T³ show that much at most.
ROUNDING = np.array([4 * 4.5e-16 / T, 8 * 4.5e-16 / T**2, 16 * 4.5e-16 / T**3])


class Stream:
    """Commands by segment, checked as a robot would: by what arrives."""

    def __init__(self, limits):
        self.limits = limits
        self.segment, self.rows, self.velocities = None, [], []
        self.worst = {"position_rad": -np.inf, "velocity": 0.0, "acceleration": 0.0, "jerk": 0.0, "sent_velocity": 0.0}
        self.segments = 0

    def note(self, segment, position, velocity):
        if segment != self.segment:
            self.close()
            self.segment = segment
        self.rows.append(position)
        self.velocities.append(velocity)

    def close(self):
        """Check a whole segment; the robot stood before it."""
        if not self.rows:
            return
        self.segments += 1
        limits, worst = self.limits, self.worst
        q = np.array([self.rows[0]] * 3 + self.rows)
        outside = np.maximum(limits.position_lower - q, q - limits.position_upper).max()
        worst["position_rad"] = max(worst["position_rad"], outside)
        assert outside <= 0.0, "outside the position limits"
        for order, (name, bound) in enumerate((("velocity", limits.velocity), ("acceleration", limits.acceleration),
                                               ("jerk", limits.jerk)), start=1):
            found = np.abs(np.diff(q, order, axis=0)) / T**order
            assert (found <= bound + ROUNDING[order - 1]).all(), f"{name} limit"
            worst[name] = max(worst[name], float(((found - ROUNDING[order - 1]) / bound).max()))
        # The velocity beside the position says the same.
        off = np.abs(np.diff(q[2:], axis=0) / T - np.array(self.velocities)).max()
        worst["sent_velocity"] = max(worst["sent_velocity"], off)
        assert off <= 1e-11, "the velocity sent is not that of the positions"
        self.rows, self.velocities = [], []


def run(seed, robot, rule, ticks, seen):
    day = Day(seed, robot, rule)
    stream, shield = Stream(day.limits), day.motor.shield
    before = shield.state
    day.motor.sent.clear()  # the pose in which it begins
    for _ in range(ticks):
        day.tick()
        (_, q, v), = day.motor.sent  # one command
        day.motor.sent.clear()
        stream.note(shield.segment, q, v)
        seen["transitions"].add((before.name, shield.state.name))
        before = shield.state
    stream.close()
    seen["states"] += ticks
    seen["segments"] += stream.segments
    seen["rules"].add(day.motor.config.ensemble.rule)
    seen["accepted"] += int(day.motor.motor_record()["accepted"])
    seen["refused"] += sum(day.motor.rejects().values())
    seen["stalls"] += shield.stalls
    for name, value in stream.worst.items():
        seen["worst"][name] = max(seen["worst"].get(name, -np.inf), value)


def fresh():
    return {"states": 0, "segments": 0, "rules": set(), "transitions": set(), "accepted": 0, "refused": 0, "stalls": 0,
            "worst": {}}


POSSIBLE = {
    ("HOLDING", "HOLDING"), ("HOLDING", "COASTING"), ("HOLDING", "NOMINAL"), ("COASTING", "COASTING"),
    ("COASTING", "NOMINAL"), ("COASTING", "BRAKING"), ("COASTING", "HOLDING"), ("NOMINAL", "NOMINAL"),
    ("NOMINAL", "COASTING"), ("NOMINAL", "BRAKING"), ("NOMINAL", "HOLDING"), ("BRAKING", "BRAKING"),
    ("BRAKING", "HOLDING")}


@pytest.mark.parametrize("ticks", SIZES)
def test_the_stream_keeps_all_limits(ticks):
    seen = fresh()
    for seed, robot, rule, count in days(ticks):
        run(seed, robot, rule, count, seen)
    assert seen["states"] == ticks and seen["rules"] == set(rule_names())
    assert seen["transitions"] <= POSSIBLE
    # All that can happen, but what takes a re-arm and its chunk in one tick.
    assert seen["transitions"] >= POSSIBLE - {("HOLDING", "NOMINAL")}
    assert seen["accepted"] > ticks / 50 and seen["refused"] > ticks / 100 and seen["stalls"] > ticks / 1000
    worst = seen["worst"]
    assert max(worst["velocity"], worst["acceleration"], worst["jerk"]) > 0.99, "the limits were never reached"
    report("3 stream", ticks=ticks, segments=seen["segments"], accepted=seen["accepted"], refused=seen["refused"],
           stalls=seen["stalls"], transitions=sorted(map(list, seen["transitions"])),
           **{f"worst_{name}": value for name, value in worst.items()})


@pytest.mark.parametrize("what", ["jerk", "acceleration", "velocity"])
def test_a_limit_that_is_not_kept_is_found(monkeypatch, what):
    """The tracker works with one limit half a percent too large."""
    made = tracking.JointTracker.__init__
    index = ["velocity", "acceleration", "jerk"].index(what) + 2

    def generous(self, *arguments):
        arguments = list(arguments)
        arguments[index] *= 1.005
        made(self, *arguments)

    monkeypatch.setattr(shield_module.JointTracker, "__init__", generous)
    with pytest.raises(AssertionError, match=f"{what} limit"):
        for seed, robot, rule, count in days(20_000):
            run(seed, robot, rule, count, fresh())


def test_a_jump_at_a_stall_is_found(monkeypatch):
    """A stream that goes on after a stall as if nothing had happened, but calls it a new segment."""
    def careless(self, measured, age_s):
        if self.state is not State.HOLDING:
            self.segment += 1

    monkeypatch.setattr(shield_module.Shield, "stall", careless)
    with pytest.raises(AssertionError, match="velocity sent|acceleration limit|jerk limit"):
        for seed, robot, rule, count in days(10_000):
            run(seed, robot, rule, count, fresh())
