"""Our topics on Zenoh against two independent imitations of rmw_zenoh, in both directions.

pyzeros brings its own CDR codec, type hashes, keys, attachments and tokens; zenoh-ros2-sdk its own reading of tokens, as
``ros2 topic info --verbose`` shows them. Neither is rmw_zenoh_cpp, which pip does not have.
"""

import asyncio
import json
import os
import shutil
import sys
import sysconfig
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from free_port import free_endpoint

from vla_common import messages, topics, wire
from vla_common.clock import NS_PER_S, SystemClock, sleep_s
from vla_common.topics import TOPICS
from vla_common.zenoh_session import open_bus

if sys.version_info < (3, 11):
    pytest.skip("pyzeros needs Python 3.11", allow_module_level=True)
zenoh = pytest.importorskip("zenoh")
if not shutil.which("cc") or not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
    pytest.skip("pyzeros compiles its attachments: a C compiler and Python's headers are needed", allow_module_level=True)
os.environ.setdefault("CYDR_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "cydr"))  # else the working directory
pyzeros = pytest.importorskip("pyzeros", reason="pip install -e .[dev]")
from pyzeros import builtin_msgs, pub, qos, utils  # noqa: E402
from ros2_pyterfaces.cyclone import all_msgs  # noqa: E402
from ros2_pyterfaces.cyclone.idl import IdlStruct, types  # noqa: E402

CLOCK = SystemClock()
NAMES = ["panda_joint1", "panda_joint2", "gripper"]
THEIRS = {f"{package}/msg/{name}": getattr(all_msgs, name) for package, name in (
    ("sensor_msgs", "JointState"), ("sensor_msgs", "CompressedImage"), ("std_msgs", "String"), ("std_msgs", "Bool"))}


@dataclass
class ShieldCommand(IdlStruct, typename="vla_runtime/msg/ShieldCommand"):
    """As someone would write it who has the .msg file and pyzeros, but not vla_common."""

    header: all_msgs.Header = field(default_factory=all_msgs.Header)
    wire_version: types.uint16 = messages.WIRE_VERSION
    command: types.uint8 = 0
    sequence: types.uint64 = 0
    crc32: types.uint32 = 0


@pytest.fixture
def endpoint():
    return free_endpoint()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The first use of an attachment compiles it, which takes longer than a test may wait."""
    builtin_msgs.Attachment.deserialize(builtin_msgs.Attachment().serialize())


def as_peer(endpoint, act):
    """Run ``act(node)`` with a node of pyzeros that joined at the endpoint, as its users would."""
    config = zenoh.Config()
    for key, value in {"mode": "client", "connect/endpoints": [endpoint], "scouting/multicast/enabled": False}.items():
        config.insert_json5(key, json.dumps(value))

    async def run():
        with zenoh.open(config) as session:
            node = pyzeros.Session("lab_peer", session, namespace="/lab", domain_id=0)
            try:
                return await asyncio.wait_for(act(node), 60.0)
            finally:
                node.close()

    return asyncio.run(run())


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_type_hashes_and_keys_agree(name):
    theirs = THEIRS[name]
    assert theirs.hash_rihs01() == messages.type_hash(name)
    for spec in TOPICS.values():
        if spec.type_name == name:
            topic = spec.topic("arm1", "wrist")
            key = pub.publisher_keyexpr(topic, utils.ros_type_to_dds_type(name), theirs.hash_rihs01(), domain_id=7)
            assert topics.data_key(topic, name, domain=7) == key


def test_the_type_hash_of_a_message_of_ours_agrees():
    assert ShieldCommand.hash_rihs01() == messages.type_hash("ShieldCommand")


@pytest.mark.parametrize("name", sorted(TOPICS))
def test_presence_tokens_and_gids_agree(name):
    spec = TOPICS[name]
    node = topics.NodeId("a1b2c3", "vla_io_arm1", "/lab", 5)
    assert topics.node_token(node) == pyzeros.node.token_keyexpr(
        "vla_io_arm1", session=object(), domain_id=5, namespace="/lab", _node_id=0, _zenoh_id="a1b2c3", _entity_id=0)
    profile = qos.QosProfile(depth=spec.depth, reliability=spec.reliability)
    arguments = dict(name=spec.topic("arm1", "wrist"), dds_type=messages.dds_type(spec.type_name),
                     hash=messages.type_hash(spec.type_name), qos_profile=profile, node_name="vla_io_arm1",
                     session=object(), domain_id=5, namespace="/lab", _node_id=0, _zenoh_id="a1b2c3", _entity_id=3)
    for kind, token_keyexpr in (("MP", pub.token_keyexpr), ("MS", pyzeros.sub.token_keyexpr)):
        ours = topics.endpoint_token(node, 3, kind, spec.topic("arm1", "wrist"), spec.type_name, spec.reliability,
                                     spec.depth)
        assert ours == token_keyexpr(**arguments)
        assert topics.token_gid(ours) == utils.rmw_zenoh_gid(ours)


def test_the_peer_hears_our_joint_states(endpoint):
    message = messages.new("JointState", header=wire.make_header(12_345_678_901, "base"), name=NAMES,
                           position=np.array([0.25, -0.5, 1.0]), velocity=np.array([1.0, 2.0, 3.0]))
    heard = []

    async def act(node):
        node.create_subscriber(THEIRS["sensor_msgs/msg/JointState"], "/arm1/joint_states",
                               qos.QosProfile.sensor_data()).asap_callback.append(heard.append)
        raw = []
        pyzeros.sub.RawSub(THEIRS["sensor_msgs/msg/JointState"], "/arm1/joint_states", raw.append, session=node)
        while not (heard and raw):
            publisher.put(wire.encode(message))
            await asyncio.sleep(0.02)
        return raw[-1].attachment.to_bytes()

    with open_bus(endpoint, "router", node="vla_sim") as bus:
        publisher = bus.publisher("joint_states", "arm1")
        packed = as_peer(endpoint, act)
        gid = publisher._gid
    received = heard[0]
    assert (received.header.stamp.sec, received.header.stamp.nanosec) == (12, 345_678_901)
    assert received.header.frame_id == "base" and list(received.name) == NAMES
    assert list(received.position) == [0.25, -0.5, 1.0] and list(received.velocity) == [1.0, 2.0, 3.0]
    assert len(received.effort) == 0
    attachment = builtin_msgs.Attachment.deserialize(b"\x00\x01\x00\x00" + packed)
    assert bytes(attachment.source_gid) == gid and 1 <= attachment.sequence_number <= publisher.sequence
    assert abs(attachment.source_timestamp - CLOCK.wall_ns()) < 600 * NS_PER_S


def test_we_hear_the_peers_joint_states_and_commands(endpoint):
    joint_state = THEIRS["sensor_msgs/msg/JointState"]
    sent = joint_state(header=all_msgs.Header(stamp=all_msgs.Time(sec=3, nanosec=4), frame_id="base"), name=NAMES,
                       position=[0.25, -0.5, 1.0])

    async def act(node):
        states = node.create_publisher(joint_state, "/arm1/joint_states", qos.QosProfile.sensor_data())
        commands = node.create_publisher(ShieldCommand, "/arm1/shield_command")
        found = {}
        while len(found) < 2:
            states.publish(sent)
            commands.publish(ShieldCommand(command=2, sequence=9))
            await asyncio.sleep(0.02)
            for name, reader in readers.items():
                found[name] = reader.try_recv() or found.get(name)
            found = {name: received for name, received in found.items() if received is not None}
        return found, bytes(states.gid)

    with open_bus(endpoint, "router", node="vla_io") as bus:
        readers = {name: bus.latest(name, "arm1") for name in ("joint_states", "shield_command")}
        found, gid = as_peer(endpoint, act)
    message = wire.decode("JointState", found["joint_states"].payload)
    assert message.name == NAMES and list(message.position) == [0.25, -0.5, 1.0]
    assert wire.stamp_ns(message.header) == 3 * NS_PER_S + 4 and message.header.frame_id == "base"
    assert found["joint_states"].attachment.gid == gid
    command = wire.decode("ShieldCommand", found["shield_command"].payload)
    assert command.crc32 == 0 and command.command == command.ESTOP and command.sequence == 9


def test_our_nodes_and_topics_are_discovered_by_their_tokens(endpoint, monkeypatch):
    """By the tool that an engineer without ROS would list topics with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        discovery = pytest.importorskip("zenoh_ros2_sdk.discovery", reason="pip install -e .[dev]")
        from zenoh_ros2_sdk.session import ZenohSession
    host, _, port = endpoint.removeprefix("tcp/").partition(":")
    config = zenoh.Config()
    for key, value in {"mode": "client", "connect/endpoints": [endpoint], "scouting/multicast/enabled": False}.items():
        config.insert_json5(key, json.dumps(value))
    with open_bus(endpoint, "router", node="vla_sim_arm1") as bus, zenoh.open(config) as session:
        bus.publisher("joint_states", "arm1")
        bus.queue("shield_command", "arm1")

        class Joined:
            liveliness = session.liveliness()

        monkeypatch.setattr(ZenohSession, "get_instance", lambda *_, **__: Joined)
        for _ in range(200):
            found = dict(discovery.get_topic_names_and_types(domain_id=0))
            if len(found) == 2:
                break
            sleep_s(CLOCK, 0.05)
        assert found == {"/arm1/joint_states": ["sensor_msgs/msg/JointState"],
                         "/arm1/shield_command": ["vla_runtime/msg/ShieldCommand"]}
        info = discovery.get_topic_info("/arm1/joint_states", domain_id=0, verbose=True)
        assert (info.publisher_count, info.subscriber_count) == (1, 0)
        (publisher,) = info.publishers
        assert (publisher.node_name, publisher.node_namespace) == ("vla_sim_arm1", "/")
        assert publisher.type_hash == messages.type_hash("JointState") and publisher.qos.startswith("2:")
