"""Invariant 5: a stop never speeds up beyond |v| <= |v0| + a0²/(2 j_max), then slows to zero monotonically, without
reversal, within a_max and j_max, in bounded time; HOLDING is latched; a re-arm is explicit and re-enters from the
measured pose.

The bound in discrete time. With D = T j_max the acceleration of the next command is at best |a0| - D, of the one after
that |a0| - 2 D, and so on: the speed rises by T sum_{i=1..p} (|a0| - i D), p = floor(|a0| / D). With |a0| = p D + r that
is T (p² D/2 - p D/2 + p r), whereas a0²/(2 j_max) = T (p² D/2 + p r + r²/(2 D)): larger by T (p D/2 + r²/(2 D)) >= 0. So
the bound of continuous time holds with no term for the discretisation, and the sum is the exact one. If the speed must
pass through zero, because v0 and a0 point in opposite directions and a0 cannot fade in time, the joint ends in the
direction of a0: "then" begins where the acceleration no longer pushes that way.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import SIZES, Day, T, days, random_states, report

from vla_edge.core.shield import Reason, State
from vla_edge.core.tracking import LIMIT_MARGIN, JointTracker

ROUNDING = 1e-12  # of a speed, and of the acceleration at which a fade counts as over


def fade(a, step):
    """Speed that an acceleration still adds while it fades from the next tick on, with its sign."""
    p = math.floor(abs(a) / step)
    return math.copysign(T * (p * abs(a) - step * p * (p + 1) / 2), a)


class Stop:
    """The promises for one joint from (v0, a0) on, checked command by command.

    Limits in units per s² and, for ``step``, change of acceleration per tick.
    """

    def __init__(self, v, a, acceleration, step):
        self.acceleration, self.step = acceleration, step
        self.a, self.u = a, None
        inside = step * (1 - LIMIT_MARGIN)  # the shield keeps that much away from the limits
        self.exact = abs(v) + abs(fade(a, inside))
        self.bound = abs(v) + a * a * T / (2 * step)
        assert self.exact <= self.bound * (1 + 1e-12)
        self.sign = 1.0 if v + fade(a, inside) >= 0.0 else -1.0
        self.eased = self.sign * a <= ROUNDING
        self.ticks, self.fade_ticks = 0, math.ceil(abs(a) / inside)
        peak = self.exact
        # Peak speed at full deceleration, ramps up and down, and a stop too short to reach full deceleration.
        self.longest = 2 + peak / (acceleration * T) + 4 * acceleration / step + math.sqrt(8 * peak / (step * T))
        self.peak = 0.0

    def note(self, v, a):
        """The next command."""
        self.ticks += 1
        assert abs(a) <= self.acceleration, "acceleration limit"
        assert abs(a - self.a) <= self.step * (1 + 1e-12) + 1e-12, "jerk limit"
        assert abs(v) <= self.exact + ROUNDING, "faster than the bound"
        self.peak = max(self.peak, abs(v))
        u = self.sign * v
        if self.eased:
            assert u >= -ROUNDING, "reversal"
            assert self.u is None or u <= self.u + ROUNDING, "not monotone"
        else:
            assert self.ticks <= self.fade_ticks, "the acceleration does not fade at full jerk"
        self.eased = self.eased or self.sign * a <= ROUNDING
        self.a, self.u = a, u if self.eased else None
        assert v == 0.0 and a == 0.0 or self.ticks <= self.longest, "not at rest in bounded time"


@pytest.mark.parametrize("stops", SIZES)
def test_a_stop_from_any_state(stops):
    """The stop that the shield sends, from states dense at zero and at the limits."""
    rng = np.random.default_rng(5)
    commands, slowest, closest = 0, 0.0, 0.0
    for _ in range(stops // 10_000):
        for v, a, velocity, acceleration, jerk in zip(*(c.tolist() for c in random_states(10_000, rng)), strict=True):
            tracker = JointTracker(-1e3, 1e3, velocity, acceleration, jerk, T)
            tracker.v, tracker.a = v, max(-tracker._a_max, min(tracker._a_max, a))
            stop = Stop(tracker.v, tracker.a, acceleration, jerk * T)
            while tracker.v != 0.0 or tracker.a != 0.0:
                tracker.brake()
                stop.note(tracker.v, tracker.a)
            tracker.brake()
            assert tracker.v == 0.0 and tracker.a == 0.0
            commands += stop.ticks
            slowest = max(slowest, stop.ticks / stop.longest)
            closest = max(closest, stop.peak - stop.exact)
    report("5 stops", stops=stops, commands=commands, longest_of_bound=slowest, above_exact_bound=closest)


class Watch:
    """Follows a motor loop's states and checks everything that the invariant says of them."""

    def __init__(self, day):
        self.day, self.shield, self.limits = day, day.motor.shield, day.limits
        self.stops = None
        self.counts = {"stops": 0, "holding_ticks": 0, "rearms": 0, "reentries": 0, "stalls": 0}
        self.remember()

    def remember(self):
        shield = self.shield
        self.state, self.segment, self.stalls = shield.state, shield.segment, shield.stalls
        self.q, self.v, self.a = shield.position.copy(), shield.velocity.copy(), shield.acceleration.copy()
        self.asked = int(self.day.motor._control["rearm"])

    def note(self):
        """After a tick."""
        shield, before = self.shield, self.state
        if shield.stalls != self.stalls:
            self.counts["stalls"] += 1
            assert shield.state is State.HOLDING, "left HOLDING without a re-arm"
            assert not shield.velocity.any() and not shield.acceleration.any(), "moves on after a stall"
            self.stops = None
        elif before is State.HOLDING:
            self._held()
        elif shield.state is State.BRAKING or (before is State.BRAKING and shield.state is State.HOLDING):
            self._brake(before)
        elif shield.state is State.HOLDING:  # from standing still, or a stop of one tick
            if not self.v.any() and not self.a.any() and shield.reason is Reason.NO_FIRST_CHUNK:
                assert (shield.position == self.q).all()
            else:
                self._brake(before)
        else:
            assert before is not State.BRAKING, "a stop was left before it ended"
        self.remember()

    def _brake(self, before):
        shield, limits = self.shield, self.limits
        if before is not State.BRAKING:
            self.stops = [Stop(*each) for each in zip(self.v.tolist(), self.a.tolist(), limits.acceleration.tolist(),
                                                      (limits.jerk * T).tolist(), strict=True)]
            self.counts["stops"] += 1
        for stop, v, a in zip(self.stops, shield.velocity.tolist(), shield.acceleration.tolist(), strict=True):
            stop.note(v, a)
        if shield.state is State.HOLDING:
            assert not shield.velocity.any() and not shield.acceleration.any()
            self.stops = None

    def _held(self):
        shield, motor = self.shield, self.day.motor
        if shield.state is State.HOLDING:
            self.counts["holding_ticks"] += 1
            assert (shield.position == self.q).all() and not shield.velocity.any(), "HOLDING moved"
            return
        assert int(motor._control["rearm"]) != self.asked, "left HOLDING without a re-arm"
        assert shield.state is State.COASTING and shield.reason is Reason.WAITING_FIRST_CHUNK
        assert motor.woke_ns - int(motor._joints["stamp_ns"]) <= 100_000_000, "re-armed from an old pose"
        measured = np.array(motor._joints["position"])
        away = np.abs(measured - self.q) > self.limits.reentry_gap
        inside = np.clip(measured, self.limits.position_lower, self.limits.position_upper)
        assert (shield.position == np.where(away, inside, self.q)).all(), "did not re-enter from the measured pose"
        assert not shield.velocity.any() and shield.segment == self.segment + away.any()
        self.counts["rearms"] += 1
        self.counts["reentries"] += bool(away.any())


def watch(seed, robot, rule, ticks, counts):
    day = Day(70_000 + seed, robot, rule, keep=False)
    watched = Watch(day)
    for _ in range(ticks):
        day.tick()
        watched.note()
    for name, count in watched.counts.items():
        counts[name] = counts.get(name, 0) + count


@pytest.mark.parametrize("ticks", SIZES)
def test_stops_holding_and_rearms_of_the_motor_loop(ticks):
    counts = {}
    for seed, robot, rule, count in days(ticks):
        watch(seed, robot, rule, count, counts)
    assert counts["stops"] > ticks / 500 and counts["holding_ticks"] > ticks / 10
    assert counts["rearms"] > ticks / 500 and counts["reentries"] > ticks / 2_000 and counts["stalls"] > ticks / 1_000
    report("5 loop", ticks=ticks, **counts)


@pytest.mark.parametrize("what", ["stop", "latch", "pose"])
def test_a_shield_that_breaks_the_promise_is_found(monkeypatch, what):
    from vla_edge.core import shield as module

    if what == "stop":  # as fast as the limits of acceleration allow, but not as the jerk limit does
        def brake(self):
            a = max(-self._a_max, min(self._a_max, -self.v / T))
            self.v, self.a = self.v + T * a, a if self.v + T * a else 0.0

        monkeypatch.setattr(JointTracker, "brake", brake)
    elif what == "latch":  # a fresh chunk leads out of HOLDING
        real = module.Shield.step

        def step(self, desired, *arguments):
            if self.state is State.HOLDING and desired is not None:
                self.state = State.COASTING
            real(self, desired, *arguments)

        monkeypatch.setattr(module.Shield, "step", step)
    else:
        monkeypatch.setattr(module.Shield, "_restart_from", lambda *_: False)
    found = {"stop": "jerk limit|bound", "latch": "without a re-arm", "pose": "from the measured pose|after a stall"}
    with pytest.raises(AssertionError, match=found[what]):
        for seed, robot, rule, count in days(20_000):
            watch(seed, robot, rule, count, {})
