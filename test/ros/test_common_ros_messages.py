"""Against ROS itself: run where vla_runtime's messages are built and rclpy is there, skipped elsewhere.

Fast-CDR leaves padding bytes as it finds them, so fields are compared, not bytes; the checksum is over zeros instead.
VLA_UPDATE_GOLDEN=1 keeps what ROS made for the tests that run without it.
"""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

serialization = pytest.importorskip("rclpy.serialization", reason="ROS 2 is not installed")
pytest.importorskip("vla_runtime.msg", reason="the messages are not built: cmake --install build/ros")

from importlib import import_module  # noqa: E402

from vla_common import messages, wire  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden" / "common"


def filled(name, seed):
    """A message whose arrays are often empty, of any length below 4."""
    rng = random.Random(seed)
    fields = {}
    for kind in messages.field_kinds(name):
        if kind.dtype is not None:
            count = kind.length if kind.length is not None else max(0, rng.randrange(-2, 4))
            fields[kind.name] = np.array([rng.randrange(2 if kind.dtype == bool else 100) for _ in range(count)]).astype(kind.dtype)
        elif kind.is_string:
            words = ["".join(rng.choices("abcde ", k=rng.randrange(6))) for _ in range(max(0, rng.randrange(-2, 4)))]
            fields[kind.name] = words if kind.is_array else "".join(rng.choices("abcde ", k=rng.randrange(6)))
        elif kind.message_type is not None and kind.is_array:
            fields[kind.name] = [filled(kind.message_type, seed + n) for n in range(rng.randrange(3))]
    return messages.new(name, **fields)


def ros_class(name):
    package, _, short = name.split("/")
    return getattr(import_module(f"{package}.msg"), short)


NAMES = sorted(messages.MAX_BYTES)


def through_ros(payload, name):
    """What ROS makes of a payload: read into its message and written again, in memory that was in use before."""
    return bytes(serialization.serialize_message(serialization.deserialize_message(payload, ros_class(name))))


def golden_bytes(name):
    return bytes.fromhex((GOLDEN / f"{name.rsplit('/', 1)[1]}.hex").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_ros_reads_what_we_write_and_we_read_what_ros_writes(name):
    golden = golden_bytes(name)
    assert wire.encode(wire.decode(name, through_ros(golden, name))) == golden


@pytest.mark.parametrize("name", NAMES)
def test_every_length_of_every_array(name):
    """Empty arrays above all: rclpy's buffer then is longer than what it wrote."""
    for seed in range(200):
        payload = wire.encode(filled(name, seed))
        assert wire.encode(wire.decode(name, through_ros(payload, name))) == payload


@pytest.mark.parametrize("name", [name for name in NAMES if messages.is_own(name)])
def test_damage_is_noticed_in_what_ros_writes(name):
    """In the last field and in the stamp, with ROS's padding between them."""
    payload = bytearray(through_ros(golden_bytes(name), name))
    for at in (5, len(golden_bytes(name)) - 1):
        payload[at] ^= 0x10
        with pytest.raises(wire.ChecksumMismatch):
            wire.decode(name, payload)
        payload[at] ^= 0x10


def test_an_operators_plain_ros_node_is_heard():
    """As 'ros2 topic pub' would: only the fields that matter are set, the version is the definition's default."""
    message = ros_class("vla_runtime/msg/ShieldCommand")(command=2, sequence=1)
    assert message.wire_version == messages.WIRE_VERSION and message.crc32 == 0
    heard = wire.decode("ShieldCommand", bytes(serialization.serialize_message(message)))
    assert heard.command == heard.ESTOP and heard.sequence == 1


def test_no_other_message_of_ours_is_taken_from_a_plain_ros_node():
    for name in NAMES:
        if messages.is_own(name) and name not in messages.UNCHECKED_IF_ZERO:
            with pytest.raises(wire.ChecksumMismatch):
                wire.decode(name, bytes(serialization.serialize_message(ros_class(name)())))


def test_the_kept_bytes_are_still_read_by_ros():
    path = GOLDEN / "from_ros.txt"
    if os.environ.get("VLA_UPDATE_GOLDEN"):
        lines = []
        for name in NAMES:
            short = name.rsplit("/", 1)[1]
            for what, payload in (("sample", golden_bytes(name)), ("empty", wire.encode(messages.new(name)))):
                lines.append(f"{short} {what} {through_ros(payload, name).hex()}\n")
        path.write_text("".join(lines), encoding="ascii")
    for line in path.read_text(encoding="ascii").splitlines():
        short, _, text = line.split()
        name = messages.full_type(short)
        payload = bytes.fromhex(text)
        assert wire.encode(wire.decode(name, through_ros(payload, name))) == wire.encode(wire.decode(name, payload))


@pytest.mark.parametrize("name", sorted(messages.MAX_BYTES))
def test_type_hash_is_that_of_ros(name):
    package, _, short = name.split("/")
    for prefix in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep):
        path = Path(prefix) / "share" / package / "msg" / f"{short}.json"
        if path.is_file():
            hashes = {entry["type_name"]: entry["hash_string"] for entry in json.loads(path.read_text())["type_hashes"]}
            assert messages.type_hash(name) == hashes[name]
            return
    pytest.skip(f"no {short}.json on AMENT_PREFIX_PATH (ROS before Iron has none)")
