"""A joint that is behind: what the step it takes must achieve, by definition, and with how much work."""

import numpy as np
import pytest
from joint_rig import INSIDE, flags, state, tracker

from vla_edge.core.braking import stop_extent, unavoidable_speed
from vla_edge.core.tracking import MAX_EVALUATIONS, JointTracker

# ------------------------------------------------------------------ behind the trajectory


class Counting(JointTracker):
    """Counts evaluations of the stop during a root search."""

    __slots__ = ("count",)

    def _miss(self, a, error, relative):
        self.count += 1
        return JointTracker._miss(self, a, error, relative)


def random_joint(rng, kind=JointTracker):
    period_s = float(rng.choice([0.01, 0.02]))
    acceleration, velocity = float(rng.uniform(1, 60)), float(rng.uniform(0.3, 5))
    jerk = acceleration / float(rng.uniform(0.3, 20)) / period_s
    made = kind(-100.0, 100.0, velocity, acceleration, jerk, period_s)
    while True:
        made.q, made.v = float(rng.uniform(-1, 1)), float(rng.uniform(-1, 1)) * velocity
        made.a = float(rng.uniform(-1, 1)) * acceleration * INSIDE
        if abs(unavoidable_speed(made.v, made.a, jerk * period_s * INSIDE, period_s)) <= velocity * INSIDE:
            return made, (acceleration * INSIDE, jerk * period_s * INSIDE, period_s)


def miss(a, before, target, speed, limits):
    """Where the stop relative to the target ends, beyond the target, if ``a`` is sent now: by definition."""
    period_s = limits[2]
    q, v = before[0], before[1]
    after_v = v + period_s * a
    after_q = q + period_s * after_v
    return (after_q - target) + stop_extent(after_v - speed, a, *limits)[2]


def test_a_joint_that_is_behind_takes_the_step_whose_stop_ends_on_the_target():
    rng = np.random.default_rng(1)
    ends, bounds = 0, 0
    for _ in range(400):
        made, limits = random_joint(rng)
        before = state(made)
        low, high = made._reachable()
        # Near where its own stop would end, so that the answer mostly lies between the bounds.
        target = before[0] + stop_extent(before[1], before[2], *limits)[2] + float(rng.normal()) * limits[2] ** 2 * 5
        speed = float(rng.choice([0.0, rng.normal() * 0.3]))
        made.track(target, speed)
        assert flags(made)[1] or made.q == target
        if made.q == target:
            continue
        missed = miss(made.a, before, target, speed, limits)
        if abs(missed) <= 1e-12:
            ends += 1
        else:
            assert made.a == (low if missed > 0 else high), "neither on the target nor as near as the limits allow"
            bounds += 1
        assert made.v == before[1] + limits[2] * made.a and made.q == before[0] + limits[2] * made.v
    assert ends > 100 and bounds > 100


def test_a_search_takes_few_evaluations():
    """Secants of a piecewise linear function: two bounds and mostly 1 to 6 more; bisection alone would need 40."""
    rng = np.random.default_rng(2)
    counts = []
    for _ in range(1500):
        made, limits = random_joint(rng, Counting)
        made.count = 0
        target = made.q + stop_extent(made.v, made.a, *limits)[2] + float(rng.normal()) * limits[2] ** 2 * 5
        low, high = made._reachable()
        made._aim(target, float(rng.normal()) * 0.3, low, high)
        counts.append(made.count)
    counts = np.array(counts)
    assert counts.max() <= 2 + MAX_EVALUATIONS
    assert (counts > 2 + 6).mean() < 0.01 and counts[counts > 2].mean() < 5.5


def test_what_a_miss_is():
    """D = 1, T = 1: error 2 behind, speed 1; sending 0.5: speed 1.5, then the stop of 1.5 from a = 0.5."""
    made = tracker(acceleration=3.0)
    after = stop_extent(1.5, 0.5, 3.0 * INSIDE, INSIDE, 1.0)[2]
    assert made._miss(0.5, -2.0, 1.0) == pytest.approx(-2.0 + 1.5 + after)
    made = tracker(acceleration=3.0, jerk=2.0, period_s=0.5)
    after = stop_extent(1.25, 0.5, 3.0 * INSIDE, INSIDE, 0.5)[2]
    assert made._miss(0.5, -2.0, 1.0) == pytest.approx(-2.0 + 0.5 * 1.25 + after)


class Script(JointTracker):
    """A miss of the test's making."""

    __slots__ = ("calls", "of")

    def _miss(self, a, error, relative):
        self.calls.append((a, error, relative))
        return self.of(a)


def scripted(of, period_s=0.5):
    made = Script(-10.0, 10.0, 10.0, 3.0, 1.0, period_s)
    made.q, made.v, made.calls, made.of = 1.0, 2.0, [], of
    return made


def test_bounds_that_already_suffice_end_the_search():
    for value, answer, evaluations in ((-1.0, 3.0, 1), (0.0, 3.0, 1), (1.0, -3.0, 2)):
        made = scripted(lambda a, value=value: value)
        assert made._aim(4.0, 0.5, -3.0, 3.0) == answer and len(made.calls) == evaluations
    made = scripted(lambda a: a + 3.0)  # zero exactly at the lower bound
    assert made._aim(4.0, 0.5, -3.0, 3.0) == -3.0 and len(made.calls) == 2


def test_error_and_speed_are_those_in_the_frame_of_the_target():
    """Target 4, its speed 0.5, T = 0.5: a tick ago it was at 3.75; the joint at 1 was 2.75 behind and 1.5 faster."""
    made = scripted(lambda a: a)
    made._aim(4.0, 0.5, -3.0, 3.0)
    assert {call[1:] for call in made.calls} == {(-2.75, 1.5)}


def test_the_first_guess_is_the_step_that_is_there_at_once():
    """2.75 behind in 0.5: relative speed 5.5, so 4 more than 1.5, so a = 8; within the bounds that is tried first."""
    made = scripted(lambda a: a - 8.0)
    assert made._aim(4.0, 0.5, -20.0, 20.0) == 8.0
    assert [call[0] for call in made.calls] == [20.0, -20.0, 8.0]
    # Not strictly between the bounds: the secant through both.
    for low, high in ((-20.0, 8.0), (8.0, 20.0), (-4.0, 4.0)):
        made = scripted(lambda a, low=low, high=high: a - (0.75 * low + 0.25 * high))
        assert made._aim(4.0, 0.5, low, high) == 0.75 * low + 0.25 * high
        assert len(made.calls) == 3


def test_a_straight_piece_is_hit_by_its_secant():
    """Two pieces with a kink between: the guess of 8 and the second point lie on one piece, so the third is the root."""
    made = scripted(lambda a: (a - 2.0) if a > 0.0 else 10.0 * a - 2.0)
    assert made._aim(4.0, 0.5, -20.0, 20.0) == pytest.approx(2.0, abs=1e-13)
    assert len(made.calls) == 4


def test_no_point_is_tried_twice():
    """The secant through 8 and 17 leads to 20, the upper end of the bracket, which was the first to be tried."""
    values = {20.0: 1.0, -20.0: -1.0, 8.0: -3.0, 17.0: -0.75}
    made = scripted(lambda a: values.get(a, a - 18.5))
    assert made._aim(4.0, 0.5, -20.0, 20.0) == 18.5
    assert [call[0] for call in made.calls] == [20.0, -20.0, 8.0, 17.0, 18.5]


def test_a_search_stops_at_the_tolerance_and_not_before():
    for miss_there, evaluations in ((1e-13, 3), (-1e-13, 3), (1.1e-13, 4)):
        made = scripted(lambda a, there=miss_there: there if a == 8.0 else 0.0 if abs(a - 8.0) < 1 else a - 8.0)
        made._aim(4.0, 0.5, -20.0, 20.0)
        assert len(made.calls) == evaluations


def test_a_search_without_end_returns_its_last_bracket():
    """A jump at 1: no point is a root. Every evaluation is used, and the answer lies within the bracket found."""
    made = scripted(lambda a: -1.0 if a < 1.0 else 1.0)
    found = made._aim(4.0, 0.5, -20.0, 20.0)
    assert len(made.calls) == 2 + MAX_EVALUATIONS
    tried = [call[0] for call in made.calls]
    assert max(a for a in tried if a < 1.0) < found < min(a for a in tried if a >= 1.0)
    assert found not in tried
