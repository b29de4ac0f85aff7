"""What robots tell of their shields over the cloud link, for views and metrics; nothing is decided by it."""

from __future__ import annotations

import logging
import math
from typing import Final

from vla_cloud.core.robot_board import MAX_TEXT, RobotBoard, Shield
from vla_common import wire
from vla_common.topics import robot_of, topic_spec
from vla_common.zenoh_session import Received

LOG = logging.getLogger(__name__)

REPORT: Final = topic_spec("shield_report")
STATES: Final = ("NOMINAL", "COASTING", "BRAKING", "HOLDING")
"""By their numbers in msg/ShieldStatus.msg."""


class ShieldReports:
    """Give :meth:`receive` to a subscriber."""

    def __init__(self, board: RobotBoard) -> None:
        """``board`` is told."""
        self._board = board
        self.refused = 0

    def receive(self, sample: Received) -> None:
        """Whatever a robot sends is a report or is counted as refused."""
        try:
            robot = robot_of(REPORT, sample.key)
            message = wire.decode("ShieldStatus", sample.payload)
            late_s = float(message.lateness_p99_s)
            shield = Shield(
                STATES[int(message.state)], str(message.reason)[:MAX_TEXT], bool(message.rearm_ready),
                int(message.missed_ticks), int(message.limit_interventions), late_s if math.isfinite(late_s) else 0.0,
                sample.received_ns,
            )  # fmt: skip
        except (ValueError, IndexError, wire.WireError) as error:
            self.refused += 1
            LOG.debug("a shield report was refused: %s", error)
            return
        self._board.told(robot, shield)
