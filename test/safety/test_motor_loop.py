"""The motor loop with two joints: what it reads, and every field of what it reports."""

import numpy as np
import pytest
from motor_rig import HOME, START_NS, Rig, verdicts

from vla_edge.core.chunk import REJECTS, GateConfig, Reject
from vla_edge.core.motor_loop import OFFER_ACCEPTED, OFFER_NOT_LOOKED_AT, OFFER_REFUSED
from vla_edge.core.shield import EstopInput, Rearm, Reason, State

# ------------------------------------------------------------------ before the first command


@pytest.mark.parametrize("age_ns, sends", [(0, True), (499_999_000, True), (500_000_000, False), (-2_000, False)])
def test_the_first_pose_must_be_at_most_half_a_second_old_and_not_from_the_future(age_ns, sends):
    rig = Rig()
    rig.write("joints", position=HOME, stamp_ns=START_NS - age_ns)
    assert rig.serve() is sends and len(rig.sent) == sends


def test_the_bounds_of_that_age():
    for stamp_ns, sends in ((START_NS - 500_000_000, True), (START_NS - 500_000_001, False), (START_NS, True),
                            (START_NS + 1, False)):
        rig = Rig()
        rig.late_ns = 0
        rig.write("joints", position=HOME, stamp_ns=stamp_ns)
        assert rig.serve() is sends, stamp_ns


def test_without_a_pose_the_state_is_reported_and_nothing_else_happens():
    rig = Rig(scheduling="fifo 80", pid=4711)
    rig.missed = 3
    assert rig.serve() is False and rig.sent == [] and len(rig.log()) == 0
    report = rig.report()
    assert (int(report["state"]), int(report["reason"]), int(report["rearm"])) == (
        State.HOLDING, Reason.NO_POSE, Rearm.NO_MEASUREMENT)
    assert (int(report["tick"]), int(report["stamp_ns"]), int(report["missed"])) == (0, START_NS, 3)
    assert report["scheduling"].item() == b"fifo 80" and int(report["pid"]) == 4711
    rig.measure(np.array([9.0, 0.0]))
    assert rig.serve() is False
    assert int(rig.report()["rearm"]) == Rearm.MEASUREMENT_OUTSIDE_LIMITS
    rig.measure()
    assert rig.serve() is True and rig.sent == [(rig.due(2), HOME.tolist(), [0.0, 0.0])]


def test_scheduling_and_process_are_unknown_unless_given():
    rig = Rig()
    rig.serve()
    assert rig.report()["scheduling"].item() == b"ordinary" and int(rig.report()["pid"]) == 0


def test_what_the_memory_held_before_does_not_act():
    """A chunk, a re-arm, a stop and a press from before the start; the level of the input is taken over."""
    old = Rig()
    old.offer(0)
    old.count("rearm", estop=3, presses=2, pressed=0, heard_ns=START_NS)
    rig = Rig(old.memory)
    rig.measure()
    rig.serve()
    assert (rig.shield.state, rig.shield.reason) == (State.HOLDING, Reason.NOT_ARMED)
    rig.write("control", rearm=2, estop=3, presses=2)
    rig.serve()
    assert rig.shield.reason is Reason.WAITING_FIRST_CHUNK
    for _ in range(3):
        rig.serve()
    assert rig.shield.reason is Reason.WAITING_FIRST_CHUNK and set(rig.log()["offered_sequence"]) == {0}
    pressed = Rig(old.memory)
    old.write("control", pressed=1)
    pressed = Rig(old.memory)
    pressed.measure()
    pressed.serve()
    assert pressed.shield.estop_level is EstopInput.PRESSED and pressed.shield.reason is Reason.ESTOP_INPUT


# ------------------------------------------------------------------ what is reported


def test_every_field_of_the_report_while_following():
    rig = Rig().following(5)
    rig.missed = 7
    rig.measure()
    rig.serve()
    report, tick = rig.report(), rig.tick - 1
    assert (int(report["tick"]), int(report["stamp_ns"]), int(report["missed"])) == (tick, rig.due(tick), 7)
    assert report["position"].tolist() == rig.sent[-1][1] and report["position"][0] == pytest.approx(HOME[0] + 0.006)
    assert report["velocity"].tolist() == rig.sent[-1][2] and report["velocity"][0] == pytest.approx(0.1)
    assert report["acceleration"].tolist() == rig.shield.acceleration.tolist()
    assert (int(report["state"]), int(report["reason"]), int(report["segment"])) == (State.NOMINAL, Reason.FOLLOWING, 1)
    assert int(report["rearm"]) == Rearm.NOT_HOLDING and int(report["accepted"]) == 1
    assert (int(report["stops"]), int(report["stalls"])) == (0, 0)
    # The plan from the next tick on: steps 7 .. 20 of the chunk.
    assert int(report["plan_rows"]) == 14
    np.testing.assert_allclose(report["plan"][:14, 0], HOME[0] + 0.001 * np.arange(7, 21))
    assert int(report["limited"]) == rig.shield.limit_interventions


def test_counts_of_the_report():
    rig = Rig().following()
    rig.shield.limit_interventions, rig.shield.stops, rig.shield.stalls = 11, 12, 13
    rig.serve()
    assert tuple(int(rig.report()[name]) for name in ("limited", "stops", "stalls")) == (11, 12, 13)
    assert rig.report()["acceleration"].tolist() == rig.shield.acceleration.tolist()


def test_no_plan_is_reported_unless_it_is_followed():
    rig = Rig().following()
    rig.count("estop")
    rig.serve()
    assert rig.shield.state is State.BRAKING and int(rig.report()["plan_rows"]) == 0
    rig = Rig().armed()  # COASTING, but nothing is planned
    assert rig.shield.state is State.COASTING and int(rig.report()["plan_rows"]) == 0
    rig.offer(rig.tick - 1)
    for _ in range(15):
        rig.serve()
    assert rig.shield.state is State.COASTING and int(rig.report()["plan_rows"]) == 5  # COASTING on an old chunk


def test_every_field_of_the_log():
    rig = Rig().following(4)
    rig.measure(HOME + 0.01, age_ns=30_000)
    stamp_ns = rig.now_ns - 30_000
    rig.missed, rig.late_ns = 5, 70_000
    rig.offer(rig.tick - 1, sequence=9)
    inner = rig.loop._send
    rig.loop._send = lambda *command: (inner(*command), rig.clock.advance_ns(12_345))
    rig.serve()
    row, tick = rig.log()[-1], rig.tick - 1
    assert (int(row["tick"]), int(row["stamp_ns"]), int(row["lateness_ns"]), int(row["work_ns"])) == (
        tick, rig.due(tick), 70_000, 12_345)
    assert (int(row["state"]), int(row["reason"]), int(row["segment"])) == (State.NOMINAL, Reason.FOLLOWING, 1)
    assert (int(row["chunk_sequence"]), int(row["offered_sequence"]), int(row["offered_verdict"])) == (
        9, 9, OFFER_ACCEPTED)
    assert int(row["measured_stamp_ns"]) == stamp_ns and int(row["missed"]) == 5
    assert (int(row["rearms"]), int(row["estops"]), int(row["estop_presses"]), int(row["estop_input"])) == (1, 0, 0, 0)
    assert row["position"].tolist() == rig.sent[-1][1] and row["velocity"].tolist() == rig.sent[-1][2]
    assert [int(k) for k in rig.log()["tick"]] == list(range(rig.tick))
    rig.count("estop", presses=4, pressed=1)
    rig.serve()
    row = rig.log()[-1]
    assert (int(row["rearms"]), int(row["estops"]), int(row["estop_presses"]), int(row["estop_input"])) == (
        1, 1, 4, EstopInput.PRESSED)
    assert (int(row["chunk_sequence"]), int(row["offered_sequence"]), int(row["offered_verdict"])) == (
        9, 0, OFFER_ACCEPTED)


def test_before_any_chunk_the_log_shows_none():
    rig = Rig()
    rig.measure()
    rig.serve()
    row = rig.log()[-1]
    assert (int(row["chunk_sequence"]), int(row["offered_sequence"]), int(row["offered_verdict"])) == (
        0, 0, OFFER_ACCEPTED)
    assert (OFFER_ACCEPTED, OFFER_NOT_LOOKED_AT, OFFER_REFUSED) == (0, 1, 2)


# ------------------------------------------------------------------ chunks


def test_a_chunk_is_refused_by_name_once_and_counted():
    rig = Rig().armed()
    for sequence, (changes, reject) in enumerate([
        ({"period_s": 0.02}, Reject.PERIOD), ({"names": ("gripper", "arm")}, Reject.JOINT_NAMES),
        ({"base_tick": rig.tick + 90}, Reject.FUTURE_TICK), ({"base_tick": -90}, Reject.BEFORE_REARM),
    ], start=1):
        rig.offer(**{"base_tick": rig.tick - 1, "sequence": sequence, **changes})
        rig.serve()
        row = rig.log()[-1]
        assert (int(row["offered_sequence"]), int(row["offered_verdict"])) == (
            sequence, OFFER_REFUSED + REJECTS.index(reject))
        assert verdicts(rig)[reject] == 1 and int(row["chunk_sequence"]) == 0
        rig.serve()  # the same record is not read again
        assert int(rig.log()[-1]["offered_sequence"]) == 0 and verdicts(rig)[reject] == 1
    assert int(rig.report()["accepted"]) == 0
    rig.offer(rig.tick - 1, sequence=5)
    rig.serve()
    rig.offer(rig.tick - 1, sequence=5)
    rig.serve()
    rig.offer(rig.tick - 1, sequence=5)
    rig.serve()
    assert verdicts(rig)[Reject.OLDER] == 2 and int(rig.report()["accepted"]) == 1


def test_what_the_queue_refuses_is_counted_too():
    rig = Rig(gate=GateConfig(max_lead_ticks=30)).armed()
    rig.offer(rig.tick + 5)  # starts in the future, and nothing leads there
    rig.serve()
    assert verdicts(rig) == {Reject.GAP: 1} and rig.queue.empty
    row = rig.log()[-1]
    assert int(row["offered_verdict"]) == OFFER_REFUSED + REJECTS.index(Reject.GAP)


@pytest.mark.parametrize("state", [State.BRAKING, State.HOLDING])
def test_a_robot_that_stops_or_holds_looks_at_no_chunk(state):
    rig = Rig().following(9)
    rig.count("estop")
    rig.serve()
    while rig.shield.state is not state:
        rig.serve()
    rig.offer(rig.tick - 1, sequence=7, period_s=0.02)
    rig.serve()
    row = rig.log()[-1]
    assert (int(row["offered_sequence"]), int(row["offered_verdict"])) == (7, OFFER_NOT_LOOKED_AT)
    assert verdicts(rig) == {}


def test_a_first_chunk_that_comes_late_starts_with_its_first_step_as_long_as_nothing_moved():
    rig = Rig().armed()
    base = rig.tick - 1
    for _ in range(4):
        rig.serve()
    rig.offer(base)
    rig.serve()
    position = np.zeros(2)
    assert rig.queue.sample(rig.tick - 1, position, np.zeros(2)) and position[0] == pytest.approx(HOME[0] + 0.001)
    assert rig.queue.last_tick == rig.tick - 1 + 19


def test_a_chunk_from_before_the_robot_rested_is_cut_like_any_other():
    """Re-armed at tick 1 after moving: only the time at rest since then counts."""
    rig = Rig().following(3)
    rig.shield.rest_ticks = 0
    rig.queue.clear()
    rig.offer(rig.tick - 3, sequence=2)
    rig.serve()
    # The chunk's first tick was two before the next one: its third step is due.
    assert rig.queue.last_tick == rig.tick - 1 - 2 + 19


def test_a_plan_grows_old_tick_by_tick():
    """fresh_ticks = 12: the tick whose base lies 12 back is NOMINAL, the one after COASTING."""
    rig = Rig().armed()
    base = rig.tick - 1
    rig.offer(base)
    states = []
    for _ in range(20):
        rig.serve()
        states.append((rig.tick - 2 - base, rig.shield.state))
    assert [age for age, state in states if state is State.NOMINAL] == list(range(13))
    assert {state for age, state in states if age > 12} == {State.COASTING}
    rig.serve()
    assert rig.shield.reason is Reason.QUEUE_EMPTY


def test_every_chunk_taken_is_counted():
    rig = Rig().armed()
    for count in (1, 2, 3):
        rig.offer(rig.tick - 1, sequence=count)
        rig.serve()
        assert int(rig.report()["accepted"]) == count and int(rig.log()[-1]["chunk_sequence"]) == count


def test_a_record_is_read_once():
    """Work per tick is bounded: a ring that holds nothing newer is not unpacked again."""
    rig = Rig().following()
    rig.measure()
    rig.count("presses")
    rig.serve()
    asked, read = [], rig.memory.read
    rig.memory.read = lambda name, newer_than=0: asked.append((name, newer_than)) or read(name, newer_than)
    rig.serve()
    newest = {name: rig.memory.rings[name].hint() for name in ("joints", "control", "chunk")}
    assert min(newest.values()) >= 1 and sorted(asked) == sorted(newest.items())
