"""The command the motor process publishes 100 times a second, serialised once and patched in place.

Three forms of the same command: ``sensor_msgs/JointState`` (ours), ``std_msgs/Float64MultiArray`` (ros2_control's
forward_command_controller) and ``trajectory_msgs/JointTrajectory`` with one point (joint_trajectory_controller).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from vla_common.messages import new
from vla_common.wire import NS_PER_S, encode

CommandOutput = Literal["joint_state", "forward_command", "joint_trajectory"]

_STAMP_AT: Final = 4
_STAMP: Final = struct.Struct("<iI")
_TIME_FROM_START_BYTES: Final = 8


class CommandTemplate(Protocol):
    """A form of the command. ``type_name`` is its full message type."""

    type_name: str

    def pack(self, stamp_ns: int, position: npt.ArrayLike, velocity: npt.ArrayLike) -> bytes:
        """Payload with these values; see :meth:`JointCommandTemplate.pack`."""


class JointCommandTemplate:
    """CDR of a ``sensor_msgs/JointState`` with fixed names, position and velocity; effort stays empty.

    A call writes 2 x n doubles and a stamp and copies about 300 bytes: no message object, no growth, bounded work.
    Not for use by two threads at once.
    """

    type_name = "sensor_msgs/msg/JointState"

    def __init__(self, names: Sequence[str], frame_id: str = "") -> None:
        """Serialise once.

        Args:
            names: joint names in the order of the arrays given to :meth:`pack`; at least one.
            frame_id: frame of the header.
        """
        if not names:
            raise ValueError("a joint command needs at least one joint name")
        self.names = tuple(names)
        count = len(self.names)
        message = new(
            "sensor_msgs/JointState", name=list(self.names), position=np.zeros(count), velocity=np.zeros(count)
        )
        message.header.frame_id = frame_id
        self._buffer = bytearray(encode(message))
        self._doubles = struct.Struct(f"<{count}d")
        # From the end of the payload backwards: effort's count, velocity, its count (aligned to 8 before the
        # doubles), position. Offsets count from the end of the 4-byte encapsulation for alignment.
        self._velocity_at = len(self._buffer) - 4 - 8 * count
        self._position_at = self._velocity_at - 8 - 8 * count

    def pack(self, stamp_ns: int, position: npt.ArrayLike, velocity: npt.ArrayLike) -> bytes:
        """Payload with these values.

        Args:
            stamp_ns: robot's CLOCK_MONOTONIC, nanoseconds, 0 .. 2**31 s.
            position: n values, rad (gripper: closure).
            velocity: n values, rad/s (gripper: closure/s).

        Raises:
            struct.error: a wrong number of values, or a stamp out of range.
        """
        _STAMP.pack_into(self._buffer, _STAMP_AT, stamp_ns // NS_PER_S, stamp_ns % NS_PER_S)
        self._doubles.pack_into(self._buffer, self._position_at, *position)  # type: ignore[misc]
        self._doubles.pack_into(self._buffer, self._velocity_at, *velocity)  # type: ignore[misc]
        return bytes(self._buffer)


class ForwardCommandTemplate:
    """CDR of a ``std_msgs/Float64MultiArray`` of n positions without a layout, as forward_command_controller takes it.

    The message has neither names nor stamp: the controller's ``joints`` must be those of the robot file, in its order.
    Not for use by two threads at once.
    """

    type_name = "std_msgs/msg/Float64MultiArray"

    def __init__(self, count: int) -> None:
        """Serialise once. ``count``: number of joints, at least one."""
        if count < 1:
            raise ValueError("a joint command needs at least one joint")
        self._buffer = bytearray(encode(new(self.type_name, data=np.zeros(count))))
        self._doubles = struct.Struct(f"<{count}d")
        self._position_at = len(self._buffer) - 8 * count

    def pack(self, stamp_ns: int, position: npt.ArrayLike, velocity: npt.ArrayLike) -> bytes:
        """Payload with these positions; the others are not in the message.

        Raises:
            struct.error: a wrong number of values.
        """
        self._doubles.pack_into(self._buffer, self._position_at, *position)  # type: ignore[misc]
        return bytes(self._buffer)


class JointTrajectoryTemplate:
    """CDR of a ``trajectory_msgs/JointTrajectory`` with one point: positions and velocities, due one period from now.

    The header's stamp is 0, which joint_trajectory_controller takes for "start now": its clock is not ours. Velocities
    are sent too, as with positions alone it interpolates linearly. Not for use by two threads at once.
    """

    type_name = "trajectory_msgs/msg/JointTrajectory"

    def __init__(self, names: Sequence[str], period_s: float) -> None:
        """Serialise once.

        Args:
            names: joint names in the order of the arrays given to :meth:`pack`; at least one.
            period_s: time of the point after the start, the period of the commands.
        """
        if not names:
            raise ValueError("a joint command needs at least one joint name")
        count = len(names)
        period_ns = round(period_s * NS_PER_S)
        point: Any = new(
            "trajectory_msgs/msg/JointTrajectoryPoint",
            positions=np.zeros(count),
            velocities=np.zeros(count),
            time_from_start=new(
                "builtin_interfaces/msg/Duration", sec=period_ns // NS_PER_S, nanosec=period_ns % NS_PER_S
            ),
        )
        self._buffer = bytearray(encode(new(self.type_name, joint_names=list(names), points=[point])))
        self._doubles = struct.Struct(f"<{count}d")
        # Backwards: time_from_start, the counts (0) of effort and accelerations, velocities, their count (aligned to 8
        # before the doubles), positions.
        self._velocity_at = len(self._buffer) - _TIME_FROM_START_BYTES - 8 - 8 * count
        self._position_at = self._velocity_at - 8 - 8 * count

    def pack(self, stamp_ns: int, position: npt.ArrayLike, velocity: npt.ArrayLike) -> bytes:
        """Payload with these values; ``stamp_ns`` is not in the message.

        Raises:
            struct.error: a wrong number of values.
        """
        self._doubles.pack_into(self._buffer, self._position_at, *position)  # type: ignore[misc]
        self._doubles.pack_into(self._buffer, self._velocity_at, *velocity)  # type: ignore[misc]
        return bytes(self._buffer)


def command_template(output: CommandOutput, names: Sequence[str], period_s: float) -> CommandTemplate:
    """The template of a form of the command.

    Args:
        output: which form. names: joint names in order. period_s: period of the commands.
    """
    if output == "forward_command":
        return ForwardCommandTemplate(len(names))
    if output == "joint_trajectory":
        return JointTrajectoryTemplate(names, period_s)
    return JointCommandTemplate(names)
