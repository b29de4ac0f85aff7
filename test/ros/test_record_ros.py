"""``vla record --bus ros`` beside plain rclpy publishers: what they send over DDS is recorded and accepted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

rclpy = pytest.importorskip("rclpy", reason="ROS 2 is not installed")
pytest.importorskip("vla_runtime.msg", reason="the messages are not built: make ros")

from rclpy.context import Context  # noqa: E402
from rclpy.duration import Duration  # noqa: E402
from rclpy.qos import qos_profile_sensor_data  # noqa: E402
from sensor_msgs.msg import JointState  # noqa: E402
from vla_runtime.msg import ShieldCommand  # noqa: E402

from vla_common import wire  # noqa: E402
from vla_common.clock import SystemClock, sleep_s  # noqa: E402
from vla_edge.adapters.mcap_reader import McapMetadata, read_mcap  # noqa: E402

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()


def test_a_robots_ros_topics_are_recorded(tmp_path):
    path = tmp_path / "lab.mcap"
    # The cloud link is one on which nothing runs.
    process = subprocess.Popen(
        [sys.executable, "-m", "vla_cli", "record", str(path), "--robot-id", "lab1", "--bus", "ros", "--cloud",
         "unixsock-stream/" + str(tmp_path / "none"), "--camera", "wrist"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    context = Context()
    context.init([])
    node = rclpy.create_node("driver", context=context, enable_rosout=False, start_parameter_services=False)
    try:
        states = node.create_publisher(JointState, "/lab1/joint_states", qos_profile_sensor_data)
        commands = node.create_publisher(ShieldCommand, "/lab1/shield_command", 100)
        for _ in range(600):
            if states.get_subscription_count() and commands.get_subscription_count():
                break
            assert process.poll() is None, process.communicate()[1]
            sleep_s(CLOCK, 0.1)
        for number in range(20):
            states.publish(JointState(name=["b", "a"], position=[0.5, float(number)], effort=[1.0]))
            commands.publish(ShieldCommand(command=ShieldCommand.ESTOP, sequence=number))
            sleep_s(CLOCK, 0.05)
        # The recorder may be behind; what has come it writes after the signal.
        assert commands.wait_for_all_acked(Duration(seconds=60))
        process.send_signal(signal.SIGINT)
        log = process.communicate(timeout=60)[1]
        assert process.returncode == 0, log
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        node.destroy_node()
        context.try_shutdown()
    seen = {}
    for item in read_mcap(path):
        if not isinstance(item, McapMetadata):
            seen.setdefault(item.topic, []).append(wire.decode(item.type_name, item.payload))
    assert set(seen) == {"/lab1/joint_states", "/lab1/shield_command"}
    heard = seen["/lab1/shield_command"]
    assert [command.sequence for command in heard] == list(range(20)), "reliable: every one, in order"
    assert all(command.command == command.ESTOP and command.crc32 == 0 for command in heard)
    state = seen["/lab1/joint_states"][-1]
    assert state.name == ["b", "a"] and list(state.effort) == [1.0] and state.velocity.size == 0
