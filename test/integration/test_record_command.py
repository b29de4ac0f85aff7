"""``vla record`` beside a robot and a cloud that this test plays, and what other readers make of its file."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from free_port import free_endpoint

from vla_common import messages, wire
from vla_common.clock import SystemClock, sleep_s
from vla_common.zenoh_session import open_bus
from vla_edge.adapters.mcap_reader import McapMetadata, read_mcap
from vla_edge.config import EdgeConfig
from vla_edge.core.trace import METADATA

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
NAMES = ["panda_joint1", "panda_joint2"]


def payloads(stamp_ns):
    header = wire.make_header(stamp_ns, "base")
    return {
        "joint_states": messages.new("JointState", header=header, name=NAMES, position=np.array([0.5, -0.5])),
        "image": messages.new("CompressedImage", header=header, format="jpeg", data=b"\xff\xd8 no picture"),
        "instruction": messages.new("String", data="touch the red cube"),
        "shield_status": messages.new("ShieldStatus", header=header, state=3, reason="not armed", joint_names=NAMES,
                                      position=np.zeros(2), velocity=np.zeros(2)),
        "context": messages.new("ContextTokens", header=header, session="s", num_tokens=1, dim=2, dtype="float32",
                                data=np.zeros(2, np.float32).tobytes()),
    }


class Play:
    """A robot's bus and a cloud link with publishers of some topics, and 'vla record' as a process."""

    def __init__(self, path, *arguments):
        self.ends = {"bus": free_endpoint(), "cloud": free_endpoint()}
        self.buses = {name: open_bus(end, "router", node=f"play_{name}") for name, end in self.ends.items()}
        self.out = {name: self.buses["cloud" if name == "context" else "bus"].publisher(
            name, "lab1", "wrist" if name == "image" else "") for name in payloads(0)}
        self.links = set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vla_cli", "record", str(path), "--robot-id", "lab1", "--bus", self.ends["bus"],
             "--cloud", self.ends["cloud"], *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def send(self, times):
        for _ in range(times):
            if self.process.poll() is not None:
                return
            for name, message in payloads(CLOCK.monotonic_ns()).items():
                self.out[name].put(wire.encode(message))
            # The other end of a link that was lost has another port when it is back.
            self.links |= {str(link.dst) for bus in self.buses.values() for link in bus._session.info.links()}
            sleep_s(CLOCK, 0.05)

    def end(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60.0), self.process.communicate()[1]

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self.process.stderr.close()
        for bus in self.buses.values():
            bus.close()


@pytest.fixture
def play():
    made = []
    yield lambda *arguments: made.append(Play(*arguments)) or made[-1]
    for one in made:
        one.close()


TOPICS = {"/lab1/joint_states", "/lab1/wrist/image_raw/compressed", "/lab1/instruction", "/lab1/shield_status",
          "/vla/lab1/context"}


def record(run):
    """A recording's log, and whether its links held, else samples are missing that nobody could have recorded.

    The log is None if the machine stood still when it was to end, and it ended itself.
    """
    for _ in range(120):
        run.send(10)
        if all(bus.connected() for bus in run.buses.values()):
            break
    run.send(50)
    code, log = run.end()
    if "did not stop within" in log:
        return None, False
    assert code == 0, log
    return log, len(run.links) == 2


def test_both_networks_are_recorded_and_any_ros_reader_reads_them(play, tmp_path):
    mcap_ros2 = pytest.importorskip("mcap_ros2.reader", reason="pip install mcap-ros2-support")
    for number in range(5):
        path = tmp_path / "runs" / f"lab{number}.mcap"
        log, links_held = record(play(path, "--camera", "wrist", "--set", "shield.fresh_ticks=9"))
        if log is None:
            continue
        seen = {}
        for message in mcap_ros2.read_ros2_messages(str(path)):
            seen.setdefault(message.channel.topic, []).append(message)
        sequences = [message.sequence_count for message in seen.get("/lab1/joint_states", ())]
        assert sequences == sorted(set(sequences)), "no sample twice, in order"
        if links_held:
            break
    else:
        raise AssertionError("the machine stood still in each recording")
    assert "/vla/lab1/context" in log and "      0  /lab1/joint_command" in log
    assert set(seen) == TOPICS
    joints = seen["/lab1/joint_states"][0].ros_msg
    assert list(joints.name) == NAMES and list(joints.position) == [0.5, -0.5]
    assert seen["/lab1/instruction"][0].ros_msg.data == "touch the red cube"
    status = seen["/lab1/shield_status"][0].ros_msg
    assert status.state == 3 and status.reason == "not armed"
    assert bytes(seen["/lab1/wrist/image_raw/compressed"][0].ros_msg.data) == b"\xff\xd8 no picture"
    for messages_of_topic in seen.values():
        assert messages_of_topic[0].schema.encoding == "ros2msg"
        times = [message.log_time_ns for message in messages_of_topic]
        assert times == sorted(times) and len(times) > 5
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences))), "every sample once, in order"


def test_the_file_is_laid_out_as_the_edges_own(play, tmp_path):
    """The wire bytes unchanged, and the settings and the robot file that 'vla replay' takes from it."""
    path = tmp_path / "lab.mcap"
    path.write_bytes(b"kept")
    run = play(path, "--camera", "wrist", "--set", "shield.fresh_ticks=9", "--duration", "6")
    run.send(1200)
    assert run.process.wait(60.0) == 0
    assert path.read_bytes() == b"kept"
    items = list(read_mcap(tmp_path / "lab-2.mcap"))
    assert isinstance(items[0], McapMetadata) and items[0].name == METADATA
    assert set(items[0].entries) == {"settings", "robot_file"}
    config = EdgeConfig.from_json(items[0].entries["settings"])
    assert config.robot_id == "lab1" and config.shield.fresh_ticks == 9 and config.record is None
    assert items[0].entries["robot_file"] == (ROOT / config.robot_file).read_text()
    assert json.loads(items[0].entries["settings"])["bus"] == run.ends["bus"]
    for item in items[1:]:
        wire.decode(item.type_name, item.payload)
    assert {item.topic for item in items[1:]} == TOPICS


def test_silence_and_wrong_settings_are_errors(play, tmp_path):
    run = play(tmp_path / "a.mcap", "--camera", "wrist", "--duration", "0.5")
    run.process.wait(120.0)
    assert run.process.returncode == 1 and "nothing was heard: is robot_id 'lab1' right" in run.process.stderr.read()
    for arguments, match in ((["--model", str(tmp_path / "none")], "none"),
                             (["--camera", "wrist", "--set", f"robot_file={tmp_path / 'r.yaml'}"], "set robot_file"),
                             (["--camera", "wrist", "--set", "shield.fresh_tick=1"], "fresh_ticks"),
                             (["--camera", "a/b"], "camera id"),
                             (["--camera", "wrist", "--duration", "0"], "positive")):
        run = play(tmp_path / "b.mcap", *arguments)
        run.process.wait(120.0)
        log = run.process.stderr.read()
        assert run.process.returncode == 2 and match in log, log
