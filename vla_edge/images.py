"""The images of one camera, compressed or raw, as they come over the robot bus."""

from __future__ import annotations

from typing import Any, Final

from vla_common.wire import decode
from vla_common.zenoh_session import Received
from vla_edge.config import EdgeConfig
from vla_edge.robot_bus import RobotBus, image_spec

NS: Final = 1_000_000_000
MAX_RAW_BYTES: Final = 64 * 1024 * 1024


class ImageIn:
    """Reader of one camera. On ROS, where cameras run at any rate, it looks only as often as observations go up."""

    def __init__(self, config: EdgeConfig, bus: RobotBus, camera: str) -> None:
        """Subscribe."""
        self._spec = image_spec(config)
        self._is_raw = self._spec.type_name == "sensor_msgs/msg/Image"
        self._in = bus.latest(self._spec if self._is_raw else self._spec.name, config.robot_id, camera)
        self._quality = config.ros.jpeg_quality
        self._period_ns = round(NS / config.ros.observation_hz) if config.is_ros else 0
        self._due_ns = 0

    def try_recv(self, now_ns: int) -> Received | None:
        """Newest image if one is due, else None. ``now_ns``: robot's CLOCK_MONOTONIC."""
        if now_ns < self._due_ns:
            return None
        received = self._in.try_recv()
        if received is not None:
            # Keeps the pace on average, so that images that come a little early or late do not halve the rate.
            self._due_ns = max(self._due_ns + self._period_ns, now_ns + self._period_ns // 2)
        return received

    def decode(self, payload: bytes) -> Any:
        """``sensor_msgs/CompressedImage``; a raw image is made JPEG.

        Raises:
            WireError: bytes that are not such a message.
            ImageRefused (a ValueError whose text names it): a raw image of another encoding.
        """
        if not self._is_raw:
            return decode(self._spec.type_name, payload)
        from vla_edge.adapters.ros_image import to_jpeg

        return to_jpeg(decode(self._spec.type_name, payload, max_bytes=MAX_RAW_BYTES), self._quality)
