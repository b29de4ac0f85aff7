"""Which bus the settings ask for; what needs ROS is imported only then, and says what to do where there is none."""

import logging
import sys

import pytest

from vla_common.config import ConfigError
from vla_common.joint_command import command_template
from vla_common.topics import topic_spec
from vla_common.zenoh_session import Bus
from vla_edge.adapters.ros_bus import RosPublisher
from vla_edge.config import EdgeConfig, RosConfig, load_edge_config
from vla_edge.robot_bus import BusError, check_robot_bus, command_spec, image_spec, open_robot_bus, ros_prefix


def config(*overrides):
    return load_edge_config(None, overrides)


@pytest.mark.parametrize("bus, prefix", [("ros", ""), ("ros:lab", "/lab"), ("ros:/lab/b2/", "/lab/b2")])
def test_namespaces(bus, prefix):
    assert ros_prefix(bus) == prefix and config(f"bus={bus}").is_ros
    check_robot_bus(config(f"bus={bus}"))


@pytest.mark.parametrize("bus", ["ros:", "ros:a b", "ros:1a", "ros:a//b", "ros:ü"])
def test_namespaces_that_ros_would_not_take(bus):
    with pytest.raises(BusError, match="such as ros:lab"):
        ros_prefix(bus)


@pytest.mark.parametrize("bus", ["tcp/127.0.0.1:7447", "rosbag", "udp/127.0.0.1:1"])
def test_other_endpoints_are_zenoh(bus):
    assert not config(f"bus={bus}").is_ros


def test_zenoh_stays_what_it_was():
    with open_robot_bus(config("bus=tcp/127.0.0.1:1"), "vla_motor") as bus:
        assert isinstance(bus, Bus) and bus.node.name == "vla_motor_arm1"
    with pytest.raises(BusError, match="allow_remote"):
        open_robot_bus(config("bus=tcp/10.0.0.1:1"), "vla_motor")
    for name in ("compressed", "raw"):
        assert image_spec(config(f"ros.image_transport={name}")).type_name == "sensor_msgs/msg/CompressedImage"
    assert command_spec(EdgeConfig(), "sensor_msgs/msg/JointState").topic("a") == "/a/joint_command"


def test_without_ros_the_remedy_is_named(monkeypatch):
    for name in ("rclpy", "rclpy.context", "rclpy.node"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BusError, match="ROS 2 is not usable here .*source its setup file"):
        open_robot_bus(config("bus=ros"), "vla_motor")


@pytest.mark.parametrize("output, topic, type_name", [
    ("joint_state", "/arm1/joint_command", "sensor_msgs/msg/JointState"),
    ("forward_command", "/forward_position_controller/commands", "std_msgs/msg/Float64MultiArray"),
    ("joint_trajectory", "/joint_trajectory_controller/joint_trajectory", "trajectory_msgs/msg/JointTrajectory")])
def test_topics_of_the_command(output, topic, type_name):
    settings = config("bus=ros", f"ros.command_output={output}")
    template = command_template(settings.ros.command_output, ["a"], 0.01)
    spec = command_spec(settings, template.type_name)
    assert (spec.topic("arm1"), spec.type_name, spec.reliability, spec.depth) == (topic, type_name, "reliable", 1)
    own = config("bus=ros", f"ros.command_output={output}", "ros.command_topic=/left/arm/commands")
    assert command_spec(own, template.type_name).topic("arm1") == "/left/arm/commands"


def test_raw_images():
    spec = image_spec(config("bus=ros", "ros.image_transport=raw"))
    assert (spec.topic("arm1", "front"), spec.type_name) == ("/arm1/front/image_raw", "sensor_msgs/msg/Image")


def test_settings_that_do_not_go_together():
    with pytest.raises(ConfigError, match="ros.command_output forward_command needs 'bus: ros'"):
        config("ros.command_output=forward_command")
    for wrong, words in (({"jpeg_quality": 0}, "jpeg_quality"), ({"observation_hz": 0.0}, "observation_hz"),
                         ({"remap": ("a=b",)}, "from:=to"), ({"remap": (":=b",)}, "from:=to"),
                         ({"command_topic": "commands"}, "must start with /")):
        with pytest.raises(ValueError, match=words):
            RosConfig(**wrong)
    with pytest.raises(ConfigError, match="would rename every process"):
        check_robot_bus(config("bus=ros", "ros.remap=['__ns:=/x']"))


def test_settings_survive_the_way_to_a_child():
    settings = config("bus=ros:lab", "ros.command_output=joint_trajectory", "ros.remap=['/a:=/b','/c:=/d']")
    assert EdgeConfig.from_json(settings.to_json()) == settings


def test_a_sample_that_the_middleware_does_not_take_is_dropped_and_counted(caplog):
    """A motor process must not end because Fast DDS gave up waiting on an overloaded machine."""
    class Refusing:
        def publish(self, payload):
            raise RuntimeError("Failed to publish: cannot publish data")

    publisher = RosPublisher(topic_spec("joint_command"), "/arm1/joint_command", Refusing())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            publisher.put(b"")
        assert publisher.failed == 3 and not caplog.records, "nothing is written in the motor's loop"
        publisher.close()
        publisher.close()
    assert len(caplog.records) == 1 and "3 of 3 samples of joint_command were not sent by ROS" in caplog.text
    with pytest.raises(BusError, match="closed"):
        publisher.put(b"")
