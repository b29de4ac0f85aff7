"""The motor loop and its operator: commands, the emergency stop input, and a process that did not run."""

import numpy as np
import pytest
from motor_rig import HOME, START_NS, T_NS, Rig, verdicts

from vla_edge.core.chunk import Reject
from vla_edge.core.shield import EstopInput, Rearm, Reason, State

# ------------------------------------------------------------------ operator


def test_before_any_rearm_none_was_refused():
    assert Rig().loop.last_rearm is Rearm.ACCEPTED


def test_a_rearm_forgets_the_plan_and_chunks_from_before_it():
    rig = Rig().following()
    rig.count("estop")
    while rig.shield.state is not State.HOLDING:
        rig.serve()
    rig.measure(np.array(rig.sent[-1][1]))
    rig.count("rearm")
    before = rig.tick - 1
    rig.serve()
    assert rig.queue.empty and rig.gate.newest is None and rig.loop.last_rearm is Rearm.ACCEPTED
    rig.offer(before, sequence=8)
    rig.serve()
    assert verdicts(rig) == {Reject.BEFORE_REARM: 1}
    rig.offer(before + 1, sequence=9)  # the tick of the re-arm
    rig.serve()
    assert rig.shield.state is State.NOMINAL


def test_a_refused_rearm_changes_nothing():
    rig = Rig().following()
    rig.count("rearm")
    rig.serve()
    assert rig.loop.last_rearm is Rearm.NOT_HOLDING
    assert rig.shield.state is State.NOMINAL and not rig.queue.empty and rig.gate.newest is not None


def test_a_rearm_is_asked_about_the_newest_measurement_and_its_age():
    rig = Rig()
    rig.measure()
    rig.serve()
    for age_ns, verdict in ((99_000_000, Rearm.ACCEPTED), (101_000_000, Rearm.MEASUREMENT_STALE)):
        rig = Rig()
        rig.measure()
        rig.serve()
        rig.clock.advance_ns(T_NS)
        rig.measure(age_ns=age_ns - 1_000)
        rig.late_ns = rig.now_ns - rig.due(1) + 1_000
        rig.count("rearm")
        rig.serve()
        assert rig.loop.last_rearm is verdict
        assert int(rig.report()["rearm"]) == (Rearm.NOT_HOLDING if verdict is Rearm.ACCEPTED else verdict)
    rig = Rig()
    rig.shield.start(HOME)  # by other means: no joint state was ever received
    rig.count("rearm")
    rig.serve()
    assert rig.loop.last_rearm is Rearm.NO_MEASUREMENT and int(rig.log()[-1]["measured_stamp_ns"]) == 0


def test_a_rearm_starts_at_the_measured_pose():
    rig = Rig()
    rig.measure()
    rig.serve()
    rig.measure(HOME + [0.5, 0.0])
    rig.count("rearm")
    rig.serve()
    assert rig.sent[-1][1] == [0.75, 0.5] and int(rig.report()["segment"]) == 2


def test_of_a_stop_and_a_rearm_the_stop_counts_and_the_rearm_is_used_up():
    for stop in ("estop", "presses"):
        rig = Rig()
        rig.measure()
        rig.serve()
        rig.count(stop, rearm=1)
        rig.serve()
        assert rig.shield.state is State.HOLDING
        assert rig.shield.reason is (Reason.ESTOP if stop == "estop" else Reason.ESTOP_INPUT)
        assert rig.shield.estop_level is EstopInput.RELEASED
        for _ in range(3):
            rig.measure()
            rig.serve()
        assert rig.shield.state is State.HOLDING
        rig.count("rearm")
        rig.serve()
        assert rig.shield.state is State.COASTING


def test_each_count_acts_once():
    rig = Rig().following()
    rig.count("estop")
    while rig.shield.state is not State.HOLDING:
        rig.serve()
    rig.measure(np.array(rig.sent[-1][1]))
    rig.count("rearm")
    for _ in range(5):
        rig.serve()
    assert rig.shield.reason is Reason.WAITING_FIRST_CHUNK and rig.shield.stops == 1


def test_a_press_and_a_level():
    rig = Rig().following()
    rig.count("presses")  # pressed and released between two ticks
    rig.serve()
    assert (rig.shield.state, rig.shield.reason) == (State.BRAKING, Reason.ESTOP_INPUT)
    rig = Rig().following()
    rig.write("control", pressed=1)  # a level without a counted press
    rig.serve()
    assert (rig.shield.state, rig.shield.reason) == (State.BRAKING, Reason.ESTOP_INPUT)
    assert rig.shield.estop_level is EstopInput.PRESSED
    rig.write("control", pressed=0)
    rig.serve()
    assert rig.shield.estop_level is EstopInput.RELEASED and rig.shield.state is State.BRAKING


@pytest.mark.parametrize("silence_ns, level", [
    (500_000_000, EstopInput.RELEASED), (500_000_001, EstopInput.SILENT), (0, EstopInput.RELEASED)])
def test_an_input_is_silent_after_its_time(silence_ns, level):
    rig = Rig(estop_silence_s=0.5)
    rig.late_ns = 0
    rig.write("control", heard_ns=START_NS - silence_ns)
    rig.measure()
    rig.serve()
    assert rig.shield.estop_level is level


def test_an_input_that_was_never_heard_is_silent_and_one_that_is_not_required_never():
    for silence_s, level in ((0.5, EstopInput.SILENT), (1e6, EstopInput.SILENT), (None, EstopInput.RELEASED)):
        rig = Rig() if silence_s is None else Rig(estop_silence_s=silence_s)
        rig.measure()
        rig.serve()
        assert rig.shield.estop_level is level
        rig.write("control", pressed=1)
        rig.serve()
        assert rig.shield.estop_level is EstopInput.PRESSED


def test_the_time_of_silence_is_kept_to_the_nanosecond():
    for silence_ns, level in ((10_000_000_000, EstopInput.RELEASED), (10_000_000_001, EstopInput.SILENT)):
        rig = Rig(estop_silence_s=10.0)
        rig.late_ns = 0
        rig.write("control", heard_ns=START_NS - silence_ns)
        rig.measure()
        rig.serve()
        assert rig.shield.estop_level is level


def test_a_clock_at_its_first_nanosecond_was_heard():
    """0 means never; 1 is an instant."""
    rig = Rig(estop_silence_s=1e6)
    rig.write("control", heard_ns=1)
    rig.measure()
    rig.serve()
    assert rig.shield.estop_level is EstopInput.RELEASED


# ------------------------------------------------------------------ the process did not run


def pause(rig, ns):
    """The next tick wakes ``ns`` after the one before."""
    woke_ns = rig.due(rig.tick - 1) + rig.late_ns + ns
    rig.tick = (woke_ns - START_NS) // T_NS
    rig.late_ns = woke_ns - rig.due(rig.tick)


@pytest.mark.parametrize("pause_ns, broken", [(50_000_000, False), (50_000_001, True)])
def test_the_stream_is_broken_off_after_the_stall_time(pause_ns, broken):
    rig = Rig().following()
    pause(rig, pause_ns)
    rig.serve()
    assert rig.shield.stalls == broken and (rig.shield.reason is Reason.MOTOR_STALLED) == broken
    assert int(rig.report()["stalls"]) == broken


def test_a_stall_takes_the_newest_measurement_and_its_age():
    for age_ns, used in ((99_000_000, True), (101_000_000, False)):
        rig = Rig().following()
        last = np.array(rig.sent[-1][1])
        pause(rig, 200_000_000)
        rig.write("joints", position=last + [0.01, 0.0], stamp_ns=rig.due(rig.tick) + rig.late_ns - age_ns)
        rig.serve()
        assert rig.sent[-1][1] == [last[0] + (0.01 if used else 0.0), 0.5] and rig.sent[-1][2] == [0.0, 0.0]


def test_a_stall_without_any_measurement_stands_at_the_last_command():
    rig = Rig()
    rig.shield.start(HOME)
    rig.shield.rearm(HOME, 0.0)
    rig.serve()
    pause(rig, 200_000_000)
    rig.serve()
    assert rig.shield.reason is Reason.MOTOR_STALLED and rig.sent[-1][1] == HOME.tolist()


def test_a_rearm_during_a_stall_is_used_up_and_a_stop_is_not():
    rig = Rig().following()
    rig.count("rearm")
    pause(rig, 200_000_000)
    rig.measure()
    rig.serve()
    rig.measure()
    rig.serve()
    assert (rig.shield.state, rig.shield.reason) == (State.HOLDING, Reason.MOTOR_STALLED)
    assert int(rig.log()[-1]["rearms"]) == 2
    rig.count("rearm")
    rig.measure()
    rig.serve()
    assert rig.shield.reason is Reason.WAITING_FIRST_CHUNK


@pytest.mark.parametrize("pause_ns, broken", [(50_000_000, False), (50_000_001, True)])
def test_a_stop_within_a_tick_is_a_stall_too(pause_ns, broken):
    """Between waking and sending; with the joint states that came meanwhile."""
    rig = Rig().following()
    last = np.array(rig.sent[-1][1])
    take = rig.loop._take_chunk

    def stopped(*arguments):
        rig.clock.advance_ns(pause_ns)
        rig.measure(last + [0.02, 0.0])
        return take(*arguments)

    rig.loop._take_chunk = stopped
    rig.serve()
    assert rig.shield.stalls == broken
    if broken:
        assert rig.sent[-1][1] == [last[0] + 0.02, 0.5] and rig.sent[-1][2] == [0.0, 0.0]
    row = rig.log()[-1]
    assert int(row["work_ns"]) == pause_ns and int(row["lateness_ns"]) == rig.late_ns
