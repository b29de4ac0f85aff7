"""The joint command the motor process publishes 100 times a second, serialised once and patched in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from vla_common.messages import new
from vla_common.wire import NS_PER_S, encode

_STAMP_AT: Final = 4
_STAMP: Final = struct.Struct("<iI")


class JointCommandTemplate:
    """CDR of a ``sensor_msgs/JointState`` with fixed names, position and velocity; effort stays empty.

    A call writes 2 x n doubles and a stamp and copies about 300 bytes: no message object, no growth, bounded work.
    Not for use by two threads at once.
    """

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
