import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vla_common import messages

ROOT = Path(__file__).parents[2]


def test_every_own_message_is_registered_and_bounded():
    own = {f"vla_runtime/msg/{path.stem}" for path in (ROOT / "msg").glob("*.msg")}
    assert own == {name for name in messages.MAX_BYTES if messages.is_own(name)} == set(messages.definition_texts())


@pytest.mark.parametrize("name", sorted(n for n in messages.MAX_BYTES if messages.is_own(n)))
def test_frame_of_every_own_message(name):
    fields = [kind.name for kind in messages.field_kinds(name)]
    assert fields[:2] == ["header", "wire_version"] and fields[-1] == "crc32"
    assert messages.new(name).wire_version == messages.WIRE_VERSION
    # What a ROS node sends that knows nothing of it.
    assert re.search(rf"^uint16 wire_version {messages.WIRE_VERSION}$", messages.definition_texts()[name], re.MULTILINE)


def test_bytes_after_the_last_field():
    """4 for each array of 8-byte values, as measured on rclpy's serialize_message, and 3."""
    assert messages.max_trailing_bytes("std_msgs/msg/Bool") == messages.max_trailing_bytes("std_msgs/msg/String") == 3
    assert messages.max_trailing_bytes("sensor_msgs/msg/JointState") == 15


def test_built_package_carries_the_same_definitions(tmp_path):
    """setup.py copies msg/ into the package; the copy is what an installed vla_common reads."""
    pytest.importorskip("setuptools")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    source = {path.name: path.read_text() for path in (ROOT / "msg").glob("*.msg")}
    built = {path.name: path.read_text() for path in (tmp_path / "vla_common" / "msg").glob("*.msg")}
    assert built == source
    script = "from vla_common import messages as m; print(m.definition_dir(), m.type_hash('ContextTokens'))"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
    ).stdout.split()
    assert found == [str(tmp_path / "vla_common" / "msg"), messages.type_hash("ContextTokens")]


def test_cmake_installs_every_package_and_message():
    text = (ROOT / "CMakeLists.txt").read_text()
    packages = re.search(r"foreach\(package (.*)\)", text).group(1).split()
    assert {"vla_common", "vla_models", "vla_cloud", "vla_edge", "vla_sim", "vla_cli"} == set(packages)
    assert "vla_common/msg" in text and "msg/*.msg" in text


def test_names_short_full_and_wrong():
    assert messages.full_type("ContextTokens") == "vla_runtime/msg/ContextTokens"
    assert messages.full_type("sensor_msgs/JointState") == "sensor_msgs/msg/JointState"
    assert messages.full_type("JointState") == "sensor_msgs/msg/JointState"
    assert messages.dds_type("String") == "std_msgs::msg::dds_::String_"
    with pytest.raises(KeyError, match="ShieldStatus"):
        messages.full_type("ShieldState")


def test_new_fills_and_coerces():
    message = messages.new("MotorTicks", tick=[1, 2], command=[[0.5, 1], [2, 3]], state=b"\x00\x01")
    assert message.tick.dtype == np.int64 and message.state.dtype == np.uint8
    np.testing.assert_array_equal(message.command, [0.5, 1, 2, 3])
    status = messages.new("ShieldStatus")
    assert status.rearm_ready is False and status.reason == "" and status.lateness_p50_s == 0.0
    assert (status.NOMINAL, status.COASTING, status.BRAKING, status.HOLDING) == (0, 1, 2, 3)
    assert messages.new("ContextTokens").model_hash.shape == (32,)


def test_new_refuses_loss_and_mistypes():
    with pytest.raises(KeyError, match="joint_names"):
        messages.new("ActionChunk", joint_name=["a"])
    with pytest.raises(TypeError):
        messages.new("MotorTicks", state=[0.5])
    with pytest.raises((TypeError, OverflowError)):
        messages.new("MotorTicks", state=[300])
    with pytest.raises(ValueError, match="takes 32 values"):
        messages.new("ContextTokens", model_hash=b"short")
    assert messages.new("MotorTicks", tick=[]).tick.dtype == np.int64


def test_two_messages_share_nothing():
    first, second = messages.new("Observation"), messages.new("Observation")
    first.header.frame_id = "changed"
    first.joint_names.append("joint")
    assert second.header.frame_id == "" and second.joint_names == []
