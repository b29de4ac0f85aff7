"""The stream of commands as sent, whatever the policy wants and whatever events come: limits, stops, convergence."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_edge.config import load_limits
from vla_edge.core.braking import stop_extent, unavoidable_speed
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.shield import EstopInput, Rearm, Shield, ShieldConfig, State
from vla_edge.core.tracking import JointTracker

T = 0.01
PANDA = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)


def random_limits(rng, joints=2):
    """Anything from stiff jerk limits (20 ticks to full acceleration) to none that binds at this tick."""
    lower, upper = -rng.uniform(0.05, 3.0, joints), rng.uniform(0.05, 3.0, joints)
    acceleration = rng.uniform(1.0, 60.0, joints)
    return JointLimits(tuple(f"j{i}" for i in range(joints)), lower, upper, rng.uniform(0.3, 5.0, joints), acceleration,
                       acceleration / rng.uniform(0.3, 20.0, joints) / T, np.clip(np.zeros(joints), lower, upper),
                       np.full(joints, 0.05))


class Stream:
    """Collects the commands of each segment and checks them as a robot would: by finite differences."""

    def __init__(self, shield, limits):
        self.shield, self.limits = shield, limits
        self.segments = []
        self.segment = None

    def note(self):
        if self.shield.segment != self.segment:
            self.segment = self.shield.segment
            start = self.shield.position.copy() if self.shield.state is State.HOLDING else None
            self.segments.append([] if start is None else [start])
        self.segments[-1].append(self.shield.position.copy())
        self._stop_is_known()

    def _stop_is_known(self):
        shield, limits = self.shield, self.limits
        for i in range(len(limits)):
            lowest, highest, _ = stop_extent(float(shield.velocity[i]), float(shield.acceleration[i]),
                                             float(limits.acceleration[i]), float(limits.jerk[i]) * T, T)
            q = shield.position[i]
            assert q + lowest >= limits.position_lower[i] - 1e-9 and q + highest <= limits.position_upper[i] + 1e-9

    def check(self):
        limits, slack = self.limits, 1 + 1e-9
        for rows in self.segments:
            q = np.array(rows)
            assert (q >= limits.position_lower).all() and (q <= limits.position_upper).all()
            assert (np.abs(np.diff(q, axis=0)) / T <= limits.velocity * slack).all()
            assert (np.abs(np.diff(q, 2, axis=0)) / T**2 <= limits.acceleration * slack).all()
            # A position of 3 rad is rounded to 4e-16, which a third difference over T³ turns into 2e-9 rad/s³.
            assert (np.abs(np.diff(q, 3, axis=0)) / T**3 <= limits.jerk * slack + 1e-8).all()


def wanted_positions(rng, limits, ticks):
    """Random walk of policies: jumps, ramps beyond the limits, smooth motion, noise, standing on a limit."""
    lower, upper = limits.position_lower, limits.position_upper
    span = upper - lower
    rows = np.empty((ticks, len(limits)))
    k = 0
    while k < ticks:
        n = int(rng.integers(1, 60))
        kind = rng.integers(6)
        start = rng.uniform(lower - 0.1 * span, upper + 0.1 * span)
        steps = np.arange(min(n, ticks - k)).reshape(-1, 1)
        if kind == 0:
            part = start + 0 * steps
        elif kind == 1:
            part = start + steps * T * rng.uniform(-1.5, 1.5, len(limits)) * limits.velocity
        elif kind == 2:
            part = 0.5 * (lower + upper) + 0.5 * span * np.sin(steps * rng.uniform(0.005, 0.3) + start)
        elif kind == 3:
            part = start + rng.normal(size=(len(steps), len(limits))) * 0.02 * span
        elif kind == 4:
            part = np.where(rng.random(len(limits)) < 0.5, lower, upper) + 0 * steps
        else:
            part = rows[k - 1] + 0 * steps if k else start + 0 * steps
        rows[k:k + len(steps)] = part
        k += len(steps)
    return rows


def run_schedule(seed, ticks, limits=None):
    rng = np.random.default_rng(seed)
    limits = limits or random_limits(rng)
    shield = Shield(limits, T, ShieldConfig(first_chunk_ticks=5))
    assert shield.start(rng.uniform(limits.position_lower, limits.position_upper)) is Rearm.ACCEPTED
    stream = Stream(shield, limits)
    stream.note()
    wanted = wanted_positions(rng, limits, ticks)
    states = set()
    for k in range(ticks):
        event = rng.random()
        if event < 0.005:
            shield.estop()
        elif event < 0.01:
            shield.estop_input(EstopInput(int(rng.integers(3))))
        elif event < 0.015:
            # Anywhere: a new segment begins at rest, so the stream's rules hold from there on.
            measured = rng.uniform(limits.position_lower, limits.position_upper) if event < 0.013 else None
            shield.stall(measured, float(rng.choice([0.0, 0.2])))
        elif shield.state is State.HOLDING and event < 0.3:
            away = rng.random() < 0.2
            measured = rng.uniform(limits.position_lower, limits.position_upper) if away else shield.position + 0.001
            shield.estop_input(EstopInput(int(rng.choice([0, 0, 0, 1, 2]))))
            shield.rearm(measured, float(rng.choice([0.0, 0.05, 0.2])))
        desired = None if event > 0.985 else wanted[k]
        if event > 0.999:
            desired = np.full(len(limits), rng.choice([np.nan, np.inf, -np.inf]))
        velocity = None if rng.random() < 0.2 or k == 0 else (wanted[k] - wanted[k - 1]) / T
        shield.step(desired, velocity, int(rng.integers(0, 20)))
        stream.note()
        states.add(shield.state)
    stream.check()
    return states


def test_ten_thousand_ticks_of_anything():
    states = set()
    for seed in range(20):
        states |= run_schedule(seed, 400)
    assert states == set(State)


def test_the_demo_robot():
    for seed in range(4):
        run_schedule(1000 + seed, 500, PANDA)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_any_schedule(seed):
    run_schedule(seed, 120)


def random_tracker(rng):
    acceleration = rng.uniform(1.0, 60.0)
    lower, upper, velocity = -rng.uniform(0.1, 3.0), rng.uniform(0.1, 3.0), rng.uniform(0.3, 5.0)
    tracker = JointTracker(lower, upper, velocity, acceleration, acceleration / rng.uniform(0.3, 20.0) / T, T)
    tracker.reset(rng.uniform(lower, upper))
    target, speed = 0.0, 0.0
    for _ in range(int(rng.integers(0, 80))):  # a random state that the limits allow
        if rng.random() < 0.2:
            target, speed = rng.uniform(lower - 0.2, upper + 0.2), rng.uniform(-velocity, velocity)
        tracker.track(target, speed)
    return tracker, lower, upper, velocity, acceleration


def known_to_stop(q, v, a, lower, upper, velocity, acceleration, step):
    """The stop from this state keeps all limits."""
    lowest, highest, _ = stop_extent(v, a, acceleration, step, T)
    rises_to = abs(unavoidable_speed(v, a, step, T))
    return (q + lowest >= lower - 1e-12 and q + highest <= upper + 1e-12 and abs(a) <= acceleration * (1 + 1e-9)
            and max(abs(v), rises_to) <= velocity * (1 + 1e-9))


def check_step_from_anywhere(seed, count):
    """One step from any state with a known stop, towards anything: the limits hold and a stop is known again."""
    rng = np.random.default_rng(seed)
    tried = 0
    while tried < count:
        acceleration, velocity = rng.uniform(1.0, 60.0), rng.uniform(0.3, 5.0)
        jerk = acceleration / rng.uniform(0.3, 20.0) / T
        lower, upper = -rng.uniform(0.0005, 1.0), rng.uniform(0.0005, 1.0)
        tracker = JointTracker(lower, upper, velocity, acceleration, jerk, T)
        for _ in range(30):
            # Dense near the position limits and at full acceleration, where the stop is about to be the only way out.
            q = rng.choice([rng.uniform(lower, upper), upper - rng.exponential(0.001), lower + rng.exponential(0.001)])
            v = rng.choice([rng.uniform(-1, 1) * velocity, rng.normal() * 0.05])
            a = rng.choice([rng.uniform(-1, 1), -1.0, 1.0]) * acceleration
            limits = (lower, upper, velocity * (1 - 1e-9), acceleration * (1 - 1e-9), jerk * T * (1 - 1e-9))
            if not known_to_stop(q, v, a * (1 - 1e-9), *limits):
                continue
            tried += 1
            tracker.q, tracker.v, tracker.a = float(q), float(v), float(a * (1 - 1e-9))
            tracker.on_target = bool(rng.random() < 0.3)
            before = (tracker.q, tracker.v, tracker.a)
            tracker.track(float(rng.uniform(lower - 0.1, upper + 0.1)), float(rng.normal() * velocity))
            assert known_to_stop(tracker.q, tracker.v, tracker.a, *limits), (seed, before, tracker.q)
            assert abs(tracker.a - before[2]) <= jerk * T
            assert tracker.v == pytest.approx((tracker.q - before[0]) / T, abs=1e-10)
            assert tracker.a == pytest.approx((tracker.v - before[1]) / T, abs=1e-9)
            assert lower <= tracker.q <= upper


def test_ten_thousand_states_one_step():
    check_step_from_anywhere(1, 10_000)


def settle(tracker, target, velocity, acceleration, jerk_ticks=20.0):
    """Ticks until it stands exactly on the target, and how often it passed the target on the way."""
    way = abs(target - tracker.q) + tracker.v**2 / acceleration + velocity
    limit = round((way / velocity + 8 * velocity / acceleration + 2 * np.sqrt(way / acceleration)) / T + 8 * jerk_ticks)
    crossings, side = 0, np.sign(target - tracker.q)
    for k in range(limit):
        tracker.track(target, 0.0)
        now = np.sign(target - tracker.q)
        crossings += now != 0 and side != 0 and now != side
        side = now or side
        if tracker.q == target and tracker.v == 0.0 and tracker.a == 0.0:
            return k, crossings
    raise AssertionError(f"not at rest on {target} after {limit} ticks: q {tracker.q} v {tracker.v} a {tracker.a}")


def test_constant_targets_are_reached_without_cycles_from_any_state():
    rng = np.random.default_rng(7)
    for _ in range(400):
        tracker, lower, upper, velocity, acceleration = random_tracker(rng)
        _, crossings = settle(tracker, rng.uniform(lower, upper), velocity, acceleration)
        # Too fast to stop before the target: once; turning with an acceleration that cannot fade in time: once more.
        assert crossings <= 2


def test_a_target_at_rest_is_not_overshot_from_rest():
    rng = np.random.default_rng(8)
    for _ in range(200):
        _, lower, upper, velocity, acceleration = random_tracker(rng)
        tracker = JointTracker(lower, upper, velocity, acceleration, acceleration / 5.0 / T, T)
        tracker.reset(rng.uniform(lower, upper))
        _, crossings = settle(tracker, rng.uniform(lower, upper), velocity, acceleration)
        assert crossings == 0


def test_a_moving_target_is_caught_and_then_followed_exactly():
    rng = np.random.default_rng(9)
    for _ in range(120):
        acceleration, velocity = rng.uniform(2.0, 60.0), rng.uniform(0.5, 5.0)
        tracker = JointTracker(-1e3, 1e3, velocity, acceleration, acceleration / rng.uniform(0.3, 20) / T, T)
        tracker.reset(rng.uniform(-1, 1))
        speed, start = rng.uniform(-0.7, 0.7) * velocity, rng.uniform(-1, 1)
        exact = 0
        for k in range(6000):
            tracker.track(start + speed * T * k, speed)
            exact = exact + 1 if tracker.q == start + speed * T * k else 0
            if exact == 50:
                break
        assert exact == 50


def test_a_trajectory_within_limits_passes_bit_for_bit():
    shield = Shield(PANDA, T)
    shield.start(PANDA.ready)
    shield.rearm(PANDA.ready, 0.0)
    for k in range(1000):
        s = 0.1 * (1 - np.cos(1.5 * k * T))
        desired = PANDA.ready + s
        shield.step(desired, None)
        assert (shield.position == desired).all()
    assert shield.limit_interventions == 0


def test_sliding_along_a_position_limit_does_not_chatter():
    """A target that runs through the limit: one approach, then rest, no switching between braking and speeding up."""
    rng = np.random.default_rng(10)
    for _ in range(80):
        acceleration, velocity = rng.uniform(1, 60), rng.uniform(0.5, 5)
        tracker = JointTracker(-3.0, 1.0, velocity, acceleration, acceleration / rng.uniform(0.3, 20) / T, T)
        tracker.reset(-rng.uniform(0.0, 1.0))
        start, speed = tracker.q, rng.uniform(0.3, 1.2) * velocity
        changes = []
        for k in range(3000):
            before = tracker.a
            tracker.track(start + speed * T * k, speed)
            changes.append(tracker.a - before)
            if tracker.q == 1.0 and tracker.v == 0.0:
                break
        assert tracker.q == 1.0
        signs = np.sign([c for c in changes if abs(c) > 1e-6])
        assert (np.diff(signs) != 0).sum() <= 5
