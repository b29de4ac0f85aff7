"""The one table of topics, and keys, attachments and liveliness tokens in the layout of rmw_zenoh.

Layout after ros2/rmw_zenoh, ``rmw_zenoh_cpp/src/detail/liveliness_utils.cpp`` and ``attachment_helpers.cpp``. It lets a
robot on rmw_zenoh see these topics as native ROS 2 topics; tried against independent Python peers, not yet against
rmw_zenoh_cpp itself.
"""

from __future__ import annotations

import difflib
import struct
from dataclasses import dataclass
from typing import Final, Literal

import xxhash

from vla_common.messages import MAX_BYTES, dds_type, full_type, type_hash

Network = Literal["bus", "cloud"]
Priority = Literal["real_time", "interactive_high", "interactive_low", "data_high", "data", "data_low", "background"]
Reliability = Literal["reliable", "best_effort"]

ANY_ROBOT: Final = "*"
"""Robot id for subscribers that hear all robots."""


@dataclass(frozen=True)
class TopicSpec:
    """One row of the table.

    Attributes:
        name: how code refers to the topic.
        pattern: ROS topic with ``{robot}`` and, for images, ``{camera}``.
        type_name: full message type.
        network: ``bus`` (inside the robot) or ``cloud`` (robot and cloud).
        rate_hz: nominal rate; 0 for events.
        max_age_s: older samples are refused by the reader on receipt.
        priority: Zenoh priority; reliability: Zenoh reliability; all streams drop rather than block.
        depth: history depth announced to ROS.
    """

    name: str
    pattern: str
    type_name: str
    network: Network
    rate_hz: float
    max_age_s: float
    priority: Priority = "data"
    reliability: Reliability = "best_effort"
    depth: int = 1

    @property
    def max_bytes(self) -> int:
        """Largest payload accepted."""
        return MAX_BYTES[self.type_name]

    def topic(self, robot: str, camera: str = "") -> str:
        """ROS topic name; with ``robot=ANY_ROBOT`` a key expression part that matches every robot.

        Raises:
            ValueError: a robot or camera id that ROS and Zenoh would not take, or a missing camera.
        """
        for what, part in (("robot", robot), ("camera", camera)):
            if part == ANY_ROBOT and what == "robot":
                continue
            if f"{{{what}}}" in self.pattern and not (part.isascii() and part.replace("_", "a").isalnum()):
                raise ValueError(f"{what} id {part!r} for topic {self.name!r}: use letters, digits and _ only")
        return self.pattern.format(robot=robot, camera=camera)


def _vla(short: str) -> str:
    return f"vla_runtime/msg/{short}"


_JOINT_STATE: Final = "sensor_msgs/msg/JointState"

TOPICS: Final[dict[str, TopicSpec]] = {
    spec.name: spec
    for spec in (
        TopicSpec("observation", "/vla/{robot}/observation", _vla("Observation"), "cloud", 10, 0.5),
        TopicSpec("context", "/vla/{robot}/context", _vla("ContextTokens"), "cloud", 10, 1.0, "data_high"),
        TopicSpec("shield_report", "/vla/{robot}/shield_report", _vla("ShieldStatus"), "cloud", 1, 5.0, "data_low"),
        TopicSpec("joint_states", "/{robot}/joint_states", _JOINT_STATE, "bus", 100, 0.1, "interactive_high"),
        TopicSpec(
            "image",
            "/{robot}/{camera}/image_raw/compressed",
            "sensor_msgs/msg/CompressedImage",
            "bus",
            10,
            0.5,
            "data_low",
        ),
        TopicSpec("instruction", "/{robot}/instruction", "std_msgs/msg/String", "bus", 2, 2.0, "data_high", "reliable"),
        TopicSpec("joint_command", "/{robot}/joint_command", _JOINT_STATE, "bus", 100, 0.1, "real_time", "reliable"),
        TopicSpec(
            "shield_command",
            "/{robot}/shield_command",
            _vla("ShieldCommand"),
            "bus",
            0,
            1.0,
            "real_time",
            "reliable",
            10,
        ),
        TopicSpec("estop", "/{robot}/estop", "std_msgs/msg/Bool", "bus", 10, 0.5, "real_time", "reliable"),
        TopicSpec("shield_status", "/{robot}/shield_status", _vla("ShieldStatus"), "bus", 20, 0.5, "interactive_low"),
        TopicSpec(
            "motor_ticks", "/{robot}/motor_ticks", _vla("MotorTicks"), "bus", 10, 5.0, "data_low", "reliable", 100
        ),
        TopicSpec(
            "measured_joints", "/{robot}/measured_joints", _JOINT_STATE, "bus", 0, 5.0, "data_low", "reliable", 10
        ),
        TopicSpec("policy_status", "/{robot}/policy_status", _vla("PolicyStatus"), "bus", 10, 0.5),
        TopicSpec("action_chunk", "/{robot}/action_chunk", _vla("ActionChunk"), "bus", 20, 0.5, "data", "reliable", 20),
        TopicSpec("task_status", "/{robot}/task_status", _vla("TaskStatus"), "bus", 10, 0.5),
        TopicSpec("sim_state", "/{robot}/sim_state", _vla("SimState"), "bus", 25, 5.0, "data_low", "reliable", 25),
    )
}


def topic_spec(name: str) -> TopicSpec:
    """Row of the table by name.

    Raises:
        KeyError: no such topic; the message names the nearest one.
    """
    if name not in TOPICS:
        near = difflib.get_close_matches(name, TOPICS, n=1)
        raise KeyError(f"no topic {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return TOPICS[name]


def data_key(topic: str, type_name: str, domain: int = 0) -> str:
    """Zenoh key of a ROS topic: ``<domain>/<topic>/<type>/<type hash>``."""
    name = full_type(type_name)
    return f"{domain}/{topic.strip('/')}/{dds_type(name)}/{type_hash(name)}"


def robot_of(spec: TopicSpec, key: str) -> str:
    """Robot id in the key of a sample of this topic.

    Raises:
        ValueError: the key is not one of this topic, or the id is not one that ROS and Zenoh would take.
    """
    parts = key.split("/")
    at = 1 + spec.pattern.strip("/").split("/").index("{robot}")  # the key starts with the domain
    robot = parts[at] if at < len(parts) else ""
    if robot == ANY_ROBOT:
        raise ValueError(f"{key!r} names no robot")
    spec.topic(robot, "any")
    return robot


@dataclass(frozen=True)
class Attachment:
    """What rmw_zenoh sends beside every sample.

    Sequence number, source time in ns since 1970, publisher's gid of 16 bytes.
    """

    sequence: int
    source_time_ns: int
    gid: bytes


_ATTACHMENT: Final = struct.Struct("<qqB16s")
_ATTACHMENT_BARE: Final = struct.Struct("<qq16s")
GID_BYTES: Final = 16


def pack_attachment(sequence: int, source_time_ns: int, gid: bytes) -> bytes:
    """33 bytes: two little-endian int64, a length byte, the gid."""
    return _ATTACHMENT.pack(sequence, source_time_ns, GID_BYTES, gid)


def unpack_attachment(data: bytes) -> Attachment | None:
    """Attachment with or without the length byte (rmw_zenoh versions differ); None if it is neither."""
    if len(data) == _ATTACHMENT.size and data[16] == GID_BYTES:
        sequence, source_time_ns, _, gid = _ATTACHMENT.unpack(data)
        return Attachment(sequence, source_time_ns, gid)
    if len(data) == _ATTACHMENT_BARE.size:
        return Attachment(*_ATTACHMENT_BARE.unpack(data))
    return None


@dataclass(frozen=True)
class NodeId:
    """The ROS node that entities of a session belong to. ``zid`` is the Zenoh session's id in hexadecimal."""

    zid: str
    name: str
    namespace: str = "/"
    domain: int = 0


def _mangle(name: str) -> str:
    return name.replace("/", "%")


def qos_key(reliability: Reliability, depth: int) -> str:
    """QoS part of a token; fields equal to rmw_zenoh's defaults (reliable, volatile, keep last 42) are left empty."""
    return f"{'' if reliability == 'reliable' else '2'}::,{'' if depth == 42 else depth}:,:,:,,"


def node_token(node: NodeId) -> str:
    """Liveliness token of a node."""
    enclave = "/"
    parts = ("@ros2_lv", str(node.domain), node.zid, "0", "0", "NN", enclave, node.namespace, node.name)
    return "/".join(_mangle(part) for part in parts)


def endpoint_token(
    node: NodeId,
    entity: int,
    kind: Literal["MP", "MS"],
    topic: str,
    type_name: str,
    reliability: Reliability,
    depth: int,
) -> str:
    """Liveliness token of a publisher (``MP``) or subscription (``MS``); ``entity`` is unique within the session."""
    name = full_type(type_name)
    parts = (
        "@ros2_lv",
        str(node.domain),
        node.zid,
        "0",
        str(entity),
        kind,
        "/",
        node.namespace,
        node.name,
        topic,
        dds_type(name),
        type_hash(name),
        qos_key(reliability, depth),
    )
    return "/".join(_mangle(part) for part in parts)


def token_gid(token: str) -> bytes:
    """Publisher's gid: XXH3-128 of its token, low half first, each little-endian."""
    digest = xxhash.xxh3_128(token.encode()).intdigest()
    return digest.to_bytes(GID_BYTES, "little")
