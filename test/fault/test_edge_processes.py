"""The edge as real processes, with a fake robot and a fake cloud: what may fail, fails, and the arm stays tame."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from edge_rig import CLOCK, INSTRUCTION, LIMITS, Rig, alive, own_children, worst_ratios

from vla_common import wire
from vla_common.clock import sleep_s

NOMINAL, COASTING, BRAKING, HOLDING = range(4)
SLACK = 1 + 1e-9


@pytest.fixture
def make_rig(tmp_path):
    rigs = []

    def make(*arguments):
        rigs.append(Rig(tmp_path, *arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
        assert rig.memory_files() == []


def check_limits(rig, from_command=0):
    ratios = worst_ratios(rig.commands[from_command:])
    assert ratios["position"] <= 0 and max(ratios["velocity"], ratios["acceleration"], ratios["jerk"]) <= SLACK, ratios


def moving(rig):
    return bool(rig.commands) and np.abs(rig.commands[-1][2]).max() > 0.02


def start_moving(rig, speed=0.05):
    rig.direction[:7] = speed
    rig.say(INSTRUCTION)
    rig.arm()
    rig.persist(lambda: moving(rig), 10.0, "moving")


def wait_held(rig, timeout_s=5.0):
    rig.wait(lambda: rig.state() == HOLDING and not moving(rig), timeout_s, "holding at rest")


def no_reversal(rig, first):
    """From the first slowing command on, no joint turns round."""
    v = np.array([velocity for _, _, velocity in rig.commands[first:]])
    for column in v.T:
        signs = np.sign(column[np.abs(column) > 1e-9])
        if not (signs[:1] == signs).all():
            return False
    return True


def test_a_working_day(make_rig, tmp_path):
    rig = make_rig("--record", str(tmp_path / "day.mcap"))
    rig.wait(lambda: rig.commands and rig.statuses, 20.0, "commands")
    rig.wait(lambda: "not armed" in rig.statuses[-1].reason, 5.0, "a status after the first command")
    assert rig.state() == HOLDING
    assert (rig.commands[-1][1] == LIMITS.ready).all() and not rig.statuses[-1].rearm_ready

    start_moving(rig)
    assert rig.policy.engine.startswith("onnxruntime")
    # Contexts that must not move the robot, whoever sends them.
    rig.cloud_answers = False
    observation = rig.observations[-1]
    for changes in ({"model_hash": b"x" * 32}, {"instruction_hash": wire.instruction_hash("other")},
                    {"session": "someone else"}, {"header": wire.make_header(CLOCK.monotonic_ns() + 10**9)},
                    {"header": wire.make_header(observation.header.stamp.sec * 10**9 - 5 * 10**9)}):
        rig.answer(observation, **changes)
        sleep_s(CLOCK, 0.08)
    wait_held(rig)
    refused = dict(zip(rig.policy.reject_names, rig.policy.reject_counts, strict=True))
    assert {"context_model_hash", "context_instruction_hash", "context_session", "context_future_stamp",
            "context_stale"} <= set(refused)
    rig.wait(lambda: "no context from the cloud for" in rig.statuses[-1].reason, 5.0, "the culprit by name")
    assert rig.statuses[-1].reason.startswith("chunks ran out: ") and not rig.statuses[-1].rearm_ready
    assert any("contexts are refused: context_" in status.reason for status in rig.statuses)

    # The cloud is back: nothing moves until an operator says so.
    rig.cloud_answers = True
    rig.wait(lambda: rig.statuses[-1].rearm_ready, 5.0, "fresh contexts")
    held = rig.commands[-1][1]
    sleep_s(CLOCK, 0.2)
    assert (rig.commands[-1][1] == held).all()
    rig.arm()
    rig.command("ESTOP")
    rig.wait(lambda: "emergency stop" in rig.statuses[-1].reason, 5.0, "the stop")
    wait_held(rig)
    assert "emergency stop" in rig.statuses[-1].reason

    # Home needs no cloud.
    rig.cloud_answers = False
    rig.say("go home")
    rig.arm()
    rig.persist(lambda: np.allclose(rig.position, LIMITS.ready, atol=1e-6), 20.0, "the ready pose")
    rig.persist(lambda: rig.state() == NOMINAL and not moving(rig), 10.0, "standing there")

    # The end while it moves: a damped stop, then nothing is left.
    rig.cloud_answers = True
    rig.say(INSTRUCTION)
    rig.persist(lambda: moving(rig), 10.0, "moving again")
    children = own_children(rig.edge.pid)
    assert set(children) == {"motor", "policy", "io", "recorder"}
    begin_ns = CLOCK.monotonic_ns()
    rig.edge.terminate()
    assert rig.edge.wait(4.0) == 0
    assert CLOCK.monotonic_ns() - begin_ns < 2_500_000_000
    sleep_s(CLOCK, 0.1)
    assert not moving(rig) and not any(map(alive, children.values()))
    check_limits(rig)
    stamps = np.array([stamp for stamp, _, _ in rig.commands])
    assert (np.diff(stamps) >= 10_000_000).all() and (np.diff(stamps) % 10_000_000 == 0).all()
    check_recording(tmp_path / "day.mcap", rig)


def check_recording(path, rig):
    from mcap.reader import make_reader

    topics, ticks = {}, []
    with path.open("rb") as file:
        for schema, channel, message in make_reader(file).iter_messages():
            assert schema.encoding == "ros2msg" and channel.message_encoding == "cdr"
            decoded = wire.decode(schema.name, message.data)  # the wire bytes, checksum and all
            topics[channel.topic] = topics.get(channel.topic, 0) + 1
            if channel.topic.endswith("motor_ticks"):
                ticks += list(decoded.tick)
    for name in ("joint_command", "joint_states", "shield_status", "motor_ticks", "policy_status", "action_chunk",
                 "instruction", "shield_command", "front/image_raw/compressed"):
        assert topics.get(f"/{rig.robot}/{name}", 0) > 0, (name, topics)
    assert topics[f"/vla/{rig.robot}/observation"] > 0 and topics[f"/vla/{rig.robot}/context"] > 0
    assert ticks == sorted(set(ticks)), "every tick exactly once"


def test_the_policy_may_die_or_freeze_and_the_io_may_die(make_rig):
    rig = make_rig()
    start_moving(rig)
    for name, kind in (("policy", signal.SIGKILL), ("policy", signal.SIGSTOP)):
        pid, first = own_children(rig.edge.pid)[name], len(rig.commands)
        os.kill(pid, kind)
        wait_held(rig)
        assert no_reversal(rig, first), name
        if kind == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        held = rig.commands[-1][1]
        rig.wait(lambda: rig.statuses[-1].rearm_ready, 15.0, "the policy is back")
        assert rig.state() == HOLDING and (rig.commands[-1][1] == held).all()
        rig.arm()
        rig.persist(lambda: moving(rig), 10.0, "moving again")
    before = own_children(rig.edge.pid)
    os.kill(before["io"], signal.SIGKILL)
    rig.wait(lambda: own_children(rig.edge.pid).get("io", before["io"]) != before["io"], 10.0, "another io process")
    # Without joint states the policy makes no chunk; the robot holds until someone looks.
    wait_held(rig, 10.0)
    rig.arm()
    assert own_children(rig.edge.pid)["motor"] == before["motor"]
    check_limits(rig)
    assert "starting it again" in rig.log.read_text()


def test_the_death_of_the_motor_process_stops_everything_loudly(make_rig):
    rig = make_rig("--record", "/proc/no/such/place.mcap")
    start_moving(rig)  # a recorder that cannot write touches no one
    assert "the robot goes on without it" in rig.log.read_text()
    children = own_children(rig.edge.pid)
    os.kill(children["motor"], signal.SIGKILL)
    assert rig.edge.wait(5.0) == 1
    assert "THE MOTOR PROCESS ENDED (killed by signal 9)" in rig.log.read_text()
    assert not any(map(alive, children.values())) and rig.memory_files() == []
    check_limits(rig)


def test_a_killed_supervisor_leaves_nothing_behind(make_rig):
    rig = make_rig()
    start_moving(rig)
    children = own_children(rig.edge.pid)
    os.kill(rig.edge.pid, signal.SIGKILL)
    rig.edge.wait()
    rig.wait(lambda: not any(map(alive, children.values())), 5.0, "all children gone")
    rig.wait(lambda: not moving(rig), 1.0, f"a damped stop, {[v[0] for _, _, v in rig.commands[-30:]]}")
    assert rig.memory_files() == []
    check_limits(rig)
    # All at once: then the file stays, and the next start removes it.
    rig.edge, seen = rig.start_edge(), len(rig.commands)
    rig.wait(lambda: len(rig.commands) > seen and len(own_children(rig.edge.pid)) == 3, 20.0, "the next edge")
    children = own_children(rig.edge.pid)
    for pid in [rig.edge.pid, *children.values()]:
        os.kill(pid, signal.SIGSTOP)
    for pid in [*children.values(), rig.edge.pid]:
        os.kill(pid, signal.SIGKILL)
    rig.edge.wait()
    sleep_s(CLOCK, 0.3)  # what the killed edge sent last may still be under way, and must not count for the next one
    left, = rig.memory_files()
    rig.edge, seen = rig.start_edge(), len(rig.commands)
    rig.wait(lambda: len(rig.commands) > seen, 20.0, "commands of the edge after that")
    assert len(rig.memory_files()) == 1 and left not in rig.memory_files()


def test_a_camera_that_falls_silent_is_named_in_status_and_log(make_rig):
    rig = make_rig()
    start_moving(rig)
    first = len(rig.commands)
    rig.camera_sends = False
    wait_held(rig)
    rig.wait(lambda: "no context from the cloud for" in rig.statuses[-1].reason, 5.0, "the reason")
    assert "(camera_missing_front)" in rig.statuses[-1].reason and not rig.statuses[-1].rearm_ready
    check_limits(rig, first)
    told = rig.log.read_text().count("camera_missing_front: no image that can be used for 0.")
    assert told == 1 and rig.edge.poll() is None
    rig.camera_sends = True
    rig.wait(lambda: rig.statuses[-1].rearm_ready, 5.0, "fresh contexts")
    assert "images of all cameras come again: front" in rig.log.read_text()
    start_moving(rig)
