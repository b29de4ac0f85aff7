"""`vla replay` and the files it reads: what they must hold, what is said when they do not, exit codes."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "property" / "invariants"))

from harness import ROBOTS, ROOT, T_NS, Motor, trace_of

from vla_cli.main import COMMANDS
from vla_cli.replay_main import main, read
from vla_common.messages import new
from vla_common.wire import encode, make_header
from vla_edge.adapters.mcap_reader import McapMessage, McapMetadata, ReadError, read_mcap
from vla_edge.adapters.mcap_recorder import McapRecorder
from vla_edge.core import tracking
from vla_edge.core.trace import METADATA
from vla_edge.policy_main import chunk_message

LIMITS = ROBOTS["panda_2f85"]
ROBOT_TEXT = (ROOT / "config/robots/panda_2f85.yaml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trace():
    motor = Motor(LIMITS).armed()
    for k in range(40):
        if k % 5 == 0:
            motor.offer(motor.good_chunk(np.linspace(motor.shield.position, motor.shield.position + 0.1, 16)))
        motor.serve()
    motor.event("estop")
    for _ in range(60):
        motor.serve()
    return motor, trace_of(motor)


def write(path, trace, robot="arm1", described=True, settings=None, first=0, last=None,
          joints="joint_states"):
    """A recording as the recorder makes it, without the processes."""
    motor, trace = trace
    recorder = McapRecorder(path)
    if described:
        recorder.describe(METADATA, {"settings": settings or motor.config.to_json(), "robot_file": ROBOT_TEXT})

    def put(name, message, type_name):
        recorder.write(f"/{robot}/{name}", type_name, encode(message), 1, 1, 0)

    for chunk in trace.chunks:
        put("action_chunk", chunk_message(chunk, trace.deadline_ns(chunk.base_tick)), "ActionChunk")
    for stamp, position in trace.measured.items():
        put(joints, new("sensor_msgs/JointState", header=make_header(stamp), name=list(LIMITS.names),
                        position=position), "sensor_msgs/JointState")
    ticks = trace.ticks[first:last]
    for part in np.array_split(ticks, 7):
        fields = {name: part[name] for name in part.dtype.names}
        at_ns = trace.deadline_ns(int(part["tick"][-1])) + T_NS // 2
        put("motor_ticks", new("MotorTicks", header=make_header(at_ns), joints=8, **fields), "MotorTicks")
    recorder.close()
    return path


def test_the_command_is_listed():
    assert COMMANDS["replay"].module == "vla_cli.replay_main" and COMMANDS["replay"].extra == "edge"


def test_identical(trace, tmp_path, capsys):
    assert main([str(write(tmp_path / "a.mcap", trace))]) == 0
    text = capsys.readouterr().out
    assert "identical, bit by bit" in text and "101 ticks replayed" in text


def test_on_ros_the_joint_states_that_the_edge_took_are_used(trace, tmp_path, capsys):
    """A driver's own may have any stamps, and joints in any order."""
    settings = trace[0].config.to_json().replace('"bus": "tcp/127.0.0.1:7447"', '"bus": "ros"')
    assert '"bus": "ros"' in settings
    assert main([str(write(tmp_path / "a.mcap", trace, settings=settings))]) == 0
    text = capsys.readouterr().out
    assert "measurement at a re-arm" in text and "101 ticks replayed" not in text
    assert main([str(write(tmp_path / "b.mcap", trace, settings=settings, joints="measured_joints"))]) == 0
    text = capsys.readouterr().out
    assert "identical, bit by bit" in text and "101 ticks replayed" in text and "missing in" not in text


def test_several_files_of_one_run_are_one(trace, tmp_path, capsys):
    files = [str(write(tmp_path / "a.mcap", trace, last=50)), str(write(tmp_path / "a-2.mcap", trace, first=50))]
    assert main(files) == 0
    assert "101 ticks replayed" in capsys.readouterr().out
    assert main(files[1:]) == 0  # alone, from its first HOLDING tick on
    other = trace[0].config.to_json().replace('"ramp_ticks": 5', '"ramp_ticks": 6')
    write(tmp_path / "b.mcap", trace, settings=other)
    assert main([files[0], str(tmp_path / "b.mcap")]) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_difference_is_shown_and_is_exit_code_1(trace, tmp_path, monkeypatch, capsys):
    path = str(write(tmp_path / "a.mcap", trace))
    monkeypatch.setattr(tracking, "LIMIT_MARGIN", 2e-9)
    assert main([path]) == 1
    assert "DIFFERENT at" in capsys.readouterr().out


def test_settings_and_robot_can_be_given(trace, tmp_path, capsys):
    path = str(write(tmp_path / "a.mcap", trace, described=False))
    assert main([path]) == 2
    assert "give --config and --robot" in capsys.readouterr().err
    config, robot = str(ROOT / "config/edge.yaml"), str(ROOT / "config/robots/panda_2f85.yaml")
    assert main([path, "--config", config]) == 2
    assert "give --robot" in capsys.readouterr().err
    given = [path, "--config", config, "--set", "shield.first_chunk_ticks=8", "--robot", robot]
    assert main(given) == 0
    assert main([*given, "--set", "ensemble.rule=replace"]) == 1


def test_a_robot_file_that_cannot_be_the_one(trace, tmp_path, capsys):
    path = str(write(tmp_path / "a.mcap", trace))
    assert main([path, "--robot", str(ROOT / "config/robots/ur5e.yaml")]) == 2
    assert "of 8 joints, the robot file of" in capsys.readouterr().err
    (tmp_path / "robot.yaml").write_text(ROBOT_TEXT.replace("lower: -3.0718", "lower: -1.0").replace(
        "ready: -2.1575", "ready: -0.5"))
    assert main([path, "--robot", str(tmp_path / "robot.yaml")]) == 2
    assert "MEASUREMENT_OUTSIDE_LIMITS" in capsys.readouterr().err


def test_files_that_hold_no_recording(trace, tmp_path, capsys):
    assert main([str(tmp_path / "none.mcap")]) == 2
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "text.mcap").write_text("hello, this is no recording")
    assert main([str(tmp_path / "text.mcap")]) == 2
    assert "is no MCAP file" in capsys.readouterr().err
    assert main([str(write(tmp_path / "other.mcap", trace, robot="arm2"))]) == 2
    assert "no robot 'arm1' in the recording, but ['arm2']" in capsys.readouterr().err
    moving = trace[1].ticks["state"] != 3
    path = write(tmp_path / "moving.mcap", trace, first=int(np.argmax(moving)), last=int(np.argmax(moving)) + 20)
    assert main([str(path)]) == 2
    assert "nothing to compare" in capsys.readouterr().out


def test_messages_that_the_wire_refuses_are_counted(trace, tmp_path, capsys):
    path = write(tmp_path / "a.mcap", trace)
    recorder = McapRecorder(tmp_path / "b.mcap")
    recorder.describe(METADATA, {"settings": trace[0].config.to_json(), "robot_file": ROBOT_TEXT})
    for item in read_mcap(path):
        if isinstance(item, McapMessage):
            recorder.write(item.topic, item.type_name, item.payload, 1, 1, 0)
            recorder.write(item.topic, item.type_name, item.payload[:-9], 1, 1, 0)
    recorder.close()
    assert main([str(tmp_path / "b.mcap")]) == 0
    assert "recorded messages were refused" in capsys.readouterr().out
    assert read([tmp_path / "b.mcap"]).refused == len(trace[1].chunks) + len(trace[1].measured) + 7


def test_a_file_cut_short_is_read_as_far_as_it_goes(trace, tmp_path):
    path = write(tmp_path / "a.mcap", trace)
    whole = path.read_bytes()
    (tmp_path / "killed.mcap").write_bytes(whole[:300])
    first = next(iter(read_mcap(tmp_path / "killed.mcap")), None)
    assert first is None or isinstance(first, McapMetadata)
    (tmp_path / "half.mcap").write_bytes(whole[:-200])
    messages = [sum(isinstance(item, McapMessage) for item in read_mcap(tmp_path / name)) for name in
                ("half.mcap", "a.mcap")]
    assert messages[0] == messages[1] > 10
    with pytest.raises(ReadError, match="no MCAP"):
        list(read_mcap(Path(__file__)))


def test_the_description_is_there_before_the_first_chunk(tmp_path):
    """A recorder that is killed at once leaves it already."""
    recorder = McapRecorder(tmp_path / "a.mcap")
    recorder.describe(METADATA, {"settings": "{}", "robot_file": "joints"})
    (tmp_path / "copy.mcap").write_bytes((tmp_path / "a.mcap").read_bytes())
    items = list(read_mcap(tmp_path / "copy.mcap"))
    assert items == [McapMetadata(METADATA, {"settings": "{}", "robot_file": "joints"})]
    recorder.close()
