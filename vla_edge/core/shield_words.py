"""States, reasons and answers of the shield, and the words in which an operator is told of them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class State(IntEnum):
    """Values as in msg/ShieldStatus.msg."""

    NOMINAL = 0
    COASTING = 1
    BRAKING = 2
    HOLDING = 3


class Reason(IntEnum):
    """Why the shield is in its state."""

    FOLLOWING = 0
    NOT_ARMED = 1
    WAITING_FIRST_CHUNK = 2
    CHUNK_OLD = 3
    QUEUE_EMPTY = 4
    NO_FIRST_CHUNK = 5
    ESTOP = 6
    SHUTDOWN = 7
    NOT_FINITE = 8
    MOTOR_STALLED = 9
    ESTOP_INPUT = 10
    ESTOP_SILENT = 11
    NO_POSE = 12


REASON_TEXT: Final[dict[Reason, str]] = {
    Reason.FOLLOWING: "following the policy",
    Reason.NOT_ARMED: "not armed: send a re-arm",
    Reason.WAITING_FIRST_CHUNK: "armed, waiting for the first chunk",
    Reason.CHUNK_OLD: "no fresh chunk: following the rest of the last one",
    Reason.QUEUE_EMPTY: "chunks ran out: policy or cloud too late",
    Reason.NO_FIRST_CHUNK: "no chunk came after the re-arm: check instruction, cloud and policy",
    Reason.ESTOP: "emergency stop by the operator: re-arm when the cause is gone",
    Reason.SHUTDOWN: "the edge is shutting down",
    Reason.NOT_FINITE: "a desired position was not finite: report this, then re-arm",
    Reason.MOTOR_STALLED: "the motor process did not run for longer than the robot waits: it was on its own time-out; "
                          "find the cause, then re-arm",
    Reason.ESTOP_INPUT: "emergency stop by its input (button or safety controller): release it, then re-arm",
    Reason.ESTOP_SILENT: "the emergency stop input fell silent: check button, driver and bus, then re-arm",
    Reason.NO_POSE: "no usable joint state yet: nothing is sent",
}


class Rearm(IntEnum):
    """Answer to a re-arm."""

    ACCEPTED = 0
    NOT_HOLDING = 1
    NO_MEASUREMENT = 2
    MEASUREMENT_STALE = 3
    MEASUREMENT_NOT_FINITE = 4
    MEASUREMENT_OUTSIDE_LIMITS = 5
    SHUTTING_DOWN = 6
    ESTOP_PRESSED = 7
    ESTOP_SILENT = 8


REARM_TEXT: Final[dict[Rearm, str]] = {
    Rearm.ACCEPTED: "accepted",
    Rearm.NOT_HOLDING: "refused: not holding; only a robot that holds can be re-armed",
    Rearm.NO_MEASUREMENT: "refused: no joint state was received; check the robot driver",
    Rearm.MEASUREMENT_STALE: "refused: the last joint state is too old; check the robot driver and the bus",
    Rearm.MEASUREMENT_NOT_FINITE: "refused: a measured joint position is not finite",
    Rearm.MEASUREMENT_OUTSIDE_LIMITS: "refused: a joint was measured outside its limits; move it back by hand",
    Rearm.SHUTTING_DOWN: "refused: the edge is shutting down",
    Rearm.ESTOP_PRESSED: "refused: the emergency stop input is pressed; release it",
    Rearm.ESTOP_SILENT: "refused: the emergency stop input is not heard; check button, driver and bus",
}


class EstopInput(IntEnum):
    """Level of the emergency stop input."""

    RELEASED = 0
    PRESSED = 1
    SILENT = 2
