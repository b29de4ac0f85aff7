"""What a robot asks of the cloud."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class RobotRequest(Generic[Payload]):
    """One observation on its way to context tokens.

    Attributes:
        robot: id of the robot, from the topic.
        session: random id of the robot's edge process; changes when it restarts.
        sequence: counts the observations of the session.
        stamp_ns: the observation's stamp on the *robot's* clock. Echoed, never compared with a clock of the cloud.
        received_ns: arrival, on the cloud's monotonic clock.
        deadline_ns: after this instant of the cloud's clock nobody waits for the answer.
        payload: the decoded observation.
    """

    robot: str
    session: str
    sequence: int
    stamp_ns: int
    received_ns: int
    deadline_ns: int
    payload: Payload
