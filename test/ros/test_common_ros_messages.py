"""Against ROS itself: run where vla_runtime's messages are built and rclpy is there, skipped elsewhere.

Fast-CDR leaves padding bytes as it finds them, so fields are compared, not bytes. For the same reason a ROS node that
publishes one of our types must send what vla_common.wire.encode returns (publishers take bytes): the checksum of a
message serialised by ROS could not be known beforehand.
"""

import json
import os
from pathlib import Path

import pytest

serialization = pytest.importorskip("rclpy.serialization", reason="ROS 2 is not installed")
pytest.importorskip("vla_runtime.msg", reason="the messages are not built: cmake --install build/ros")

from importlib import import_module  # noqa: E402

from vla_common import messages, wire  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden" / "common"


def ros_class(name):
    package, _, short = name.split("/")
    return getattr(import_module(f"{package}.msg"), short)


@pytest.mark.parametrize("name", sorted(messages.MAX_BYTES))
def test_ros_reads_what_we_write_and_we_read_what_ros_writes(name):
    golden = bytes.fromhex((GOLDEN / f"{name.rsplit('/', 1)[1]}.hex").read_text())
    from_ros = bytes(serialization.serialize_message(serialization.deserialize_message(golden, ros_class(name))))
    if messages.is_own(name):
        message = wire._parse(name, from_ros)  # unchecked: the checksum carried along is that of our padding
        sent = message.crc32
        assert wire.encode(message) == golden and message.crc32 == sent
    else:
        assert wire.encode(wire.decode(name, from_ros)) == golden


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
