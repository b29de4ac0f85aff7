"""Sessions over loopback TCP, in this process and with a killed router in another."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from free_port import free_endpoint

from vla_common import messages, tensors, topics, wire
from vla_common.bus_config import check_endpoint, session_config
from vla_common.clock import NS_PER_S, SystemClock, sleep_s
from vla_common.zenoh_session import BusError, open_bus

CLOCK = SystemClock()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def endpoint():
    return free_endpoint()


def until(condition, timeout_s=30.0, every_s=0.01):
    """The first truthy value of condition(), or the last value after the timeout."""
    deadline_ns = CLOCK.monotonic_ns() + round(timeout_s * NS_PER_S)
    while not (value := condition()) and CLOCK.monotonic_ns() < deadline_ns:
        sleep_s(CLOCK, every_s)
    return value


def open_router(endpoint):
    """Where the one before has just been closed, which may take longer than its close() waits."""

    def attempt():
        try:
            return open_bus(endpoint, "router", node="sim")
        except BusError as error:
            assert "in use" in str(error)
            return None

    return until(attempt)


def send_until_received(publisher, subscriber, payload=b"payload"):
    def attempt():
        publisher.put(payload)
        sleep_s(CLOCK, 0.01)
        return subscriber.try_recv()

    return until(attempt)


def test_context_from_cloud_to_edge(endpoint):
    with open_bus(endpoint, "router", node="vla_cloud") as cloud, open_bus(endpoint, node="vla_policy") as edge:
        publisher, subscriber = cloud.publisher("context", "panda"), edge.latest("context", "panda")
        edge.wait_connected(30.0)
        tokens = np.arange(2048, dtype=np.float32).reshape(16, 128)
        message = messages.new("ContextTokens", header=wire.make_header(42), **tensors.token_fields(tokens))
        received = send_until_received(publisher, subscriber, wire.encode(message))
        decoded = wire.decode("ContextTokens", received.payload)
        np.testing.assert_array_equal(tensors.tokens_of(decoded), tokens)
        assert wire.stamp_ns(decoded.header) == 42
        assert received.attachment.sequence == publisher.sequence or received.attachment.sequence > 0
        assert len(received.attachment.gid) == 16
        assert received.key == topics.data_key("/vla/panda/context", "ContextTokens")


def test_peer_opens_before_the_router_and_peers_hear_each_other(endpoint):
    with open_bus(endpoint, node="motor") as motor, open_bus(endpoint, node="recorder") as recorder:
        assert not motor.connected()
        publisher, subscriber = motor.publisher("joint_command", "panda"), recorder.latest("joint_command", "panda")
        publisher.put(b"to no one")
        assert subscriber.try_recv() is None
        with pytest.raises(BusError, match="start 'vla cloud'"):
            motor.wait_connected(0.1, "start 'vla cloud'")
        with open_bus(endpoint, "router", node="sim"):
            assert send_until_received(publisher, subscriber).payload == b"payload"
        assert until(lambda: not motor.connected())
        with open_router(endpoint):  # the router comes back
            assert send_until_received(publisher, subscriber).payload == b"payload"


def test_isolated_peers_hear_the_router_only(endpoint):
    with (
        open_bus(endpoint, "router", node="vla_cloud") as cloud,
        open_bus(endpoint, node="a", isolated=True) as first,
        open_bus(endpoint, node="b", isolated=True) as second,
    ):
        publisher = first.publisher("observation", "a")
        at_cloud = cloud.queue("observation", topics.ANY_ROBOT, capacity=8)
        at_second = second.latest("observation", topics.ANY_ROBOT)
        received = send_until_received(publisher, at_cloud)
        assert topics.robot_of(at_cloud.spec, received.key) == "a"
        assert at_second.try_recv() is None
        with pytest.raises(ValueError, match="one robot"):
            first.publisher("observation", topics.ANY_ROBOT)


def test_latest_keeps_the_newest_and_queue_keeps_order(endpoint):
    with open_bus(endpoint, "router", node="sim") as sim:  # one session: nothing is dropped on the way
        publisher = sim.publisher("motor_ticks", "panda")
        latest, queue = sim.latest("motor_ticks", "panda"), sim.queue("motor_ticks", "panda", capacity=4)
        assert send_until_received(publisher, latest)
        for number in range(20):
            publisher.put(b"%d" % number)
        assert latest.try_recv().payload == b"19"
        assert [queue.try_recv().payload for _ in range(4)] == [b"16", b"17", b"18", b"19"]
        assert queue.try_recv() is None


def test_listeners_survive_their_callback_and_stop_with_the_bus(endpoint, caplog):
    heard = []

    def callback(received):
        heard.append(received.payload)
        if len(heard) == 1:
            raise RuntimeError("a bad day")

    with open_bus(endpoint, "router", node="sim") as sim:
        sim.listen("instruction", "panda", callback)
        publisher = sim.publisher("instruction", "panda")
        assert until(lambda: publisher.put(b"x") or len(heard) >= 2)
    assert "the receiver of instruction failed" in caplog.text
    assert until(lambda: not any(thread.name.startswith("listen-") for thread in threading.enumerate()))


def test_a_subscriber_closes_alone(endpoint):
    with open_bus(endpoint, "router", node="sim") as sim:
        subscriber = sim.queue("instruction", "panda")
        thread = threading.Thread(target=subscriber.serve, args=(lambda received: None,))
        thread.start()
        subscriber.close()
        subscriber.close()
        thread.join(30)
        assert not thread.is_alive() and subscriber.try_recv() is None


def test_close_is_quick_final_and_repeatable(endpoint):
    before = set(threading.enumerate())
    bus = open_bus(endpoint, node="io")
    publisher, subscriber = bus.publisher("joint_command", "panda"), bus.latest("joint_states", "panda")
    start_ns = CLOCK.monotonic_ns()
    bus.close()
    bus.close()
    assert CLOCK.monotonic_ns() - start_ns < 60 * NS_PER_S  # 1 s on an idle machine; without a router it may try for ever
    assert subscriber.try_recv() is None
    with pytest.raises(BusError):
        publisher.put(b"late")
    with pytest.raises(BusError, match="closed"):
        bus.publisher("joint_command", "panda")
    with open_bus(endpoint, "router", node="end"):  # what still tries to connect gets there and ends
        assert until(lambda: not set(threading.enumerate()) - before)


def test_presence_tokens_are_seen_and_go_away(endpoint):
    zenoh = pytest.importorskip("zenoh")
    with open_bus(endpoint, "router", node="vla_cloud") as cloud:
        watch = cloud._session.liveliness().declare_subscriber("@ros2_lv/**", zenoh.handlers.FifoChannel(100))
        edge = open_bus(endpoint, node="vla_io")
        edge.publisher("observation", "panda")
        seen = {}

        def drain(kind):
            while (sample := watch.try_recv()) is not None:
                seen[str(sample.key_expr)] = sample.kind
            return [key for key, value in seen.items() if value == kind and f"/{edge.node.zid}/" in key]

        assert until(lambda: len(drain(zenoh.SampleKind.PUT)) == 2)
        keys = sorted(drain(zenoh.SampleKind.PUT))
        assert keys[0].endswith("/0/0/NN/%/%/vla_io")
        assert "/0/1/MP/%/%/vla_io/%vla%panda%observation/vla_runtime::msg::dds_::Observation_/" in keys[1]
        edge.close()
        assert until(lambda: len(drain(zenoh.SampleKind.DELETE)) == 2)
        watch.undeclare()


def test_killed_router_is_noticed_and_its_return_too(endpoint):
    """kill -9, as a crash would: the peer carries on and reconnects by itself."""
    code = (
        "import sys; from vla_common.zenoh_session import open_bus; b = open_bus(sys.argv[1], 'router', node='r');"
        "print('up', flush=True); sys.stdin.read()"
    )

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", code, endpoint],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout.readline() == b"up\n"
        return process

    router = start()
    try:
        with open_bus(endpoint, node="a") as first, open_bus(endpoint, node="b") as second:
            publisher, subscriber = first.publisher("context", "panda"), second.latest("context", "panda")
            assert send_until_received(publisher, subscriber)
            # What it has mapped there would stay behind; the folder itself is everybody's.
            assert ".zenoh" not in Path(f"/proc/{router.pid}/maps").read_text()
            router.send_signal(signal.SIGKILL)
            router.communicate()
            assert until(lambda: not first.connected())
            publisher.put(b"into the void")
            router = start()
            assert send_until_received(publisher, subscriber)
    finally:
        router.kill()
        router.communicate()


def test_errors_name_the_cause(endpoint):
    with open_bus(endpoint, "router", node="sim"):
        with pytest.raises(BusError, match="in use: another router"):
            open_bus(endpoint, "router", node="sim")
    for bad, match in (
        ("127.0.0.1:7447", "link/address"),
        ("tcp/0.0.0.0:7447", "reachable from other machines"),
        ("tcp/192.168.0.1:7447", "allow_remote"),
        ("tcp/localhost.evil:7447", "allow_remote"),
    ):
        with pytest.raises(BusError, match=match):
            check_endpoint(bad, allow_remote=False)
    for good in ("tcp/127.0.0.1:7447", "udp/localhost:1", "tcp/[::1]:7447", "unixsock-stream//tmp/socket"):
        check_endpoint(good, allow_remote=False)
    check_endpoint("tcp/192.168.0.1:7447", allow_remote=True)
    with pytest.raises(BusError, match="cannot open"):
        open_bus("nonsense/127.0.0.1:1", "router", node="sim")


def test_configuration_keeps_to_itself():
    for role in ("router", "peer"):
        config = session_config("tcp/127.0.0.1:1", role)
        assert config["scouting/multicast/enabled"] is False and config["scouting/gossip/enabled"] is False
        assert config["transport/shared_memory/enabled"] is False
        assert config["transport/link/tx/lease"] == 400
        assert bool(config["listen/endpoints"]) == (role == "router")
