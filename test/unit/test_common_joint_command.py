import struct

import numpy as np
import pytest

from vla_common import messages, wire
from vla_common.joint_command import JointCommandTemplate, command_template

JOINTS = [*(f"panda_joint{number}" for number in range(1, 8)), "gripper"]


@pytest.mark.parametrize("names", [JOINTS, ["a"], ["ab", "c"], ["abc"] * 3, ["abcd", "e"], ["ü"]])
@pytest.mark.parametrize("frame_id", ["", "b", "base"])
def test_equals_full_serialisation(names, frame_id):
    rng = np.random.default_rng(len(names))
    template = JointCommandTemplate(names, frame_id)
    for stamp_ns in (0, 999_999_999, 1_000_000_000, 12_345_678_901_234):
        position, velocity = rng.normal(size=len(names)), rng.normal(size=len(names))
        message = messages.new(
            "JointState", header=wire.make_header(stamp_ns, frame_id), name=names, position=position, velocity=velocity
        )
        assert template.pack(stamp_ns, position, velocity) == wire.encode(message)


def test_earlier_payloads_do_not_change():
    template = JointCommandTemplate(JOINTS)
    first = template.pack(1, np.zeros(8), np.zeros(8))
    template.pack(2, np.ones(8), np.ones(8))
    assert wire.decode("JointState", first).position.sum() == 0


def test_refuses_wrong_width_and_no_names():
    template = JointCommandTemplate(JOINTS)
    with pytest.raises(struct.error):
        template.pack(0, np.zeros(7), np.zeros(8))
    with pytest.raises(ValueError):
        JointCommandTemplate([])


@pytest.mark.parametrize("names", [JOINTS, ["a"], ["ab", "c"], ["abc"] * 3, ["abcd", "e"], ["ü"]])
@pytest.mark.parametrize("period_s", [0.01, 0.004, 1.5])
def test_trajectory_equals_full_serialisation(names, period_s):
    rng = np.random.default_rng(len(names))
    template = command_template("joint_trajectory", names, period_s)
    duration = messages.new("builtin_interfaces/msg/Duration", sec=int(period_s), nanosec=round(period_s % 1 * 1e9))
    for _ in range(3):
        position, velocity = rng.normal(size=len(names)), rng.normal(size=len(names))
        point = messages.new("trajectory_msgs/msg/JointTrajectoryPoint", positions=position, velocities=velocity,
                             time_from_start=duration)
        message = messages.new("trajectory_msgs/msg/JointTrajectory", joint_names=names, points=[point])
        assert template.pack(12_345_678_901, position, velocity) == wire.encode(message)


@pytest.mark.parametrize("count", [1, 6, 8])
def test_forward_command_equals_full_serialisation(count):
    rng = np.random.default_rng(count)
    template = command_template("forward_command", ["j"] * count, 0.01)
    for _ in range(3):
        position = rng.normal(size=count)
        message = messages.new("std_msgs/msg/Float64MultiArray", data=position)
        assert template.pack(5, position, np.zeros(count)) == wire.encode(message)


@pytest.mark.parametrize("output", ["joint_state", "forward_command", "joint_trajectory"])
def test_every_form_refuses_wrong_width_and_no_names(output):
    template = command_template(output, JOINTS, 0.01)
    assert messages.full_type(template.type_name) == template.type_name
    with pytest.raises(struct.error):
        template.pack(0, np.zeros(7), np.zeros(8))
    with pytest.raises(ValueError, match="at least one"):
        command_template(output, [], 0.01)
