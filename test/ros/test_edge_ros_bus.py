"""The robot bus on ROS topics keeps the promises of the one on Zenoh; bytes are the same on both."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed")
pytest.importorskip("vla_runtime.msg", reason="the messages are not built: cmake --install build/ros")

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from free_port import free_endpoint

from vla_common import messages, topics, wire
from vla_common.clock import NS_PER_S, SystemClock, sleep_s
from vla_common.joint_command import command_template
from vla_common.zenoh_session import open_bus
from vla_edge.adapters.ros_bus import message_class, open_ros_bus
from vla_edge.robot_bus import BusError

CLOCK = SystemClock()
ROOT = Path(__file__).parents[2]
ROBOT = f"r{os.getpid()}"
NAMES = ["a", "bc", "gripper"]


@pytest.fixture(params=["ros", "zenoh"])
def make_bus(request):
    """Buses of one network; what is asserted of one is asserted of the other."""
    opened, endpoint = [], free_endpoint()

    def make(node):
        if request.param == "ros":
            opened.append(open_ros_bus(node))
        else:
            opened.append(open_bus(endpoint, "peer" if opened else "router", node=node))
        return opened[-1]

    make.kind = request.param
    yield make
    for bus in reversed(opened):
        bus.close()


def until(condition, timeout_s=20.0):
    deadline_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
    while not (value := condition()) and CLOCK.monotonic_ns() < deadline_ns:
        sleep_s(CLOCK, 0.01)
    return value


def send_until_received(publisher, subscriber, payload):
    def attempt():
        publisher.put(payload)
        sleep_s(CLOCK, 0.01)
        return subscriber.try_recv()

    return until(attempt)


def text(data):
    return wire.encode(messages.new("std_msgs/String", data=data))


def settled(subscriber):
    """Nothing is on its way any more."""
    sleep_s(CLOCK, 0.2)
    while subscriber.try_recv() is not None:
        pass


def payloads():
    rng = np.random.default_rng(3)
    joints = dict(name=NAMES, position=rng.normal(size=3), velocity=rng.normal(size=3))
    yield "joint_states", wire.encode(messages.new("sensor_msgs/JointState", header=wire.make_header(7), **joints))
    yield "joint_command", command_template("joint_state", NAMES, 0.01).pack(9, rng.normal(size=3), rng.normal(size=3))
    yield "instruction", text("touch the red cube")
    yield "estop", wire.encode(messages.new("std_msgs/Bool", data=True))
    yield "image", wire.encode(messages.new("sensor_msgs/CompressedImage", format="jpeg",
                                            data=rng.integers(0, 256, 40_000, dtype=np.uint8)))
    yield "shield_status", wire.encode(messages.new("ShieldStatus", reason="why", joint_names=NAMES,
                                                    position=np.ones(3), velocity=np.ones(3)))
    yield "shield_command", wire.encode(messages.new("ShieldCommand", command=2, sequence=5))


def test_bytes_come_as_they_were_sent(make_bus):
    sender, receiver = make_bus("sender"), make_bus("receiver")
    for name, payload in payloads():
        publisher, subscriber = sender.publisher(name, ROBOT, "front"), receiver.latest(name, ROBOT, "front")
        received = send_until_received(publisher, subscriber, payload)
        assert received is not None and received.payload == payload and type(received.payload) is bytes, name
        assert received.attachment.sequence > 0 and abs(received.attachment.source_time_ns - CLOCK.wall_ns()) < 60e9
        assert subscriber.spec is topics.topic_spec(name)


def test_latest_keeps_the_newest_and_queue_keeps_order(make_bus):
    bus = make_bus("one")
    publisher = bus.publisher("motor_ticks", ROBOT)
    latest, queue = bus.latest("motor_ticks", ROBOT), bus.queue("motor_ticks", ROBOT, capacity=4)
    tick = [wire.encode(messages.new("MotorTicks", tick=np.array([number]))) for number in range(20)]
    assert send_until_received(publisher, latest, tick[0]) and until(queue.try_recv)
    settled(latest)
    settled(queue)
    for payload in tick:
        publisher.put(payload)
        sleep_s(CLOCK, 0.005)
    sleep_s(CLOCK, 0.2)
    assert latest.try_recv().payload == tick[19] and latest.try_recv() is None
    assert [queue.try_recv().payload for _ in range(4)] == tick[16:] and queue.try_recv() is None


def test_instants_are_of_the_local_monotonic_clock(make_bus):
    bus = make_bus("one")
    publisher, subscriber = bus.publisher("instruction", ROBOT), bus.latest("instruction", ROBOT)
    assert send_until_received(publisher, subscriber, text("x"))
    settled(subscriber)
    before_ns = CLOCK.monotonic_ns()
    publisher.put(text("y"))
    received = until(subscriber.try_recv)
    assert before_ns - 1_000_000 <= received.received_ns <= CLOCK.monotonic_ns()


def test_closing_is_final_and_repeatable(make_bus):
    bus = make_bus("one")
    publisher, subscriber = bus.publisher("instruction", ROBOT), bus.latest("instruction", ROBOT)
    subscriber.close()
    subscriber.close()
    bus.close()
    bus.close()
    assert subscriber.try_recv() is None
    with pytest.raises(BusError):
        publisher.put(text("late"))
    with pytest.raises(BusError, match="closed"):
        bus.publisher("instruction", ROBOT)


def test_a_publisher_needs_one_robot(make_bus):
    with pytest.raises(ValueError, match="one robot"):
        make_bus("one").publisher("instruction", topics.ANY_ROBOT)


# ------------------------------------------------------------------ ROS only


def test_a_sample_that_waited_keeps_its_arrival():
    with open_ros_bus("one") as bus:
        publisher, subscriber = bus.publisher("instruction", ROBOT), bus.latest("instruction", ROBOT)
        assert send_until_received(publisher, subscriber, text("x"))
        settled(subscriber)
        publisher.put(text("y"))
        sent_ns = CLOCK.monotonic_ns()
        sleep_s(CLOCK, 0.5)
        received = subscriber.try_recv()
        assert received.payload == text("y") and received.received_ns - sent_ns < 250_000_000


def test_ros_itself_reads_and_writes_the_same_topics():
    from rclpy.context import Context
    from rclpy.node import Node

    context = Context()
    context.init([])
    node = Node("other", context=context)
    heard = node.create_subscription(message_class("std_msgs/msg/String"), f"/lab/{ROBOT}/instruction", print, 1)
    from rclpy.qos import qos_profile_sensor_data
    driver = node.create_publisher(message_class("sensor_msgs/msg/JointState"), "/driver/joints", qos_profile_sensor_data)
    with open_ros_bus("one", prefix="/lab", remap=[f"/lab/{ROBOT}/joint_states:=/driver/joints"]) as bus:
        publisher, joints = bus.publisher("instruction", ROBOT), bus.latest("joint_states", ROBOT)
        state = driver.msg_type(name=["x"], position=[1.5])

        def exchange():
            publisher.put(text("hello"))
            driver.publish(state)
            sleep_s(CLOCK, 0.02)
            with heard.handle:
                return heard.handle.take_message(heard.msg_type, False), joints.try_recv()

        found = []
        assert until(lambda: found.append(exchange()) or any(a for a, _ in found) and any(b for _, b in found))
        assert next(a for a, _ in found if a)[0].data == "hello"
        payload = next(b for _, b in found if b).payload
        assert wire.decode("sensor_msgs/JointState", payload).position.tolist() == [1.5]
        # What tools show: the table's reliability and depth.
        def shown():
            return node.get_publishers_info_by_topic(f"/lab/{ROBOT}/instruction")

        # A publisher is known by its data before the graph's own topic has brought the name of its node.
        assert until(lambda: [one.node_name for one in shown()] == ["one"])
        info, = shown()
        assert info.qos_profile.reliability.name == "RELIABLE" and info.node_name == "one"
    node.destroy_node()
    context.try_shutdown()


@pytest.mark.parametrize("output", ["joint_state", "forward_command", "joint_trajectory"])
def test_commands_are_what_ros_would_write(output):
    """Field by field: Fast-CDR leaves padding bytes as it finds them."""
    from rclpy.serialization import deserialize_message, serialize_message

    template = command_template(output, NAMES, 0.01)
    position, velocity = np.array([1.5, -2.0, 0.25]), np.array([0.1, 0.2, -0.3])
    payload = template.pack(12_000_000_034, position, velocity)
    message = deserialize_message(payload, message_class(template.type_name))
    if output == "forward_command":
        assert list(message.data) == position.tolist() and message.layout.data_offset == 0 and not message.layout.dim
    elif output == "joint_trajectory":
        point, = message.points
        assert message.joint_names == NAMES and (message.header.stamp.sec, message.header.stamp.nanosec) == (0, 0)
        assert (list(point.positions), list(point.velocities)) == (position.tolist(), velocity.tolist())
        assert (point.time_from_start.sec, point.time_from_start.nanosec) == (0, 10_000_000)
        assert not point.accelerations and not point.effort
    else:
        assert message.name == NAMES and list(message.position) == position.tolist()
        assert list(message.velocity) == velocity.tolist() and not message.effort
    again = bytes(serialize_message(message))  # the same length but for what Fast-CDR leaves after the last field
    assert 0 <= len(again) - len(payload) <= 8
    assert wire.encode(wire.decode(template.type_name, again[:len(payload)])) == payload


def test_a_frozen_or_killed_reader_does_not_delay_the_sender():
    """The motor's outlet is reliable; a reader that stopped must not block it."""
    code = ("import sys, time; from vla_edge.adapters.ros_bus import open_ros_bus\n"
            "bus = open_ros_bus('reader'); s = bus.queue('joint_command', sys.argv[1], capacity=10)\n"
            "p = bus.publisher('instruction', sys.argv[1])\n"
            "from vla_common import wire, messages; x = wire.encode(messages.new('std_msgs/String', data='up'))\n"
            "while True:\n    p.put(x) if s.try_recv() else None; time.sleep(0.005)\n")
    reader = subprocess.Popen([sys.executable, "-c", code, ROBOT], cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        with open_ros_bus("motor") as bus:
            publisher, up = bus.publisher("joint_command", ROBOT), bus.latest("instruction", ROBOT)
            payload = command_template("joint_state", NAMES, 0.01).pack(0, np.zeros(3), np.zeros(3))
            assert send_until_received(publisher, up, payload)
            for kind in (signal.SIGSTOP, signal.SIGKILL):
                reader.send_signal(kind)
                longest_ns = 0
                for _ in range(300):
                    start_ns = CLOCK.monotonic_ns()
                    publisher.put(payload)
                    longest_ns = max(longest_ns, CLOCK.monotonic_ns() - start_ns)
                    sleep_s(CLOCK, 0.002)
                print(f"longest publish after {kind.name}: {longest_ns * 1e-6:.2f} ms")
    finally:
        reader.kill()
        reader.wait()


def test_errors_name_the_remedy():
    with pytest.raises(BusError, match="no ROS message no_such/msg/Thing .*: build this package"):
        message_class("no_such/msg/Thing")
    with pytest.raises(BusError, match="does not start"):
        open_ros_bus("not a name")
