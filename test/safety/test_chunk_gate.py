"""The gate at its boundaries: what lies exactly on a limit is admitted, the next number beyond is refused by name."""

import numpy as np
import pytest

from vla_edge.core.chunk import ActionChunk, ChunkGate, GateConfig, Reject
from vla_edge.core.joint_limits import JointLimits

NS = 1_000_000_000
NOW_NS = 1_000 * NS
T = 0.01
LIMITS = JointLimits(("a", "b"), *(np.array(row) for row in (
    [-1.0, -2.0], [1.0, 2.0], [1.0, 1.0], [2.0, 2.0], [50.0, 50.0], [0.0, 0.0], [0.1, 0.1])))
CONFIG = GateConfig(max_horizon=4, position_tolerance=0.25, max_observation_age_s=1.0, future_tolerance_s=0.005)


def chunk(base_tick=9, sequence=1, session="s", positions=None, **changes):
    fields = {"session": session, "sequence": sequence, "base_tick": base_tick, "observation_stamp_ns": NOW_NS,
              "period_s": T, "names": ("a", "b"), "positions": np.zeros((4, 2)) if positions is None else positions}
    return ActionChunk(**{**fields, **changes})


def verdict(*args, config=CONFIG, next_tick=10, period_s=T, **changes):
    return ChunkGate(LIMITS, period_s, config).admit(chunk(*args, **changes), next_tick, NOW_NS)


def row(column, value):
    positions = np.zeros((4, 2))
    positions[2, column] = value
    return positions


@pytest.mark.parametrize("changes, reject", [
    ({"positions": np.zeros((1, 2))}, None), ({"positions": np.zeros((4, 2))}, None),
    ({"positions": np.zeros((0, 2))}, Reject.HORIZON), ({"positions": np.zeros((5, 2))}, Reject.HORIZON),
    ({"positions": row(0, 1.25)}, None), ({"positions": row(0, np.nextafter(1.25, 2))}, Reject.OUTSIDE_LIMITS),
    ({"positions": row(0, -1.25)}, None), ({"positions": row(0, np.nextafter(-1.25, -2))}, Reject.OUTSIDE_LIMITS),
    ({"positions": row(1, 2.25)}, None), ({"positions": row(1, 2.2500001)}, Reject.OUTSIDE_LIMITS),
    ({"positions": row(1, -2.25)}, None), ({"positions": row(1, -2.2500001)}, Reject.OUTSIDE_LIMITS),
    ({"observation_stamp_ns": NOW_NS - NS}, None), ({"observation_stamp_ns": NOW_NS - NS - 1}, Reject.STALE),
    ({"observation_stamp_ns": NOW_NS + 5_000_000}, None),
    ({"observation_stamp_ns": NOW_NS + 5_000_001}, Reject.FUTURE_STAMP),
    ({"base_tick": 9}, None), ({"base_tick": 10}, Reject.FUTURE_TICK),
    ({"base_tick": 6}, None), ({"base_tick": 5}, Reject.ALL_PAST),  # steps 7 .. 10, and 6 .. 9
])
def test_a_limit_belongs_to_what_is_admitted(changes, reject):
    assert verdict(**changes) is reject


def test_tolerances_are_kept_to_the_nanosecond_however_long():
    config = GateConfig(max_horizon=4, max_observation_age_s=10.0, future_tolerance_s=10.0)
    for stamp_ns, reject in ((NOW_NS + 10 * NS, None), (NOW_NS + 10 * NS + 1, Reject.FUTURE_STAMP),
                             (NOW_NS - 10 * NS, None), (NOW_NS - 10 * NS - 1, Reject.STALE)):
        assert verdict(config=config, observation_stamp_ns=stamp_ns) is reject


def test_periods_agree_to_a_nanosecond():
    """Periods come from configuration files of two processes; a nanosecond apart they are the same."""
    assert verdict(period_s=1.0, config=CONFIG) is Reject.PERIOD  # the gate's own period differs
    # Around zero the difference is exact.
    gate = ChunkGate(LIMITS, 0.0, CONFIG)
    for period_s, reject in ((1e-9, None), (-1e-9, None), (1.001e-9, Reject.PERIOD), (-1.001e-9, Reject.PERIOD)):
        gate.restart(0)
        assert gate.admit(chunk(period_s=period_s), 10, NOW_NS) is reject


def test_the_first_reason_is_the_one_that_is_named():
    """Form before time; of the form, what makes the numbers unreadable first."""
    right = {"positions": np.zeros((4, 2)), "names": ("a", "b"), "period_s": T, "observation_stamp_ns": NOW_NS}
    wrong = {"positions": np.full((4, 2), np.nan), "names": ("b", "a"), "period_s": 0.02, "observation_stamp_ns": 0,
             "base_tick": 10**6}
    assert verdict(**{**wrong, "positions": np.zeros((4, 3))}) is Reject.WIDTH
    assert verdict(**{**wrong, "positions": np.full((5, 2), np.nan)}) is Reject.HORIZON
    assert verdict(**wrong) is Reject.JOINT_NAMES
    assert verdict(**{**wrong, "names": right["names"]}) is Reject.PERIOD
    assert verdict(**{**right, "positions": wrong["positions"], "observation_stamp_ns": 0}) is Reject.NOT_FINITE
    assert verdict(**{**right, "positions": np.full((4, 2), 9.0), "observation_stamp_ns": 0}) is Reject.OUTSIDE_LIMITS
    assert verdict(**{**right, "observation_stamp_ns": 0, "base_tick": 10**6}) is Reject.STALE
    assert verdict(**{**right, "base_tick": 10**6}) is Reject.FUTURE_TICK


@pytest.mark.parametrize("positions", [np.zeros(2), np.zeros((4, 2, 2)), np.zeros((2, 4)), np.zeros((4, 1))])
def test_rows_of_the_right_width_or_none(positions):
    assert verdict(positions=positions) is Reject.WIDTH


def test_the_lead_is_counted_from_the_next_command():
    config = GateConfig(max_horizon=4, max_lead_ticks=2)
    assert verdict(11, config=config) is None
    assert verdict(12, config=config) is Reject.FUTURE_TICK


def test_after_a_rearm_the_rearm_tick_is_the_first_that_counts():
    gate = ChunkGate(LIMITS, T, CONFIG)
    assert gate.admit(chunk(9), 10, NOW_NS) is None
    gate.restart(9)
    assert gate.newest is None
    assert gate.admit(chunk(8), 10, NOW_NS) is Reject.BEFORE_REARM
    assert gate.newest is None
    assert gate.admit(chunk(9), 10, NOW_NS) is None


def test_before_any_rearm_every_tick_counts():
    """Ticks of a clock may be negative."""
    assert verdict(-(10**9), next_tick=-(10**9) + 1) is None


def test_newer_means_a_later_number_of_the_same_policy_and_no_earlier_tick():
    gate = ChunkGate(LIMITS, T, CONFIG)
    first = chunk(8, 5)
    assert gate.admit(first, 10, NOW_NS) is None and gate.newest is first
    for base_tick, sequence, session in ((7, 6, "s"), (8, 5, "s"), (9, 5, "s"), (9, 4, "s"), (7, 1, "t")):
        assert gate.admit(chunk(base_tick, sequence, session), 10, NOW_NS) is Reject.OLDER
        assert gate.newest is first
    same_tick = chunk(8, 6)
    assert gate.admit(same_tick, 10, NOW_NS) is None and gate.newest is same_tick
    restarted = chunk(8, 1, "t")
    assert gate.admit(restarted, 10, NOW_NS) is None and gate.newest is restarted


def test_ticks_of_a_chunk():
    made = chunk(9)
    assert (made.first_tick, made.last_tick) == (10, 13)


def test_what_the_defaults_are():
    config = GateConfig()
    assert (config.max_horizon, config.position_tolerance, config.max_lead_ticks) == (64, 0.25, 0)
    assert (config.max_observation_age_s, config.future_tolerance_s) == (1.0, 0.005)
