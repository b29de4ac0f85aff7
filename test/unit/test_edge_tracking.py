"""Guards of the tracking law that no sound root search needs: they must hold without it."""

import numpy as np

from vla_edge.core.braking import stop_extent
from vla_edge.core.tracking import MAX_EVALUATIONS, JointTracker

T = 0.01
LIMITS = {"lower": -0.5, "upper": 0.5, "velocity": 2.0, "acceleration": 20.0, "jerk": 500.0, "period_s": T}


class Misled(JointTracker):
    """Its root search answers anything that the limits of acceleration allow."""

    def _aim(self, target, target_speed, low, high):
        return float(low + (high - low) * RNG.choice([0.0, 1.0, RNG.random()]))


RNG = np.random.default_rng(5)


def test_a_wrong_root_is_never_sent_beyond_the_limits():
    tracker = Misled(**LIMITS)
    rows = [tracker.q] * 3
    for _ in range(5000):
        tracker.track(float(RNG.uniform(-1, 1)), 0.0)
        lowest, highest, _ = stop_extent(tracker.v, tracker.a, LIMITS["acceleration"], LIMITS["jerk"] * T, T)
        assert -0.5 - 1e-9 <= tracker.q + lowest and tracker.q + highest <= 0.5 + 1e-9
        rows.append(tracker.q)
    q = np.array(rows)
    assert np.abs(q).max() <= 0.5
    for order, name in ((1, "velocity"), (2, "acceleration"), (3, "jerk")):
        assert np.abs(np.diff(q, order)).max() / T**order <= LIMITS[name] * (1 + 1e-9)
    assert np.abs(q).max() > 0.4  # it did run into the limits


class Crooked(JointTracker):
    """A miss that grows in one step, on which the secant alone fails."""

    calls = 0

    def _miss(self, a, error, relative):
        Crooked.calls += 1
        return float(np.cbrt(a - 1.2345) * 1e3 + (a - 1.2345) ** 9)


def test_the_root_search_stays_in_its_bracket_and_within_its_bound():
    tracker = Crooked(**LIMITS)
    for low, high in ((-20.0, 20.0), (1.0, 20.0), (-20.0, 1.3), (-20.0, 1.0), (2.0, 20.0)):
        Crooked.calls = 0
        a = tracker._aim(0.1, 0.0, low, high)
        assert low <= a <= high and Crooked.calls <= MAX_EVALUATIONS + 2


def test_a_target_outside_counts_as_limited_even_when_it_stands_on_the_limit():
    tracker = JointTracker(**LIMITS)
    for _ in range(200):
        tracker.track(0.7, 0.0)
    assert tracker.q == 0.5 and tracker.on_target and tracker.limited
    tracker.track(0.5, 0.0)
    assert not tracker.limited


def test_reset_moves_into_the_limits():
    tracker = JointTracker(**LIMITS)
    tracker.reset(0.6)
    assert (tracker.q, tracker.v, tracker.a) == (0.5, 0.0, 0.0)
