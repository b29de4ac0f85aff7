"""A fake robot that hosts the robot bus: its joints are where the last command put them; its outlet may be faulty.

With ``--largest-step`` it ignores a command that is farther away than that, as drivers do: someone moved it by hand.
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np
from edge_rig import CLOCK, LIMITS
from mangle import Fault, Orders, Outbox, Share

from vla_common import messages, wire
from vla_common.process import end_with_parent
from vla_common.zenoh_session import open_bus

HOUR_NS = 3_600_000_000_000
TURN_NS = 2_500_000
TURNS = 4  # per joint state


def joint_states(stamp_ns: int, position: np.ndarray, fault: str) -> bytes:
    """The measured pose, with the content fault asked for."""
    names = list(LIMITS.names)
    position = position.copy()
    if fault == "nan":
        position[2] = np.nan
    elif fault == "order":
        names[0], names[1] = names[1], names[0]
        position[[0, 1]] = position[[1, 0]]
    elif fault == "width":
        position = position[:7]
    elif fault == "future":
        stamp_ns += HOUR_NS
    return wire.encode(messages.new("sensor_msgs/JointState", header=wire.make_header(stamp_ns), name=names,
                                    position=position, velocity=np.zeros(len(position))))


def main() -> None:
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--robot", required=True)
    parser.add_argument("--position", type=json.loads, default=LIMITS.ready.tolist())
    parser.add_argument("--instruction", default="")
    parser.add_argument("--largest-step", type=float, default=float("inf"))
    options = parser.parse_args()
    position, image = np.array(options.position), os.urandom(64)
    orders, share, fault, image_fault = Orders(), Share(), Fault(), Fault()
    with open_bus(options.endpoint, "router", node="matrix_robot") as bus:
        commands = bus.queue("joint_command", options.robot, capacity=256)
        joints = Outbox(bus.publisher("joint_states", options.robot), flips=False)
        images = Outbox(bus.publisher("image", options.robot, "front"), flips=False)
        instructions = bus.publisher("instruction", options.robot)
        due_ns, turn = CLOCK.monotonic_ns(), 0
        while orders.open:
            for order in orders.poll():
                fault = Fault(**order["fault"]) if "fault" in order else fault
                image_fault = Fault(**order["image_fault"]) if "image_fault" in order else image_fault
                image = os.urandom(order["image_bytes"]) if "image_bytes" in order else image
            while (received := commands.try_recv()) is not None:
                command = np.array(wire.decode("sensor_msgs/JointState", received.payload).position)
                if np.abs(command - position).max() <= options.largest_step:
                    position = command
            now_ns = CLOCK.monotonic_ns()
            if turn % TURNS == 0:
                is_hit = share.hit(fault.share)
                joints.send(now_ns, joint_states(now_ns, position, fault.kind if is_hit else "none"), fault, is_hit)
            if turn % (10 * TURNS) == 0:
                stamp_ns = now_ns + (HOUR_NS if image_fault.kind == "future" else 0)
                images.send(now_ns, wire.encode(messages.new(
                    "sensor_msgs/CompressedImage", header=wire.make_header(stamp_ns, "front"), format="jpeg",
                    data=image)), image_fault, True)
            joints.flush(now_ns)
            images.flush(now_ns)
            if turn % (25 * TURNS) == 0:
                instructions.put(wire.encode(messages.new("std_msgs/String", data=options.instruction)))
            turn += 1
            due_ns = max(due_ns + TURN_NS, now_ns)
            CLOCK.sleep_until_ns(due_ns)


if __name__ == "__main__":
    main()
