"""The age of what comes in, and which joints it names."""

import numpy as np
import pytest

from vla_edge.core.arrival import NS, JointReader, MonotonicStamps, ReceiveInstants

MS = 1_000_000
NAMES = ["a", "b", "grip"]


def test_monotonic_stamps_are_ages():
    rule = MonotonicStamps()
    now = 10 * NS
    assert rule.instant_ns("joint_states", now - 50 * MS, now, now, 0.1) == now - 50 * MS and rule.rejected == ""
    assert rule.instant_ns("joint_states", now - 101 * MS, now, now, 0.1) is None and rule.rejected == "stale"
    assert rule.instant_ns("joint_states", now + 4 * MS, now, now, 0.1) == now + 4 * MS
    assert rule.instant_ns("joint_states", now + 6 * MS, now, now, 0.1) is None and rule.rejected == "future_stamp"


@pytest.mark.parametrize("origin_ns", [1_700_000_000 * NS, 3 * NS, 0], ids=["wall", "simulated", "none"])
def test_ros_stamps_do_not_make_an_age(origin_ns):
    """The wall clock, a simulated clock at a tenth of the speed, or no stamp at all: the instant is that of arrival."""
    rule, now = ReceiveInstants(), 10 * NS
    for k in range(100):
        now += 10 * MS
        rule.turn(now)
        stamp = origin_ns and origin_ns + k * MS
        assert rule.instant_ns("joint_states", stamp, now - 2 * MS, now, 0.1) == now - 2 * MS


def test_a_sample_that_waited_unread_is_stale():
    rule = ReceiveInstants()
    assert rule.instant_ns("joint_states", 0, 10 * NS, 10 * NS + 100 * MS, 0.1) == 10 * NS
    assert rule.instant_ns("joint_states", 0, 10 * NS, 10 * NS + 101 * MS, 0.1) is None and rule.rejected == "stale"


def test_repeated_and_older_stamps_are_refused_per_stream():
    rule, now = ReceiveInstants(), 10 * NS
    assert rule.instant_ns("joint_states", 500, now, now, 0.1) is not None
    for stamp in (500, 499, 500, 1):
        assert rule.instant_ns("joint_states", stamp, now, now, 0.1) is None and rule.rejected == "out_of_order"
    assert rule.instant_ns("image:front", 400, now, now, 0.5) is not None
    assert rule.instant_ns("joint_states", 501, now, now, 0.1) is not None


def test_a_frozen_driver_is_refused_for_ever():
    rule, now = ReceiveInstants(), 10 * NS
    taken = 0
    for _ in range(500):
        now += 10 * MS
        taken += rule.instant_ns("joint_states", 7 * NS, now, now, 0.1) is not None
    assert taken == 1


def test_a_clock_set_back_is_believed_after_half_a_second():
    rule, now = ReceiveInstants(), 10 * NS
    assert rule.instant_ns("joint_states", 900 * NS, now, now, 0.1) is not None
    first = None
    for k in range(1, 100):
        now += 10 * MS
        if rule.instant_ns("joint_states", k * 10 * MS, now, now, 0.1) is not None and first is None:
            first = k
    assert first == 51


def test_what_comes_right_after_this_process_was_stopped_is_not_taken():
    rule, now = ReceiveInstants(), 10 * NS
    for _ in range(5):
        now += 5 * MS
        rule.turn(now)
    assert rule.instant_ns("joint_states", 0, now, now, 0.1) == now
    now += 400 * MS
    rule.turn(now)
    assert rule.instant_ns("joint_states", 0, now, now, 0.1) is None and rule.rejected == "stale"
    now += 49 * MS
    rule.turn(now)
    assert rule.instant_ns("shield_command", 0, now, now, 1.0) is None
    now += 2 * MS
    rule.turn(now)
    assert rule.instant_ns("joint_states", 0, now, now, 0.1) == now


def test_joints_by_name():
    reader = JointReader(NAMES, by_name=True)
    position, velocity = reader.read(["x", "grip", "b", "a"], np.array([9.0, 3, 2, 1]), np.array([90.0, 30, 20, 10]))
    assert position.tolist() == [1, 2, 3] and velocity.tolist() == [10, 20, 30]
    position, velocity = reader.read(["a", "b", "grip"], np.array([1.0, 2, 3]), np.zeros(0))
    assert position.tolist() == [1, 2, 3] and velocity.tolist() == [0, 0, 0]
    # A joint that is not ours may be anything.
    assert reader.read(["x", "grip", "b", "a"], np.array([np.nan, 3, 2, 1]), np.zeros(0)) is not None
    position, velocity = reader.read(NAMES, np.ones(3), np.array([1.0, np.nan, np.inf]))
    assert velocity.tolist() == [1, 0, 0]


@pytest.mark.parametrize("names, position, why", [
    (["a", "grip"], [1.0, 2], "missing_b"), ([], [], "missing_a"), (["a", "b", "b", "grip"], [1.0, 2, 3, 4], "twice_b"),
    (NAMES, [1.0, 2], "position"), (NAMES, [1.0, 2, 3, 4], "position"), (NAMES, [1.0, np.nan, 3], "position")])
def test_joints_by_name_are_refused_by_name(names, position, why):
    reader = JointReader(NAMES, by_name=True)
    assert reader.read(names, np.array(position), np.zeros(0)) is None and reader.rejected == why
    assert reader.read(NAMES, np.ones(3), np.zeros(3)) is not None and reader.rejected == ""
    assert reader.read(names, np.array(position), np.zeros(0)) is None and reader.rejected == why


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("speeds", [1, 2, 4])
def test_speeds_that_are_not_one_for_each_name_are_refused(by_name, speeds):
    reader = JointReader(NAMES, by_name)
    assert reader.read(NAMES, np.ones(3), np.zeros(speeds)) is None and reader.rejected == "velocity"
    assert reader.read(NAMES, np.ones(3), np.zeros(0)) is not None and reader.rejected == ""


def test_joints_in_order():
    reader = JointReader(NAMES, by_name=False)
    for names in (["b", "a", "grip"], [*NAMES, "x"], ["a"]):
        assert reader.read(names, np.zeros(len(names)), np.zeros(0)) is None and reader.rejected == "names"
    assert reader.read(NAMES, np.zeros(2), np.zeros(0)) is None and reader.rejected == "position"
    position, velocity = reader.read(NAMES, np.arange(3.0), np.ones(3))
    assert position.tolist() == [0, 1, 2] and velocity.tolist() == [1, 1, 1]
