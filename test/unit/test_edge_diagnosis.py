"""What tools that watch many devices are told."""

import numpy as np
import pytest

from vla_edge.core.diagnosis import Level, clock_finding, inputs_finding, policy_finding, shield_finding
from vla_edge.core.health import PolicyHealth, Tick
from vla_edge.core.records import EdgeMemory
from vla_edge.core.shield_words import Reason, State


def motor(**changes):
    record = EdgeMemory.private(2).blank("motor")
    record["scheduling"] = b"fifo 80"
    for name, value in changes.items():
        record[name] = value
    return record


@pytest.mark.parametrize("reason, level", [
    (Reason.FOLLOWING, Level.OK), (Reason.NOT_ARMED, Level.OK), (Reason.CHUNK_OLD, Level.WARN),
    (Reason.QUEUE_EMPTY, Level.WARN), (Reason.ESTOP, Level.WARN), (Reason.ESTOP_INPUT, Level.ERROR),
    (Reason.ESTOP_SILENT, Level.ERROR), (Reason.MOTOR_STALLED, Level.ERROR), (Reason.NO_POSE, Level.WARN)])
def test_the_shield(reason, level):
    found = shield_finding(motor(state=State.HOLDING, reason=reason, stops=3, rejects=np.arange(
        motor()["rejects"].size)), "in words")
    assert (found.level, found.message, found.values["stops"]) == (level, "HOLDING: in words", "3")
    assert int(found.values["chunks_rejected"]) == sum(range(motor()["rejects"].size))


def test_nothing_runs_yet():
    assert shield_finding(None, "").level is Level.STALE
    assert clock_finding(None, Tick.NOT_STARTED, 2.0, float("nan")).message == "not started (2.0 s)"
    assert policy_finding(None, "").level is Level.ERROR and inputs_finding(None, {}).level is Level.ERROR


def test_the_clock():
    found = clock_finding(motor(tick=70, missed=2), Tick.TICKING, 0.0, 1e-4)
    assert (found.level, found.values["missed_ticks"], found.values["lateness_p99_s"]) == (Level.OK, "2", "0.000100")
    assert clock_finding(motor(), Tick.HANGS, 0.7, 1e-4).level is Level.ERROR


@pytest.mark.parametrize("changes, level, message", [
    ({}, Level.OK, "can plan"), ({"ready": False}, Level.WARN, "the cause"), ({"age_s": 0.3}, Level.ERROR, "the cause")])
def test_the_policy(changes, level, message):
    health = PolicyHealth(**{"age_s": 0.01, "ready": True, "skill": "policy", "context_age_s": 0.1, **changes})
    found = policy_finding(health, "" if level is Level.OK else "the cause")
    assert (found.level, found.message, found.values["context_age_s"]) == (level, message, "0.100")


def test_the_inputs():
    assert inputs_finding(0.01, {"image_stale": 3}).values["refused image_stale"] == "3"
    assert inputs_finding(0.01, {}).level is Level.OK and inputs_finding(0.5, {}).level is Level.ERROR
    assert inputs_finding(0.01, {}).values["cameras"] == "ok"


@pytest.mark.parametrize("joints_age_s, message", [
    (0.01, "camera_missing_front: no image yet"), (0.5, "no fresh joint state from the robot for 0.5 s"),
    (None, "no joint state was taken yet: check the driver, its topic and names")])
def test_cameras_are_named_whatever_else_is_wrong(joints_age_s, message):
    found = inputs_finding(joints_age_s, {}, "camera_missing_front: no image yet")
    assert (found.level, found.message, found.values["cameras"]) == (Level.ERROR, message, "camera_missing_front")
