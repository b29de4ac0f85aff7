"""Invariant 6: what is malformed, stale, from the future or from elsewhere is refused, counted and named; what is well
formed is accepted. A refused chunk changes nothing; the shield acts on its absence.

The oracle below says in plain loops what is wrong with a chunk; gate, queue and motor loop are held against it.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import ROBOTS, SIZES, T_NS, Motor, T, random_limits, report

from vla_edge.core.chunk import REJECTS, ActionChunk, ChunkGate, GateConfig, Reject
from vla_edge.core.motor_loop import OFFER_ACCEPTED, OFFER_REFUSED
from vla_edge.core.shield import State

CONFIG = GateConfig()
MAX_AGE_NS, FUTURE_NS, TOLERANCE, LONGEST = 1_000_000_000, 5_000_000, 0.25, 64


def wrong_with(chunk, limits, newest, not_before, next_tick, now_ns):
    """Every reason against a chunk, as the documentation states them."""
    wrong = set()
    rows = chunk.positions
    if rows.ndim != 2 or rows.shape[1] != len(limits):
        return {Reject.WIDTH}
    if len(rows) < 1 or len(rows) > LONGEST:
        wrong.add(Reject.HORIZON)
    if list(chunk.names) != list(limits.names):
        wrong.add(Reject.JOINT_NAMES)
    if math.isnan(chunk.period_s) or abs(chunk.period_s - T) > 1e-9:
        wrong.add(Reject.PERIOD)
    for row in rows.tolist():
        for q, lower, upper in zip(row, limits.position_lower.tolist(), limits.position_upper.tolist(), strict=True):
            if not math.isfinite(q):
                wrong.add(Reject.NOT_FINITE)
            elif q < lower - TOLERANCE or q > upper + TOLERANCE:
                wrong.add(Reject.OUTSIDE_LIMITS)
    if chunk.observation_stamp_ns > now_ns + FUTURE_NS:
        wrong.add(Reject.FUTURE_STAMP)
    if chunk.observation_stamp_ns < now_ns - MAX_AGE_NS:
        wrong.add(Reject.STALE)
    if chunk.base_tick >= next_tick:
        wrong.add(Reject.FUTURE_TICK)
    if chunk.base_tick < not_before:
        wrong.add(Reject.BEFORE_REARM)
    if newest is not None and (chunk.base_tick < newest.base_tick or
                               (chunk.session == newest.session and chunk.sequence <= newest.sequence)):
        wrong.add(Reject.OLDER)
    if len(rows) and chunk.base_tick + len(rows) < next_tick:
        wrong.add(Reject.ALL_PAST)
    return wrong


def good_fields(rng, limits, newest, not_before, next_tick, now_ns):
    """A chunk that is right in every respect, often only just."""
    horizon = int(rng.integers(1, 7)) if rng.random() < 0.8 else int(rng.choice([1, LONGEST, rng.integers(1, LONGEST)]))
    oldest = max(not_before, next_tick - horizon, -2**62 if newest is None else newest.base_tick)
    base = int(rng.choice([oldest, next_tick - 1, int(rng.integers(min(oldest, next_tick - 1), next_tick))]))
    lower, upper = limits.position_lower - TOLERANCE, limits.position_upper + TOLERANCE
    rows = rng.uniform(lower, upper, (horizon, len(limits)))
    if rng.random() < 0.3:
        rows[rng.integers(horizon)] = rng.choice([lower, upper])
    is_new_session = newest is None or rng.random() < 0.1
    return {"session": f"s{rng.integers(10**6)}" if is_new_session else newest.session,
            "sequence": int(rng.integers(1, 100)) if is_new_session else newest.sequence + int(rng.integers(1, 1000)),
            "base_tick": base, "period_s": T + float(rng.choice([0.0, 0.9e-9, -0.9e-9])), "names": limits.names,
            "observation_stamp_ns": now_ns - int(rng.choice([-FUTURE_NS, 0, MAX_AGE_NS, int(rng.integers(MAX_AGE_NS))])),
            "positions": rows}


def bad_number(rng):
    return float(rng.choice([np.nan, np.inf, -np.inf, 1e300, -1e300, 50.0, 5e-324]))


def break_width(rng, f, *_):
    rows = f["positions"]
    f["positions"] = [rows[:, :-1], np.hstack([rows, rows[:, :1]]), rows[0], rows[:, :, None],
                      np.zeros((len(rows), 0))][rng.integers(5)]


def break_horizon(rng, f, *_):
    rows = f["positions"]
    f["positions"] = rows[:0] if rng.random() < 0.5 else np.vstack([rows] * (LONGEST // len(rows) + 1))


def break_names(rng, f, *_):
    names = list(f["names"])
    if not names:
        return
    kind = rng.integers(5)
    if kind == 0 and len(names) > 1:
        names[0], names[-1] = names[-1], names[0]
    elif kind == 1:
        names[rng.integers(len(names))] += str(rng.choice(["x", " ", "\x00", "é"]))
    elif kind == 2:
        names = names[:-1]
    elif kind == 3:
        names.append(names[0])
    else:
        names[rng.integers(len(names))] = ""
    f["names"] = tuple(names)


def break_period(rng, f, *_):
    f["period_s"] = float(rng.choice([np.nan, np.inf, -np.inf, 0.0, -T, 2 * T, T + 1.2e-9, T - 1.2e-9, 1e-320]))


def break_number(rng, f, *_):
    f["positions"] = f["positions"].copy()
    f["positions"].flat[rng.integers(f["positions"].size)] = bad_number(rng)


def break_stamp(rng, f, now_ns, *_):
    f["observation_stamp_ns"] = now_ns + int(rng.choice([FUTURE_NS + 1, 10**9, 2**62 - now_ns, -MAX_AGE_NS - 1,
                                                         -now_ns, -2**62]))


def break_tick(rng, f, now_ns, next_tick):
    f["base_tick"] = next_tick + int(rng.choice([0, 1, 100, 2**60, -66, -200, -2**60]))


def break_order(rng, f, *_):
    f["base_tick"] -= int(rng.integers(1, 70))
    if rng.random() < 0.5:
        f["sequence"] = int(rng.integers(1, 5))


BREAKS = [break_width, break_horizon, break_names, break_period, break_number, break_stamp, break_tick, break_order]


class Tally:
    def __init__(self):
        self.accepted, self.refused, self.by_name, self.wrong_ways = 0, 0, dict.fromkeys(REJECTS, 0), 0

    def count(self, reject, faults):
        if reject is None:
            self.accepted += 1
            assert not faults
        else:
            self.refused += 1
            self.by_name[reject] += 1
            self.wrong_ways += len(faults) > 1


def check_gate(seed, chunks, tally, breaks=BREAKS, make_gate=ChunkGate):
    """One gate under a stream of chunks, right ones and wrong ones, while ticks and re-arms go by."""
    rng = np.random.default_rng(seed)
    robots = list(ROBOTS.values())
    limits = robots[seed] if seed < len(robots) else random_limits(rng, int(rng.integers(1, 9)))
    gate, now_ns, next_tick, not_before = make_gate(limits, T), int(rng.integers(2 * 10**9, 10**15)), 100, -2**62
    for _ in range(chunks):
        step = int(rng.choice([0, 1, 5]))
        next_tick, now_ns = next_tick + step, now_ns + step * T_NS
        if rng.random() < 0.01:
            not_before = next_tick - 1
            gate.restart(not_before)
        before = gate.newest
        fields = good_fields(rng, limits, before, not_before, next_tick, now_ns)
        for _ in range(int(rng.choice([0, 1, 1, 2, 3]))):
            breaks[rng.integers(len(breaks))](rng, fields, now_ns, next_tick)
            if fields["positions"].ndim != 2 or not fields["positions"].size:
                break
        chunk = ActionChunk(**fields)
        faults = wrong_with(chunk, limits, before, not_before, next_tick, now_ns)
        reject = gate.admit(chunk, next_tick, now_ns)
        if reject is None:
            assert not faults, f"accepted although {faults}"
            assert gate.newest is chunk
        else:
            assert reject in faults, f"refused as {reject}, but what is wrong is {faults or 'nothing'}"
            assert gate.newest is before, "a refused chunk became the newest"
        tally.count(reject, faults)


@pytest.mark.parametrize("chunks", SIZES)
def test_the_gate_agrees_with_the_rules(chunks):
    tally = Tally()
    for seed in range(chunks // 500):
        check_gate(seed, 500, tally)
    assert tally.accepted > chunks / 10 and tally.refused > chunks / 3 and tally.wrong_ways > chunks / 20
    assert all(count > 0 for name, count in tally.by_name.items() if name is not Reject.GAP), tally.by_name
    report("6 gate", chunks=chunks, accepted=tally.accepted, refused=tally.refused,
           **{name.value: count for name, count in tally.by_name.items()})


@pytest.mark.parametrize("check", ["_check_form", "_check_time"])
def test_a_gate_that_does_not_look_is_found(check):
    blind = type("Blind", (ChunkGate,), {check: lambda *_: None})
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(20):
            check_gate(seed, 500, Tally(), make_gate=blind)


def test_a_gate_that_refuses_everything_is_found():
    with pytest.raises(AssertionError, match="refused as"):
        check_gate(0, 500, Tally(), make_gate=type("Deaf", (ChunkGate,), {"_check_form": lambda *_: Reject.PERIOD}))


# ------------------------------------------------------------------ through shared memory and the motor loop


def flip_bits(rng, record):
    """A record with a few bits changed anywhere, but with a correct checksum: a producer gone mad."""
    raw = bytearray(record.tobytes())
    for _ in range(int(rng.integers(1, 6))):
        raw[rng.integers(len(raw))] ^= 1 << int(rng.integers(8))
    return bytes(raw)


def check_loop(seed, ticks, tally):
    rng = np.random.default_rng(seed)
    robots = list(ROBOTS.values())
    limits = robots[seed] if seed < len(robots) else random_limits(rng, int(rng.integers(1, 4)))
    motor = Motor(limits, keep=False).armed()
    gate, queue, breaks = motor.loop._gate, motor.loop._queue, [b for b in BREAKS if b is not break_width]
    rearmed_at = motor.tick - 1
    for _ in range(ticks):
        if motor.shield.state in (State.HOLDING, State.BRAKING):
            motor.measure(motor.shield.position)
            motor.event("rearm")
            was_braking = motor.shield.state is State.BRAKING
            motor.serve()
            rearmed_at = rearmed_at if was_braking or motor.shield.state is State.HOLDING else motor.tick - 1
            continue
        late_ns = int(rng.integers(T_NS))
        now_ns = motor.start_ns + motor.tick * T_NS + late_ns
        before = gate.newest
        fields = good_fields(rng, limits, before, rearmed_at, motor.tick, now_ns)
        for _ in range(int(rng.choice([0, 0, 1, 2]))):
            breaks[rng.integers(len(breaks))](rng, fields, now_ns, motor.tick)
            if len(fields["names"]) != len(limits) or not 1 <= len(fields["positions"]) <= LONGEST:
                fields["names"], fields["positions"] = limits.names, np.zeros((0, len(limits)))
                break
        fields["session"] = fields["session"][:16]
        if any(len(name.encode()) > 32 for name in fields["names"]):
            continue
        chunk = ActionChunk(**fields)
        motor.offer(chunk)
        if rng.random() < 0.2:
            motor.memory.rings["chunk"].write(flip_bits(rng, motor._chunk))
        elif rng.random() < 0.02:
            motor.memory.rings["chunk"].write(rng.bytes(motor._chunk.nbytes))
        # What the loop will read, judged by the oracle.
        chunk = motor.loop._reader.chunk(motor.memory.read("chunk")[1])
        faults = wrong_with(chunk, limits, before, rearmed_at, motor.tick, now_ns)
        counts, plan = motor.motor_record(), (queue.first_tick, queue.last_tick)
        motor.serve(late_ns)
        after = motor.motor_record()
        row = motor.logged()[-1]
        accepted, refused = int(after["accepted"] - counts["accepted"]), after["rejects"] - counts["rejects"]
        if faults:
            assert accepted == 0 and refused.sum() == 1, (faults, accepted)
            name = REJECTS[int(np.argmax(refused))]
            assert name in faults and int(row["offered_verdict"]) == OFFER_REFUSED + REJECTS.index(name)
            assert gate.newest is before and (queue.first_tick, queue.last_tick) == plan, "a refused chunk left a trace"
        else:
            assert accepted == 1 and not refused.any() and int(row["offered_verdict"]) == OFFER_ACCEPTED
            name = None
        assert int(row["offered_sequence"]) == chunk.sequence
        assert np.isfinite(motor.shield.position).all()
        tally.count(name, faults)


@pytest.mark.parametrize("ticks", [3_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_the_motor_loop_refuses_counts_and_names(ticks):
    tally = Tally()
    runs = max(6, ticks // 2_000)
    for seed in range(runs):
        check_loop(seed, ticks // runs, tally)
    assert tally.accepted > ticks / 20 and tally.refused > ticks / 20
    report("6 loop", ticks=ticks, accepted=tally.accepted, refused=tally.refused,
           **{name.value: count for name, count in tally.by_name.items()})


def test_without_good_chunks_the_robot_stops():
    """Only wrong ones, every tick: the shield acts on the absence."""
    for seed, change in enumerate([{"period_s": 0.02}, {"names": ("x",)}, {"observation_stamp_ns": 0}, {"base_tick": 0},
                                   {"positions": np.full((16, 1), np.nan)}]):
        motor = Motor(random_limits(np.random.default_rng(seed), 1)).armed()
        start = motor.shield.position.copy()
        for _ in range(12):
            motor.offer(motor.good_chunk(np.tile(motor.shield.position, (16, 1)) + 1e-4))
            motor.serve()
        assert motor.shield.state is State.NOMINAL and (motor.shield.position != start).any()
        for _ in range(120):
            motor.offer(motor.good_chunk(**{"positions": np.tile(motor.shield.position, (16, 1)), **change}))
            motor.serve()
        assert motor.shield.state is State.HOLDING and sum(motor.rejects().values()) > 10


def test_a_chunk_that_would_leave_a_gap_leaves_no_trace():
    """Where chunks may start ahead of the last command, the queue refuses what the gate cannot: a gap in the plan."""
    limits = next(iter(ROBOTS.values()))
    motor = Motor(limits, gate=GateConfig(max_lead_ticks=10)).armed()
    rows = np.tile(motor.shield.position, (4, 1))
    motor.offer(motor.good_chunk(rows))
    motor.serve()
    newest = motor.loop._gate.newest
    motor.offer(motor.good_chunk(rows, base_tick=motor.tick + 8))
    motor.serve()
    assert motor.rejects() == {Reject.GAP: 1} and motor.loop._gate.newest is newest
    motor.offer(motor.good_chunk(rows))
    motor.serve()
    assert motor.rejects() == {Reject.GAP: 1} and int(motor.motor_record()["accepted"]) == 2
