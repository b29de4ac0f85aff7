"""The robot bus on ROS 2 topics: CDR bytes out and in, as over Zenoh, so that the processes of the edge need not know.

Publishers send bytes and subscriptions take raw ones (no message object is made), with names, types and quality of
service from the table of topics. There is no executor and no thread: a reader that is polled anyway takes the sample
straight from the middleware, whose history of the reader's depth is the "newest only". So nothing but the middleware's
own threads runs beside the motor clock, and a reader that is late finds the newest sample, not a queue.

A ROS context of its own: no signal handlers, no rosout, no parameter services, no global arguments.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from vla_common.bus_config import BusError
from vla_common.clock import Clock, SystemClock
from vla_common.topics import ANY_ROBOT, Attachment, TopicSpec, topic_spec
from vla_common.zenoh_endpoints import Received

LOG = logging.getLogger(__name__)

_UNKNOWN_SEQUENCE: Final = 2**63
_NO_ROS: Final = ("ROS 2 is not usable here ({}): source its setup file (such as /opt/ros/jazzy/setup.bash) and that "
                  "of the workspace with vla_runtime's messages, or use a Zenoh endpoint for 'bus'")


def message_class(type_name: str) -> Any:
    """Python class of a message type such as ``sensor_msgs/msg/JointState``.

    Raises:
        BusError: its package is not installed.
    """
    package, kind, short = type_name.split("/")
    try:
        return getattr(import_module(f"{package}.{kind}"), short)
    except (ImportError, AttributeError) as error:
        raise BusError(f"no ROS message {type_name} ({error}): build this package in a ROS workspace "
                       f"(docs/operations.md), or install {package}") from error


class RosPublisher:
    """Sends CDR payloads. For one thread."""

    def __init__(self, spec: TopicSpec, topic: str, publisher: Any) -> None:
        """Use :meth:`RosBus.publisher`."""
        self.spec, self.topic = spec, topic
        self.sequence = self.failed = 0
        self._publisher = publisher
        self.closed = threading.Event()

    def put(self, payload: bytes, attachment: Attachment | None = None) -> None:
        """Send; dropped when no one listens. ``attachment`` is Zenoh's and not sent: ROS numbers samples itself.

        A sample that the middleware does not take (on an overloaded machine Fast DDS gives up waiting for its own
        threads) is dropped and counted in ``failed``: the next one is due soon, and whoever waits for samples has a
        time-out. The motor process must not end for it, nor write a log in its loop: :meth:`close` tells.

        Raises:
            BusError: the bus is closed.
        """
        if self.closed.is_set():
            raise BusError(f"cannot publish {self.spec.name}: the bus is closed")
        self.sequence += 1
        try:
            self._publisher.publish(payload)
        except Exception:  # rclpy raises RCLError, a type of its extension module
            self.failed += 1

    def close(self) -> None:
        """Refuse everything from now on, and say how many samples were not sent. More than once."""
        if not self.closed.is_set():
            self.closed.set()
            if self.failed:
                LOG.error("%d of %d samples of %s were not sent by ROS: take load off this machine, and use "
                          "config/fastdds.xml", self.failed, self.sequence, self.spec.name)


class RosSubscriber:
    """The newest samples of a topic, oldest first. For one thread, except :meth:`close`."""

    def __init__(self, spec: TopicSpec, topic: str, subscription: Any, clock: Clock) -> None:
        """Use :meth:`RosBus.latest` or :meth:`RosBus.queue`."""
        self.spec, self.topic = spec, topic
        self._subscription = subscription
        self._clock = clock
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def try_recv(self) -> Received | None:
        """Next sample, or None at once if there is none (also after the bus has closed).

        ``received_ns`` is when the sample arrived on this host, however long it waited to be taken. Its sender is not
        known: the attachment's gid is empty.
        """
        with self._lock:
            if self.closed.is_set():
                return None
            handle = self._subscription.handle
            with handle:
                found = handle.take_message(self._subscription.msg_type, True)
        if found is None:
            return None
        payload, info = found
        sequence = info.get("publication_sequence_number") or 0
        return Received(payload, Attachment(sequence if sequence < _UNKNOWN_SEQUENCE else 0,
                                            max(0, info.get("source_timestamp") or 0), b""),
                        self._arrival_ns(info.get("received_timestamp") or 0), self.topic)

    def _arrival_ns(self, wall_ns: int) -> int:
        """Both readings of the wall clock are of this host, microseconds to milliseconds apart. If it is set forward
        between them the sample looks old, which stops; if it is set back, as if it had just come."""
        now_ns = self._clock.monotonic_ns()
        return now_ns if wall_ns <= 0 else now_ns - max(0, self._clock.wall_ns() - wall_ns)

    def close(self) -> None:
        """End the subscription before the bus does. From any thread, more than once."""
        with self._lock:
            if not self.closed.is_set():
                self.closed.set()
                self._subscription.destroy()


class RosBus:
    """One ROS node with the endpoints of a process."""

    def __init__(self, context: Any, node: Any, prefix: str, clock: Clock) -> None:
        """Use :func:`open_ros_bus`."""
        self._context, self._node, self._prefix, self.clock = context, node, prefix, clock
        self._endpoints: list[RosPublisher | RosSubscriber] = []
        self._closed = False

    def __enter__(self) -> RosBus:
        """The bus itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def publisher(self, topic: str | TopicSpec, robot: str, camera: str = "") -> RosPublisher:
        """Publisher of a topic of the table, or of a row of its own.

        Raises:
            ValueError: a robot or camera id that is not one.
            BusError: the bus is closed, or the message type is not installed.
        """
        spec, name = self._named(topic, robot, camera)
        made = self._node.create_publisher(message_class(spec.type_name), name, quality(spec, spec.depth))
        self._endpoints.append(RosPublisher(spec, name, made))
        return self._endpoints[-1]

    def latest(self, topic: str | TopicSpec, robot: str, camera: str = "") -> RosSubscriber:
        """Reader that keeps the newest sample; poll it with ``try_recv()``."""
        return self.queue(topic, robot, camera, capacity=1)

    def queue(self, topic: str | TopicSpec, robot: str, camera: str = "", capacity: int = 256) -> RosSubscriber:
        """Reader that keeps the newest ``capacity`` samples in order, dropping the oldest.

        Raises:
            ValueError, BusError: see :meth:`publisher`.
        """
        spec, name = self._named(topic, robot, camera)
        made = self._node.create_subscription(message_class(spec.type_name), name, _unused, quality(spec, capacity),
                                              raw=True)
        self._endpoints.append(RosSubscriber(spec, name, made, self.clock))
        return self._endpoints[-1]

    def _named(self, topic: str | TopicSpec, robot: str, camera: str) -> tuple[TopicSpec, str]:
        spec = topic_spec(topic) if isinstance(topic, str) else topic
        if self._closed:
            raise BusError(f"cannot open {spec.name}: the bus is closed")
        if robot == ANY_ROBOT:
            raise ValueError(f"{spec.name!r} on ROS needs the id of one robot: topics there know no wildcards")
        return spec, self._prefix + spec.topic(robot, camera)

    def close(self) -> None:
        """End all endpoints and the node; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for endpoint in self._endpoints:
            endpoint.close()
        self._node.destroy_node()
        self._context.try_shutdown()


def quality(spec: TopicSpec, depth: int) -> Any:
    """Quality of service of a row of the table: keep the last ``depth`` samples, nothing for late joiners."""
    from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy

    return QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=depth, durability=DurabilityPolicy.VOLATILE,
                      reliability=getattr(ReliabilityPolicy, spec.reliability.upper()))


def open_ros_bus(node: str, *, prefix: str = "", remap: Sequence[str] = (), clock: Clock | None = None,
                 never_wait: bool = False) -> RosBus:
    """Make a node on the ROS network of the environment (ROS_DOMAIN_ID, RMW_IMPLEMENTATION and so on).

    Args:
        node: its name. prefix: namespace before all topics, such as ``/lab``.
        remap: rules ``from:=to``. clock: time source for receive instants.
        never_wait: Fast DDS sends from a thread of its own. By default the caller sends, and with a stopped or killed
            reader it takes up to 1 ms instead of 0.2 ms. Counts for all nodes that this process makes.

    Raises:
        BusError: ROS is not installed or does not start; names the remedy.
    """
    try:
        from rclpy.context import Context
        from rclpy.node import Node
        from rclpy.parameter import Parameter
    except ImportError as error:
        raise BusError(_NO_ROS.format(error)) from error
    if never_wait:
        os.environ.setdefault("RMW_FASTRTPS_PUBLICATION_MODE", "ASYNCHRONOUS")
    context = Context()
    arguments = [part for rule in remap for part in ("-r", rule)]
    try:
        context.init(["--ros-args", *arguments] if arguments else [], initialize_logging=False)
        made = Node(node, context=context, enable_rosout=False, start_parameter_services=False,
                    parameter_overrides=[Parameter("start_type_description_service", value=False)])
    except Exception as error:
        context.try_shutdown()
        raise BusError(f"the ROS node {node} does not start: {error}") from error
    return RosBus(context, made, prefix, clock or SystemClock())


def _unused(_: bytes) -> None:
    """Samples are taken by :meth:`RosSubscriber.try_recv`, never by an executor."""
