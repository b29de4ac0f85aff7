"""The stop against hand-worked cases and against its definition, carried out step by step without closed forms."""

import math

import numpy as np
import pytest

from vla_edge.core.braking import (
    fade_distance,
    fade_speed,
    fadeable,
    stop_extent,
    stop_step,
    stop_trajectory,
    unavoidable_speed,
)

# ------------------------------------------------------------------ parts, by hand: D = 1, T = 1


@pytest.mark.parametrize("m, total", [
    (0, 0), (0.5, 0.5), (1, 1), (1.5, 2), (2, 3), (2.5, 2.5 + 1.5 + 0.5), (3, 6), (10, 55), (-2, -2)])
def test_speed_that_a_fading_deceleration_removes(m, total):
    assert fade_speed(m, 1.0, 1.0) == total
    assert fade_speed(4.0 * m, 4.0, 0.5) == 2.0 * total  # units: m and D scale together, T multiplies
    assert fadeable(total, 1.0, 1.0) == m
    assert fadeable(2.0 * total, 4.0, 0.5) == 4.0 * m


@pytest.mark.parametrize("m, speeds", [
    (0, []), (1, []), (0.75, []), (1.5, [0.5]), (2, [1]), (2.5, [2, 0.5]), (3, [3, 1]), (3.5, [4.5, 2, 0.5]),
    (5, [10, 6, 3, 1])])
def test_distance_covered_while_a_deceleration_fades(m, speeds):
    """``speeds`` are those of the following ticks: fade_speed(m) - m, then less (m - 1), less (m - 2), ..."""
    assert fade_distance(m, 1.0, 1.0) == pytest.approx(sum(speeds), abs=1e-15)
    assert fade_distance(4.0 * m, 4.0, 0.5) == pytest.approx(sum(speeds), abs=1e-15)
    assert fade_distance(8.0 * m, 8.0, 0.25) == pytest.approx(0.5 * sum(speeds), abs=1e-15)


@pytest.mark.parametrize("v, a, reached", [
    (5, 0, 5), (5, 1, 5), (5, 0.5, 5), (5, 2, 6), (5, 2.5, 5 + 1.5 + 0.5), (5, 3, 8),
    (5, -1, 5), (5, -2, 4), (5, -3, 2), (-5, 3, -2), (-5, -3, -8)])
def test_speed_that_cannot_be_avoided(v, a, reached):
    assert unavoidable_speed(v, a, 1.0, 1.0) == reached
    assert unavoidable_speed(v, 4.0 * a, 4.0, 0.25) == reached
    assert unavoidable_speed(v, 4.0 * a, 4.0, 0.5) == 2.0 * reached - v


# ------------------------------------------------------------------ whole stops, by hand: D = 1, T = 1

THIRD = 1 / 3
STOPS = [  # v, a, acceleration limit, then (v', a') of every tick
    (0, 0, 3, [(0, 0)]),
    (0.5, 0, 3, [(0, -0.5), (0, 0)]),
    (1, 0, 3, [(0, -1), (0, 0)]),
    (2, 0, 3, [(1, -1), (0, -1), (0, 0)]),
    (3, 0, 3, [(2, -1), (0.5, -1.5), (0, -0.5), (0, 0)]),
    (4, 0, 3, [(3, -1), (1, -2), (0, -1), (0, 0)]),
    (10, 0, 3, [(9, -1), (7, -2), (4, -3), (4 - 7 * THIRD, -7 * THIRD), (THIRD, -4 * THIRD), (0, -THIRD), (0, 0)]),
    (10, 0, 2, [(9, -1), (7, -2), (5, -2), (3, -2), (1, -2), (0, -1), (0, 0)]),
    (5, -2, 2, [(3, -2), (1, -2), (0, -1), (0, 0)]),  # at full deceleration already
    (3, -2, 2, [(1, -2), (0, -1), (0, 0)]),  # the deceleration must fade from here on
    (2, 2, 2, [(3, 1), (3, 0), (2, -1), (0.5, -1.5), (0, -0.5), (0, 0)]),  # speeds up while it fades
    (2, 0.5, 2, [(1.5, -0.5), (0.25, -1.25), (0, -0.25), (0, 0)]),
    (-2.5, 3, 3, [(-0.5, 2), (0.5, 1), (0.5, 0), (0, -0.5), (0, 0)]),  # turns, which cannot be helped, and stops
    (-3, 3, 3, [(-1, 2), (0, 1), (0, 0)]),  # comes to rest by fading alone
    (-2.875, 3, 3, [(-0.875, 2), (0.125, 1), (0.125, 0), (0, -0.125), (0, 0)]),  # turns and ends where it never began
    (-3.25, 3, 3, [(-3.25 + 25 / 12, 25 / 12), (-1 / 12, 13 / 12), (0, 1 / 12), (0, 0)]),  # fades a little slower
    (-1, 3, 3, [(1, 2), (2, 1), (2, 0), (1, -1), (0, -1), (0, 0)]),
    (0, 3, 3, [(2, 2), (3, 1), (3, 0), (2, -1), (0.5, -1.5), (0, -0.5), (0, 0)]),
    (1, 0, 0.25, [(0.75, -0.25), (0.5, -0.25), (0.25, -0.25), (0, -0.25), (0, 0)]),  # the limit is below D
]


@pytest.mark.parametrize("v, a, acceleration, rows", STOPS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_stop_tick_by_tick(v, a, acceleration, rows, sign):
    """For T = 1 with D = 1, and for T = 0.5 with D = 2: the same stop in other units of time, half the distance."""
    for period, unit in ((1.0, 1.0), (0.5, 2.0)):
        state = (sign * v, sign * unit * a)
        q = [0.0]
        for after_v, after_a in rows:
            state = stop_step(*state, unit * acceleration, unit, period)
            assert state == pytest.approx((sign * after_v, sign * unit * after_a), abs=1e-14)
            q.append(q[-1] + period * state[0])
        # Thirds leave a rounding error of the last bits, which one more tick removes.
        assert stop_step(*state, unit * acceleration, unit, period) == (0.0, 0.0)
        extent = stop_extent(sign * v, sign * unit * a, unit * acceleration, unit, period)
        assert extent == pytest.approx((min(q), max(q), q[-1]), abs=1e-14)
        array = stop_trajectory(*(np.array([x, x], float) for x in (
            sign * v, sign * unit * a, unit * acceleration, unit / period)), period, len(rows))
        expected = np.array([(v, a), *rows]) * sign * [1.0, unit]
        np.testing.assert_allclose(array[0], np.repeat(np.array(q)[:, None], 2, 1), atol=1e-14)
        np.testing.assert_allclose(array[1], np.repeat(expected[:, :1], 2, 1), atol=1e-14)
        np.testing.assert_allclose(array[2], np.repeat(expected[:, 1:], 2, 1), atol=1e-14)


@pytest.mark.parametrize("v, a, acceleration, extent", [
    (10, 0, 3, (0, 22, 22)), (10, 0, 2, (0, 25, 25)), (-2.5, 3, 3, (-0.5, 0.5, 0.5)), (-3, 3, 3, (-1, 0, -1)),
    (100, -2, 2, (0, 2450, 2450)),  # 98 + 96 + ... + 2 in one go, then 0: fade_speed(2) = 3, 100 - 2 n
    (0, 0, 2, (0, 0, 0)),
])
def test_extent_of_a_stop(v, a, acceleration, extent):
    if v == 100:  # 98, 96, ..., 4 at full deceleration; 4 is no longer fadeable at 2 with anything but 2, 1 and rest
        rows, state, q = [], (100.0, -2.0), 0.0
        while state != (0.0, 0.0):
            state = stop_step(*state, 2.0, 1.0, 1.0)
            q += state[0]
            rows.append(state[0])
        extent = (0, q, q)
        assert rows[:48] == [100.0 - 2 * k for k in range(1, 49)]
    assert stop_extent(v, a, acceleration, 1.0, 1.0) == pytest.approx(extent, abs=1e-12)
    low, high, final = extent
    assert stop_extent(-v, -a, acceleration, 1.0, 1.0) == pytest.approx((-high, -low, -final), abs=1e-12)


def test_joints_of_a_trajectory_stop_each_by_itself():
    v, a, limit = np.array([3.0, -2.0, 0.0]), np.array([0.0, 0.0, 0.0]), np.array([3.0, 3.0, 3.0])
    q, speed, _ = stop_trajectory(v, a, limit, np.ones(3), 1.0, 5)
    assert q.shape == (6, 3) and q[0].tolist() == [0.0, 0.0, 0.0] and speed[0].tolist() == v.tolist()
    assert q[-1].tolist() == [2.5, -1.0, 0.0]


# ------------------------------------------------------------------ the definition


def plain_fadeable(v, step, period):
    """The m with ``period (m + (m - step) + ...) = v``, by trying how many ticks the fading takes."""
    x, p = v / period, 0
    while True:
        m = (x + step * p * (p + 1) / 2) / (p + 1)
        if m <= (p + 1) * step:
            return m
        p += 1


def plain_step(v, a, acceleration, step, period):
    """The strongest deceleration that jerk, acceleration and fading allow."""
    fade, rest = 0.0, abs(a) - step
    while rest > 0:
        fade, rest = fade + rest, rest - step
    sign = 1 if v + (1 if a > 0 else -1) * period * fade >= 0 else -1
    speed, before = v * sign, -a * sign
    m = before + step
    if m > 0:
        m = min(m, acceleration, plain_fadeable(speed, step, period))
    return (speed - period * m) * sign, -m * sign


def coarse_states(seed, count):
    """States on coarse binary grids, so that many lie exactly on the boundaries between the stop's cases."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        step = int(rng.integers(1, 9)) / 4
        acceleration = step * int(rng.integers(1, 40)) / int(rng.choice([2, 4, 8]))
        a = acceleration * int(rng.integers(-8, 9)) / 8
        period = 1 / int(rng.choice([1, 8, 128]))
        yield int(rng.integers(-80, 81)) / int(rng.choice([4, 8, 64])) * period * 8, a, acceleration, step, period


def test_every_step_and_the_extent_equal_the_definition():
    for v, a, *limits in coarse_states(1, 300):
        state, q = (v, a), [0.0]
        for _ in range(2000):
            after = plain_step(*state, *limits)
            if len(q) < 30:
                assert stop_step(*state, *limits) == pytest.approx(after, abs=1e-12), (state, limits)
            state = after
            q.append(q[-1] + limits[2] * state[0])
            if abs(state[0]) + abs(state[1]) < 1e-13:
                break
        assert abs(state[0]) + abs(state[1]) < 1e-13
        assert stop_extent(v, a, *limits) == pytest.approx((min(q), max(q), q[-1]), abs=1e-10), (v, a, limits)


@pytest.mark.parametrize("period", [1.0, 0.125])
def test_the_arrays_equal_the_definition(period):
    states = np.array([state[:4] for state in coarse_states(2, 150)])
    v, a, acceleration, step = states.T
    q, speed, accel = stop_trajectory(v, a, acceleration, step / period, period, 12)
    assert q.shape == speed.shape == accel.shape == (13, 150)
    for i in range(150):
        state, at = (v[i], a[i]), 0.0
        for k in range(1, 13):
            state = plain_step(*state, acceleration[i], step[i], period)
            at += period * state[0]
            assert (q[k, i], speed[k, i], accel[k, i]) == pytest.approx((at, *state), abs=1e-11)


def test_zero_speed_is_exactly_zero():
    """Also where the deceleration that stops now is exactly the one that D allows, and T times v / T is not quite v."""
    period, found = 0.01, 0
    for v in np.random.default_rng(4).uniform(0.01, 1.0, 200):
        v = float(v)
        step = v / period
        found += v - period * step != 0.0
        for sign in (1.0, -1.0):
            assert stop_step(sign * v, 0.0, 2.0 * step, step, period) == (0.0, -sign * step)
        speed, accel = (rows[:, 0] for rows in stop_trajectory(
            np.array([v]), np.zeros(1), np.array([2.0 * step]), np.array([step / period]), period, 3)[1:])
        # The array multiplies jerk by T, which may round D up or down by a bit: then the last bits take one more tick.
        assert speed[-1] == 0.0 and accel[-1] == 0.0
    assert found > 20


def test_zero_speed_of_the_arrays_is_exactly_zero():
    period, found = 0.01, 0
    for step in np.random.default_rng(5).uniform(1.0, 100.0, 2000):
        jerk = step / period
        step = jerk * period
        v = step * period
        if v / period == step and v - period * step == 0.0:
            v = math.nextafter(v, 0.0)
        if v / period == step and v - period * step != 0.0:
            found += 1
            _, speed, accel = stop_trajectory(np.array([v]), np.zeros(1), np.array([9.0 * step]), np.array([jerk]), period, 1)
            assert speed[1, 0] == 0.0 and accel[1, 0] == -step
    assert found > 20


def test_rounding_never_asks_for_more_jerk_than_there_is():
    """A fading deceleration falls by D per tick; that the speed left fits is true only up to the last bits."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        period, step = 0.01, float(rng.uniform(0.1, 5.0))
        acceleration = step * float(rng.uniform(2.0, 20.0))
        state = (float(rng.uniform(0.5, 5.0)), 0.0)
        while state != (0.0, 0.0):
            after = stop_step(*state, acceleration, step, period)
            assert abs(after[1] - state[1]) <= math.nextafter(step, 99.0) + math.ulp(acceleration)
            assert after[0] >= -1e-14
            state = after
