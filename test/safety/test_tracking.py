"""One joint, step by step: hand-made cases in units of D = 1 and T = 1."""

import numpy as np
import pytest
from joint_rig import INSIDE, flags, state, tracker

from vla_edge.core import tracking
from vla_edge.core.braking import stop_extent, stop_step
from vla_edge.core.tracking import MAX_EVALUATIONS, STOP_SLACK, JointTracker

# ------------------------------------------------------------------ start and stop


def test_a_new_joint_rests_in_the_middle_of_its_range():
    made = tracker(lower=-1.0, upper=3.0)
    assert state(made) == (1.0, 0.0, 0.0) and flags(made) == (False, False)


@pytest.mark.parametrize("q, held", [(-1.5, -1.0), (-1.0, -1.0), (0.25, 0.25), (3.0, 3.0), (3.5, 3.0)])
def test_a_stream_starts_at_rest_within_the_limits(q, held):
    made = tracker(lower=-1.0, upper=3.0, state=(0.0, 2.0, -1.0), on_target=True)
    made.limited = True
    made.reset(q)
    assert state(made) == (held, 0.0, 0.0) and flags(made) == (False, False)


@pytest.mark.parametrize("period_s, jerk", [(1.0, 1.0), (0.5, 4.0)])
def test_braking_sends_the_stop(period_s, jerk):
    made = tracker(jerk=jerk, period_s=period_s, state=(5.0, 9.0, 1.0), on_target=True)
    made.limited = True
    v, a, q = 9.0, 1.0, 5.0
    while (v, a) != (0.0, 0.0):
        v, a = stop_step(v, a, 3.0 * INSIDE, jerk * period_s * INSIDE, period_s)
        q += period_s * v
        made.brake()
        assert state(made) == (q, v, a) and flags(made) == (False, False)


def test_rounding_beyond_a_limit_is_removed_from_the_command():
    made = tracker(lower=0.0, upper=1.0, state=(1.0 + STOP_SLACK, 0.0, 0.0))
    made.brake()
    assert made.q == 1.0
    made.q = -STOP_SLACK
    made.brake()
    assert made.q == 0.0
    for beyond, limit in ((1.0 + STOP_SLACK, 1.0), (-STOP_SLACK, 0.0)):
        made.q = beyond
        assert made._send_if_safe(0.0) and made.q == limit


# ------------------------------------------------------------------ on the desired trajectory


def test_a_point_within_reach_is_sent_bit_for_bit():
    """0.4 in one tick, and the speed of 0.4 can be removed in the next: -0.4 after +0.4 is within D."""
    made = tracker(state=(0.1, 0.0, 0.0))
    made.track(0.1 + 0.4, 0.0)
    assert made.q == 0.1 + 0.4 and made.v == (0.1 + 0.4) - 0.1 and made.a == made.v and flags(made) == (True, False)
    made.track(0.5, 0.0)
    assert made.q == 0.5 and (made.v, made.a) == (0.0, -0.4) and flags(made) == (True, False)


@pytest.mark.parametrize("v, target, exact", [
    (0.0, 0.499, True), (0.0, 0.501, False),  # to and fro: 2 x 0.5 is the most that D allows
    (0.0, -0.499, True), (0.0, -0.501, False),
    (0.7, 0.3, True),  # a' = -0.4, then -0.3
    (0.9, 0.9, True), (0.999, 0.999, True), (1.001, 1.001, False),  # a' = 0, then up to 1 to lose the rest
    (-0.999, -0.999, True), (-1.001, -1.001, False),
])
def test_only_a_speed_that_the_next_tick_can_remove_counts_as_there(v, target, exact):
    made = tracker(state=(0.0, v, 0.0))
    made.track(target, 0.0)
    assert (made.q == target) == exact and made.limited != exact


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_trajectory_that_takes_all_that_D_allows_is_followed(sign):
    made = tracker(state=(0.0, 0.0, 0.0), on_target=True)
    target = sign * made._reachable()[1]
    made.track(target, target)
    assert state(made) == (target, target, target) and flags(made) == (True, False)


def test_what_the_next_tick_removes_is_exactly_what_the_limits_allow():
    made = tracker(jerk=2.0, period_s=0.5, acceleration=3.0)
    d = made._step
    for following, a, ends in ((d, 0.0, True), (1.0001 * d, 0.1, False), (0.5 * d, -0.5 * d, True), (0.5 * d, -0.6 * d, False)):
        for sign in (1.0, -1.0):
            assert made._ends_at_once(-0.5 * sign * following, sign * a) is ends
    made = tracker(jerk=8.0, period_s=0.5, acceleration=3.0)
    assert made._ends_at_once(0.5 * made._a_max, 0.0) and not made._ends_at_once(0.501 * made._a_max, 0.0)


def test_the_speed_that_must_vanish_is_the_one_relative_to_the_target():
    """5.2 per tick behind a target that does 5: as above with 0.2; at rest it could not be stopped on."""
    made = tracker(state=(0.0, 5.0, 0.0))
    made.track(5.2, 5.0)
    assert made.q == 5.2 and flags(made) == (True, False)
    made = tracker(state=(0.0, 5.0, 0.0))
    made.track(5.2, 0.0)
    assert made.q != 5.2 and flags(made) == (False, True)


def test_a_small_acceleration_limit_bounds_what_the_next_tick_removes():
    for v, exact in ((0.249, True), (0.251, False)):
        made = tracker(acceleration=0.25, state=(0.0, v, 0.0))
        made.track(v, 0.0)
        assert (made.q == v) == exact


def test_once_on_the_trajectory_anything_the_limits_allow_is_followed():
    """A speed of 3 is not one tick from rest, but the trajectory may well know what it does."""
    made = tracker(state=(0.0, 0.5, 0.0), on_target=True)
    for a, exact in ((0.9, True), (1.8, True), (0.801, True), (-0.2, False)):  # the last step is 1.001 down
        target = made.q + made.v + a
        made.track(target, 0.0)
        assert (made.q == target) == exact and flags(made) == (exact, not exact)


@pytest.mark.parametrize("period_s", [1.0, 0.5])
def test_a_trajectory_is_followed_in_its_own_time(period_s):
    made = tracker(period_s=period_s, jerk=1.0 / period_s, state=(0.0, 2.0, 0.0), on_target=True)
    made.track(2.1 * period_s, 2.0)
    assert state(made) == (2.1 * period_s, pytest.approx(2.1), pytest.approx(0.1 / period_s))
    assert flags(made) == (True, False)


def test_a_point_outside_is_the_limit_at_rest_and_counts_as_limited():
    """The speed of a target that runs through the limit is none of ours."""
    made = tracker(lower=-1.0, upper=1.0, state=(0.75, 0.0, 0.0))
    made.track(5.0, 4.0)
    assert state(made) == (1.0, 0.25, 0.25) and flags(made) == (True, True)
    made.track(1.0, 0.0)
    assert state(made) == (1.0, 0.0, -0.25) and flags(made) == (True, False)
    made.reset(-0.75)
    made.track(-5.0, -4.0)
    assert made.q == -1.0 and flags(made) == (True, True)


def test_a_point_whose_stop_would_leave_the_limits_is_not_sent():
    """At 9 with speed 2 the stop covers 1 more."""
    for sign in (1, -1):
        for room, exact in ((10.001, True), (9.999, False)):
            lower, upper = (-50.0, room) if sign > 0 else (-room, 50.0)
            made = tracker(lower=lower, upper=upper, state=(sign * 7.0, sign * 2.0, 0.0), on_target=True)
            made.track(sign * 9.0, sign * 2.0)
            assert (made.q == sign * 9.0) == exact and flags(made) == (exact, not exact)


# ------------------------------------------------------------------ the limits, reached exactly


def test_a_far_target_is_approached_at_full_jerk_acceleration_and_speed():
    """The stop from speed 10 backwards: 1, 2, 3, then what can still fade to exactly 10."""
    for sign in (1, -1):
        made = tracker(state=(0.0, 0.0, 0.0))
        found = []
        for _ in range(9):
            made.track(sign * 900.0, 0.0)
            found.append((sign * made.v, sign * made.a))
            assert flags(made) == (False, True)
        expected = [(1, 1), (3, 2), (6, 3), (25 / 3, 7 / 3), (29 / 3, 4 / 3), (10, 1 / 3), (10, 0), (10, 0), (10, 0)]
        np.testing.assert_allclose(found, expected, atol=1e-7)
        assert abs(made.v) <= 10.0


def test_speed_is_given_up_before_it_would_pass_the_limit():
    """At 9 and speeding up by 2 the next ticks' 1 leads to exactly 10: from there on the acceleration must fall."""
    made = tracker(state=(0.0, 7.0 * INSIDE, 2.0 * INSIDE))
    made.track(900.0, 0.0)
    assert (made.v, made.a) == (pytest.approx(9.0), pytest.approx(2.0))
    made.track(900.0, 0.0)
    assert (made.v, made.a) == (pytest.approx(10.0), pytest.approx(1.0))


@pytest.mark.parametrize("state_, low, high", [
    ((0.0, 0.0, 0.0), -1.0, 1.0), ((0.0, 0.0, 2.5), 1.5, 3.0), ((0.0, 0.0, -2.5), -3.0, -1.5),
    ((0.0, 9.5, 0.0), -1.0, 0.5), ((0.0, -9.5, 0.0), -0.5, 1.0), ((0.0, 8.0, 1.5), 0.5, 1.5),
    ((0.0, -8.0, -1.5), -1.5, -0.5),
])
def test_accelerations_within_reach(state_, low, high):
    """Of the next tick: within D of this one, within the limit, and not past the top speed while it fades."""
    assert tracker(state=state_)._reachable() == pytest.approx((low, high), abs=1e-7)
    scaled = tracker(velocity=40.0, acceleration=24.0, jerk=16.0, period_s=0.5, state=(
        0.0, 4.0 * state_[1], 8.0 * state_[2]))  # D = 8, T D = 4
    assert scaled._reachable() == pytest.approx((8.0 * low, 8.0 * high), abs=1e-6)


def test_a_stop_that_ends_on_a_limit_is_safe_to_the_last_bits():
    made = tracker(lower=0.0, upper=10.0)
    for q, safe in ((-STOP_SLACK, True), (-1.001 * STOP_SLACK, False), (5.0, True)):
        assert made._safe(q, 0.0, 0.0) is safe
    made = tracker(lower=-10.0, upper=0.0)
    for q, safe in ((STOP_SLACK, True), (1.001 * STOP_SLACK, False)):
        assert made._safe(q, 0.0, 0.0) is safe
    # From speed 3 the stop covers 2.5 more; from -3 as much the other way.
    made = tracker(lower=-10.0, upper=10.0)
    for q, v, safe in ((7.4, 3.0, True), (7.6, 3.0, False), (-7.4, -3.0, True), (-7.6, -3.0, False)):
        assert made._safe(q, v, 0.0) is safe


def test_units_of_the_slacks():
    """Far below what a robot resolves (1e-6 rad), far above the rounding of positions (4e-16 rad)."""
    assert (tracking.ROOT_TOLERANCE, tracking.STOP_SLACK, tracking.ON_TARGET) == (1e-13, 2e-13, 1e-9)
    assert tracking.LIMIT_MARGIN == 1e-9 and MAX_EVALUATIONS == 10


# ------------------------------------------------------------------ arriving, and the limits on the way


def test_a_target_at_rest_is_reached_and_kept():
    made = tracker(state=(0.0, 0.0, 0.0))
    before = 0.0
    for _ in range(30):
        made.track(20.0, 0.0)
        assert before - 1e-12 <= made.q <= 20.0 + 1e-12
        before = made.q
    assert state(made) == (20.0, 0.0, 0.0) and flags(made) == (True, False)


@pytest.mark.parametrize("q_off, v_off, arrives", [
    (0.9e-9, 0.0, True), (-0.9e-9, 0.0, True), (1.1e-9, 0.0, False), (-1.1e-9, 0.0, False), (-1.0, 0.0, False), (0.0, 1.8e-9, True), (0.0, 2.2e-9, False),
    (0.0, -1.8e-9, True), (0.0, -2.2e-9, False), (1.1e-9, 2.2e-9, False), (1e-9, 2e-9, True),
])
def test_what_counts_as_arrived(q_off, v_off, arrives):
    """Within 1e-9 of the position, and the speed left moves it by no more in a tick (0.5 s)."""

    class Placed(JointTracker):
        """Sends what the test says."""

        def _aim(self, target, target_speed, low, high):
            return 0.0

        def _send_if_safe(self, a):
            self.q, self.v = q_off, v_off
            return True

    made = Placed(-10.0, 10.0, 10.0, 3.0, 1.0, 0.5)
    made.q, made.v, made.a = 1.0, 9.0, 0.0
    made.track(0.0, 0.0)
    assert flags(made) == (arrives, True)


@pytest.mark.parametrize("speed", [0.25, -0.5])
def test_arriving_is_meant_relative_to_the_target(speed):
    class Placed(JointTracker):
        """Sends what the test says."""

        def _aim(self, target, target_speed, low, high):
            return 0.0

        def _send_if_safe(self, a):
            self.q, self.v = 5.0, speed
            return True

    for target, target_speed, arrives in ((5.0, speed, True), (4.0, speed, False), (5.0, -speed, False)):
        made = Placed(-10.0, 10.0, 10.0, 3.0, 1.0, 0.5)
        made.v = 9.0
        made.track(target, target_speed)
        assert flags(made) == (arrives, True)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_target_that_runs_into_a_limit_leads_to_rest_on_it(sign):
    """Speed 9 and 20 from the limit: towards a target that moves on, the joint would pass the limit, so it aims at it."""
    lower, upper = (-1000.0, 25.0) if sign > 0 else (-25.0, 1000.0)
    made = tracker(lower=lower, upper=upper, state=(0.0, sign * 7.0, 0.0))
    for k in range(40):
        made.track(sign * min(4.0 + 9.0 * k, 24.9), sign * 9.0)
        lowest, highest, _ = stop_extent(made.v, made.a, 3.0 * INSIDE, INSIDE, 1.0)
        assert made.q + highest <= upper + STOP_SLACK and made.q + lowest >= lower - STOP_SLACK
        assert made.limited
    assert abs(made.q - sign * 25.0) <= 0.11


@pytest.mark.parametrize("period_s", [1.0, 0.5])
def test_whether_a_step_leads_above_the_upper_limit(period_s):
    """After a = 0 the joint is at 8 with speed 3, whose stop covers 2.5; after a = 1 at 9, and 4 + 3 + 1 more to go."""
    made = tracker(lower=-1.0, upper=12.0 * period_s, jerk=1.0 / period_s**2, acceleration=3.0 / period_s,
                   state=(5.0 * period_s, 3.0, 0.0), period_s=period_s)
    assert not made._leaves_above(0.0) and made._leaves_above(1.0 / period_s)
    made.q, made.v = 12.0 * period_s, 0.0
    assert not made._leaves_above(0.0)  # on the limit
    # A stop that turns: from (2.9, -3) it goes 0.9 up and ends at 0.7. The way there counts, not the end.
    made.q, made.v = 8.3 * period_s, 5.9
    assert made._leaves_above(-3.0 / period_s)


def test_if_even_the_limit_cannot_be_aimed_at_the_known_stop_is_sent():
    class Wild(JointTracker):
        """Its root search always wants full speed upwards."""

        def _aim(self, target, target_speed, low, high):
            asked.append((target, target_speed, low, high))
            return high

    asked = []
    made = Wild(-10.0, 10.0, 10.0, 3.0, 1.0, 1.0)
    made.q, made.v, made.a = 6.0, 3.0, 0.0
    expected = stop_step(3.0, 0.0, 3.0 * INSIDE, INSIDE, 1.0)
    low, high = made._reachable()
    made.track(9.0, 2.0)
    assert (made.v, made.a) == expected and made.q == 6.0 + expected[0] and flags(made) == (False, True)
    assert asked == [(9.0, 2.0, low, high), (10.0, 0.0, low, high)]  # first the target, then the limit at rest
