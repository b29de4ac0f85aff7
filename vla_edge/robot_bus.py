"""The robot bus: Zenoh, or ROS 2 topics where the settings say ``bus: ros``. One interface for both.

ROS is imported only when it is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Protocol

from vla_common.clock import Clock
from vla_common.config import ConfigError
from vla_common.topics import Attachment, TopicSpec, topic_spec
from vla_common.zenoh_session import BusError, Received, check_endpoint, open_bus
from vla_edge.config import COMMAND_TOPICS, EdgeConfig

__all__ = ["BusError", "RobotBus", "RobotPublisher", "RobotSubscriber", "check_robot_bus", "command_spec", "image_spec",
           "open_robot_bus", "ros_prefix"]

_RAW_IMAGE: Final = replace(topic_spec("image"), pattern="/{robot}/{camera}/image_raw",
                            type_name="sensor_msgs/msg/Image")


class RobotPublisher(Protocol):
    """Sends payloads of one topic."""

    sequence: int

    def put(self, payload: bytes, attachment: Attachment | None = None) -> None:
        """Send CDR bytes; does not wait."""


class RobotSubscriber(Protocol):
    """Holds the newest samples of one topic."""

    spec: TopicSpec

    def try_recv(self) -> Received | None:
        """Next sample, or None at once."""


class RobotBus(Protocol):
    """What the edge's processes use of a bus."""

    def publisher(self, topic: str | TopicSpec, robot: str, camera: str = "") -> RobotPublisher:
        """Publisher of a topic."""

    def latest(self, topic: str | TopicSpec, robot: str, camera: str = "") -> RobotSubscriber:
        """Reader of the newest sample only."""

    def queue(self, topic: str | TopicSpec, robot: str, camera: str = "", capacity: int = 256) -> RobotSubscriber:
        """Reader of the newest ``capacity`` samples, oldest first."""

    def close(self) -> None:
        """End everything; safe to call twice."""

    def __enter__(self) -> Any:
        """The bus itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Close."""


def ros_prefix(bus: str) -> str:
    """Namespace before all topics: empty for ``ros``, ``/lab`` for ``ros:lab`` and ``ros:/lab``.

    Raises:
        BusError: a namespace that ROS would not take.
    """
    namespace = bus.partition(":")[2].strip("/")
    parts = namespace.split("/") if namespace else []
    if bus.startswith("ros:") and not parts or not all(
            part.isascii() and part.replace("_", "a").isalnum() and not part[0].isdigit() for part in parts):
        raise BusError(f"bus {bus!r}: give 'ros', or 'ros:' and a namespace of letters, digits and _, such as ros:lab")
    return "".join(f"/{part}" for part in parts)


def check_robot_bus(config: EdgeConfig) -> None:
    """Refuse a robot bus that cannot be opened or leaves this machine without leave.

    Raises:
        BusError, ConfigError: with the remedy.
    """
    if not config.is_ros:
        check_endpoint(config.bus, config.allow_remote)
        return
    ros_prefix(config.bus)
    for rule in config.ros.remap:
        if rule.split(":=")[0] in ("__node", "__ns", "__name"):
            raise ConfigError(f"ros.remap: {rule!r} would rename every process; set robot_id or bus: ros:<namespace>")


def command_spec(config: EdgeConfig, type_name: str) -> TopicSpec:
    """Topic of the command, of the configured form."""
    spec = topic_spec("joint_command")
    topic = config.ros.command_topic or COMMAND_TOPICS.get(config.ros.command_output, spec.pattern)
    return replace(spec, pattern=topic, type_name=type_name) if config.is_ros else spec


def image_spec(config: EdgeConfig) -> TopicSpec:
    """Topic of the images, in the configured transport."""
    return _RAW_IMAGE if config.is_ros and config.ros.image_transport == "raw" else topic_spec("image")


def open_robot_bus(config: EdgeConfig, node: str, clock: Clock | None = None, never_wait: bool = False) -> RobotBus:
    """Open the robot bus of the settings.

    Args:
        config: the edge's. node: name shown to ROS tools, without the robot id. clock: for instants.
        never_wait: sending is left to another thread, whatever the state of the readers. Zenoh always does so.

    Raises:
        BusError: a bad endpoint, or ROS is asked for and not usable; names the remedy.
    """
    check_robot_bus(config)
    name = f"{node}_{config.robot_id}"
    if not config.is_ros:
        return open_bus(config.bus, node=name, allow_remote=config.allow_remote, clock=clock)
    from vla_edge.adapters.ros_bus import open_ros_bus

    return open_ros_bus(name, prefix=ros_prefix(config.bus), remap=config.ros.remap, clock=clock, never_wait=never_wait)
