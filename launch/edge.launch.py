"""The robot side on ROS 2 topics: the lifecycle node vla_edge, which starts the motor and policy processes.

Only what both launch_ros and play_launch understand is used; respawn is left out on purpose: an edge that ended must be
looked at before the robot moves again.
"""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode

SHARE = Path(get_package_share_directory("vla_runtime"))

ARGUMENTS = (
    ("robot_id", "arm1", "Robot id, part of every topic: letters, digits and _"),
    ("namespace", "", "Namespace before all topics and the node, to keep apart several sites; such as lab"),
    ("params_file", str(SHARE / "config" / "edge_params.yaml"), "Parameters of the node; other arguments override it"),
    ("edge_config", "", "Settings file of the form of config/edge.yaml, below the parameters; empty: built-in values"),
    ("robot_file", str(SHARE / "config" / "robots" / "panda_2f85.yaml"), "Joints and their limits"),
    ("model", str(SHARE / "models" / "tabletop"), "Model folder"),
    ("cloud", "tcp/127.0.0.1:7448", "Endpoint of vla cloud"),
    ("allow_remote", "false", "Whether the cloud may be on another machine without encryption; tls/ always may"),
    ("record", "", "Record all topics to this file, such as run.mcap; empty: do not"),
    ("command_output", "joint_state", "joint_state, forward_command or joint_trajectory"),
    ("command_topic", "", "Topic of the commands; empty: the usual one of command_output"),
    ("joint_states_topic", "", "Topic of the measured joints; empty: /<robot_id>/joint_states"),
    ("instruction_topic", "", "Topic of the instruction; empty: /<robot_id>/instruction"),
    ("estop_topic", "", "Topic of the emergency stop input; empty: /<robot_id>/estop"),
    ("image_topics", "", "Images as camera=topic, separated by commas, such as front=/camera/image_raw/compressed; "
                         "empty: /<robot_id>/<camera>/image_raw/compressed"),
    ("image_transport", "compressed", "compressed, or raw for sensor_msgs/Image"),
    ("fastdds_profile", str(SHARE / "config" / "fastdds.xml"), "Fast DDS profile for large images; empty: its own"),
    ("autostart", "true", "Configure and activate the node at once. The robot does not move before it is re-armed"),
    ("log_level", "info", "debug, info, warn or error"),
)


def remap_rules(value) -> list[str]:
    """Rules from:=to of the topic arguments; ``value`` gives an argument by its name."""
    prefix = f"/{value('namespace')}" if value("namespace") else ""
    robot = f"{prefix}/{value('robot_id')}"
    rules = [f"{robot}/{topic}:={value(f'{topic}_topic')}" for topic in ("joint_states", "instruction", "estop")
             if value(f"{topic}_topic")]
    kind = "image_raw/compressed" if value("image_transport") == "compressed" else "image_raw"
    for entry in filter(None, value("image_topics").split(",")):
        camera, equals, topic = entry.partition("=")
        if not equals:
            raise RuntimeError(f"image_topics: {entry!r} is not of the form camera=topic")
        rules.append(f"{robot}/{camera.strip()}/{kind}:={topic.strip()}")
    return rules


def overrides(value) -> dict:
    """Parameters that the arguments set; an empty argument leaves the file's value."""
    namespace = value("namespace")
    result = {
        "robot_id": value("robot_id"), "robot_file": value("robot_file"), "model": value("model"),
        "bus": f"ros:{namespace}" if namespace else "ros", "cloud": value("cloud"),
        "allow_remote": value("allow_remote").lower() == "true",
        "ros.command_output": value("command_output"), "ros.image_transport": value("image_transport")}
    given = {"config": value("edge_config"), "record": value("record"), "ros.command_topic": value("command_topic"),
             "ros.remap": remap_rules(value)}
    return result | {name: item for name, item in given.items() if item}


def make_node(context) -> list:
    """The node, from arguments as given."""

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context).strip().strip("/" if name == "namespace" else " ")

    profile = value("fastdds_profile")
    # Not passed when off: launch_ros knows it since Jazzy, and on Humble "ros2 lifecycle set" does the same.
    autostart = {"autostart": True} if value("autostart").lower() == "true" else {}
    return [LifecycleNode(
        package="vla_runtime", executable="vla_edge_node", name="vla_edge",
        namespace=f"/{value('namespace')}/{value('robot_id')}" if value("namespace") else f"/{value('robot_id')}",
        parameters=[value("params_file"), overrides(value)],
        arguments=["--ros-args", "--log-level", value("log_level")],
        additional_env={"FASTDDS_DEFAULT_PROFILES_FILE": profile} if profile else {},
        output="screen", **autostart)]


def generate_launch_description() -> LaunchDescription:
    """Called by launch."""
    declared = [DeclareLaunchArgument(name, default_value=default, description=text)
                for name, default, text in ARGUMENTS]
    return LaunchDescription([*declared, OpaqueFunction(function=make_node)])
