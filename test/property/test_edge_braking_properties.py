"""The stop of one joint: what it promises, over random states, with values dense near the bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_edge.core.braking import fade_speed, fadeable, stop_extent, stop_step, stop_trajectory

T = 0.01
TICKS = 600  # the slowest stop of these states: 5 rad/s at 1 rad/s²


def random_states(count, seed):
    """(v, a, acceleration, jerk, velocity) with ratios from 'full acceleration in a third of a tick' to '20 ticks'."""
    rng = np.random.default_rng(seed)
    acceleration = rng.uniform(1.0, 60.0, count)
    jerk = acceleration / rng.uniform(0.3, 20.0, count) / T
    velocity = rng.uniform(0.3, 5.0, count)
    dense = np.array([-1.0, -1.0 + 1e-12, -0.5, -1e-12, 0.0, 1e-12, 0.5, 1.0 - 1e-12, 1.0])
    v = velocity * np.where(rng.random(count) < 0.3, rng.choice(dense, count), rng.uniform(-1, 1, count))
    a = acceleration * np.where(rng.random(count) < 0.3, rng.choice(dense, count), rng.uniform(-1, 1, count))
    return v, a, acceleration, jerk, velocity


def check_stop(v, a, acceleration, jerk):
    q, speed, accel = stop_trajectory(v, a, acceleration, jerk, T, TICKS)
    # Finite differences are exact by construction of the sums; the limits on them:
    np.testing.assert_allclose(np.diff(q, axis=0), T * speed[1:], atol=1e-13)
    np.testing.assert_allclose(np.diff(speed, axis=0), T * accel[1:], atol=1e-13)
    assert (np.abs(accel) <= acceleration * (1 + 1e-9)).all()
    assert (np.abs(np.diff(accel, axis=0)) <= jerk * T * (1 + 1e-9)).all()
    # At rest, exactly, in bounded time.
    assert (speed[-1] == 0.0).all() and (accel[-1] == 0.0).all()
    ticks_to_rest = (speed != 0.0).sum(axis=0)
    bound = 2 + (np.abs(v) + a * a / (2 * jerk)) / (acceleration * T) + 4 * acceleration / (jerk * T) + np.sqrt(
        8 * (np.abs(v) + a * a / (2 * jerk)) / (jerk * T * T))
    assert (ticks_to_rest <= bound).all()
    # |v| <= |v0| + a0² / (2 jerk), always.
    assert (np.abs(speed) <= np.abs(v) + a * a / (2 * jerk) + 1e-12).all()
    check_monotone(speed, accel, jerk)


def check_monotone(speed, accel, jerk):
    """While the first acceleration fades the joint may speed up or even turn, for that cannot be helped; from then on
    its speed falls to zero without rising and without changing sign."""
    step = jerk * T
    fade = np.arange(1, 30).reshape(-1, 1)
    v, a = speed[0], accel[0]
    unavoidable = v + np.sign(a) * T * np.maximum(np.abs(a) - fade * step, 0.0).sum(axis=0)
    sign = np.where(unavoidable >= 0.0, 1.0, -1.0)
    u, b = sign * speed, sign * accel
    # The row from which it no longer accelerates in the direction in which it will end.
    start = np.argmax(b <= 1e-12, axis=0)
    assert (start <= np.ceil(np.abs(a) / step)).all(), "the acceleration does not fade at full jerk"
    later = np.arange(len(u)).reshape(-1, 1) >= start
    assert (u[later] >= -1e-12).all(), "reversal"
    assert (np.diff(u, axis=0)[later[:-1]] <= 1e-12).all(), "not monotone"


def test_ten_thousand_stops():
    for seed in range(5):
        v, a, acceleration, jerk, _ = random_states(2_000, seed)
        check_stop(v, a, acceleration, jerk)


def check_closed_form(v, a, acceleration, jerk):
    q, speed, accel = stop_trajectory(v, a, acceleration, jerk, T, TICKS)
    for i in range(v.size):
        args = (float(acceleration[i]), float(jerk[i] * T), T)
        lowest, highest, final = stop_extent(float(v[i]), float(a[i]), *args)
        assert lowest == pytest.approx(q[:, i].min(), abs=1e-12)
        assert highest == pytest.approx(q[:, i].max(), abs=1e-12)
        assert final == pytest.approx(q[-1, i], abs=1e-12)
        assert stop_step(float(v[i]), float(a[i]), *args) == pytest.approx((speed[1, i], accel[1, i]), abs=1e-11)


def test_the_closed_form_equals_the_stop_tick_by_tick():
    v, a, acceleration, jerk, _ = random_states(2_000, 12)
    check_closed_form(v, a, acceleration, jerk)


@settings(max_examples=100, deadline=None)
@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(0.5, 100), st.floats(0.05, 25), st.floats(0.01, 10))
def test_any_stop(v_share, a_share, acceleration, ramp_ticks, velocity):
    v0, a0, step = v_share * velocity, a_share * acceleration, acceleration / ramp_ticks
    q, v, a = 0.0, v0, a0
    lows, highs = [0.0], [0.0]
    for _ in range(2500):
        before = a
        v, a = stop_step(v, a, acceleration, step, T)
        q += T * v
        lows.append(min(lows[-1], q))
        highs.append(max(highs[-1], q))
        assert abs(a) <= acceleration * (1 + 1e-9) and abs(a - before) <= step * (1 + 1e-9)
        assert abs(v) <= abs(v0) + a0 * a0 * T / (2 * step) + 1e-12
        if v == 0.0 and a == 0.0:
            break
    assert v == 0.0 and a == 0.0
    assert stop_extent(v0, a0, acceleration, step, T) == pytest.approx((lows[-1], highs[-1], q), abs=1e-10)


def test_the_stop_goes_on_as_it_was_planned():
    """Its own next step plus the rest of the way is the whole way: the certificate of one tick holds for the next."""
    v, a, acceleration, jerk, _ = random_states(1_000, 13)
    for i in range(v.size):
        args = (float(acceleration[i]), float(jerk[i] * T), T)
        _, _, final = stop_extent(float(v[i]), float(a[i]), *args)
        v1, a1 = stop_step(float(v[i]), float(a[i]), *args)
        assert T * v1 + stop_extent(v1, a1, *args)[2] == pytest.approx(final, abs=1e-12)


def test_accelerating_more_now_stops_farther():
    """What makes the root of the tracking law unique."""
    v, a, acceleration, jerk, _ = random_states(150, 14)
    for i in range(v.size):
        args = (float(acceleration[i]), float(jerk[i] * T), T)
        ends = []
        for a1 in np.linspace(-acceleration[i], acceleration[i], 40):
            v1 = float(v[i] + T * a1)
            ends.append(T * v1 + stop_extent(v1, float(a1), *args)[2])
        assert (np.diff(ends) > 0).all()


@given(st.floats(0, 100), st.floats(0.01, 50))
def test_fadeable_inverts_fade_speed(m, step):
    assert fadeable(fade_speed(m, step, T), step, T) == pytest.approx(m, rel=1e-9, abs=1e-12)


def test_fade_speed_is_the_sum_it_stands_for():
    for m in (0.0, 0.3, 1.0, 1.7, 5.0, 12.34):
        total = T * sum(max(m - i * 1.0, 0.0) for i in range(20))
        assert fade_speed(m, 1.0, T) == pytest.approx(total)
