"""The shield at the boundaries of its times and tolerances: configuration and measured poses."""

import numpy as np
import pytest
from shield_rig import CONFIG, GAP, HOME, LIMITS, PRESSED, RELEASED, SILENT, T, armed, counts, known, moving, started

from vla_edge.core.joint_limits import JointLimits, LimitsError
from vla_edge.core.shield import Rearm, Reason, Shield, ShieldConfig, State

# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize("field", ["fresh_ticks", "first_chunk_ticks", "stall_ticks"])
def test_ticks_of_the_configuration(field):
    least = 0 if field == "fresh_ticks" else 1
    assert getattr(ShieldConfig(**{field: least}), field) == least
    with pytest.raises(ValueError) as error:
        ShieldConfig(**{field: least - 1})
    assert str(error.value) == "fresh_ticks must not be negative, first_chunk_ticks and stall_ticks at least 1"


@pytest.mark.parametrize("field, allowed, refused", [
    ("measurement_max_age_s", [1e-9, 0.5], [0.0, -0.1, float("nan")]),
    ("outside_tolerance", [0.0, 0.5], [-1e-9, float("nan")]),
])
def test_tolerances_of_the_configuration(field, allowed, refused):
    for value in allowed:
        assert getattr(ShieldConfig(**{field: value}), field) == value
    for value in refused:
        with pytest.raises(ValueError) as error:
            ShieldConfig(**{field: value})
        assert str(error.value) == "measurement_max_age_s must be positive and outside_tolerance not negative"


def test_what_the_defaults_are():
    config = ShieldConfig()
    assert (config.fresh_ticks, config.first_chunk_ticks, config.stall_ticks) == (12, 100, 10)
    assert (config.measurement_max_age_s, config.outside_tolerance) == (0.1, 0.02)
    assert Shield(LIMITS, 0.1).stall_ns == 1_000_000_000 and Shield(LIMITS, T, CONFIG).stall_ns == 375_000_000


def test_a_new_shield_has_nothing_to_send():
    shield = Shield(LIMITS, T)
    assert not shield.started and known(shield) == (State.HOLDING, Reason.NO_POSE) and counts(shield) == (0, 0, 0, 0)
    assert shield.estop_level is RELEASED and shield.rest_ticks == 0
    for array in (shield.position, shield.velocity, shield.acceleration):
        assert array.shape == (2,) and array.dtype == np.float64 and (array == 0.0).all()


def test_limits_that_do_not_fit_the_tick_are_refused():
    Shield(LIMITS, 4.0 / (25 * 64.0))
    with pytest.raises(LimitsError, match="within 25 ticks"):
        Shield(LIMITS, 4.0 / (25 * 64.0) * 0.999)


def test_every_start_begins_a_segment():
    shield = started()
    assert shield.start(HOME + 0.1) is Rearm.ACCEPTED
    assert shield.segment == 2 and shield.position.tolist() == (HOME + 0.1).tolist()


@pytest.mark.parametrize("desired, velocity", [(np.zeros(3), None), (np.zeros(1), None), (HOME, np.zeros(1))])
def test_a_vector_of_another_width_is_an_error_of_the_program(desired, velocity):
    """Not a motion of some of the joints."""
    with pytest.raises(ValueError):
        armed().step(desired, velocity, 0)


def test_every_joint_has_its_own_limits():
    limits = JointLimits(("a", "b"), *(np.array(row) for row in (
        [-1.0, -2.0], [3.0, 4.0], [1.0, 2.0], [4.0, 6.0], [64.0, 96.0], [0.0, 0.0], [0.1, 0.1])))
    shield = Shield(limits, T)
    shield.start(np.zeros(2))
    shield.rearm(np.zeros(2), 0.0)
    rows = [np.zeros(2)] * 3
    for _ in range(200):
        shield.step(np.array([9.0, 9.0]))
        rows.append(shield.position.copy())
    assert rows[-1].tolist() == [3.0, 4.0]
    for _ in range(300):
        shield.step(np.array([-9.0, -9.0]))
        rows.append(shield.position.copy())
    assert rows[-1].tolist() == [-1.0, -2.0]
    for order, bound in ((1, limits.velocity), (2, limits.acceleration), (3, limits.jerk)):
        largest = np.abs(np.diff(rows, order, axis=0)).max(axis=0) / T**order
        assert (largest <= bound * (1 + 1e-8)).all() and (largest > 0.9 * bound).all()


# ------------------------------------------------------------------ measured poses


@pytest.mark.parametrize("q, verdict", [
    ([-2.25, 0.5], Rearm.ACCEPTED), ([2.25, 1.25], Rearm.ACCEPTED), ([0.0, -0.25], Rearm.ACCEPTED),
    ([-2.26, 0.5], Rearm.MEASUREMENT_OUTSIDE_LIMITS), ([2.26, 0.5], Rearm.MEASUREMENT_OUTSIDE_LIMITS),
    ([0.0, 1.26], Rearm.MEASUREMENT_OUTSIDE_LIMITS), ([0.0, -0.26], Rearm.MEASUREMENT_OUTSIDE_LIMITS),
    ([0.0, np.nan], Rearm.MEASUREMENT_NOT_FINITE), ([np.inf, 0.0], Rearm.MEASUREMENT_NOT_FINITE),
    ([0.0], Rearm.MEASUREMENT_NOT_FINITE), ([0.0, 0.0, 0.0], Rearm.MEASUREMENT_NOT_FINITE),
    ([[0.0, 0.0]], Rearm.MEASUREMENT_NOT_FINITE),
])
def test_a_pose_may_be_measured_slightly_outside(q, verdict):
    shield = Shield(LIMITS, T, CONFIG)
    assert shield.start(np.array(q)) is verdict
    assert shield.started == (verdict is Rearm.ACCEPTED) and shield.segment == int(shield.started)
    if shield.started:
        np.testing.assert_array_equal(shield.position, np.clip(q, LIMITS.position_lower, LIMITS.position_upper))
        assert known(shield) == (State.HOLDING, Reason.NOT_ARMED) and shield.rest_ticks == 1
    assert started().rearm_verdict(np.array(q), 0.0) is verdict


@pytest.mark.parametrize("age_s, verdict", [
    (0.25, Rearm.ACCEPTED), (0.2501, Rearm.MEASUREMENT_STALE), (0.0, Rearm.ACCEPTED), (-0.005, Rearm.ACCEPTED),
    (-0.00501, Rearm.MEASUREMENT_STALE)])
def test_a_measurement_may_be_this_old(age_s, verdict):
    shield = started()
    assert shield.rearm_verdict(HOME, age_s) is verdict
    assert shield.rearm(HOME, age_s) is verdict
    assert known(shield) == ((State.COASTING, Reason.WAITING_FIRST_CHUNK) if verdict is Rearm.ACCEPTED else (
        State.HOLDING, Reason.NOT_ARMED))


def test_a_reason_to_hold_from_before_the_first_pose_stays():
    shield = Shield(LIMITS, T)
    shield.estop()
    shield.start(HOME)
    assert known(shield) == (State.HOLDING, Reason.ESTOP) and shield.stops == 0


def test_the_first_obstacle_is_the_one_that_is_named():
    shield = Shield(LIMITS, T, CONFIG)
    assert shield.rearm_verdict(None, 9.0) is Rearm.NO_MEASUREMENT
    assert shield.rearm_verdict(HOME, 9.0) is Rearm.MEASUREMENT_STALE
    assert shield.rearm_verdict(np.full(2, np.nan), 9.0) is Rearm.MEASUREMENT_STALE
    assert shield.rearm_verdict(np.full(2, np.nan), 0.0) is Rearm.MEASUREMENT_NOT_FINITE
    assert shield.rearm_verdict(HOME, 0.0) is Rearm.NO_MEASUREMENT  # not started: nothing was ever sent
    shield = moving()
    shield.estop_input(SILENT)
    assert shield.rearm_verdict(None, 9.0) is Rearm.NOT_HOLDING
    while shield.state is not State.HOLDING:
        shield.step(None)
    assert shield.rearm_verdict(None, 9.0) is Rearm.ESTOP_SILENT
    shield.estop_input(PRESSED)
    assert shield.rearm_verdict(None, 9.0) is Rearm.ESTOP_PRESSED
    shield.shut_down()
    assert shield.rearm_verdict(None, 9.0) is Rearm.SHUTTING_DOWN


@pytest.mark.parametrize("away, is_away", [(GAP, False), (-GAP, False), (1.001 * GAP, True), (-1.001 * GAP, True)])
def test_a_joint_within_its_gap_continues_from_its_command(away, is_away):
    shield = started()
    measured = HOME + [away, 0.5]  # the gripper's gap spans its range
    assert shield.rearm(measured, 0.0) is Rearm.ACCEPTED
    assert shield.position.tolist() == [measured[0] if is_away else HOME[0], HOME[1]]
    assert shield.segment == 1 + is_away and shield.rest_ticks == 2
