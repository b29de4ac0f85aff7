"""Our stop beside Ruckig's time-optimal one (community edition, MIT): as fast but for a few ticks, and inside the limits."""

from pathlib import Path

import numpy as np
import pytest

from vla_edge.config import load_limits
from vla_edge.core.braking import stop_extent, stop_step, unavoidable_speed

ruckig = pytest.importorskip("ruckig", reason="yardstick of the stop: pip install ruckig")

T = 0.01
PANDA = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)


def random_limits(rng):
    """Acceleration and jerk: 1 to 20 ticks to full acceleration; speed and acceleration as small and large robots have."""
    acceleration = rng.uniform(1.0, 60.0)
    return rng.uniform(0.3, 5.0), acceleration, acceleration / rng.uniform(1.0, 20.0) / T


def random_state(rng, velocity, acceleration, jerk):
    """Speed and acceleration that the velocity limit allows to fade out."""
    while True:
        v, a = rng.uniform(-1, 1) * velocity, rng.uniform(-1, 1) * acceleration
        if abs(unavoidable_speed(v, a, jerk * T, T)) <= velocity:
            return v, a


def ruckig_stop(v, a, acceleration, jerk):
    """Ruckig's trajectory to rest in shortest time, one joint, continuous time."""
    wanted = ruckig.InputParameter(1)
    wanted.control_interface = ruckig.ControlInterface.Velocity
    wanted.current_position, wanted.current_velocity, wanted.current_acceleration = [0.0], [v], [a]
    wanted.target_velocity, wanted.target_acceleration = [0.0], [0.0]
    wanted.max_acceleration, wanted.max_jerk = [acceleration], [jerk]
    trajectory = ruckig.Trajectory(1)
    assert ruckig.Ruckig(1).calculate(wanted, trajectory) == ruckig.Result.Working
    return trajectory


def sampled(trajectory):
    """Positions at the ticks until rest."""
    ticks = int(np.ceil(trajectory.duration / T - 1e-9))
    return np.array([trajectory.at_time((k + 1) * T)[0][0] for k in range(ticks)])


def our_ticks(v, a, acceleration, jerk):
    """Ticks until v = a = 0 exactly."""
    return len(our_stop(v, a, acceleration, jerk))


def our_stop(v, a, acceleration, jerk):
    """Positions relative to the present one, tick by tick until rest."""
    q, way = 0.0, []
    while v != 0.0 or a != 0.0:
        v, a = stop_step(v, a, acceleration, jerk * T, T)
        q += T * v
        way.append(q)
    return np.array(way)


def compare_times(seed, count):
    """Our ticks minus the time-optimal stop's, for random states under random limits and under the demo robot's."""
    rng = np.random.default_rng(seed)
    extra = []
    for k in range(count):
        if k % 2:
            velocity, acceleration, jerk = random_limits(rng)
        else:
            i = int(rng.integers(len(PANDA)))
            velocity, acceleration, jerk = PANDA.velocity[i], PANDA.acceleration[i], PANDA.jerk[i]
        v, a = random_state(rng, velocity, acceleration, jerk)
        best = ruckig_stop(v, a, acceleration, jerk).duration / T
        extra.append(our_ticks(v, a, acceleration, jerk) - best)
    return np.array(extra)


def compare_in_range(seed, count):
    """Random states of the demo robot's joints that have a known stop: how often Ruckig's, sampled, leaves the range."""
    rng = np.random.default_rng(seed)
    left = tried = 0
    while tried < count:
        i = int(rng.integers(len(PANDA)))
        lower, upper = PANDA.position_lower[i], PANDA.position_upper[i]
        v, a = random_state(rng, PANDA.velocity[i], PANDA.acceleration[i], PANDA.jerk[i])
        q = rng.uniform(lower, upper)
        lowest, highest, _ = stop_extent(v, a, PANDA.acceleration[i], PANDA.jerk[i] * T, T)
        if q + lowest < lower or q + highest > upper:
            continue
        tried += 1
        way = q + sampled(ruckig_stop(v, a, PANDA.acceleration[i], PANDA.jerk[i]))
        left += way.size > 0 and bool(way.max() > upper + 1e-9 or way.min() < lower - 1e-9)
    return left


def compare_limits(seed, count):
    """States from which our stop ends inside the position limits, near to them: how often Ruckig's leaves them, and by
    how much at most (rad)."""
    rng = np.random.default_rng(seed)
    left, worst, ours_left = 0, 0.0, 0
    for _ in range(count):
        velocity, acceleration, jerk = random_limits(rng)
        v, a = random_state(rng, velocity, acceleration, jerk)
        lowest, highest, _ = stop_extent(v, a, acceleration, jerk * T, T)
        # Towards an end at `room` ahead: as close as our stop allows, up to 10 mrad away.
        room = (highest if v > 0 else -lowest) + rng.uniform(0.0, 0.01)
        way = sampled(ruckig_stop(v, a, acceleration, jerk)) * (1 if v > 0 else -1)
        beyond = float(way.max(initial=0.0)) - room
        left += beyond > 1e-9
        worst = max(worst, beyond)
        ours_left += float((our_stop(v, a, acceleration, jerk) * (1 if v > 0 else -1)).max(initial=0.0)) - room > 1e-9
    return left, worst, ours_left


def test_our_stop_takes_few_ticks_more_than_the_time_optimal_one():
    extra = compare_times(1, 3000)
    assert extra.max() <= 3.0
    # The discrete stream slows within the very tick in which it decides to, so it may even end earlier.
    assert extra.min() >= -4.0
    assert np.median(extra) <= 1.0


def test_our_stop_keeps_position_limits_that_the_time_optimal_one_sampled_at_ticks_leaves():
    left, worst, ours_left = compare_limits(2, 2000)
    assert ours_left == 0
    assert left > 20 and worst > 1e-3
    assert compare_in_range(5, 4000) > 0


@pytest.mark.slow
def test_twenty_thousand_stops():
    extra = compare_times(3, 20_000)
    assert -5.0 <= extra.min() and extra.max() <= 3.0
    assert compare_limits(4, 20_000)[2] == 0
