"""The closed loop without hardware: one cloud, and for each robot a simulated cell and its edge, on ROS 2 topics."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction, Shutdown
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

SHARE = Path(get_package_share_directory("vla_runtime"))

ARGUMENTS = (
    ("robots", "arm1", "Robot ids separated by commas; each gets a cell and an edge of its own"),
    ("namespace", "", "Namespace before all topics, such as lab"),
    ("model", str(SHARE / "models" / "tabletop"), "Model folder"),
    ("cloud", "tcp/127.0.0.1:7448", "Endpoint that the cloud hosts and the edges join"),
    ("episodes", "10", "Episodes per robot"),
    ("seed", "0", "Seed of the first robot's episodes; each further robot's is one higher"),
    ("tasks", "touch,pick", "Kinds of task"),
    ("motion", "still", "still, moving or both"),
    ("results", "", "Folder for one <robot>.json each; empty: none"),
    ("params_file", str(SHARE / "config" / "edge_params.yaml"), "Parameters of the edges"),
    ("fastdds_profile", str(SHARE / "config" / "fastdds.xml"), "Fast DDS profile for large images; empty: its own"),
    ("autostart", "true", "Configure and activate the edges at once"),
)


def include(name: str, arguments: dict) -> IncludeLaunchDescription:
    """Another launch file of this package."""
    source = PythonLaunchDescriptionSource(str(SHARE / "launch" / name))
    return IncludeLaunchDescription(source, launch_arguments=list(arguments.items()))


def make_all(context) -> list:
    """Cloud, cells and edges, from arguments as given."""

    def value(name: str) -> str:
        return LaunchConfiguration(name).perform(context).strip()

    namespace, profile = value("namespace").strip("/"), value("fastdds_profile")
    started = [include("cloud.launch.py", {"listen": value("cloud"), "model": value("model")})]
    for number, robot in enumerate(filter(None, (part.strip() for part in value("robots").split(",")))):
        arguments = ["--bus", f"ros:{namespace}" if namespace else "ros", "--robot", robot,
                     "--episodes", value("episodes"), "--seed", str(int(value("seed")) + number),
                     "--tasks", value("tasks"), "--motion", value("motion")]
        if value("results"):
            arguments += ["--results", str(Path(value("results")) / f"{robot}.json")]
        # The simulator stands for the robot: when it ends, there is nothing left to run for.
        started.append(Node(
            package="vla_runtime", executable="vla_sim", name="vla_sim",
            namespace=f"/{namespace}/{robot}" if namespace else f"/{robot}",
            arguments=arguments, additional_env={"FASTDDS_DEFAULT_PROFILES_FILE": profile} if profile else {},
            output="screen", on_exit=[Shutdown()]))
        started.append(include("edge.launch.py", {
            "robot_id": robot, "namespace": namespace, "model": value("model"), "cloud": value("cloud"),
            "params_file": value("params_file"), "fastdds_profile": profile, "autostart": value("autostart")}))
    return started


def generate_launch_description() -> LaunchDescription:
    """Called by launch."""
    declared = [DeclareLaunchArgument(name, default_value=default, description=text)
                for name, default, text in ARGUMENTS]
    return LaunchDescription([*declared, OpaqueFunction(function=make_all)])
