"""The cloud side: context tokens for any number of robots. Not a ROS node; robots reach it over Zenoh."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

SHARE = Path(get_package_share_directory("vla_runtime"))

ARGUMENTS = (
    ("config", str(SHARE / "config" / "cloud.yaml"), "Settings of vla cloud"),
    ("listen", "tcp/127.0.0.1:7448", "Endpoint to host"),
    ("model", str(SHARE / "models" / "tabletop"), "Model folder"),
    ("threads", "1", "Threads of torch"),
    ("allow_non_loopback", "false", "Listen without encryption on an address that other machines reach"),
)


def make_node(context) -> list:
    """The process, from arguments as given."""

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context).strip()

    arguments = [f"--{name}={value(name)}" for name in ("config", "listen", "model", "threads")]
    if value("allow_non_loopback").lower() == "true":
        arguments.append("--insecure-non-loopback")
    return [Node(package="vla_runtime", executable="vla_cloud", name="vla_cloud", arguments=arguments, output="screen")]


def generate_launch_description() -> LaunchDescription:
    """Called by launch."""
    declared = [DeclareLaunchArgument(name, default_value=default, description=text)
                for name, default, text in ARGUMENTS]
    return LaunchDescription([*declared, OpaqueFunction(function=make_node)])
