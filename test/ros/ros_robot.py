"""A fake ROS robot in a process of its own: joint states that follow the commands, a camera, and a log of every command.

Joint states hold an extra joint, in another order than the robot file's, and are stamped with the wall clock, as ROS
drivers do. SIGUSR1 stops the camera, and starts it again. Each command is appended to the log as it is received: instant (CLOCK_MONOTONIC, ns), stamp, positions and
speeds, 2 + 2 n doubles.
"""

import argparse
import io
import signal
import time

import numpy as np
import rclpy
from PIL import Image as Pillow
from rclpy.node import Node
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

TYPES = {"joint_state": JointState, "forward_command": Float64MultiArray, "joint_trajectory": JointTrajectory}


class Robot(Node):
    def __init__(self, options):
        super().__init__("robot_driver", enable_rosout=False, start_parameter_services=False)
        self.names, self.position = options.names.split(","), np.array([float(q) for q in options.position.split(",")])
        self.without, self.image = options.without, options.image
        self.is_silent = False
        signal.signal(signal.SIGUSR1, self.toggle_camera)
        self.log = open(options.log, "ab", buffering=0)
        self.joints_out = self.create_publisher(JointState, options.joints, qos_profile_sensor_data)
        kind = CompressedImage if options.image == "jpeg" else Image
        self.images_out = self.create_publisher(kind, options.images, qos_profile_sensor_data)
        # Deep enough for seconds in which a busy machine does not let this process run.
        self.commands_in = self.create_subscription(TYPES[options.output], options.commands, self.on_command,
                                                    QoSProfile(depth=1000))
        self.create_timer(0.01, self.send_joints)
        self.create_timer(0.1, self.send_image)

    def on_command(self, message):
        """And all that have come since: one per turn of the executor would leave a busy robot ever farther behind."""
        self.obey(message)
        while (found := self.commands_in.handle.take_message(self.commands_in.msg_type, False)) is not None:
            self.obey(found[0])

    def obey(self, message):
        now_ns = time.monotonic_ns()
        velocity, stamp = np.full(len(self.names), np.nan), np.nan
        if isinstance(message, Float64MultiArray):
            position = np.array(message.data)
        elif isinstance(message, JointTrajectory):
            assert message.joint_names == self.names and len(message.points) == 1
            position, velocity = np.array(message.points[0].positions), np.array(message.points[0].velocities)
        else:
            assert list(message.name) == self.names
            position, velocity = np.array(message.position), np.array(message.velocity)
            stamp = message.header.stamp.sec * 1e9 + message.header.stamp.nanosec
        self.position = position
        self.log.write(np.concatenate([[now_ns, stamp], position, velocity]).tobytes())

    def send_joints(self):
        names = [name for name in self.names[::-1] if name != self.without]
        values = dict(zip(self.names, self.position, strict=True))
        message = JointState(name=["finger_left", *names], position=[0.04, *(values[name] for name in names)],
                             velocity=[0.0] * (1 + len(names)))
        message.header.stamp = self.get_clock().now().to_msg()
        self.joints_out.publish(message)

    def toggle_camera(self, *_):
        self.is_silent = not self.is_silent

    def send_image(self):
        if self.is_silent:
            return
        pixels = np.zeros((24, 32, 3), np.uint8)
        pixels[:, :16] = (255, 0, 0)
        if self.image == "jpeg":
            buffer = io.BytesIO()
            Pillow.fromarray(pixels).save(buffer, format="JPEG")
            message = CompressedImage(format="jpeg", data=buffer.getvalue())
        elif self.image == "16UC1":
            message = Image(height=24, width=32, encoding="16UC1", step=64, data=bytes(24 * 64))
        else:
            message = Image(height=24, width=32, encoding="bgr8", step=96, data=pixels[..., ::-1].tobytes())
        message.header.stamp = self.get_clock().now().to_msg()
        self.images_out.publish(message)


def main():
    parser = argparse.ArgumentParser()
    for name in ("names", "position", "joints", "images", "commands", "log"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--output", default="joint_state", choices=TYPES)
    parser.add_argument("--image", default="jpeg", choices=("jpeg", "bgr8", "16UC1"))
    parser.add_argument("--without", default="")
    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    rclpy.spin(Robot(parser.parse_args()))


if __name__ == "__main__":
    main()
