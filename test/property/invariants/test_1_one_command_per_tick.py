"""Invariant 1: one command per tick, at absolute deadlines k T; a missed deadline is counted, never caught up.

The process may wake late by anything, oversleep whole periods, and its work may take longer than a period.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import ROBOTS, SIZES, T_NS, Motor, random_limits, report

from vla_common.clock import SteppedClock
from vla_edge.core.shield import State
from vla_edge.motor_main import run_clock


class Schedule:
    """Delays of a scheduler that is mostly punctual: dense at 0 and at whole periods, where counting goes wrong."""

    def __init__(self, rng, period_ns):
        self._rng, self._period_ns = rng, period_ns

    def delay_ns(self):
        rng, period = self._rng, self._period_ns
        kind = rng.random()
        if kind < 0.5:
            return int(rng.exponential(50_000))
        if kind < 0.8:  # at a deadline, one before, one after
            return max(0, int(rng.integers(0, 4)) * period + int(rng.integers(-1, 2)))
        if kind < 0.9:
            return int(rng.uniform(0, period))
        return int(rng.exponential(4 * period))


class UnpunctualClock(SteppedClock):
    """Wakes late. ``early_ns`` > 0: sometimes a little early, as no clock of ours does."""

    def __init__(self, start_ns, schedule, rng, early_ns=0):
        super().__init__(start_ns)
        self._schedule, self._rng, self._early_ns = schedule, rng, early_ns

    def sleep_until_ns(self, deadline_ns):
        early_ns = int(self._rng.integers(0, self._early_ns + 1)) if self._rng.random() < 0.1 else 0
        super().sleep_until_ns(deadline_ns + (-early_ns if early_ns else self._schedule.delay_ns()))


class Watched:
    """Stands where the motor loop does: notes every tick served and takes its time. ``inner``: a real loop."""

    def __init__(self, clock, schedule, inner=None):
        self._clock, self._schedule, self._inner = clock, schedule, inner
        self.shield = self if inner is None else inner.shield
        self.state, self.shut = State.NOMINAL, False
        self.served = []

    def shut_down(self):
        self.shut, self.state = True, State.HOLDING

    def serve(self, tick, deadline_ns, woke_ns, missed):
        self.served.append((tick, deadline_ns, woke_ns, missed, self._clock.monotonic_ns()))
        if self._inner is not None:
            self._inner.serve(tick, deadline_ns, woke_ns, missed)
        self._clock.advance_ns(self._schedule.delay_ns())
        return True


class StopAfter:
    def __init__(self, loop, ticks):
        self._loop, self._ticks = loop, ticks

    def is_set(self):
        return len(self._loop.served) >= self._ticks


def check(served, clock_end, period_ns, start_ns):
    """All of the invariant, for one run of the clock. Returns the missed deadlines and the latest wake in periods."""
    tick, deadline, woke, missed, at = (np.array(column, dtype=np.int64) for column in zip(*served, strict=True))
    assert (deadline == start_ns + tick * period_ns).all(), "not on the grid of absolute deadlines"
    assert (np.diff(tick) >= 1).all(), "a tick was served twice, or an old one"
    late = woke - deadline
    assert (late < period_ns).all(), "served a tick although a later one was due: that is catching up"
    assert (woke == at).all()
    # Every deadline is either served or counted as missed: nothing is forgotten, nothing counted twice.
    assert tick[0] == missed[0]
    assert (np.diff(tick) - 1 == np.diff(missed)).all()
    assert clock_end.missed >= missed[-1]
    # No burst: never two commands within one period of the grid.
    assert (np.diff((at - start_ns) // period_ns)[late[1:] >= 0] >= 1).all()
    return int(missed[-1]), float(np.max(late)) / period_ns


@pytest.mark.parametrize("ticks", SIZES)
def test_any_lateness_and_any_work(ticks):
    missed = served = 0
    worst = 0.0
    runs = max(10, ticks // 20_000)
    for index in range(runs):
        rng = np.random.default_rng(index)
        period_ns = int(rng.choice([T_NS, 1_000_000, 3_333_333, 100_000_000]))
        schedule = Schedule(rng, period_ns)
        clock = UnpunctualClock(int(rng.integers(0, 10**15)), schedule, rng, early_ns=period_ns // 5 * (index % 3 == 0))
        start_ns = clock.monotonic_ns() + period_ns
        loop = Watched(clock, schedule)
        done = run_clock(loop, clock, period_ns, StopAfter(loop, ticks // runs))
        assert loop.shut, "the end is asked for through the shield"
        lost, latest = check(loop.served, done, period_ns, start_ns)
        missed, served, worst = missed + lost, served + len(loop.served), max(worst, latest)
    assert served >= ticks and missed > ticks / 10
    report("1 clock", ticks=served, deadlines_missed=missed, latest_in_periods=worst)


@pytest.mark.parametrize("ticks", [2_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_the_real_loop_sends_one_command_for_each(ticks):
    """With the motor loop inside: what is sent carries the deadline, once per tick, in every state and to the end."""
    sent = missed = 0
    runs = max(4, ticks // 20_000)
    for index in range(runs):
        rng = np.random.default_rng(100 + index)
        limits = random_limits(rng) if index else next(iter(ROBOTS.values()))
        motor = Motor(limits).armed()
        del motor.sent[:]
        schedule = Schedule(rng, T_NS)
        clock = UnpunctualClock(motor.now_ns, schedule, rng)
        motor.loop._clock = clock
        start_ns = clock.monotonic_ns() + T_NS
        loop = Watched(clock, schedule, motor.loop)
        done = run_clock(loop, clock, T_NS, StopAfter(loop, ticks // runs))
        stamps = np.array([stamp for stamp, _, _ in motor.sent])
        assert stamps.tolist() == [deadline for _, deadline, *_ in loop.served]
        assert ((stamps - start_ns) % T_NS == 0).all() and (np.diff(stamps) >= T_NS).all()
        assert motor.shield.state is State.HOLDING
        sent, missed = sent + len(stamps), missed + done.missed
    assert sent >= ticks
    report("1 loop", commands=sent, deadlines_missed=missed)


def test_a_clock_that_catches_up_would_be_found():
    """The check fails for what it is there to find."""
    burst = [(k, k * T_NS, 5 * T_NS + k, 0, 5 * T_NS + k) for k in range(5)]
    with pytest.raises(AssertionError, match="catching up"):
        check(burst, type("End", (), {"missed": 0}), T_NS, 0)
    forgotten = [(k, k * T_NS, k * T_NS, 0, k * T_NS) for k in (0, 1, 4)]
    with pytest.raises(AssertionError):
        check(forgotten, type("End", (), {"missed": 0}), T_NS, 0)
    drifted = [(k, k * (T_NS + 1), k * (T_NS + 1), 0, k * (T_NS + 1)) for k in range(3)]
    with pytest.raises(AssertionError, match="grid"):
        check(drifted, type("End", (), {"missed": 0}), T_NS, 0)
