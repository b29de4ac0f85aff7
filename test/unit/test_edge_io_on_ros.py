"""io on the rules of ROS, without ROS: a bus of queues, a clock that the test moves, drivers that stamp as they like."""

from collections import defaultdict, deque

import numpy as np
import pytest

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
    """Arrived samples by topic name; what was sent."""

    def __init__(self):
        self.waiting, self.sent = defaultdict(deque), defaultdict(list)

    def queue(self, topic, robot, camera="", capacity=256):
        waiting = self.waiting[getattr(topic, "name", topic)]
        return type("Line", (), {"try_recv": lambda _: waiting.popleft() if waiting else None})()

    latest = queue

    def publisher(self, topic, robot, camera=""):
        return type("Line", (), {"put": lambda _, payload: self.sent[topic].append(payload)})()


class Edge:
    def __init__(self, *overrides):
        self.clock, self.bus, self.cloud = ManualClock(100 * NS), Bus(), Bus()
        self.config = load_edge_config(None, ["bus=ros", *overrides])
        self.memory = EdgeMemory.private(len(LIMITS))
        self.io = IoLoop(Child(self.config, self.memory, LIMITS, self.clock, None), ["front"], self.bus, self.cloud)

    def arrives(self, topic, message, waited_ns=0):
        self.bus.waiting[topic].append(Received(wire.encode(message), Attachment(1, WALL_NS, b""),
                                                self.clock.monotonic_ns() - waited_ns, topic))

    def joints(self, stamp_ns=0, names=LIMITS.names, waited_ns=0):
        position = [LIMITS.ready[LIMITS.names.index(name)] if name in LIMITS.names else 9.0 for name in names]
        self.arrives("joint_states", messages.new("sensor_msgs/JointState", header=wire.make_header(stamp_ns),
                                                  name=list(names), position=np.array(position)), waited_ns)

    def image(self, stamp_ns=0):
        self.arrives("image", messages.new("sensor_msgs/CompressedImage", header=wire.make_header(stamp_ns, "optical"),
                                           format="jpeg", data=b"jpeg"))

    def turn(self, step_ns=5 * MS):
        self.clock.advance_ns(step_ns)
        self.io.turn()

    def measured(self):
        found = self.memory.read("joints")
        return None if found is None else (int(found[1]["stamp_ns"]), found[1]["position"].tolist())

    def control(self):
        found = self.memory.read("control")
        return (0, 0) if found is None else (int(found[1]["rearm"]), int(found[1]["estop"]))


@pytest.fixture
def edge():
    return Edge()


def test_joints_count_from_their_arrival_and_by_name(edge):
    edge.turn()
    edge.joints(WALL_NS, ("extra", *LIMITS.names[::-1]))
    arrived_ns = edge.clock.monotonic_ns()
    edge.turn()
    assert edge.measured() == (arrived_ns, LIMITS.ready.tolist())


@pytest.mark.parametrize("change, name", [
    ({"names": LIMITS.names[:-1]}, "joint_states_missing_gripper"), ({"waited_ns": 200 * MS}, "joint_states_stale"),
    ({"stamp_ns": WALL_NS - 1}, "joint_states_out_of_order"), ({"stamp_ns": WALL_NS}, "joint_states_out_of_order")])
def test_joints_are_refused_by_name(edge, change, name):
    edge.turn()
    edge.joints(WALL_NS)
    edge.turn()
    before = edge.measured()
    edge.joints(**change)
    edge.turn()
    assert edge.io.rejects() == {name: 1} and edge.measured() == before


def test_joints_that_waited_while_this_process_was_stopped_are_not_taken(edge):
    edge.turn()
    edge.clock.advance_ns(2 * NS)
    edge.joints()
    edge.turn()
    assert edge.measured() is None and edge.io.rejects() == {"joint_states_stale": 1}


def test_an_observation_carries_instants_of_this_host(edge):
    edge.arrives("instruction", messages.new("std_msgs/String", data="touch the red cube"))
    for _ in range(3):
        edge.joints(0)
        edge.turn()
    edge.image(WALL_NS)
    arrived_ns = edge.clock.monotonic_ns()
    edge.turn()
    observation, = [wire.decode("Observation", payload) for payload in edge.cloud.sent["observation"]]
    image, = observation.images
    assert wire.stamp_ns(observation.header) == wire.stamp_ns(image.header) == arrived_ns
    assert image.header.frame_id == "front" and list(observation.joint_names) == list(LIMITS.names)


@pytest.mark.parametrize("camera_hz, low, high", [(10, 95, 101), (30, 95, 101), (100, 95, 101), (5, 48, 51)])
def test_observations_go_up_ten_times_a_second_at_most(edge, camera_hz, low, high):
    edge.arrives("instruction", messages.new("std_msgs/String", data="touch the red cube"))
    for k in range(2000):
        if k % 2 == 0:
            edge.joints(0)
        if (k * 5 * camera_hz) % 1000 < 5 * camera_hz:
            edge.image(WALL_NS + k * MS)
        edge.turn()
        while len(edge.bus.waiting["image"]) > 1:  # newest only
            edge.bus.waiting["image"].popleft()
    assert low <= len(edge.cloud.sent["observation"]) <= high


def command(edge, name, sequence=0):
    message = messages.new("ShieldCommand", sequence=sequence)
    message.command = getattr(message, name)
    return message


def test_operators_need_no_sequence_numbers_and_no_stamp(edge):
    edge.turn()
    for name, expected in (("REARM", (1, 0)), ("REARM", (2, 0)), ("ESTOP", (2, 1)), ("REARM", (3, 1))):
        edge.arrives("shield_command", command(edge, name))
        edge.turn()
        assert edge.control() == expected


def test_a_rearm_that_waited_is_refused_and_a_stop_never(edge):
    edge.turn()
    for name in ("REARM", "ESTOP"):
        edge.arrives("shield_command", command(edge, name), waited_ns=2 * NS)
    edge.turn()
    assert edge.control() == (0, 1) and edge.io.rejects() == {"shield_command_stale": 1}
    edge.clock.advance_ns(NS)  # this process was stopped: what it finds may be older than it looks
    for name in ("REARM", "ESTOP"):
        edge.arrives("shield_command", command(edge, name))
    edge.turn()
    assert edge.control() == (0, 2)


def test_rearms_can_be_switched_off_and_stops_cannot(edge):
    edge.io.accepts_rearm = False
    edge.turn()
    edge.arrives("shield_command", command(edge, "REARM"))
    edge.arrives("shield_command", command(edge, "ESTOP"))
    edge.io.request("rearm")
    edge.io.request("estop")
    edge.turn()
    assert edge.control() == (0, 2) and edge.io.rejects() == {"rearm_not_active": 2}
    edge.io.accepts_rearm = True
    edge.io.request("rearm")
    edge.turn()
    assert edge.control() == (1, 2)


def test_raw_images_become_jpeg_and_depth_is_refused_by_name():
    edge = Edge("ros.image_transport=raw")
    edge.arrives("instruction", messages.new("std_msgs/String", data="touch the red cube"))
    edge.joints(0)
    edge.turn()
    for encoding, width in (("16UC1", 2), ("rgb8", 3)):
        edge.arrives("image", messages.new("sensor_msgs/msg/Image", height=8, width=8, encoding=encoding, step=8 * width,
                                           data=np.zeros(64 * width, np.uint8)))
        edge.turn(100 * MS)
    observation, = [wire.decode("Observation", payload) for payload in edge.cloud.sent["observation"]]
    assert observation.images[0].format == "jpeg" and bytes(observation.images[0].data[:2]) == b"\xff\xd8"
    assert edge.io.rejects() == {"image_encoding_16UC1": 1}
