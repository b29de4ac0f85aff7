"""ROS's own launch runs the edge: it becomes active by itself and ends cleanly. For launch_test; needs Jazzy or newer."""

import socket
import time
import unittest

import launch_testing.actions
import launch_testing.asserts
import rclpy
from launch import LaunchDescription
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare
from lifecycle_msgs.msg import State
from lifecycle_msgs.srv import GetState


def generate_test_description():
    """Called by launch_test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        cloud = f"tcp/127.0.0.1:{free.getsockname()[1]}"

    def include(name, arguments):
        path = PathJoinSubstitution([FindPackageShare("vla_runtime"), "launch", name])
        return IncludeLaunchDescription(PythonLaunchDescriptionSource(path), launch_arguments=arguments)

    return LaunchDescription([
        include("cloud.launch.py", [("listen", cloud)]),
        include("edge.launch.py", [("robot_id", "left"), ("namespace", "lab"), ("cloud", cloud)]),
        launch_testing.actions.ReadyToTest()])


class WhileRunning(unittest.TestCase):
    """With both processes up."""

    def test_cloud_serves(self, proc_output):
        """It says so."""
        proc_output.assertWaitFor("READY tcp/127.0.0.1:", timeout=60)

    def test_edge_becomes_active(self):
        """Without anyone asking it to."""
        rclpy.init()
        node = rclpy.create_node("asker")
        try:
            client = node.create_client(GetState, "/lab/left/vla_edge/get_state")
            self.assertTrue(client.wait_for_service(60.0))
            state, deadline = None, time.monotonic() + 60.0
            while state != State.PRIMARY_STATE_ACTIVE and time.monotonic() < deadline:
                answer = client.call_async(GetState.Request())
                rclpy.spin_until_future_complete(node, answer, timeout_sec=2.0)
                state = answer.result().current_state.id if answer.done() else None
                time.sleep(0.1)
            self.assertEqual(state, State.PRIMARY_STATE_ACTIVE)
        finally:
            node.destroy_node()
            rclpy.shutdown()


@launch_testing.post_shutdown_test()
class AfterShutdown(unittest.TestCase):
    """After Ctrl-C to all."""

    def test_clean_end(self, proc_info):
        """Exit code 0 of both."""
        launch_testing.asserts.assertExitCodes(proc_info)
