"""The io process without ROS and without Zenoh: a bus of queues, a clock that the test moves."""

from collections import defaultdict, deque

import numpy as np

from vla_common import messages, wire
from vla_common.clock import ManualClock
from vla_common.topics import Attachment
from vla_common.zenoh_session import Received
from vla_edge.child import Child
from vla_edge.config import load_edge_config, load_limits
from vla_edge.core.records import EdgeMemory
from vla_edge.io_main import IoLoop

NS, MS = 1_000_000_000, 1_000_000
CONFIG = load_edge_config(None, ["bus=ros"])
LIMITS = load_limits(CONFIG.robot_file, CONFIG.motor.period_s)
WALL_NS = 1_700_000_000 * NS


class Bus:
    """Arrived samples by topic name, with the camera after it; what was sent."""

    def __init__(self):
        self.waiting, self.sent = defaultdict(deque), defaultdict(list)

    def queue(self, topic, robot, camera="", capacity=256):
        waiting = self.waiting[f"{getattr(topic, 'name', topic)} {camera}".strip()]
        return type("Line", (), {"try_recv": lambda _: waiting.popleft() if waiting else None})()

    latest = queue

    def publisher(self, topic, robot, camera=""):
        return type("Line", (), {"put": lambda _, payload: self.sent[topic].append(payload)})()


class Edge:
    def __init__(self, *overrides, cameras=("front",)):
        self.clock, self.bus, self.cloud = ManualClock(100 * NS), Bus(), Bus()
        self.config = load_edge_config(None, ["bus=ros", *overrides])
        self.memory = EdgeMemory.private(len(LIMITS))
        self.io = IoLoop(Child(self.config, self.memory, LIMITS, self.clock, None), list(cameras), self.bus, self.cloud)

    def arrives(self, topic, message, waited_ns=0):
        payload = message if isinstance(message, bytes) else wire.encode(message)
        self.bus.waiting[topic].append(Received(payload, Attachment(1, WALL_NS, b""),
                                                self.clock.monotonic_ns() - waited_ns, topic))

    def joints(self, stamp_ns=0, names=LIMITS.names, waited_ns=0):
        position = [LIMITS.ready[LIMITS.names.index(name)] if name in LIMITS.names else 9.0 for name in names]
        self.arrives("joint_states", messages.new("sensor_msgs/JointState", header=wire.make_header(stamp_ns),
                                                  name=list(names), position=np.array(position)), waited_ns)

    def image(self, stamp_ns=0, camera="front", data=b"jpeg", **raw):
        """Compressed, or with fields of a raw one. The newest only, as the buses keep it."""
        header = wire.make_header(stamp_ns, "optical")
        self.bus.waiting[f"image {camera}"].clear()
        self.arrives(f"image {camera}", messages.new("sensor_msgs/msg/Image", header=header, data=data, **raw) if raw else
                     messages.new("sensor_msgs/CompressedImage", header=header, format="jpeg", data=data))

    def turn(self, step_ns=5 * MS):
        self.clock.advance_ns(step_ns)
        self.io.turn()

    def measured(self):
        found = self.memory.read("joints")
        return None if found is None else (int(found[1]["stamp_ns"]), found[1]["position"].tolist())

    def control(self):
        found = self.memory.read("control")
        return (0, 0) if found is None else (int(found[1]["rearm"]), int(found[1]["estop"]))
