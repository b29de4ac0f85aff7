"""The shield while it acts, stops and stalls."""

import numpy as np
import pytest
from shield_rig import GAP, HOME, PRESSED, RELEASED, SILENT, T, armed, counts, known, moving, started

from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.shield import Rearm, Reason, Shield, ShieldConfig, State
from vla_edge.core.shield_words import REARM_TEXT, REASON_TEXT

# ------------------------------------------------------------------ waiting, freshness, the desired trajectory


def test_waiting_for_the_first_chunk_takes_as_long_as_it_says():
    shield = armed()
    for _ in range(3):
        shield.step(None)
        assert known(shield) == (State.COASTING, Reason.WAITING_FIRST_CHUNK)
    shield.step(None)
    assert known(shield) == (State.HOLDING, Reason.NO_FIRST_CHUNK) and shield.stops == 0
    assert shield.rearm(HOME, 0.0) is Rearm.ACCEPTED  # the whole time again
    for _ in range(3):
        shield.step(None)
    assert shield.state is State.COASTING
    shield.step(HOME, None, 0)
    shield.step(None)
    assert known(shield) == (State.HOLDING, Reason.QUEUE_EMPTY) and shield.stops == 1  # nothing was left to wait


def test_a_stop_ends_the_waiting():
    shield = armed()
    shield.estop()
    assert known(shield) == (State.BRAKING, Reason.ESTOP)
    shield.step(None)
    assert known(shield) == (State.HOLDING, Reason.ESTOP) and shield.stops == 1
    shield.step(None)
    assert shield.reason is Reason.ESTOP


@pytest.mark.parametrize("age_ticks, state, reason", [
    (0, State.NOMINAL, Reason.FOLLOWING), (3, State.NOMINAL, Reason.FOLLOWING), (4, State.COASTING, Reason.CHUNK_OLD)])
def test_a_chunk_is_fresh_this_long(age_ticks, state, reason):
    shield = armed()
    shield.step(HOME, None, age_ticks)
    assert known(shield) == (state, reason)
    shield = armed(config=ShieldConfig(fresh_ticks=0))
    shield.step(HOME)  # the age counts as 0 unless given
    assert known(shield) == (State.NOMINAL, Reason.FOLLOWING)


def test_the_desired_velocity_is_what_a_joint_that_is_behind_aims_ahead_with():
    """Both follow the same jump; the one that knows the target moves on goes farther."""
    ends = []
    for velocity in (None, np.zeros(2), np.array([0.5, 0.0])):
        shield = armed()
        for k in range(12):
            shield.step(HOME + [0.3 + 0.5 * T * k, 0.0], velocity, 0)
        ends.append(shield.position[0])
    assert ends[0] == ends[1] < ends[2]


def test_each_step_with_a_limited_joint_counts_once():
    shield = armed()
    shield.step(HOME, None, 0)
    assert shield.limit_interventions == 0
    shield.step(HOME + [1.0, 0.0], None, 0)
    assert shield.limit_interventions == 1
    shield.step(HOME + [1.0, 0.5], None, 0)
    assert shield.limit_interventions == 2
    shield = armed()
    shield.step(HOME + [0.0, 0.5], None, 0)  # the last joint alone
    assert shield.limit_interventions == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["position", "velocity"])
@pytest.mark.parametrize("joint", [0, 1])
def test_a_number_that_is_not_finite_stops_the_robot(bad, where, joint):
    shield = moving()
    before = shield.velocity[0]
    desired, velocity = HOME + 0.1, np.zeros(2)
    (desired if where == "position" else velocity)[joint] = bad
    shield.step(desired, velocity, 0)
    assert known(shield) == (State.BRAKING, Reason.NOT_FINITE) and shield.stops == 1
    assert 0.0 <= shield.velocity[0] < before and np.isfinite(shield.position).all()


def test_braking_continues_whatever_is_desired_and_counts_one_stop():
    shield = moving()
    shield.step(None)
    assert known(shield) == (State.BRAKING, Reason.QUEUE_EMPTY)
    shield.estop()
    shield.estop_input(PRESSED)
    for _ in range(60):
        shield.step(HOME + 1.0, np.ones(2), 0)
    assert known(shield) == (State.HOLDING, Reason.ESTOP_INPUT) and shield.stops == 1
    assert (shield.velocity == 0.0).all() and (shield.acceleration == 0.0).all()


def test_braking_lasts_until_the_last_joint_rests():
    for slow in (0, 1):
        limits = JointLimits(("a", "b"), *(np.array(row) for row in (
            [-20.0, -20.0], [20.0, 20.0], [1.0, 1.0], [0.5 if k == slow else 4.0 for k in range(2)], [64.0, 64.0],
            [0.0, 0.0], [0.1, 0.1])))
        shield = Shield(limits, T)
        shield.start(np.zeros(2))
        shield.rearm(np.zeros(2), 0.0)
        for _ in range(60):
            shield.step(np.array([9.0, 9.0]))
        shield.step(None)
        while (shield.velocity != 0.0).any() or (shield.acceleration != 0.0).any():
            assert shield.state is State.BRAKING and shield.rest_ticks == 0
            shield.step(None)
        assert shield.state is State.HOLDING and shield.rest_ticks == 1


def test_an_acceleration_alone_is_motion():
    """At the tick in which the speed becomes zero a joint still decelerates: it rests from the next one on."""
    for index in (0, 1):
        shield = armed()
        shield._joints[index].v = 0.125
        shield.estop()
        shield.step(None)
        assert shield.velocity[index] == 0.0 and shield.acceleration[index] == -2.0
        assert shield.state is State.BRAKING and shield.rest_ticks == 0
        shield.step(None)
        assert shield.state is State.HOLDING and shield.rest_ticks == 1


def test_rest_is_counted():
    shield = started()
    for count in (2, 3, 4):
        shield.step(None)
        assert shield.rest_ticks == count
    assert moving().rest_ticks == 0


# ------------------------------------------------------------------ emergency stop, shutting down


def test_what_a_level_does_when_it_comes_and_while_it_stays():
    shield = moving()
    shield.estop_input(PRESSED)
    assert known(shield) == (State.BRAKING, Reason.ESTOP_INPUT) and shield.estop_level is PRESSED
    shield.estop()  # another reason meanwhile
    shield.estop_input(PRESSED)  # no new press
    assert shield.reason is Reason.ESTOP
    shield.estop_input(SILENT)  # from pressed to silent: nothing new either
    assert shield.reason is Reason.ESTOP and shield.estop_level is SILENT
    shield.estop_input(PRESSED)
    assert shield.reason is Reason.ESTOP_INPUT
    shield.estop_input(RELEASED)
    assert known(shield) == (State.BRAKING, Reason.ESTOP_INPUT) and shield.estop_level is RELEASED
    assert shield.stops == 1


def test_silence_stops_a_robot_that_acts_and_tells_one_that_holds_nothing_new():
    shield = moving()
    shield.estop_input(SILENT)
    assert known(shield) == (State.BRAKING, Reason.ESTOP_SILENT)
    shield = started()
    shield.estop_input(SILENT)
    assert known(shield) == (State.HOLDING, Reason.NOT_ARMED)
    shield.estop_input(PRESSED)
    assert known(shield) == (State.HOLDING, Reason.ESTOP_INPUT) and shield.stops == 0


def test_once_closing_every_stop_is_the_shutdown():
    shield = moving()
    shield.shut_down()
    assert known(shield) == (State.BRAKING, Reason.SHUTDOWN)
    shield.estop()
    shield.estop_input(PRESSED)
    assert shield.reason is Reason.SHUTDOWN and shield.stops == 1


# ------------------------------------------------------------------ the motor process did not run


def test_a_stall_puts_a_joint_that_moved_where_it_was_measured_and_keeps_the_others():
    shield = moving()
    last = shield.position.copy()
    shield.stall(last + [0.01, 0.05], 0.0)
    assert shield.position.tolist() == [last[0] + 0.01, last[1]]
    assert known(shield) == (State.HOLDING, Reason.MOTOR_STALLED) and counts(shield) == (2, 0, 1, 1)
    assert (shield.velocity == 0.0).all() and (shield.acceleration == 0.0).all()
    shield.step(None)
    assert shield.rest_ticks == 1


@pytest.mark.parametrize("v, a, moved", [(0.25, 0.0, True), (0.0, 2.0, True), (0.0, 0.0, False)])
def test_a_joint_moved_if_it_had_speed_or_acceleration(v, a, moved):
    """One that stood follows the rule of the re-arm: within its gap it keeps its command."""
    shield = armed()
    shield._joints[0].v, shield._joints[0].a = v, a
    shield._publish()
    shield.stall(HOME + [0.5 * GAP, 0.0], 0.0)
    assert shield.position[0] == HOME[0] + (0.5 * GAP if moved else 0.0)


@pytest.mark.parametrize("gap, kept", [(1.0, True), (0.999, False)])
def test_a_joint_whose_gap_spans_its_range_keeps_its_command_even_if_it_moved(gap, kept):
    limits = JointLimits(("arm", "gripper"), *(np.array(row) for row in (
        [-2.0, 0.0], [2.0, 1.0], [1.0, 1.0], [4.0, 4.0], [64.0, 64.0], [0.0, 0.0], [GAP, gap])))
    shield = Shield(limits, T)
    shield.start(HOME)
    shield.rearm(HOME, 0.0)
    for k in range(6):
        shield.step(HOME + [0.0, 0.02 * (k + 1)], None, 0)
    last = shield.position.copy()
    shield.stall(last + [0.0, -0.05], 0.0)
    assert (shield.position[1] == last[1]) == kept


@pytest.mark.parametrize("measured, age_s", [
    (None, 0.0), (HOME + 0.2, 0.26), (HOME + 0.2, -0.006), (HOME + 9.0, 0.0), (np.full(2, np.nan), 0.0)])
def test_a_stall_without_a_usable_measurement_stands_at_the_last_command(measured, age_s):
    shield = moving()
    last = shield.position.copy()
    shield.stall(measured, age_s)
    assert shield.position.tolist() == last.tolist() and (shield.velocity == 0.0).all()
    assert known(shield) == (State.HOLDING, Reason.MOTOR_STALLED) and counts(shield) == (2, 0, 1, 1)


def test_a_stall_measured_as_late_as_a_rearm_allows():
    shield = moving()
    measured = shield.position + [0.01, 0.0]
    shield.stall(measured, 0.25)
    assert shield.position[0] == measured[0]


@pytest.mark.parametrize("stop, reason", [
    (lambda s: s.estop(), Reason.ESTOP), (lambda s: s.estop_input(PRESSED), Reason.ESTOP_INPUT),
    (lambda s: s.estop_input(SILENT), Reason.ESTOP_SILENT), (lambda s: s.shut_down(), Reason.SHUTDOWN),
    (lambda s: s.step(None), Reason.MOTOR_STALLED), (lambda s: s.step(np.full(2, np.nan)), Reason.MOTOR_STALLED)])
def test_a_stop_that_a_stall_breaks_off_keeps_an_operators_reason(stop, reason):
    shield = moving()
    stop(shield)
    shield.stall(None, 0.0)
    assert known(shield) == (State.HOLDING, reason) and shield.stalls == 1


def test_a_stall_of_a_robot_that_holds_is_none():
    shield = started()
    before = (*known(shield), *counts(shield), shield.rest_ticks, shield.position.tolist())
    shield.stall(HOME + 0.2, 0.0)
    assert before == (*known(shield), *counts(shield), shield.rest_ticks, shield.position.tolist())


def test_stalls_and_stops_are_counted():
    shield = moving()
    shield.step(None)
    for count in (1, 2, 3):
        shield.stall(None, 0.0)
        assert shield.stalls == count and shield.segment == 1 + count and shield.stops == count
        shield.rearm(shield.position.copy(), 0.0)
        shield.step(shield.position + [0.001, 0.0], None, 0)
        shield.step(None)


def test_after_a_stall_a_rearm_waits_the_whole_time_for_a_chunk():
    shield = armed()
    shield.stall(None, 0.0)
    for _ in range(10):
        shield.step(HOME + 0.1, None, 0)
    assert known(shield) == (State.HOLDING, Reason.MOTOR_STALLED)
    shield.rearm(HOME, 0.0)
    for _ in range(4):
        assert shield.state is State.COASTING
        shield.step(None)
    assert known(shield) == (State.HOLDING, Reason.NO_FIRST_CHUNK)


def test_every_word_an_operator_reads_is_there():
    for words, texts in ((Reason, REASON_TEXT), (Rearm, REARM_TEXT)):
        assert set(texts) == set(words) and len(set(texts.values())) == len(texts)
        assert all(text and text == text.strip() for text in texts.values())
