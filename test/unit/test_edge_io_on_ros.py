"""io on the rules of ROS, without ROS: drivers that stamp as they like."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from io_rig import LIMITS, MS, NS, WALL_NS, Edge

from vla_common import messages, wire


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


def test_joint_states_that_were_used_are_told_as_they_were_taken():
    """For recordings: a driver's stamps, order and other joints cannot be replayed."""
    edge, taken = Edge(), []
    record = edge.memory.blank("ticks")
    for k in range(30):
        edge.joints(WALL_NS + k, ("extra", *LIMITS.names[::-1]))
        taken.append(edge.clock.monotonic_ns())
        record["tick"], record["measured_stamp_ns"] = k, taken[-1]
        record["rearms"], record["segment"] = k >= 10, k >= 20
        edge.turn()
        edge.memory.ticks.append(record.tobytes())
    edge.turn(100 * MS)
    told = [wire.decode("sensor_msgs/JointState", payload) for payload in edge.bus.sent["measured_joints"]]
    assert [wire.stamp_ns(message.header) for message in told] == [taken[0], taken[10], taken[20]]
    assert all(list(message.name) == list(LIMITS.names) and message.position.tolist() == LIMITS.ready.tolist()
               for message in told)
    edge = Edge("bus=tcp/127.0.0.1:7447")  # there joint_states can
    edge.joints(edge.clock.monotonic_ns())
    edge.turn()
    edge.memory.ticks.append(record.tobytes())
    edge.turn(100 * MS)
    assert edge.measured() is not None and edge.bus.sent["motor_ticks"] and not edge.bus.sent["measured_joints"]


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
        edge.image(height=8, width=8, encoding=encoding, step=8 * width, data=np.zeros(64 * width, np.uint8))
        edge.turn(100 * MS)
    observation, = [wire.decode("Observation", payload) for payload in edge.cloud.sent["observation"]]
    assert observation.images[0].format == "jpeg" and bytes(observation.images[0].data[:2]) == b"\xff\xd8"
    assert edge.io.rejects() == {"image_encoding_16UC1": 1}
