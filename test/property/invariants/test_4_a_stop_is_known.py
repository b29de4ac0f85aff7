"""Invariant 4: every tick, before it is needed, a stop from the present state is known that ends inside the position
limits.

Checked against the stop worked out tick by tick for many states at once (``stop_trajectory``), not against the closed
form that the tracker decides by.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import ROBOTS, SIZES, Day, T, days, ramps, report

from vla_edge.core import tracking
from vla_edge.core.braking import stop_trajectory
from vla_edge.core.joint_limits import MAX_RAMP_TICKS
from vla_edge.core.tracking import STOP_SLACK, JointTracker

INSIDE = 1.0 - tracking.LIMIT_MARGIN
# The closed form and the sum of up to some hundred steps round differently: 1e-13 rad beside the tracker's own slack.
SLACK = STOP_SLACK + 2e-13


def ticks_to_rest(v, a, acceleration, jerk):
    """More ticks than the slowest of these stops takes."""
    peak = np.abs(v) + a * a / (2 * jerk)
    return int(np.max(peak / (acceleration * T))) + 4 * MAX_RAMP_TICKS + 4


def check_stops(q, v, a, lower, upper, acceleration, jerk):
    """The stops from all these states. Returns the smallest distance to a limit, rad; negative: beyond it."""
    order = np.argsort(np.abs(v) / acceleration)
    nearest = np.inf
    for part in np.array_split(order, max(1, len(order) // 2_000)):
        limits = acceleration[part] * INSIDE, jerk[part] * INSIDE
        offset, speed, rate = stop_trajectory(v[part], a[part], *limits, T, ticks_to_rest(v[part], a[part], *limits))
        assert (speed[-1] == 0.0).all() and (rate[-1] == 0.0).all(), "no end in bounded time"
        assert (np.abs(rate) <= acceleration[part]).all(), "the stop itself is beyond the acceleration limit"
        assert (np.abs(np.diff(rate, axis=0)) <= jerk[part] * T).all(), "the stop itself is beyond the jerk limit"
        way = q[part] + offset
        margin = np.minimum((way - lower[part]).min(axis=0), (upper[part] - way).min(axis=0))
        nearest = min(nearest, float(margin.min()))
        assert nearest >= -SLACK, f"the stop leaves the position limits by {-nearest} rad"
    return nearest


def columns(limits, count):
    """Limits per joint repeated for ``count`` states."""
    return [np.tile(column, count) for column in (limits.position_lower, limits.position_upper, limits.acceleration,
                                                  limits.jerk)]


@pytest.mark.parametrize("ticks", SIZES)
def test_every_tick_of_the_motor_loop_has_a_stop(ticks):
    states, moving, nearest = 0, 0, np.inf
    for seed, robot, rule, count in days(ticks):
        day = Day(50_000 + seed, robot, rule, keep=False)
        shield, rows = day.motor.shield, []
        for _ in range(count):
            day.tick()
            rows.append((shield.position.copy(), shield.velocity.copy(), shield.acceleration.copy()))
        q, v, a = (np.array(column).reshape(-1) for column in zip(*rows, strict=True))
        lower, upper, acceleration, jerk = columns(day.limits, count)
        nearest = min(nearest, check_stops(q, v, a, lower, upper, acceleration, jerk))
        states, moving = states + len(q), moving + int((v != 0).sum())
    assert moving > states / 10
    report("4 loop", ticks=ticks, joint_states=states, moving=moving, nearest_rad=nearest)


def random_joints(rng, count):
    """(lower, upper, velocity, acceleration, jerk) of random joints; the first ones are those of the robot files."""
    lower, upper = -rng.uniform(5e-4, 1.0, count), rng.uniform(5e-4, 1.0, count)
    velocity, acceleration = rng.uniform(0.3, 5.0, count), rng.uniform(1.0, 60.0, count)
    made = np.array([lower, upper, velocity, acceleration, acceleration / ramps(rng, count) / T])
    given = np.concatenate([[robot.position_lower, robot.position_upper, robot.velocity, robot.acceleration,
                             robot.jerk] for robot in ROBOTS.values()], axis=1)
    made[:, :given.shape[1]] = given[:, :count]
    return made


def states_with_a_stop(rng, joints, per_joint):
    """Random states (q, v, a) of these joints that keep all limits and have a stop, by joint index.

    Dense near the position limits and at full acceleration, where the stop is about to be the only way out.
    """
    index = np.repeat(np.arange(joints.shape[1]), per_joint)
    lower, upper, velocity, acceleration, jerk = joints[:, index]
    n = len(index)
    near = rng.exponential(0.001, n)
    q = np.choose(rng.integers(0, 3, n), [rng.uniform(lower, upper), upper - near, lower + near])
    v = np.where(rng.random(n) < 0.5, rng.uniform(-1, 1, n) * velocity, rng.normal(size=n) * 0.05)
    a = np.choose(rng.integers(0, 3, n), [rng.uniform(-1, 1, n), np.full(n, -1.0), np.ones(n)]) * acceleration * INSIDE
    limits = acceleration * INSIDE, jerk * INSIDE
    offset, speed, _ = stop_trajectory(v, a, *limits, T, ticks_to_rest(v, a, *limits))
    good = ((q + offset).min(axis=0) >= lower) & ((q + offset).max(axis=0) <= upper)
    good &= (np.abs(speed) <= velocity * INSIDE).all(axis=0)
    return index[good], q[good], v[good], a[good]


def check_steps(seed, joint_count, per_joint):
    rng = np.random.default_rng(seed)
    joints = random_joints(rng, joint_count)
    index, q, v, a = states_with_a_stop(rng, joints, per_joint)
    trackers = [JointTracker(*joint.tolist(), T) for joint in joints.T]
    after = np.empty((3, len(index)))
    lower, upper, velocity, acceleration, jerk = joints[:, index]
    for k, i in enumerate(index):
        tracker = trackers[i]
        tracker.q, tracker.v, tracker.a = float(q[k]), float(v[k]), float(a[k])
        tracker.on_target = bool(k % 3 == 0)
        tracker.track(float(rng.uniform(lower[k] - 0.1, upper[k] + 0.1)), float(rng.normal() * velocity[k]))
        after[:, k] = tracker.q, tracker.v, tracker.a
    q1, v1, a1 = after
    assert ((q1 >= lower) & (q1 <= upper)).all() and (np.abs(a1) <= acceleration).all()
    assert (np.abs(v1) <= velocity).all() and (np.abs(a1 - a) <= jerk * T).all()
    np.testing.assert_allclose(v1, (q1 - q) / T, atol=2e-11)
    np.testing.assert_allclose(a1, (v1 - v) / T, atol=1e-9)
    return len(index), check_stops(q1, v1, a1, lower, upper, acceleration, jerk)


@pytest.mark.parametrize("states", SIZES)
def test_one_step_from_any_state_that_has_a_stop(states):
    """Towards anything whatever: the next command keeps the limits and has a stop again. By induction, for ever."""
    tried, nearest, seed = 0, np.inf, 0
    while tried < states:
        count, margin = check_steps(seed, 200, 40)
        tried, nearest, seed = tried + count, min(nearest, margin), seed + 1
    report("4 step", states=tried, nearest_rad=nearest)


def test_a_tracker_that_looks_no_stop_ahead_is_found(monkeypatch):
    monkeypatch.setattr(JointTracker, "_safe", lambda *_: True)
    with pytest.raises(AssertionError):
        check_steps(0, 200, 40)


def test_a_certificate_that_is_slightly_wrong_is_found(monkeypatch):
    """Stops believed to be one part in a thousand shorter than they are."""
    real = tracking.stop_extent

    def optimistic(*arguments):
        lowest, highest, final = real(*arguments)
        return lowest * 0.999, highest * 0.999, final

    monkeypatch.setattr(tracking, "stop_extent", optimistic)
    with pytest.raises(AssertionError, match="leaves the position limits"):
        for seed in range(20):
            check_steps(seed, 200, 40)
