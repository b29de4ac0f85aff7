"""Replay of recorded motor loops: identical where nothing changed, exact about where something did, honest about gaps."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "property" / "invariants"))

from harness import ROBOTS, T_NS, Day, Motor, trace_of

from vla_cli.replay_main import loop_maker
from vla_common.messages import new
from vla_common.wire import make_header
from vla_edge.core import tracking
from vla_edge.core.chunk import ActionChunk
from vla_edge.core.replay import replay
from vla_edge.core.shield import Reason, State
from vla_edge.core.trace import COLUMNS, ChunkShelf, TraceBuilder, TraceError, cut, tick_dtype


def recorded(seed, ticks=400):
    day = Day(seed)
    for _ in range(ticks):
        day.tick()
    return trace_of(day.motor), loop_maker(day.motor.config, day.limits)


def test_anything_is_replayed_bit_by_bit():
    """Outages, stops, re-arms, stalls between and within ticks, bad chunks: under every kind of merge rule."""
    states, segments = set(), 0
    for seed in range(25):
        trace, make_loop = recorded(seed)
        result = replay(trace, make_loop)
        assert result.identical and result.begun == 1 and result.unknown == 1 and result.lost == 0, (seed, result)
        assert result.compared == result.published == len(trace.ticks) - 1
        assert result.missed == int(trace.ticks["missed"][-1] - trace.ticks["missed"][0])
        states |= set(result.states)
        segments += int(trace.ticks["segment"][-1])
    assert states == {state.name for state in State} and segments > 50


def test_a_replay_from_any_holding_tick_is_the_same():
    trace, make_loop = recorded(3)
    holding = trace.ticks["tick"][trace.ticks["state"] == State.HOLDING]
    for tick in holding[::9]:
        part = dataclasses.replace(trace, ticks=trace.ticks[trace.ticks["tick"] >= tick])
        assert (result := replay(part, make_loop)).identical or result.recorded == 1, (tick, result)


def test_lost_ticks_are_counted_and_not_guessed():
    trace, make_loop = recorded(4, 800)
    state = trace.ticks["state"]
    moving = int(np.flatnonzero(state == State.NOMINAL)[5])
    again = moving + 2 + int(np.argmax(state[moving + 2:] == State.HOLDING))
    absent = int(trace.ticks["tick"][moving + 2] - trace.ticks["tick"][moving - 1] - 1
                 - (trace.ticks["missed"][moving + 2] - trace.ticks["missed"][moving - 1]))
    gappy = dataclasses.replace(trace, ticks=np.delete(trace.ticks, slice(moving, moving + 2)))
    result = replay(gappy, make_loop)
    assert result.identical and result.lost == absent == 2 and result.begun == 2
    assert result.unknown == 1 + (again - (moving + 2) + 1)


def moved():
    """A short day: armed, moving, an emergency stop, armed again by way of a measured pose elsewhere."""
    motor = Motor(ROBOTS["panda_2f85"]).armed()
    for k in range(60):
        if k % 5 == 0:
            motor.offer(motor.good_chunk(np.linspace(motor.shield.position, motor.shield.position + 0.1, 16)))
        motor.serve()
    motor.event("estop")
    for _ in range(120):
        motor.serve()
    assert motor.shield.state is State.HOLDING
    motor.measure(motor.limits.position_lower)
    motor.event("rearm")
    for _ in range(12):
        motor.serve()
    return trace_of(motor), loop_maker(motor.config, motor.limits)


def test_inputs_that_were_not_recorded_are_named():
    trace, make_loop = moved()
    assert replay(trace, make_loop).identical
    no_chunks = replay(dataclasses.replace(trace, chunks=trace.chunks[3:]), make_loop)
    assert no_chunks.missing["chunk"] == 1 and no_chunks.begun == 2 and no_chunks.identical
    last = max(trace.measured)
    unmeasured = {stamp: position for stamp, position in trace.measured.items() if stamp != last}
    result = replay(dataclasses.replace(trace, measured=unmeasured), make_loop)
    assert result.missing["measurement at a re-arm or stall"] == 1 and result.identical


@pytest.mark.parametrize("column, change", [("state", State.COASTING), ("reason", Reason.NOT_FINITE), ("segment", 77),
                                            ("offered_verdict", 9), ("chunk_sequence", 10**6)])
def test_a_column_that_differs_is_named_with_its_tick(column, change):
    trace, make_loop = moved()
    ticks = trace.ticks.copy()
    ticks[column][50] = change
    if column == "segment":  # a new segment is an event, not an input: changed for good, or it would be two
        ticks[column][50:] = change
    result = replay(dataclasses.replace(trace, ticks=ticks), make_loop)
    assert result.different >= 1 and result.first.what == column and result.first.tick == int(ticks["tick"][50])


def test_one_bit_is_a_difference():
    trace, make_loop = moved()
    ticks = trace.ticks.copy()
    ticks["command"].view(np.uint64)[30, -1] ^= 1
    result = replay(dataclasses.replace(trace, ticks=ticks), make_loop)
    assert result.different == 1 and not result.identical
    assert str(result.first).startswith(f"tick {ticks['tick'][30]}: command of joint {trace.joints - 1} was ")
    stamp = trace.deadline_ns(int(ticks["tick"][40]))
    position, velocity = trace.sent[stamp]
    sent = {**trace.sent, stamp: (position, velocity + 1e-15)}
    result = replay(dataclasses.replace(trace, sent=sent), make_loop)
    assert result.different == 1 and "published velocity" in result.first.what


def test_changed_code_is_a_difference(monkeypatch):
    trace, make_loop = moved()
    monkeypatch.setattr(tracking, "LIMIT_MARGIN", 1e-6)
    result = replay(trace, make_loop)
    assert result.different > 1 and result.first is not None


def test_a_recording_without_holding_ticks_cannot_be_judged():
    trace, make_loop = moved()
    ticks = trace.ticks[trace.ticks["state"] == State.NOMINAL]
    result = replay(dataclasses.replace(trace, ticks=ticks), make_loop)
    assert result.compared == 0 and not result.identical and result.first is None


def test_a_part_carries_what_it_needs():
    trace, make_loop = moved()
    first, last = int(trace.ticks["tick"][0]), int(trace.ticks["tick"][-1])
    part = cut(trace, first, last - 5)
    assert len(part.ticks) == len(trace.ticks) - 5 and len(part.measured) <= 3
    assert replay(part, make_loop).identical
    with pytest.raises(TraceError, match="no ticks from"):
        cut(trace, last + 1, last + 2)


def test_chunks_of_a_restarted_policy_are_told_apart():
    def chunk(session, base):
        return ActionChunk(session, 1, base, 0, 0.01, ("a",), np.zeros((1, 1)))

    shelf = ChunkShelf([chunk("first", 10), chunk("second", 50)])
    assert shelf.find(1, 12).session == "first" and shelf.find(1, 51).session == "second"
    assert shelf.find(1, 5).session == "first" and shelf.find(2, 5) is None


# ------------------------------------------------------------------ from messages


def batch(stamp_ns, ticks):
    columns = {name: np.zeros(len(ticks), dtype=dtype) for name, dtype in COLUMNS.items()}
    return new("MotorTicks", header=make_header(stamp_ns), joints=2,
               **{**columns, "tick": np.array(ticks), "command": np.arange(2.0 * len(ticks))})


def joint_command(stamp_ns):
    return new("sensor_msgs/JointState", header=make_header(stamp_ns), name=["a", "b"], position=np.ones(2),
               velocity=np.zeros(2))


def test_repeated_ticks_count_once_and_chunks_say_when_tick_0_was():
    builder = TraceBuilder()
    builder.take("motor_ticks", batch(10**9, [5, 6]))
    builder.take("motor_ticks", batch(10**9, [6, 7]))
    for base, at_ns in ((6, 700 + 6 * T_NS), (7, 700 + 7 * T_NS), (8, 1)):  # the last one is a stranger's
        builder.take("action_chunk", new(
            "ActionChunk", header=make_header(at_ns), session="s", sequence=base, base_tick=base, period_s=0.01,
            joint_names=["a", "b"], horizon=1, positions=np.zeros(2)))
    trace = builder.trace(T_NS)
    assert trace.ticks["tick"].tolist() == [5, 6, 7] and trace.ticks.dtype == tick_dtype(2)
    assert trace.origin_ns == 700 and trace.deadline_ns(5) == 700 + 5 * T_NS
    assert trace.ticks["command"][2].tolist() == [2.0, 3.0]


def test_without_chunks_the_published_commands_place_the_ticks():
    builder = TraceBuilder()
    for first in (0, 10, 20):
        delay_ns = 3_000_000 + 100_000 * first
        builder.take("motor_ticks", batch(777 + (first + 9) * T_NS + delay_ns, list(range(first, first + 10))))
    for tick in range(12, 20):
        builder.take("joint_command", joint_command(777 + tick * T_NS))
    assert builder.trace(T_NS).origin_ns == 777


def test_recordings_that_cannot_be_replayed():
    with pytest.raises(TraceError, match="no motor ticks"):
        TraceBuilder().trace(T_NS)
    builder = TraceBuilder()
    builder.take("motor_ticks", batch(10**9, [1]))
    other = batch(10**9, [2])
    other.joints = 1
    builder.take("motor_ticks", other)
    with pytest.raises(TraceError, match=r"robots with \[1, 2\] joints"):
        builder.trace(T_NS)
    with pytest.raises(TraceError, match="not written by this edge"):
        builder.take("action_chunk", new("ActionChunk", joint_names=["a"], horizon=2, positions=np.zeros(5)))
