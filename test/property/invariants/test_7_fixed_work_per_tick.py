"""Invariant 7: the worst-case work of a tick is fixed whatever comes in: bounded evaluations, no growth of memory, no
I/O, no logging.
"""

import builtins
import gc
import logging
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import ROBOTS, SIZES, Day, T, days, random_limits, report, rule_names

from vla_edge.core import braking, tracking
from vla_edge.core.joint_limits import MAX_RAMP_TICKS
from vla_edge.core.motor_loop import MotorLoop
from vla_edge.core.tracking import MAX_EVALUATIONS, JointTracker

# Of one step of one joint, see vla_edge/core/tracking.py: two root searches with both bounds each, and the three checks
# (exact, aimed, limit) plus the one that says on which side it leaves.
MOST_EVALUATIONS = 2 * (MAX_EVALUATIONS + 2) + 4


class Counter:
    """Counts calls; the most within one step."""

    def __init__(self, function):
        self._function, self.calls, self.most, self.total = function, 0, 0, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self._function(*arguments)

    def close(self):
        self.most, self.total, self.calls = max(self.most, self.calls), self.total + self.calls, 0


@pytest.mark.parametrize("steps", SIZES)
def test_the_evaluations_of_a_step_are_bounded(monkeypatch, steps):
    """Any state within the limits, wherever the stop from it leads, and any target."""
    extent = Counter(tracking.stop_extent)
    monkeypatch.setattr(tracking, "stop_extent", extent)
    rng = np.random.default_rng(7)
    joints = [column for robot in ROBOTS.values() for column in
              zip(robot.position_lower, robot.position_upper, robot.velocity, robot.acceleration, robot.jerk, strict=True)]
    for index in range(steps // 100):
        limits = random_limits(rng, 1)
        column = joints[index] if index < len(joints) else tuple(
            x[0] for x in (limits.position_lower, limits.position_upper, limits.velocity, limits.acceleration, limits.jerk))
        tracker = JointTracker(*map(float, column), T)
        lower, upper, velocity, acceleration, _ = map(float, column)
        for k, share in enumerate(rng.uniform(-1.0, 1.0, (100, 5)).tolist()):
            if k % 4 == 0:
                tracker.q = (lower, upper, 0.5 * (lower + upper) + share[0] * (upper - lower))[k % 3]
                tracker.v, tracker.a = share[1] * velocity, share[2] * acceleration
                tracker.on_target = k % 8 == 0
            tracker.track(share[3] * (0.1, 1.0, 10.0, 1e9)[k % 4], share[4] * velocity * (0.0, 1.0, 2.0, 1e9)[k // 3 % 4])
            extent.close()
    assert extent.most <= MOST_EVALUATIONS
    report("7 evaluations", steps=steps, most=extent.most, bound=MOST_EVALUATIONS, mean=extent.total / steps)


def lines_of(function, *arguments):
    """Lines of Python that a call executes, and what it returns."""
    count = 0

    def trace(_frame, event, _argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function(*arguments)
    finally:
        sys.settrace(before)
    return count, result


def test_the_work_of_a_stops_closed_form_is_bounded():
    """2 a_max / D turns at most, and a_max / D <= MAX_RAMP_TICKS by the check of the robot file."""
    rng = np.random.default_rng(8)
    most = 0
    for _ in range(3_000):
        acceleration = rng.uniform(1.0, 60.0)
        step = acceleration / MAX_RAMP_TICKS * (1 + 1e-9)
        v = rng.choice([rng.uniform(-5, 5), rng.uniform(-1e9, 1e9), 0.0, 1e-300])
        a = acceleration * rng.choice([-1.0, 1.0, rng.uniform(-1, 1), 0.0])
        lines, _ = lines_of(braking.stop_extent, float(v), float(a), acceleration, step, T)
        most = max(most, lines)
    per_turn, fixed = 11, 40
    assert most <= per_turn * (2 * MAX_RAMP_TICKS + 1) + fixed
    report("7 stop_extent", most_lines=most, bound=per_turn * (2 * MAX_RAMP_TICKS + 1) + fixed)


@pytest.mark.parametrize("ticks", [2_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_the_lines_of_a_tick_are_bounded(ticks):
    """Lines of Python per tick of the whole motor loop: the same bound for any input."""
    worst = lines = 0.0
    for seed, robot, rule, count in days(ticks):
        day = Day(90_000 + seed, robot, rule, keep=False)
        # Each evaluation is at most 11 lines per turn of the closed form and some around it.
        per_joint = MOST_EVALUATIONS * (11 * (2 * MAX_RAMP_TICKS + 1) + 60) + 200
        bound = 2_000 + len(day.limits) * per_joint
        serve, most = day.motor.loop.serve, 0

        def counted(*arguments, serve=serve):
            nonlocal most
            executed, done = lines_of(serve, *arguments)
            most = max(most, executed)
            return done

        day.motor.loop.serve = counted
        for _ in range(count):
            day.tick()
        assert most <= bound
        worst, lines = max(worst, most / bound), max(lines, most / len(day.limits))
    report("7 lines", ticks=ticks, most_per_joint=lines, worst_of_bound=worst)


def growth(rules, traced, further):
    """Bytes traced by tracemalloc over ``traced`` ticks, blocks of the interpreter over ``further`` ones, per rule, and
    objects in reference cycles that they left. The garbage collector is off, as in the motor process: what reference
    counts do not free stays for good."""
    robot, grown, blocks, alive = random_limits(np.random.default_rng(3)), [], [], []
    quiet_day("speed_ramp", robot, 500)
    gc.collect()
    gc.disable()
    fill_free_lists()
    try:
        for rule in rules:
            day = quiet_day(rule, robot, 300)
            alive.append(day)
            tracemalloc.start()
            first = tracemalloc.get_traced_memory()[0]
            for _ in range(traced):
                day.tick()
            grown.append(tracemalloc.get_traced_memory()[0] - first)
            tracemalloc.stop()
            before = sys.getallocatedblocks()
            for _ in range(further):
                day.tick()
            blocks.append(sys.getallocatedblocks() - before)
        return grown, blocks, gc.collect()
    finally:
        tracemalloc.stop()
        gc.enable()


# What one tick holds and another does not: a chunk record of 4 kB, a few floats; blocks: the interpreter's own caches.
# A leak of one object in 300 ticks is more than that in the long run.
MOST_BYTES, MOST_BLOCKS, MOST_UNREACHABLE = 16_000, 500, 10


@pytest.mark.parametrize("ticks", SIZES)
def test_memory_does_not_grow(ticks):
    """tracemalloc, exact and slow, over the first 10^4 ticks; the interpreter's own count of blocks over all others."""
    rules = rule_names()
    grown, blocks, unreachable = growth(rules, 10_000 // len(rules) + 1, (ticks - 10_000) // len(rules))
    assert max(grown) < MOST_BYTES and max(blocks) < MOST_BLOCKS and unreachable < MOST_UNREACHABLE, (
        grown, blocks, unreachable)
    report("7 memory", ticks=max(ticks, 10_000), traced_bytes=grown, blocks=blocks, unreachable=unreachable)


@pytest.mark.parametrize("what", ["float", "cycle"])
def test_a_leak_per_tick_is_found(monkeypatch, what):
    leak, real = [], MotorLoop._obey

    def leaky(self, *arguments):
        if what == "float":
            leak.append(float(len(leak)))
        else:
            loop = []
            loop.append(loop)
        real(self, *arguments)

    monkeypatch.setattr(MotorLoop, "_obey", leaky)
    grown, blocks, unreachable = growth(["speed_ramp"], 1_000, 0)
    assert max(grown) > MOST_BYTES
    assert unreachable > MOST_UNREACHABLE or what == "float"


def fill_free_lists():
    """CPython keeps up to 2000 freed tuples of each small size. That is no leak, but until it is full it looks like one."""
    kept = [tuple([None] * size) for size in range(1, 21) for _ in range(2_000)]
    kept += [0.5 * number for number in range(200)]
    del kept


def quiet_day(rule, robot, ticks):
    """A day that keeps no notes of its own, some ticks old."""
    day = Day(1, robot, rule, keep=False)
    day.motor.measured = Nothing()
    for _ in range(ticks):
        day.tick()
    return day


class Nothing(dict):
    """Forgets: the harness must not grow where the loop is watched for growth."""

    def __setitem__(self, key, value):
        pass


class Ears:
    """Hears everything that the interpreter does towards the outside while ``listening``."""

    FORBIDDEN = ("open", "os.", "socket.", "subprocess.", "import", "compile", "exec", "mmap.", "fcntl.", "shutil.",
                 "signal.", "time.sleep", "select.", "ctypes.", "_thread.", "sqlite3.", "tempfile.", "glob.")
    installed = None

    def __init__(self):
        self.listening, self.heard = False, []
        sys.addaudithook(self.hear)

    def hear(self, event, _arguments):
        if self.listening and event.startswith(self.FORBIDDEN):
            self.heard.append(event)


def ears():
    """An audit hook cannot be taken off again, so there is one for all."""
    Ears.installed = Ears.installed or Ears()
    return Ears.installed


def loud(name):
    def speak(*_arguments, **_keywords):
        raise AssertionError(f"{name} within a tick")

    return speak


def listen(monkeypatch, ticks, seed=0, spy=None):
    """Days whose ticks must be silent; returns the events heard."""
    hear = ears()
    hear.heard.clear()
    for day_seed, robot, rule, count in days(ticks):
        day = Day(95_000 + seed + day_seed, robot, rule, keep=False)
        serve = day.motor.loop.serve

        def silent(*arguments, serve=serve):
            with monkeypatch.context() as patch:
                patch.setattr(logging.Logger, "_log", loud("logging"))
                patch.setattr(builtins, "print", loud("print"))
                patch.setattr(sys.stdout, "write", loud("stdout"), raising=False)
                patch.setattr(sys.stderr, "write", loud("stderr"), raising=False)
                hear.listening = True
                try:
                    if spy is not None:
                        spy()
                    return serve(*arguments)
                finally:
                    hear.listening = False

        day.motor.loop.serve = silent
        for _ in range(count):
            day.tick()
    return list(hear.heard)


@pytest.mark.parametrize("ticks", [10_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_a_tick_does_no_io_and_logs_nothing(monkeypatch, ticks):
    assert listen(monkeypatch, ticks) == []
    report("7 silence", ticks=ticks)


@pytest.mark.parametrize("spy", [lambda: logging.getLogger("x").warning("y"), lambda: print("x"),
                                 lambda: sys.stderr.write("x")])
def test_words_within_a_tick_are_found(monkeypatch, spy):
    with pytest.raises(AssertionError, match="within a tick"):
        listen(monkeypatch, 10, spy=spy)


def test_a_file_opened_within_a_tick_is_found(monkeypatch, tmp_path):
    (tmp_path / "x").touch()
    assert "open" in listen(monkeypatch, 10, spy=lambda: (tmp_path / "x").read_text())
