"""The shield's state machine: every state meets every event."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from vla_edge.config import load_limits
from vla_edge.core.joint_limits import LimitsError
from vla_edge.core.shield import REARM_TEXT, REASON_TEXT, Rearm, Reason, Shield, ShieldConfig, State

T = 0.01
LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)
READY = LIMITS.ready
FAR = READY + np.array([0.5] * 7 + [0.0])
NAN = np.full(8, np.nan)
WAIT = 5


def shield_in(name):
    """A shield brought into a situation by the way that leads there."""
    shield = Shield(LIMITS, T, ShieldConfig(first_chunk_ticks=WAIT))
    assert shield.start(READY) is Rearm.ACCEPTED
    if name == "not armed":
        return shield
    assert shield.rearm(READY, 0.0) is Rearm.ACCEPTED
    if name == "waiting":
        return shield
    for k in range(20):
        shield.step(READY + 0.002 * (k + 1), np.full(8, 0.2), 0)
    if name == "coasting":
        shield.step(READY + 0.042, np.full(8, 0.2), 99)
    if name in ("braking", "holding"):
        shield.step(None)
    if name == "holding":
        while shield.state is not State.HOLDING:
            shield.step(None)
    return shield


SITUATIONS = {"not armed": (State.HOLDING, Reason.NOT_ARMED), "waiting": (State.COASTING, Reason.WAITING_FIRST_CHUNK),
              "nominal": (State.NOMINAL, Reason.FOLLOWING), "coasting": (State.COASTING, Reason.CHUNK_OLD),
              "braking": (State.BRAKING, Reason.QUEUE_EMPTY), "holding": (State.HOLDING, Reason.QUEUE_EMPTY)}

EVENTS = {
    "fresh chunk": lambda s: s.step(READY + 0.05, np.zeros(8), 0),
    "old chunk": lambda s: s.step(READY + 0.05, np.zeros(8), 99),
    "no chunk": lambda s: s.step(None),
    "nan chunk": lambda s: s.step(NAN, np.zeros(8), 0),
    "nan velocity": lambda s: s.step(READY, NAN, 0),
    "estop": lambda s: (s.estop(), s.step(READY, None, 0)),
    "shut down": lambda s: (s.shut_down(), s.step(READY, None, 0)),
    "re-arm": lambda s: (s.rearm(s.position.copy(), 0.0), s.step(None)),
    "re-arm, stale": lambda s: (s.rearm(s.position.copy(), 0.2), s.step(None)),
}

SAME = None
AFTER = {  # situation → event → (state, reason) after one step; SAME: nothing changes
    "not armed": {"estop": (State.HOLDING, Reason.ESTOP), "shut down": (State.HOLDING, Reason.SHUTDOWN),
                  "re-arm": (State.COASTING, Reason.WAITING_FIRST_CHUNK)},
    "waiting": {"fresh chunk": (State.NOMINAL, Reason.FOLLOWING), "old chunk": (State.COASTING, Reason.CHUNK_OLD),
                # At rest already, so braking is over within the same step.
                "nan chunk": (State.HOLDING, Reason.NOT_FINITE), "nan velocity": (State.HOLDING, Reason.NOT_FINITE),
                "estop": (State.HOLDING, Reason.ESTOP), "shut down": (State.HOLDING, Reason.SHUTDOWN)},
    "nominal": {"old chunk": (State.COASTING, Reason.CHUNK_OLD), "no chunk": (State.BRAKING, Reason.QUEUE_EMPTY),
                "nan chunk": (State.BRAKING, Reason.NOT_FINITE), "nan velocity": (State.BRAKING, Reason.NOT_FINITE),
                "estop": (State.BRAKING, Reason.ESTOP), "shut down": (State.BRAKING, Reason.SHUTDOWN),
                "re-arm": (State.BRAKING, Reason.QUEUE_EMPTY), "re-arm, stale": (State.BRAKING, Reason.QUEUE_EMPTY)},
    "braking": {"estop": (State.BRAKING, Reason.ESTOP), "shut down": (State.BRAKING, Reason.SHUTDOWN)},
    "holding": {"estop": (State.HOLDING, Reason.ESTOP), "shut down": (State.HOLDING, Reason.SHUTDOWN),
                "re-arm": (State.COASTING, Reason.WAITING_FIRST_CHUNK)},
}
AFTER["coasting"] = {**AFTER["nominal"], "old chunk": SAME, "fresh chunk": (State.NOMINAL, Reason.FOLLOWING)}


@pytest.mark.parametrize("situation, event", list(itertools.product(SITUATIONS, EVENTS)))
def test_every_state_meets_every_event(situation, event):
    shield = shield_in(situation)
    assert (shield.state, shield.reason) == SITUATIONS[situation]
    EVENTS[event](shield)
    expected = AFTER[situation].get(event) or SITUATIONS[situation]
    assert (shield.state, shield.reason) == expected


@pytest.mark.parametrize("situation", SITUATIONS)
def test_once_shut_down_nothing_moves_it_again(situation):
    shield = shield_in(situation)
    shield.shut_down()
    for _ in range(100):
        shield.step(FAR, None, 0)
    assert shield.state is State.HOLDING
    assert shield.rearm(shield.position.copy(), 0.0) is Rearm.SHUTTING_DOWN


def test_holding_is_latched_against_fresh_chunks():
    shield = shield_in("holding")
    held = shield.position.copy()
    for _ in range(50):
        shield.step(FAR, None, 0)
        assert shield.state is State.HOLDING and (shield.position == held).all()


def test_braking_ends_in_holding_and_chunks_cannot_interrupt_it():
    shield = shield_in("braking")
    for _ in range(100):
        shield.step(FAR, None, 0)
    assert (shield.state, shield.reason) == (State.HOLDING, Reason.QUEUE_EMPTY)
    assert (shield.velocity == 0).all() and (shield.acceleration == 0).all()
    assert shield.stops == 1


def test_a_first_chunk_that_does_not_come():
    shield = shield_in("waiting")
    for _ in range(WAIT):
        shield.step(None)
    assert (shield.state, shield.reason) == (State.HOLDING, Reason.NO_FIRST_CHUNK)
    assert (shield.position == READY).all() and shield.stops == 0


@pytest.mark.parametrize("measured, age_s, verdict", [
    (READY, 0.0, Rearm.ACCEPTED), (READY, 0.1, Rearm.ACCEPTED), (READY, 0.101, Rearm.MEASUREMENT_STALE),
    (READY, -1.0, Rearm.MEASUREMENT_STALE), (READY, float("nan"), Rearm.MEASUREMENT_STALE),
    (READY, float("inf"), Rearm.MEASUREMENT_STALE), (None, 0.0, Rearm.NO_MEASUREMENT),
    (NAN, 0.0, Rearm.MEASUREMENT_NOT_FINITE), (READY[:7], 0.0, Rearm.MEASUREMENT_NOT_FINITE),
    (READY + 9.0, 0.0, Rearm.MEASUREMENT_OUTSIDE_LIMITS),
])
def test_verdicts_on_a_rearm(measured, age_s, verdict):
    shield = shield_in("not armed")
    before = (shield.state, shield.reason, shield.segment, shield.position.tolist())
    assert shield.rearm_verdict(measured, age_s) is verdict
    assert (shield.state, shield.reason, shield.segment, shield.position.tolist()) == before
    assert shield.rearm(measured, age_s) is verdict
    assert (shield.state is State.HOLDING) == (verdict is not Rearm.ACCEPTED)


@pytest.mark.parametrize("situation", ["waiting", "nominal", "coasting", "braking"])
def test_only_a_holding_robot_is_rearmed(situation):
    assert shield_in(situation).rearm(READY, 0.0) is Rearm.NOT_HOLDING


def test_a_shield_without_a_pose_cannot_be_rearmed():
    shield = Shield(LIMITS, T)
    assert not shield.started and shield.rearm(READY, 0.0) is Rearm.NO_MEASUREMENT


@pytest.mark.parametrize("measured, verdict", [
    (NAN, Rearm.MEASUREMENT_NOT_FINITE), (READY + 9, Rearm.MEASUREMENT_OUTSIDE_LIMITS), (READY[:3], Rearm.MEASUREMENT_NOT_FINITE),
])
def test_a_pose_that_cannot_be_held_starts_nothing(measured, verdict):
    shield = Shield(LIMITS, T)
    assert shield.start(measured) is verdict and not shield.started


def test_rearming_near_the_last_command_continues_the_stream():
    shield = shield_in("holding")
    held, segment = shield.position.copy(), shield.segment
    assert shield.rearm(held + 0.04, 0.0) is Rearm.ACCEPTED
    shield.step(None)
    assert (shield.position == held).all() and shield.segment == segment


def test_rearming_elsewhere_starts_a_segment_from_the_measured_pose():
    shield = shield_in("holding")
    held, segment = shield.position.copy(), shield.segment
    measured = held.copy()
    measured[2] += 0.3
    measured[7] = 0.9  # the gripper holds something: it keeps its command
    shield.rearm(measured, 0.0)
    shield.step(None)
    assert shield.position[2] == measured[2] and shield.position[7] == held[7] and shield.segment == segment + 1
    assert (shield.velocity == 0).all()


def test_a_pose_slightly_outside_is_held_at_the_limit():
    measured = READY.copy()
    measured[7] = -0.01
    shield = Shield(LIMITS, T)
    assert shield.start(measured) is Rearm.ACCEPTED and shield.position[7] == 0.0


def test_a_target_outside_the_limits_is_approached_only_to_the_limit():
    shield = shield_in("nominal")
    for _ in range(600):
        shield.step(LIMITS.position_upper + 0.2, None, 0)
    np.testing.assert_array_equal(shield.position, LIMITS.position_upper)
    assert shield.limit_interventions >= 600


def test_rest_is_counted_in_commands():
    shield = shield_in("not armed")
    for _ in range(3):
        shield.step(None)
    assert shield.rest_ticks == 4
    shield = shield_in("nominal")
    assert shield.rest_ticks == 0


def test_every_reason_and_answer_has_a_text():
    assert set(REASON_TEXT) == set(Reason) and set(REARM_TEXT) == set(Rearm)


def test_a_period_that_does_not_fit_the_limits_is_refused():
    with pytest.raises(LimitsError, match="raise jerk"):
        Shield(LIMITS, 0.0001)
