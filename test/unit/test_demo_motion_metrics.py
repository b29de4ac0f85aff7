"""Metrics of synthetic command streams with known answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vla_common.messages import new
from vla_common.wire import make_header
from vla_edge.core.joint_limits import JointLimits
from vla_sim.motion_metrics import (
    check_limits,
    differentiate,
    max_gap_s,
    merge_ticks,
    state_intervals,
    state_shares,
    summarise,
)

PERIOD_S = 0.01
MS = 1_000_000


def limits(jerk: float = 1e9) -> JointLimits:
    names = [f"j{i}" for i in range(2)]
    return JointLimits.from_mapping({
        "scale": {"velocity": 1.0, "acceleration": 1.0, "jerk": 1.0},
        "joints": [{"name": name, "lower": -1.0, "upper": 1.0, "velocity": 1.0, "acceleration": 10.0, "jerk": jerk,
                    "ready": 0.0, "reentry_gap": 0.05} for name in names]})


def batches(command: np.ndarray, states: list[int] | None = None, start_tick: int = 100, per_batch: int = 10,
            segments: list[int] | None = None) -> list[Any]:
    count = len(command)
    out = []
    for first in range(0, count, per_batch):
        rows = slice(first, min(count, first + per_batch))
        tick = np.arange(start_tick + rows.start, start_tick + rows.stop)
        out.append(new("MotorTicks", header=make_header(int(tick[-1]) * 10 * MS + 3 * MS), joints=command.shape[1],
                       tick=tick, lateness_ns=np.full(len(tick), 50_000), chunk_sequence=np.ones(len(tick), np.uint64),
                       state=np.array((states or [0] * count)[rows], np.uint8), command=command[rows],
                       segment=np.array((segments or [1] * count)[rows], np.uint32)))
    return out


def ramp(count: int, rate: float) -> np.ndarray:
    """Joint 0 at constant speed, joint 1 at rest."""
    return np.stack([np.arange(count) * rate * PERIOD_S, np.zeros(count)], axis=1)


def test_merge_orders_and_counts() -> None:
    parts = batches(ramp(40, 0.5))
    stream = merge_ticks([parts[2], parts[0], parts[1], parts[1], parts[3]], PERIOD_S)
    assert stream.tick.tolist() == list(range(100, 140))
    assert (stream.duplicates, stream.gaps) == (10, 0)
    assert stream.command[:, 0] == pytest.approx(ramp(40, 0.5)[:, 0])
    assert np.diff(stream.stamp_ns).tolist() == [10 * MS] * 39 and stream.stamp_ns[0] == 1003 * MS
    assert stream.lateness_s[0] == pytest.approx(50e-6)
    assert merge_ticks([parts[0], parts[3]], PERIOD_S).gaps == 20
    assert len(merge_ticks([], PERIOD_S).tick) == 0


def test_derivatives_of_a_polynomial_are_exact() -> None:
    t = np.arange(50)[:, None] * PERIOD_S
    found = differentiate(2 * t**3, PERIOD_S)
    assert found.jerk == pytest.approx(np.full((47, 1), 12.0), rel=1e-6)
    assert found.velocity.shape == (49, 1) and found.acceleration.shape == (48, 1)


def test_within_limits_exactly_at_the_limit_is_no_violation() -> None:
    report = check_limits(merge_ticks(batches(ramp(100, 1.0)), PERIOD_S), limits(), PERIOD_S)
    assert report.total == 0 and report.first_violation == ""
    assert report.peak["velocity"] == pytest.approx([1.0, 0.0])
    assert report.peak["acceleration"] == pytest.approx([0.0, 0.0], abs=1e-9)


@pytest.mark.parametrize(("quantity", "tick"), [("velocity", 151), ("acceleration", 150), ("position", 150), ("jerk", 150)])
def test_each_violation_is_found_and_named(quantity: str, tick: int) -> None:
    command = np.zeros((100, 2))
    if quantity == "velocity":
        command = ramp(100, 0.99)
        command[51:, 0] += 0.02 * PERIOD_S
        loose = JointLimits(("j0", "j1"), *[np.array([v] * 2) for v in (-9.0, 9.0, 1.0, 1e9, 1e9, 0.0, 1.0)])
    elif quantity == "acceleration":
        command[50:, 0] = 0.002
        loose = JointLimits(("j0", "j1"), *[np.array([v] * 2) for v in (-9.0, 9.0, 1e9, 19.0, 1e9, 0.0, 1.0)])
    elif quantity == "position":
        command[50:, 0] = 9.1
        loose = JointLimits(("j0", "j1"), *[np.array([v] * 2) for v in (-9.0, 9.0, 1e9, 1e9, 1e9, 0.0, 1.0)])
    else:
        command[50:, 0] = 0.001
        loose = JointLimits(("j0", "j1"), *[np.array([v] * 2) for v in (-9.0, 9.0, 1e9, 1e9, 900.0, 0.0, 1.0)])
    report = check_limits(merge_ticks(batches(command), PERIOD_S), loose, PERIOD_S)
    assert report.violations[quantity] > 0 and report.total == report.violations[quantity]
    assert f"tick {tick}: {quantity} of j0" in report.first_violation


def test_reentry_from_a_measured_pose_is_a_new_segment_and_said() -> None:
    command = np.zeros((60, 2))
    command[40:, 0] = 0.3
    states, segments = [3] * 40 + [1] * 20, [1] * 40 + [2] * 20
    report = check_limits(merge_ticks(batches(command, states, segments=segments), PERIOD_S), limits(), PERIOD_S)
    assert report.total == 0
    assert report.reentries == 1 and report.largest_reentry == pytest.approx(0.3) and report.stalls == 0
    # The same jump without the latch in between, or without a new segment, is a violation.
    for other in (batches(command, [0] * 60, segments=segments), batches(command, states)):
        report = check_limits(merge_ticks(other, PERIOD_S), limits(), PERIOD_S)
        assert report.total > 0 and report.reentries == 0


def test_a_stall_is_a_new_segment_that_begins_at_rest() -> None:
    command = ramp(60, 0.9)
    command[40:] = command[39] + np.array([0.05, 0.02])
    states, segments = [0] * 40 + [3] * 20, [1] * 40 + [2] * 20
    stream = merge_ticks(batches(command, states, segments=segments), PERIOD_S)
    report = check_limits(stream, limits(), PERIOD_S)
    assert report.total == 0 and (report.stalls, report.reentries) == (1, 0)
    assert report.largest_stall == pytest.approx(0.05)
    assert report.peak["velocity"] == pytest.approx([0.9, 0.0])  # the step is no motion
    # What moves at once in the new segment does not begin at rest.
    command[41:, 0] += 0.005
    report = check_limits(merge_ticks(batches(command, states, segments=segments), PERIOD_S), limits(), PERIOD_S)
    assert report.violations["acceleration"] > 0
    # Going into HOLDING with the step but without a new segment is a violation.
    assert check_limits(merge_ticks(batches(command, states), PERIOD_S), limits(), PERIOD_S).total > 0


def test_columns_of_different_length_are_refused() -> None:
    parts = batches(ramp(20, 0.5))
    parts[1].segment = parts[1].segment[:-1]
    with pytest.raises(ValueError, match="not recorded by this release"):
        merge_ticks(parts, PERIOD_S)


def test_holes_in_a_recording_split_but_missed_deadlines_do_not() -> None:
    parts = batches(ramp(60, 0.9))
    del parts[2]
    stream = merge_ticks(parts, PERIOD_S)
    # The clock missed no deadline, so ten commands were sent and not recorded: nothing can be said about them.
    report = check_limits(stream, limits(), PERIOD_S, missed_deadlines=0)
    assert (report.total, report.holes) == (0, 1)
    # The clock skipped them: then these are consecutive commands, and the step is a violation.
    report = check_limits(stream, limits(), PERIOD_S, missed_deadlines=10)
    assert report.total > 0 and report.holes == 0
    # A hole inside one message is never excused.
    command = ramp(60, 0.9)
    whole = batches(command, per_batch=60)[0]
    for name in ("tick", "lateness_ns", "state", "segment", "chunk_sequence"):
        setattr(whole, name, np.delete(getattr(whole, name), slice(20, 30)))
    whole.command = np.delete(command, slice(20, 30), axis=0).ravel()
    assert check_limits(merge_ticks([whole], PERIOD_S), limits(), PERIOD_S).total > 0


def test_an_anchor_places_ticks_exactly() -> None:
    stream = merge_ticks(batches(ramp(30, 0.1)), PERIOD_S, anchor=(105, 7_000 * MS))
    assert stream.stamp_ns[0] == 6_950 * MS and stream.stamp_ns[5] == 7_000 * MS


def test_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match="robot file"):
        check_limits(merge_ticks(batches(np.zeros((10, 3))), PERIOD_S), limits(), PERIOD_S)


def test_state_intervals_and_shares() -> None:
    stream = merge_ticks(batches(np.zeros((100, 2)), [0] * 50 + [2] * 10 + [3] * 40), PERIOD_S)
    intervals = state_intervals(stream, PERIOD_S)
    assert [(i.state, (i.end_ns - i.start_ns) // MS) for i in intervals] == [(0, 500), (2, 100), (3, 400)]
    assert state_shares(intervals) == {0: pytest.approx(0.5), 2: pytest.approx(0.1), 3: pytest.approx(0.4)}
    assert state_intervals(merge_ticks([], PERIOD_S), PERIOD_S) == []


def test_summaries() -> None:
    summary = summarise([*range(1, 101), math.nan])
    assert (summary.count, summary.p50, summary.most) == (100, 50.5, 100.0)
    assert math.isnan(summarise([]).p99)
    assert math.isnan(max_gap_s([5]))
    assert max_gap_s([0, 100 * MS, 400 * MS]) == pytest.approx(0.3)


def test_empty_stream_has_no_violations() -> None:
    assert check_limits(merge_ticks([], PERIOD_S), limits(), PERIOD_S).total == 0
