"""What the seven proofs share: random robots, a motor loop in memory of its own, random inputs, figures to report.

Every proof runs in two sizes from the same code: SIZES gives 10^4 by default and 10^6 under ``-m slow``.
"""

import json
import os
import random
import typing
from pathlib import Path

import numpy as np
import pytest

from vla_common.clock import SteppedClock
from vla_common.process import StopFlag
from vla_edge.child import Child
from vla_edge.config import EdgeConfig, EnsembleConfig, load_limits
from vla_edge.core.chunk import REJECTS, ActionChunk, GateConfig
from vla_edge.core.joint_limits import MAX_RAMP_TICKS, JointLimits
from vla_edge.core.records import MAX_HORIZON, EdgeMemory, fill_chunk
from vla_edge.core.shield import ShieldConfig, State
from vla_edge.core.trace import COLUMNS, Trace, tick_dtype
from vla_edge.motor_main import build_loop

T, T_NS = 0.01, 10_000_000
ROOT = Path(__file__).resolve().parents[3]
ROBOTS = {path.stem: load_limits(path, T) for path in sorted((ROOT / "config/robots").glob("*.yaml"))}
SIZES = [pytest.param(10_000, id="1e4"), pytest.param(1_000_000, id="1e6", marks=pytest.mark.slow)]


def rule_names():
    """Every merge rule that the configuration knows."""
    return typing.get_args(typing.get_type_hints(EnsembleConfig)["rule"])


def report(proof, **figures):
    """Print the figures of a proof; with VLA_PROOFS=FILE append them there as a line of JSON."""
    line = json.dumps({"proof": proof, **figures}, default=float)
    print(line)
    if os.environ.get("VLA_PROOFS"):
        with open(os.environ["VLA_PROOFS"], "a", encoding="utf-8") as file:
            file.write(line + "\n")


def ramps(rng, count):
    """Ticks from zero to full acceleration: jerk that never binds, that binds at once, and the slowest allowed."""
    edges = np.array([0.05, 0.5, 1.0, 1.0 + 1e-9, 2.0, MAX_RAMP_TICKS - 1e-6])
    return np.where(rng.random(count) < 0.3, rng.choice(edges, count), rng.uniform(0.3, MAX_RAMP_TICKS - 1e-6, count))


def random_limits(rng, joints=2):
    """Anything from a range of a millimetre-sized joint to six radians, from soft to stiff."""
    tiny = rng.random(joints) < 0.1
    lower = -np.where(tiny, rng.uniform(5e-4, 5e-3, joints), rng.uniform(0.05, 3.0, joints))
    upper = np.where(tiny, rng.uniform(5e-4, 5e-3, joints), rng.uniform(0.05, 3.0, joints))
    acceleration = rng.uniform(1.0, 60.0, joints)
    return JointLimits(tuple(f"j{i}" for i in range(joints)), lower, upper, rng.uniform(0.3, 5.0, joints), acceleration,
                       acceleration / ramps(rng, joints) / T, np.zeros(joints), np.full(joints, 0.05))


def random_states(count, rng):
    """(v, a, velocity, acceleration, jerk), float64[count] each; values dense near zero and at the bounds."""
    acceleration, velocity = rng.uniform(1.0, 60.0, count), rng.uniform(0.3, 5.0, count)
    jerk = acceleration / ramps(rng, count) / T
    dense = np.array([-1.0, -1.0 + 1e-12, -0.5, -1e-12, 0.0, 1e-12, 0.5, 1.0 - 1e-12, 1.0])

    def shares():
        return np.where(rng.random(count) < 0.3, rng.choice(dense, count), rng.uniform(-1, 1, count))

    return shares() * velocity, shares() * acceleration, velocity, acceleration, jerk


class PausingClock(SteppedClock):
    """Jumps to deadlines; with ``pause_ns`` set, the next reading finds that the process was stopped meanwhile."""

    pause_ns = 0

    def monotonic_ns(self):
        if self.pause_ns:
            self.pause_ns, pause_ns = 0, self.pause_ns
            self.advance_ns(pause_ns)
        return super().monotonic_ns()


class Motor:
    """The motor process without the process: its loop as :func:`build_loop` makes it, on a clock that jumps.

    Attributes:
        sent: (stamp_ns, position, velocity) of every command. log: what was logged, as drained by :meth:`logged`.
    """

    def __init__(self, limits, rule="speed_ramp", ramp_ticks=5, shield=None, gate=None, keep=True):
        self.limits, self.keep = limits, keep
        self.config = EdgeConfig(ensemble=EnsembleConfig(rule=rule, ramp_ticks=ramp_ticks), gate=gate or GateConfig(),
                                 shield=shield or ShieldConfig(first_chunk_ticks=8))
        self.clock = PausingClock(1_000 * T_NS)
        self.start_ns, self.tick, self.missed = 1_000 * T_NS, 0, 0
        self.memory = EdgeMemory.private(len(limits))
        self.sent, self.chunks, self.measured, self._logged = [], [], {}, 0
        self.loop = build_loop(Child(self.config, self.memory, limits, self.clock, StopFlag()), self._send, "proof")
        self._joints, self._control = self.memory.blank("joints"), self.memory.blank("control")
        self._chunk = self.memory.blank("chunk")
        self.sequence = 0

    def _send(self, stamp_ns, position, velocity):
        if self.keep:
            self.sent.append((stamp_ns, position.copy(), velocity.copy()))

    @property
    def shield(self):
        return self.loop.shield

    @property
    def now_ns(self):
        return self.clock.monotonic_ns()

    def measure(self, position, stamp_ns=None):
        """A joint state as the io process would pass it on: stamps only ever grow."""
        stamp_ns = self.now_ns if stamp_ns is None else stamp_ns
        if stamp_ns <= self._joints["stamp_ns"]:
            return
        self._joints["position"], self._joints["stamp_ns"] = position, stamp_ns
        self.measured[int(self._joints["stamp_ns"])] = np.array(position, dtype=np.float64)
        self.memory.write("joints", self._joints)

    def event(self, name):
        self._control[name] += 1
        self.memory.write("control", self._control)

    def estop_input(self, pressed):
        self._control["presses"] += int(pressed and not self._control["pressed"])
        self._control["pressed"], self._control["heard_ns"] = pressed, self.now_ns
        self.memory.write("control", self._control)

    def good_chunk(self, positions, **changes):
        """A chunk as the policy would make it from the last command."""
        self.sequence += 1
        fields = {"session": "s", "sequence": self.sequence, "base_tick": self.tick - 1,
                  "observation_stamp_ns": self.now_ns - 50_000_000, "period_s": T, "names": self.limits.names,
                  "positions": positions}
        return ActionChunk(**{**fields, **changes})

    def offer(self, chunk):
        if self.keep:
            self.chunks.append(chunk)
        fill_chunk(self._chunk, chunk)
        self.memory.write("chunk", self._chunk)

    def serve(self, lateness_ns=50_000, skip=0, pause_ns=0):
        """The next tick, or the one ``skip`` ticks later; ``pause_ns``: stopped for so long within the tick."""
        following = max(self.tick, (self.now_ns - self.start_ns) // T_NS + 1) + skip
        self.missed += following - self.tick
        self.tick = following
        deadline_ns = self.start_ns + self.tick * T_NS
        self.woke_ns = deadline_ns + lateness_ns
        self.clock.sleep_until_ns(self.woke_ns)
        self.clock.pause_ns = pause_ns
        done = self.loop.serve(self.tick, deadline_ns, self.woke_ns, self.missed)
        self.tick += 1
        return done

    def begin(self, pose=None):
        """Seen and holding, not armed."""
        self.measure(self.limits.ready if pose is None else pose)
        self.serve()
        return self

    def armed(self, pose=None):
        self.begin(pose)
        self.measure(self.shield.position)
        self.event("rearm")
        self.serve()
        return self

    def motor_record(self):
        return self.memory.read("motor")[1]

    def rejects(self):
        return {reject: int(n) for reject, n in zip(REJECTS, self.motor_record()["rejects"], strict=True) if n}

    def logged(self):
        """Log records since the last call, a structured array."""
        self._logged, records, lost = self.memory.ticks.drain(self._logged, 2**30)
        assert lost == 0
        return np.frombuffer(b"".join(records), dtype=self.memory.dtypes["ticks"])


def trace_of(motor):
    """What a recording of this motor loop would hold."""
    logged = motor.logged()
    ticks = np.zeros(len(logged), tick_dtype(len(motor.limits)))
    for name in COLUMNS:
        ticks[name] = logged[name]
    ticks["command"] = logged["position"]
    return Trace(ticks, motor.start_ns, T_NS, tuple(motor.chunks), motor.measured,
                 {stamp: (q, v) for stamp, q, v in motor.sent})


def random_rows(rng, limits, position, tolerance=0.2):
    """Positions of a chunk, float64[H, n]: jumps, ramps beyond the limits, smooth motion, noise, standing on a limit."""
    lower, upper = limits.position_lower, limits.position_upper
    span, joints = upper - lower, len(limits)
    horizon = (1, 2, 3, 16, MAX_HORIZON, int(rng.integers(1, MAX_HORIZON + 1)))[rng.integers(6)]
    steps = np.arange(1, horizon + 1).reshape(-1, 1)
    kind = rng.integers(7)
    start = rng.uniform(lower - 0.1 * span, upper + 0.1 * span)
    if kind == 0:
        rows = start + 0 * steps
    elif kind == 1:
        rows = position + steps * T * rng.uniform(-1.5, 1.5, joints) * limits.velocity
    elif kind == 2:
        rows = 0.5 * (lower + upper) + 0.5 * span * np.sin(steps * rng.uniform(0.005, 0.3) + start)
    elif kind == 3:
        rows = start + rng.normal(size=(horizon, joints)) * 0.02 * span
    elif kind == 4:
        rows = np.where(rng.random(joints) < 0.5, lower, upper) + 0 * steps
    elif kind == 5:
        rows = position + 0 * steps
    else:
        rows = position + 0.3 * span * (1 - np.cos(steps * rng.uniform(0.005, 0.1))) * rng.uniform(-1, 1, joints)
    return np.clip(rows, lower - tolerance, upper + tolerance)


def spoil(rng, motor, chunk):
    """The chunk with one thing wrong, or old, or from elsewhere."""
    fields = dict(chunk.__dict__)
    kind = rng.integers(9)
    if kind == 0:
        rows = fields["positions"].copy()
        rows[rng.integers(len(rows)), rng.integers(rows.shape[1])] = rng.choice([np.nan, np.inf, -np.inf, 1e300])
        fields["positions"] = rows
    elif kind == 1:
        fields["names"] = tuple(rng.permutation([*fields["names"][1:], "other"]).tolist())
    elif kind == 2:
        fields["base_tick"] += int(rng.choice([-100, -40, -16, -5, 1, 2, 1000, 2**40]))
    elif kind == 3:
        fields["observation_stamp_ns"] += int(rng.choice([-10**10, -10**9, 10**9, 10**12]))
    elif kind == 4:
        fields["period_s"] = float(rng.choice([0.0, 0.02, np.nan, -0.01]))
    elif kind == 5:
        fields["sequence"] = max(1, motor.sequence - int(rng.integers(1, 5)))
    elif kind == 6:
        fields["session"] = str(rng.choice(["", "another", "\x00"]))
    elif kind == 7:
        fields["positions"] = fields["positions"][:0]
    else:
        fields["base_tick"] -= int(rng.integers(1, 12))  # late: a part of it is past
    return ActionChunk(**fields)


class Day:
    """A motor loop under everything at once, tick by tick: chunks good and bad, outages, stops, re-arms, missed ticks."""

    def __init__(self, seed, limits=None, rule=None, keep=True):
        rng = np.random.default_rng(seed)
        self.rng, self.dice = rng, random.Random(seed)
        self.limits = limits if limits is not None else random_limits(rng, int(rng.integers(1, 4)))
        rule = rule or str(rng.choice(rule_names()))
        self.motor = Motor(self.limits, rule, int(rng.choice([1, 2, 5, 8, 16])), keep=keep)
        lower, upper = self.limits.position_lower, self.limits.position_upper
        self.motor.begin(rng.choice([lower, upper, rng.uniform(lower, upper)]))
        self.outage = 0

    def tick(self):
        """One tick with random inputs."""
        dice, motor = self.dice, self.motor
        if dice.random() < 0.9:
            self._measure()
        if dice.random() < 0.004:
            motor.event("estop")
        if dice.random() < (0.2 if motor.shield.state is State.HOLDING else 0.003):
            motor.event("rearm")
        if dice.random() < 0.003:
            motor.estop_input(dice.random() < 0.3)
        if self.outage:
            self.outage -= 1
        elif dice.random() < 0.004:
            self.outage = dice.randrange(20, 90)
        elif dice.random() < 0.25:
            chunk = motor.good_chunk(random_rows(self.rng, self.limits, motor.shield.position))
            motor.offer(spoil(self.rng, motor, chunk) if dice.random() < 0.15 else chunk)
        late = dice.choice((0, 1, 100_000, T_NS - 1, dice.randrange(T_NS)))
        # Stopped for up to a quarter of a second, between two ticks or within one: shorter and longer than a stall.
        skip = dice.choice((1, 2, 5, 9, 10, 11, 25)) if dice.random() < 0.01 else 0
        pause_ns = dice.randrange(1, 25 * T_NS) if dice.random() < 0.003 else 0
        motor.serve(late, skip, pause_ns)

    def _measure(self):
        rng, motor, limits = self.rng, self.motor, self.limits
        if self.dice.random() < 0.1:  # moved by hand, or lost
            position = rng.uniform(limits.position_lower - 0.05, limits.position_upper + 0.05)
        else:
            position = motor.shield.position + rng.normal(size=len(limits)) * 0.002
        motor.measure(position, motor.now_ns - self.dice.choice((0, 10_000_000, 90_000_000, 200_000_000)))


def days(total):
    """Seeds and sizes that make ``total`` ticks: every robot file and every rule first, random robots after that."""
    per_day = 200 if total < 100_000 else 1_000
    robots, rules = list(ROBOTS.values()), rule_names()
    given = [(robot, rule) for robot in robots for rule in rules]
    for index in range(-(-total // per_day)):
        robot, rule = given[index] if index < len(given) else (None, None)
        if index >= len(given) and index % 10 == 0:  # and now and then again, under other inputs
            robot = robots[index // 10 % len(robots)]
        yield index, robot, rule, min(per_day, total - index * per_day)
