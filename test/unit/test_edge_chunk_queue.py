"""Gate and queue: alignment by tick, and the queue faults of other runtimes by their right behaviour."""

from pathlib import Path

import numpy as np
import pytest

from vla_edge.config import load_limits
from vla_edge.core.chunk import ActionChunk, ChunkGate, GateConfig, Reject
from vla_edge.core.chunk_queue import ChunkQueue
from vla_edge.core.ensembler import MinimumJerkRamp, Replace

T = 0.01
LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)
NOW_NS = 1_000_000_000_000


def chunk(base_tick, horizon=16, sequence=1, session="a", value=None, **changes):
    """Row k holds its own tick / 1000, so that a row in the wrong place shows."""
    ticks = base_tick + 1 + np.arange(horizon)
    rows = np.tile(ticks.reshape(-1, 1) * 1e-3 if value is None else value, (1, 8)) + np.zeros((horizon, 8))
    fields = {"session": session, "sequence": sequence, "base_tick": base_tick, "observation_stamp_ns": NOW_NS,
              "period_s": T, "names": LIMITS.names, "positions": rows}
    return ActionChunk(**{**fields, **changes})


def queue(rule=None, joints=8):
    return ChunkQueue(joints, rule or Replace(), T)


def rows(q, first, last):
    position, velocity = np.zeros(8), np.zeros(8)
    found = []
    for tick in range(first, last + 1):
        assert q.sample(tick, position, velocity), tick
        found.append(float(position[0]))
    return found


# ------------------------------------------------------------------ queue


def test_an_action_belongs_to_its_tick():
    q = queue()
    assert q.insert(chunk(9), 10) is None
    assert rows(q, 10, 25) == pytest.approx([t * 1e-3 for t in range(10, 26)])
    assert not q.covers(9) and not q.covers(26) and q.last_tick == 25


def test_velocity_is_the_finite_difference_of_the_plan():
    q = queue()
    q.insert(chunk(9), 10)
    position, velocity = np.zeros(8), np.zeros(8)
    for tick in (10, 17, 25):  # forwards, and backwards at the end
        q.sample(tick, position, velocity)
        np.testing.assert_allclose(velocity, 0.1)
    single = queue()
    single.insert(chunk(9, horizon=1), 10)
    single.sample(10, position, velocity)
    assert (velocity == 0.0).all()


def test_nothing_is_written_for_a_tick_that_is_not_planned():
    position, velocity = np.full(8, 5.0), np.full(8, 5.0)
    q = queue()
    assert q.empty and not q.sample(0, position, velocity)
    assert (position == 5.0).all() and (velocity == 5.0).all()


def test_a_late_chunk_contributes_only_its_future():
    q = queue()
    assert q.insert(chunk(9), 20) is None
    assert q.first_tick == 20 and rows(q, 20, 25) == pytest.approx([t * 1e-3 for t in range(20, 26)])


def test_a_late_chunk_that_is_all_past_leaves_good_actions_alone():
    """LeRobot: queue 20..27, latest 19, late chunk 0..15 emptied the queue."""
    q, gate = queue(), ChunkGate(LIMITS, T)
    first = chunk(19, horizon=8, sequence=2)
    assert gate.admit(first, 20, NOW_NS) is None and q.insert(first, 20) is None
    late = chunk(-1, horizon=16, sequence=3, session="b")
    assert gate.admit(late, 20, NOW_NS) in (Reject.OLDER, Reject.ALL_PAST)
    assert q.insert(late, 20) is Reject.ALL_PAST
    assert rows(q, 20, 27) == pytest.approx([t * 1e-3 for t in range(20, 28)])


def test_an_older_chunk_never_replaces_a_newer_one():
    """LeRobot: queue 20..35, older chunk 10..25 left only 20..25."""
    q, gate = queue(), ChunkGate(LIMITS, T)
    newer, older = chunk(19, sequence=2), chunk(9, sequence=1)
    assert gate.admit(newer, 20, NOW_NS) is None and q.insert(newer, 20) is None
    assert gate.admit(older, 20, NOW_NS) is Reject.OLDER
    assert q.last_tick == 35


def test_a_chunk_that_starts_later_does_not_jump():
    """LeRobot: queue 20..27, chunk 24..39 jumped by four steps."""
    q = queue(MinimumJerkRamp(4))
    q.insert(chunk(19, horizon=8), 20)
    ahead = chunk(23, value=1.0)
    assert q.insert(ahead, 20) is None
    found = rows(q, 20, 39)
    assert found[:5] == pytest.approx([0.020, 0.021, 0.022, 0.023, 0.024])  # the ramp starts on the old trajectory
    assert found[8:] == pytest.approx([1.0] * 12)
    assert (np.diff(found) >= 0).all()


def test_a_first_chunk_that_was_slow_to_make_starts_with_its_first_action_if_nothing_moved_meanwhile():
    """LeRobot: a first chunk with a delay of 20 steps started at action 20 although none had been consumed."""
    q = queue()
    late = chunk(99, horizon=50)
    assert q.insert(late, 120, still_since_tick=90) is None
    assert rows(q, 120, 121) == pytest.approx([0.100, 0.101]) and q.last_tick == 169


@pytest.mark.parametrize("still_since", [None, 100])
def test_a_first_chunk_that_starts_from_elsewhere_is_cut_as_any_other(still_since):
    q = queue()
    assert q.insert(chunk(99, horizon=50), 120, still_since_tick=still_since) is None
    assert rows(q, 120, 121) == pytest.approx([0.120, 0.121])


def test_a_second_chunk_is_never_shifted():
    q = queue()
    q.insert(chunk(99), 100)
    q.insert(chunk(104, sequence=2), 107, still_since_tick=90)
    assert rows(q, 107, 108) == pytest.approx([0.107, 0.108])


def test_a_delay_longer_than_the_chunk_keeps_the_queue():
    """LeRobot: delay 60 with chunks of 50 emptied the queue."""
    q = queue()
    q.insert(chunk(99, horizon=50), 100)
    assert q.insert(chunk(40, horizon=50, sequence=2), 100) is Reject.ALL_PAST
    assert q.last_tick == 149


def test_no_gap_is_ever_filled():
    q = queue()
    assert q.insert(chunk(20), 10) is Reject.GAP
    assert q.empty
    q.insert(chunk(9, horizon=8), 10)
    assert q.insert(chunk(20), 10) is Reject.GAP
    assert q.insert(chunk(17), 10) is None  # joins without a gap
    assert rows(q, 10, 33) == pytest.approx([t * 1e-3 for t in range(10, 34)])


def test_an_old_plan_that_ran_out_is_not_merged_with():
    q = queue(MinimumJerkRamp(8))
    q.insert(chunk(9, horizon=4, value=9.0), 10)
    q.insert(chunk(99, sequence=2), 100)
    assert rows(q, 100, 115) == pytest.approx([t * 1e-3 for t in range(100, 116)])


def test_the_newest_chunk_decides_how_far_the_plan_reaches():
    q = queue()
    q.insert(chunk(9, horizon=32), 10)
    q.insert(chunk(14, horizon=8, sequence=2), 15)
    assert q.last_tick == 22


def test_a_horizon_that_changes_between_chunks():
    q, reach = queue(MinimumJerkRamp(3)), 0
    for k, horizon in enumerate((4, 64, 16, 5, 40)):
        base = 10 + 3 * k
        assert q.insert(chunk(base, horizon=horizon, sequence=k + 1), base + 1) is None
        reach = base + horizon
        assert q.last_tick == reach
        assert rows(q, base + 1, reach) == pytest.approx([t * 1e-3 for t in range(base + 1, reach + 1)])


def test_chunks_out_of_order_in_the_queue_itself_stay_on_their_ticks():
    """The gate refuses them; should one get through, it changes its own ticks and nothing else."""
    q = queue()
    q.insert(chunk(12, sequence=2), 13)
    assert q.insert(chunk(9, sequence=1), 13) is None
    assert rows(q, 13, 25) == pytest.approx([t * 1e-3 for t in range(13, 26)]) and q.last_tick == 25


def test_a_shorter_chunk_cuts_the_plan_off_and_a_longer_one_carries_on():
    q = queue(MinimumJerkRamp(4))
    q.insert(chunk(9, horizon=40), 10)
    q.insert(chunk(11, horizon=4, sequence=2), 12)
    assert q.last_tick == 15 and not q.covers(16)
    q.insert(chunk(12, horizon=20, sequence=3, value=7.0), 13)
    found = rows(q, 13, 32)
    assert found[0] == pytest.approx(0.013) and found[3:] == pytest.approx([7.0] * 17)


@pytest.mark.parametrize("horizon, fits", [(30, True), (31, False)])
def test_the_memory_bounds_how_far_a_plan_reaches(horizon, fits):
    """One row of the past is kept beside the plan."""
    q = ChunkQueue(8, Replace(), T, capacity=31)
    q.insert(chunk(9, horizon=5), 10)
    before = rows(q, 10, 14)
    assert (q.insert(chunk(9, horizon=horizon, sequence=2), 10) is None) == fits
    assert rows(q, 10, 14) == before and q.last_tick == (39 if fits else 14)
    if fits:  # and it still fits when a row of the past has to be kept
        assert q.insert(chunk(10, horizon=horizon, sequence=3), 11) is None
        position, velocity = np.zeros(8), np.zeros(8)
        assert q.sample(40, position, velocity) and position[0] == pytest.approx(0.040)


def test_the_plan_ahead_is_copied_as_far_as_it_reaches():
    q, out = queue(), np.full((6, 8), -1.0)
    assert q.ahead(10, out) == 0 and (out == -1.0).all()
    q.insert(chunk(9, horizon=8), 10)
    assert q.ahead(10, out) == 6
    np.testing.assert_allclose(out[:, 0], [t * 1e-3 for t in range(10, 16)])
    out[:] = -1.0
    assert q.ahead(14, out) == 4 and (out[4:] == -1.0).all()
    np.testing.assert_allclose(out[:4, 3], [0.014, 0.015, 0.016, 0.017])
    assert q.ahead(18, out) == 0 and q.ahead(8, out) == 0


def test_a_first_chunk_shifted_by_a_standstill_is_merged_with_from_there_on():
    q = queue(MinimumJerkRamp(4))
    q.insert(chunk(99, horizon=10), 105, still_since_tick=90)
    assert rows(q, 105, 114) == pytest.approx([t * 1e-3 for t in range(100, 110)])
    q.insert(chunk(105, horizon=16, sequence=2), 106, still_since_tick=None)
    assert rows(q, 106, 106) == pytest.approx([0.101]) and rows(q, 110, 121)[0] == pytest.approx(0.110)


def test_ten_thousand_random_insertions_keep_rows_on_their_ticks():
    rng = np.random.default_rng(0)
    q, position, velocity = queue(MinimumJerkRamp(8)), np.zeros(8), np.zeros(8)
    for tick in range(10_000):
        if rng.random() < 0.3:
            base = tick - int(rng.integers(0, 20))
            q.insert(chunk(base - 1, horizon=int(rng.integers(1, 60))), tick)
        if q.sample(tick, position, velocity):
            assert position[0] == pytest.approx(tick * 1e-3)
            assert velocity[0] == pytest.approx(0.1) or not q.covers(tick + 1)
    q.clear()
    assert q.empty


# ------------------------------------------------------------------ gate


def with_row(value, column=3):
    rows_ = np.tile(LIMITS.ready, (16, 1))
    rows_[5, column] = value
    return rows_


GOOD = np.tile(LIMITS.ready, (16, 1))


@pytest.mark.parametrize("changes, reject", [
    ({"positions": GOOD[:, :4]}, Reject.WIDTH),  # strands-labs/robots#1704 filled a 4-wide action up with zeros
    ({"positions": GOOD[:, 0]}, Reject.WIDTH),
    ({"positions": GOOD[:0]}, Reject.HORIZON),
    ({"positions": np.tile(GOOD, (5, 1))}, Reject.HORIZON),
    ({"names": tuple(reversed(LIMITS.names))}, Reject.JOINT_NAMES),  # lerobot#4452: joint order
    ({"names": LIMITS.names[:7]}, Reject.JOINT_NAMES),
    ({"period_s": 0.02}, Reject.PERIOD),
    ({"period_s": float("nan")}, Reject.PERIOD),
    ({"positions": with_row(np.nan)}, Reject.NOT_FINITE),
    ({"positions": with_row(np.inf)}, Reject.NOT_FINITE),
    ({"positions": with_row(-np.inf)}, Reject.NOT_FINITE),
    ({"positions": with_row(0.3)}, Reject.OUTSIDE_LIMITS),
    ({"positions": with_row(-9.0)}, Reject.OUTSIDE_LIMITS),
    ({"observation_stamp_ns": NOW_NS + 6_000_000}, Reject.FUTURE_STAMP),
    ({"observation_stamp_ns": NOW_NS - 1_001_000_000}, Reject.STALE),
    ({"base_tick": 100}, Reject.FUTURE_TICK),
    ({"base_tick": 49}, Reject.BEFORE_REARM),
    ({"base_tick": 83}, Reject.ALL_PAST),
])
def test_the_gate_refuses_by_name(changes, reject):
    gate = ChunkGate(LIMITS, T)
    gate.restart(50)
    assert gate.admit(chunk(**{"base_tick": 99, "positions": GOOD, **changes}), 100, NOW_NS) is reject
    assert gate.newest is None


@pytest.mark.parametrize("changes", [
    {}, {"base_tick": 90}, {"base_tick": 84}, {"observation_stamp_ns": NOW_NS + 4_000_000},
    {"observation_stamp_ns": NOW_NS - 999_000_000}, {"positions": with_row(0.1)}, {"positions": GOOD[:1]},
])
def test_the_gate_admits(changes):
    gate = ChunkGate(LIMITS, T)
    good = chunk(**{"base_tick": 99, "positions": GOOD, **changes})
    assert gate.admit(good, 100, NOW_NS) is None and gate.newest is good


def test_order_within_and_across_sessions():
    gate = ChunkGate(LIMITS, T)

    def admit(**changes):
        return gate.admit(chunk(**{"base_tick": 99, "positions": GOOD, **changes}), 100, NOW_NS)

    assert admit(sequence=5) is None
    assert admit(sequence=5) is Reject.OLDER  # twice
    assert admit(sequence=4) is Reject.OLDER  # out of order
    assert admit(sequence=6, base_tick=98) is Reject.OLDER
    assert admit(sequence=1, session="b") is None  # the policy was restarted
    assert admit(sequence=1, session="c", base_tick=98) is Reject.OLDER
    gate.restart(99)
    assert admit(sequence=1, session="b") is None


def test_lead_is_a_setting():
    gate = ChunkGate(LIMITS, T, GateConfig(max_lead_ticks=3))
    assert gate.admit(chunk(102, positions=GOOD), 100, NOW_NS) is None
    assert gate.admit(chunk(103, positions=GOOD, sequence=2), 100, NOW_NS) is Reject.FUTURE_TICK


def test_refused_chunks_are_left_as_they_are():
    bad = chunk(99, positions=with_row(np.nan))
    before = bad.positions.copy()
    ChunkGate(LIMITS, T).admit(bad, 100, NOW_NS)
    np.testing.assert_array_equal(bad.positions, before)
