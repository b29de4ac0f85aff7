"""The shield's state machine: every state meets every event."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from vla_edge.config import load_limits
from vla_edge.core.joint_limits import LimitsError
from vla_edge.core.shield import REARM_TEXT, REASON_TEXT, EstopInput, Rearm, Reason, Shield, ShieldConfig, State

T = 0.01
LIMITS = load_limits(Path(__file__).parents[2] / "config/robots/panda_2f85.yaml", T)
READY = LIMITS.ready
FAR = READY + np.array([0.5] * 7 + [0.0])
NAN = np.full(8, np.nan)
WAIT = 5


def shield_in(name):
    """A shield brought into a situation by the way that leads there."""
    shield = Shield(LIMITS, T, ShieldConfig(first_chunk_ticks=WAIT))
    if name == "no pose":
        return shield
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
    if name.startswith("pressed"):
        shield.estop_input(EstopInput.PRESSED)
        shield.step(None)
    if name == "closing" or name == "closed":
        shield.shut_down()
        shield.step(None)
    if name in ("holding", "pressed, holding", "closed"):
        while shield.state is not State.HOLDING:
            shield.step(None)
    return shield


HOLD, BRAKE, COAST, NOMINAL = State.HOLDING, State.BRAKING, State.COASTING, State.NOMINAL

SITUATIONS = {
    "no pose": (HOLD, Reason.NO_POSE), "not armed": (HOLD, Reason.NOT_ARMED),
    "waiting": (COAST, Reason.WAITING_FIRST_CHUNK), "nominal": (NOMINAL, Reason.FOLLOWING),
    "coasting": (COAST, Reason.CHUNK_OLD), "braking": (BRAKE, Reason.QUEUE_EMPTY),
    "holding": (HOLD, Reason.QUEUE_EMPTY), "pressed, braking": (BRAKE, Reason.ESTOP_INPUT),
    "pressed, holding": (HOLD, Reason.ESTOP_INPUT), "closing": (BRAKE, Reason.SHUTDOWN),
    "closed": (HOLD, Reason.SHUTDOWN),
}


def rearm(measured=None, age_s=0.0, level=None):
    def act(shield):
        if level is not None:
            shield.estop_input(level)
        here = shield.position.copy() if shield.started else READY
        ACT.verdict = shield.rearm(here if measured is None else measured, age_s)
        shield.step(None)
    return act


class ACT:
    verdict = None


def wait_out(shield):
    for _ in range(WAIT):
        shield.step(None)


MOVED = READY + 0.2
EVENTS = {
    "fresh chunk": lambda s: s.step(READY + 0.05, np.zeros(8), 0),
    "old chunk": lambda s: s.step(READY + 0.05, np.zeros(8), 99),
    "no chunk": lambda s: s.step(None),
    "no chunk for the first-chunk time": wait_out,
    "nan chunk": lambda s: s.step(NAN, np.zeros(8), 0),
    "nan velocity": lambda s: s.step(READY, NAN, 0),
    "estop": lambda s: (s.estop(), s.step(READY, None, 0)),
    "estop input pressed": lambda s: (s.estop_input(EstopInput.PRESSED), s.step(READY, None, 0)),
    "estop input silent": lambda s: (s.estop_input(EstopInput.SILENT), s.step(None)),
    "estop input released": lambda s: (s.estop_input(EstopInput.RELEASED), s.step(None)),
    "shut down": lambda s: (s.shut_down(), s.step(READY, None, 0)),
    "stall, measured": lambda s: (s.stall(MOVED, 0.0), s.step(READY, None, 0)),
    "stall, not measured": lambda s: (s.stall(None, 0.0), s.step(READY, None, 0)),
    # One for each answer that depends on the measurement or the input.
    "re-arm": rearm(),
    "re-arm, released": rearm(level=EstopInput.RELEASED),
    "re-arm, never measured": lambda s: (setattr(ACT, "verdict", s.rearm(None, 0.0)), s.step(None)),
    "re-arm, stale": rearm(age_s=0.2),
    "re-arm, not finite": rearm(measured=NAN),
    "re-arm, outside": rearm(measured=READY + 9),
    "re-arm, pressed": rearm(level=EstopInput.PRESSED),
    "re-arm, silent": rearm(level=EstopInput.SILENT),
}

STILL = {event: (HOLD, None) for event in EVENTS}  # None: the reason stays
# The stop from here takes two ticks, less than the first-chunk time.
REFUSED = {event: (HOLD if event == "no chunk for the first-chunk time" else BRAKE, None) for event in EVENTS}
ACCEPTED = (COAST, Reason.WAITING_FIRST_CHUNK)
LATCHED_INPUT = (HOLD, Reason.ESTOP_INPUT)
RUN_OUT, INPUT, SILENT = (BRAKE, Reason.QUEUE_EMPTY), (BRAKE, Reason.ESTOP_INPUT), (BRAKE, Reason.ESTOP_SILENT)
STALLED = (HOLD, Reason.MOTOR_STALLED)

# Situation → event → (state, reason) after one step (after WAIT steps for the one that says so). Every pair is here.
AFTER = {
    "no pose": {**STILL, "estop": (HOLD, Reason.ESTOP), "estop input pressed": LATCHED_INPUT,
                "shut down": (HOLD, Reason.SHUTDOWN), "re-arm, pressed": LATCHED_INPUT},
    "not armed": {**STILL, "estop": (HOLD, Reason.ESTOP), "estop input pressed": LATCHED_INPUT,
                  "shut down": (HOLD, Reason.SHUTDOWN), "re-arm": ACCEPTED, "re-arm, released": ACCEPTED,
                  "re-arm, pressed": LATCHED_INPUT},
    "waiting": {
        "fresh chunk": (NOMINAL, Reason.FOLLOWING), "old chunk": (COAST, Reason.CHUNK_OLD),
        "no chunk": ACCEPTED, "no chunk for the first-chunk time": (HOLD, Reason.NO_FIRST_CHUNK),
        # At rest already, so braking is over within the same step.
        "nan chunk": (HOLD, Reason.NOT_FINITE), "nan velocity": (HOLD, Reason.NOT_FINITE),
        "estop": (HOLD, Reason.ESTOP), "estop input pressed": LATCHED_INPUT,
        "estop input silent": (HOLD, Reason.ESTOP_SILENT), "estop input released": ACCEPTED,
        "shut down": (HOLD, Reason.SHUTDOWN), "stall, measured": STALLED, "stall, not measured": STALLED,
        "re-arm": ACCEPTED, "re-arm, released": ACCEPTED, "re-arm, never measured": ACCEPTED,
        "re-arm, stale": ACCEPTED, "re-arm, not finite": ACCEPTED, "re-arm, outside": ACCEPTED,
        "re-arm, pressed": LATCHED_INPUT, "re-arm, silent": (HOLD, Reason.ESTOP_SILENT)},
    "nominal": {
        "fresh chunk": (NOMINAL, Reason.FOLLOWING), "old chunk": (COAST, Reason.CHUNK_OLD),
        "no chunk": RUN_OUT, "no chunk for the first-chunk time": (HOLD, Reason.QUEUE_EMPTY),
        "nan chunk": (BRAKE, Reason.NOT_FINITE), "nan velocity": (BRAKE, Reason.NOT_FINITE),
        "estop": (BRAKE, Reason.ESTOP), "estop input pressed": INPUT, "estop input silent": SILENT,
        "estop input released": RUN_OUT, "shut down": (BRAKE, Reason.SHUTDOWN),
        "stall, measured": STALLED, "stall, not measured": STALLED,
        "re-arm": RUN_OUT, "re-arm, released": RUN_OUT, "re-arm, never measured": RUN_OUT, "re-arm, stale": RUN_OUT,
        "re-arm, not finite": RUN_OUT, "re-arm, outside": RUN_OUT, "re-arm, pressed": INPUT, "re-arm, silent": SILENT},
    "braking": {**REFUSED, "estop": (BRAKE, Reason.ESTOP), "estop input pressed": INPUT, "estop input silent": SILENT,
                "shut down": (BRAKE, Reason.SHUTDOWN), "stall, measured": STALLED, "stall, not measured": STALLED,
                "re-arm, pressed": INPUT, "re-arm, silent": SILENT},
    "pressed, braking": {**REFUSED, "estop": (BRAKE, Reason.ESTOP), "shut down": (BRAKE, Reason.SHUTDOWN),
                         "stall, measured": LATCHED_INPUT, "stall, not measured": LATCHED_INPUT},
    "pressed, holding": {**STILL, "estop": (HOLD, Reason.ESTOP), "shut down": (HOLD, Reason.SHUTDOWN),
                         "re-arm, released": ACCEPTED},
    "closing": {**REFUSED, "stall, measured": (HOLD, Reason.SHUTDOWN), "stall, not measured": (HOLD, Reason.SHUTDOWN)},
    "closed": STILL,
}
AFTER["holding"] = AFTER["not armed"]
AFTER["coasting"] = AFTER["nominal"]


def test_the_table_is_whole():
    assert set(AFTER) == set(SITUATIONS)
    assert {pair for pair in itertools.product(SITUATIONS, EVENTS) if pair[1] not in AFTER[pair[0]]} == set()
    assert {state for state, _ in SITUATIONS.values()} == set(State)
    reached = {reason for row in AFTER.values() for _, reason in row.values()} | {r for _, r in SITUATIONS.values()}
    assert set(Reason) <= reached


@pytest.mark.parametrize("situation, event", list(itertools.product(SITUATIONS, EVENTS)))
def test_every_state_meets_every_event(situation, event):
    shield = shield_in(situation)
    assert (shield.state, shield.reason) == SITUATIONS[situation]
    EVENTS[event](shield)
    state, reason = AFTER[situation][event]
    assert (shield.state, shield.reason) == (state, SITUATIONS[situation][1] if reason is None else reason)


def answer(situation, event):
    """What a re-arm is told; the first obstacle counts."""
    if situation in ("closing", "closed"):
        return Rearm.SHUTTING_DOWN
    if SITUATIONS[situation][0] is not HOLD:
        return Rearm.NOT_HOLDING
    if event == "re-arm, pressed" or (situation == "pressed, holding" and event not in (
            "re-arm, released", "re-arm, silent")):
        return Rearm.ESTOP_PRESSED
    if event == "re-arm, silent":
        return Rearm.ESTOP_SILENT
    given = {"re-arm, never measured": Rearm.NO_MEASUREMENT, "re-arm, stale": Rearm.MEASUREMENT_STALE,
             "re-arm, not finite": Rearm.MEASUREMENT_NOT_FINITE, "re-arm, outside": Rearm.MEASUREMENT_OUTSIDE_LIMITS}
    return given.get(event, Rearm.NO_MEASUREMENT if situation == "no pose" else Rearm.ACCEPTED)


@pytest.mark.parametrize("situation, event", list(itertools.product(
    SITUATIONS, [event for event in EVENTS if event.startswith("re-arm")])))
def test_every_rearm_gets_its_answer(situation, event):
    shield = shield_in(situation)
    EVENTS[event](shield)
    assert ACT.verdict is answer(situation, event)


def test_every_answer_is_given_somewhere():
    given = {answer(*pair) for pair in itertools.product(SITUATIONS, EVENTS) if pair[1].startswith("re-arm")}
    assert given == set(Rearm)


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


# ------------------------------------------------------------------ the motor process did not run


def moving_shield(ticks=20):
    """Joints 1 to 7 move, the gripper stands."""
    shield = Shield(LIMITS, T)
    shield.start(READY)
    shield.rearm(READY, 0.0)
    way = np.array([1.0] * 7 + [0.0])
    for k in range(ticks):
        shield.step(READY + 0.002 * (k + 1) * way, 0.2 * way, 0)
    assert (shield.velocity[:7] > 0).all() and shield.velocity[7] == 0
    return shield


def is_at_rest(shield):
    return (shield.velocity == 0).all() and (shield.acceleration == 0).all()


def test_after_a_stall_joints_that_moved_stand_where_they_were_measured():
    shield = moving_shield()
    last, segment = shield.position.copy(), shield.segment
    measured = last + 0.03  # less than the re-entry gap: a robot on its own time-out stopped there
    shield.stall(measured, 0.05)
    np.testing.assert_array_equal(shield.position[:7], measured[:7])
    assert shield.position[7] == last[7]  # it did not move: as at a re-arm, and a gripper keeps what it holds
    assert is_at_rest(shield) and (shield.segment, shield.stalls, shield.stops) == (segment + 1, 1, 0)
    shield.step(FAR, None, 0)
    assert is_at_rest(shield) and (shield.state, shield.reason) == (HOLD, Reason.MOTOR_STALLED)
    assert shield.rest_ticks == 1
    np.testing.assert_array_equal(shield.position[:7], measured[:7])


def test_a_gripper_that_was_closing_keeps_its_command_over_a_stall():
    shield = Shield(LIMITS, T)
    shield.start(READY)
    shield.rearm(READY, 0.0)
    close = np.array([0.0] * 7 + [1.0])
    for k in range(20):
        shield.step(READY + 0.01 * (k + 1) * close, close, 0)
    last = shield.position.copy()
    assert shield.velocity[7] > 0
    shield.stall(last - 0.04 * close, 0.0)  # an object keeps it from closing
    assert shield.position[7] == last[7] and is_at_rest(shield)


@pytest.mark.parametrize("gap, place", [(0.04, "command"), (0.06, "measured")])
def test_joints_that_stood_follow_the_rule_of_the_rearm(gap, place):
    shield = shield_in("waiting")
    measured = READY + np.array([gap] * 7 + [0.0])
    shield.stall(measured, 0.0)
    np.testing.assert_array_equal(shield.position, READY if place == "command" else measured)
    assert (shield.state, shield.reason, shield.segment) == (HOLD, Reason.MOTOR_STALLED, 2)


@pytest.mark.parametrize("measured, age_s", [
    (None, 0.0), (READY + 0.2, 0.11), (READY + 0.2, -0.006), (NAN, 0.0), (READY + 9, 0.0), (READY[:3], 0.0),
], ids=["none", "old", "future", "not finite", "outside", "width"])
def test_a_stall_without_a_usable_measurement_keeps_the_last_command(measured, age_s):
    shield = moving_shield()
    last = shield.position.copy()
    shield.stall(measured, age_s)
    np.testing.assert_array_equal(shield.position, last)
    assert is_at_rest(shield) and (shield.state, shield.reason) == (HOLD, Reason.MOTOR_STALLED)
    assert (shield.segment, shield.stalls) == (2, 1)


@pytest.mark.parametrize("situation", ["no pose", "not armed", "holding", "pressed, holding", "closed"])
def test_a_stall_changes_nothing_for_a_robot_that_holds(situation):
    shield = shield_in(situation)
    before = (shield.state, shield.reason, shield.segment, shield.stalls, shield.position.tolist(), shield.rest_ticks)
    shield.stall(MOVED, 0.0)
    assert before == (shield.state, shield.reason, shield.segment, shield.stalls, shield.position.tolist(),
                      shield.rest_ticks)


def test_a_stall_needs_a_rearm_like_any_stop():
    shield = moving_shield()
    shield.stall(shield.position + 0.02, 0.0)
    for _ in range(20):
        shield.step(FAR, None, 0)
    assert shield.state is HOLD
    assert shield.rearm(shield.position.copy(), 0.0) is Rearm.ACCEPTED and shield.segment == 2
    shield.step(shield.position + 0.001, None, 0)
    assert (shield.state, shield.reason) == (NOMINAL, Reason.FOLLOWING)


def test_a_stall_while_waiting_ends_the_waiting():
    shield = shield_in("waiting")
    shield.stall(None, 0.0)
    shield.rearm(READY, 0.0)
    wait_out(shield)
    assert shield.reason is Reason.NO_FIRST_CHUNK  # the time of the second re-arm, not what was left of the first


def test_the_stall_limit_is_a_time():
    assert Shield(LIMITS, T).stall_ns == 100_000_000
    assert Shield(LIMITS, T, ShieldConfig(stall_ticks=3)).stall_ns == 30_000_000


@pytest.mark.parametrize("changes", [
    {"fresh_ticks": -1}, {"first_chunk_ticks": 0}, {"stall_ticks": 0}, {"measurement_max_age_s": 0.0},
    {"measurement_max_age_s": float("nan")}, {"outside_tolerance": -0.1},
])
def test_times_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError, match="must"):
        ShieldConfig(**changes)


# ------------------------------------------------------------------ emergency stop input


def test_the_input_stops_once_per_press_and_forbids_rearming_while_pressed():
    shield = moving_shield()
    for _ in range(60):
        shield.estop_input(EstopInput.PRESSED)
        shield.step(FAR, None, 0)
    assert (shield.state, shield.reason, shield.stops) == (HOLD, Reason.ESTOP_INPUT, 1)
    assert shield.rearm(shield.position.copy(), 0.0) is Rearm.ESTOP_PRESSED
    shield.estop_input(EstopInput.SILENT)
    assert shield.rearm(shield.position.copy(), 0.0) is Rearm.ESTOP_SILENT
    assert shield.reason is Reason.ESTOP_INPUT
    shield.estop_input(EstopInput.RELEASED)
    shield.step(FAR, None, 0)
    assert shield.state is HOLD  # releasing alone moves nothing
    assert shield.rearm(shield.position.copy(), 0.0) is Rearm.ACCEPTED


def test_a_press_during_silence_is_a_press():
    shield = shield_in("not armed")
    shield.estop_input(EstopInput.SILENT)
    assert shield.reason is Reason.NOT_ARMED
    shield.estop_input(EstopInput.PRESSED)
    assert shield.reason is Reason.ESTOP_INPUT


def test_nothing_hides_that_the_edge_shuts_down():
    shield = moving_shield()
    shield.shut_down()
    shield.estop()
    shield.estop_input(EstopInput.PRESSED)
    assert shield.reason is Reason.SHUTDOWN


def test_a_stop_from_before_the_first_pose_stays_the_reason():
    shield = Shield(LIMITS, T)
    shield.estop()
    assert shield.start(READY) is Rearm.ACCEPTED
    assert (shield.state, shield.reason) == (HOLD, Reason.ESTOP)
