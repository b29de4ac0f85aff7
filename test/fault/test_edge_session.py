"""Supervisor and io in one process, as the ROS node runs them, on the Zenoh bus and so without ROS."""

import os
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from edge_rig import CLOCK, INSTRUCTION, LIMITS, Rig, alive, worst_ratios

from vla_common.clock import sleep_s
from vla_edge.config import load_edge_config
from vla_edge.edge_main import parse
from vla_edge.session import EdgeSession

NOMINAL, COASTING, BRAKING, HOLDING = range(4)


class SessionRig(Rig):
    """The robot's and the cloud's side around a session of this process."""

    def start_edge(self):
        config = parse(self.arguments[3:])  # without the interpreter's own
        self.log.write_text("")
        self.session = EdgeSession(config, LIMITS, CLOCK)
        return types.SimpleNamespace(poll=lambda: 0)


@pytest.fixture
def rig(tmp_path, request):
    made = SessionRig(tmp_path, *getattr(request, "param", ()))
    yield made
    made.session.stop()
    made.session.stop()
    made.close()
    assert made.memory_files() == []


def moving(rig):
    return bool(rig.commands) and np.abs(rig.commands[-1][2]).max() > 0.1


def start(rig):
    rig.session.start()
    rig.wait(lambda: rig.commands and rig.session.look() == "", 60.0, "commands")


def start_moving(rig):
    rig.session.accept_rearms(True)
    rig.session.say(INSTRUCTION)
    rig.instruction = INSTRUCTION  # the rig's own operator says the same
    rig.set_out()

    def moves():
        assert rig.session.look() == ""
        # An answer that comes too late says no although the arm was armed, so what it does is what counts.
        if int(rig.session.motor["state"]) == HOLDING:
            rig.session.rearm()
        return moving(rig)

    rig.wait(moves, 120.0, "moving")


def stops(rig):
    return int(rig.session.motor["stops"]) + int(rig.session.motor["stalls"])


def seen_in_motion(rig):
    """What the session tells of a robot that moves, and answers to a re-arm then."""
    for _ in range(10):
        start_moving(rig)
        before = stops(rig)
        seen = rig.session.goal_view(), rig.session.findings(), rig.session.rearm()
        if stops(rig) == before:
            return seen
        # A busy machine stopped the arm meanwhile. Once more.
    raise AssertionError("never in motion for long enough")


def stop_for_a_test(rig):
    """Whether the stop was one of a robot that moved: one that stands is not told why it is stopped."""
    start_moving(rig)
    assert rig.session.stop_damped(30.0, "a test wants it")
    assert not rig.session.motor["velocity"].any() and int(rig.session.motor["state"]) == HOLDING
    told = ("stopped, a test wants it", "emergency stop by the operator")
    rig.wait(lambda: rig.session.reason.startswith(told), 30.0, "the reason")
    return rig.session.reason.startswith(told[0])


def test_operators_of_a_session(rig, monkeypatch):
    monkeypatch.setattr("vla_edge.session.ANSWER_S", 20.0)  # what is checked is what they answer, not how soon
    assert rig.session.stop_damped(0.1, "why")  # nothing has begun, nothing moves
    start(rig)
    assert rig.session.rearm() == (False, "refused: the node is not active")
    view, findings, (taken, words) = seen_in_motion(rig)
    assert view.state in (NOMINAL, COASTING) and view.heard == INSTRUCTION
    assert {finding.name: finding.level.name for finding in findings}["motor clock"] == "OK"
    assert not taken and "only a robot that holds" in words

    # On a busy machine the arm may have stopped by itself just before. Then once more.
    assert any(stop_for_a_test(rig) for _ in range(5))
    assert rig.session.estop()[0]  # of a robot that stands already: an emergency from now on
    rig.wait(lambda: rig.session.reason.startswith("emergency stop by the operator"), 30.0, "the reason")
    held = rig.session.motor["position"].copy()
    sleep_s(CLOCK, 0.2)
    np.testing.assert_array_equal(rig.session.motor["position"], held)

    start_moving(rig)
    assert rig.session.estop() == (True, "braking; the robot will hold until it is re-armed")
    rig.session.accept_rearms(False)
    # Over the bus, too.
    rig.insist("REARM", lambda: rig.session.findings()[3].values.get("refused rearm_not_active"), "a refused re-arm")

    start_moving(rig)
    children = [rig.session.pid(name) for name in ("motor", "policy")]
    rig.session.stop()
    ratios = worst_ratios(rig, rig.commands)
    assert not rig.ticks[-1][-1]["velocity"].any() and not any(map(alive, children))
    assert ratios["position"] <= 0 and max(ratios["velocity"], ratios["acceleration"], ratios["jerk"]) <= 1 + 1e-9


def test_what_cannot_go_on_is_told(rig):
    start(rig)
    os.kill(rig.session.pid("motor"), signal.SIGKILL)
    rig.wait(lambda: "the motor process ended" in rig.session.look(), 30.0, "the end of the motor process")


@pytest.mark.parametrize("rig", [("--set", "supervisor.motor_stop_s=1.0")], indirect=True)
def test_a_motor_process_that_hangs_is_told_and_killed(rig):
    start(rig)
    start_moving(rig)
    pid = rig.session.pid("motor")
    os.kill(pid, signal.SIGSTOP)
    rig.wait(lambda: rig.session.findings()[1].level.name == "ERROR", 30.0, "hangs")
    assert rig.session.look() == ""  # it may come back
    assert rig.session.estop() == (False, "THE MOTOR PROCESS DOES NOT ANSWER: use the robot's own stop")
    assert not rig.session.stop_damped(0.3, "why")
    rig.session.stop()
    assert not alive(pid)


def test_an_io_that_fails_is_told(rig, monkeypatch):
    start(rig)

    def fail():
        raise RuntimeError("a bad day")

    monkeypatch.setattr(rig.session._io, "turn", fail)
    rig.wait(lambda: rig.session.look() == "io failed", 30.0, "io failed")


def test_a_session_that_cannot_open_its_bus_leaves_nothing(tmp_path):
    from vla_edge.robot_bus import BusError

    before = set(Path("/dev/shm").glob("vla-edge.nobus.*"))
    config = load_edge_config(None, ["bus=tcp/10.0.0.1:7447", "robot_id=nobus"])
    with pytest.raises(BusError):
        EdgeSession(config, LIMITS, CLOCK)
    assert set(Path("/dev/shm").glob("vla-edge.nobus.*")) == before
