"""The images of the robot's cameras, compressed or raw, from the robot bus; and which of them go up together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from vla_common.metrics import Counters
from vla_common.topics import topic_spec
from vla_common.wire import WireError, decode, make_header, stamp_ns
from vla_common.zenoh_session import Received
from vla_edge.config import EdgeConfig
from vla_edge.core.camera_set import CameraSet
from vla_edge.robot_bus import RobotBus, image_spec

LOG = logging.getLogger(__name__)

NS: Final = 1_000_000_000
MAX_RAW_BYTES: Final = 64 * 1024 * 1024

InstantOf = Callable[[str, int, int, str], "int | None"]
"""The instant from which a sample of a topic counts, from its stamp and arrival, or None if it is refused; the last
argument is the camera."""


class ImageIn:
    """Reader of one camera."""

    def __init__(self, config: EdgeConfig, bus: RobotBus, camera: str) -> None:
        """Subscribe."""
        self._spec = image_spec(config)
        self._is_raw = self._spec.type_name == "sensor_msgs/msg/Image"
        self._in = bus.latest(self._spec if self._is_raw else self._spec.name, config.robot_id, camera)
        self._quality = config.ros.jpeg_quality

    def try_recv(self) -> Received | None:
        """Newest image that was not looked at yet, or None."""
        return self._in.try_recv()

    def decode(self, payload: bytes) -> Any:
        """The image as it came, checked.

        Raises:
            WireError: bytes that are not such a message.
            ImageRefused (a ValueError whose text names it): a raw image of another encoding.
        """
        if not self._is_raw:
            return decode(self._spec.type_name, payload)
        from vla_edge.adapters.ros_image import check

        message = decode(self._spec.type_name, payload, max_bytes=MAX_RAW_BYTES)
        check(message)
        return message

    def compressed(self, message: Any) -> Any:
        """``sensor_msgs/CompressedImage`` of an image that :meth:`decode` gave; a raw one is made JPEG."""
        if not self._is_raw:
            return message
        from vla_edge.adapters.ros_image import to_jpeg

        return to_jpeg(message, self._quality)


class Cameras:
    """All cameras of the model. On ROS, where they run at any rate, sets are made only as often as observations go up;
    a single camera is looked at no more often than that, too."""

    def __init__(self, config: EdgeConfig, bus: RobotBus, cameras: Sequence[str], instant_of: InstantOf,
                 rejects: Counters, now_ns: int) -> None:
        """Subscribe.

        Args:
            config: the edge's. bus: the robot's. cameras: names from the model's manifest.
            instant_of: judges the age; counts what it refuses. rejects: counts images that cannot be used.
            now_ns: robot's CLOCK_MONOTONIC.
        """
        self._sources = {camera: ImageIn(config, bus, camera) for camera in cameras}
        self._instant_of, self._rejects = instant_of, rejects
        self._set = CameraSet(cameras, config.io.camera_window_s, topic_spec("image").max_age_s, now_ns)
        self._period_ns = round(NS / config.ros.observation_hz) if config.is_ros else 0
        self._due_ns, self._wanted_ns = 0, now_ns

    @property
    def state(self) -> str:
        """Name of what is wrong, or empty; see :class:`CameraSet`."""
        return self._set.state

    def describe(self, now_ns: int) -> str:
        """What is wrong in words, or empty."""
        return self._set.describe(now_ns)

    def turn(self, now_ns: int) -> list[Any] | None:
        """Look at what arrived.

        Args:
            now_ns: robot's CLOCK_MONOTONIC.

        Returns:
            One ``sensor_msgs/CompressedImage`` of each camera if a set is due and there is one. Their headers hold the
            instants from which they count, and the camera's name.
        """
        is_due = now_ns >= self._due_ns
        if not self._sources or (not is_due and len(self._sources) == 1):
            return None
        has_refused = False
        for camera, source in self._sources.items():
            received = source.try_recv()
            if received is not None and not self._keep(camera, source, received):
                has_refused = True
        if not is_due:
            return None
        chosen = self._set.take(now_ns)
        if chosen is not None or has_refused:
            # Keeps the pace on average, so that images that come a little early or late do not halve the rate.
            self._due_ns = max(self._due_ns + self._period_ns, now_ns + self._period_ns // 2)
        if chosen is not None:
            self._wanted_ns = self._due_ns
        if self._set.look(now_ns, self._wanted_ns):
            self._tell(now_ns)
        return None if chosen is None else [self._finished(*item) for item in
                                            zip(self._sources.items(), chosen, strict=True)]

    def _keep(self, camera: str, source: ImageIn, received: Received) -> bool:
        try:
            message = source.decode(received.payload)
        except (WireError, ValueError) as error:
            self._rejects.add(f"image_{error.cause if isinstance(error, WireError) else error}")
            return False
        stamp = stamp_ns(message.header)
        instant_ns = self._instant_of("image", stamp, received.received_ns, camera)
        if instant_ns is None:
            return False
        self._set.add(camera, stamp, instant_ns, (instant_ns, message))
        return True

    def _finished(self, source: tuple[str, ImageIn], chosen: tuple[int, Any]) -> Any:
        image = source[1].compressed(chosen[1])
        image.header = make_header(chosen[0], source[0])
        return image

    def _tell(self, now_ns: int) -> None:
        if self.state:
            LOG.warning("%s; no observations are sent", self.describe(now_ns))
        else:
            LOG.info("images of all cameras come again: %s", ", ".join(self._sources))
