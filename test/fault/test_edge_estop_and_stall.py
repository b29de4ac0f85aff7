"""A pressed button, a button that falls silent, a motor process that is stopped: real processes, a fake robot."""

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from edge_rig import CLOCK, INSTRUCTION, Rig, own_children, worst_ratios

from vla_common import messages, wire
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


class Button:
    """The robot's own button: says 20 times a second whether it is pressed, or nothing (None)."""

    def __init__(self, rig):
        self.pressed = None
        self._out = rig.bus.publisher("estop", rig.robot)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            if self.pressed is not None:
                self._out.put(wire.encode(messages.new("std_msgs/Bool", data=self.pressed)))
            sleep_s(CLOCK, 0.05)

    def close(self):
        self._stop.set()
        self._thread.join(1.0)


def moving(rig):
    return bool(rig.commands) and np.abs(rig.commands[-1][2]).max() > 0.02


def start_moving(rig):
    rig.set_out()
    rig.say(INSTRUCTION)
    rig.arm()
    rig.persist(lambda: moving(rig), 60.0, "moving")


def says(rig, words):
    return bool(rig.statuses) and words in rig.statuses[-1].reason


def held(rig):
    return rig.state() == HOLDING and not rig.commands[-1][2].any()


def check_limits(rig, first=0, end=None):
    ratios = worst_ratios(rig, rig.commands[first:end])
    assert ratios["position"] <= 0 and max(ratios["velocity"], ratios["acceleration"], ratios["jerk"]) <= SLACK, ratios


def test_the_button_stops_latches_and_must_be_heard(make_rig):
    rig = make_rig("--set", "io.estop_topic=require")
    button = Button(rig)
    try:
        rig.say(INSTRUCTION)
        rig.wait(lambda: says(rig, "emergency stop input is not heard"), 60.0, "the button is missed")
        assert rig.state() == HOLDING and not rig.statuses[-1].rearm_ready
        button.pressed = False
        start_moving(rig)
        button.pressed = True
        rig.wait(lambda: says(rig, "emergency stop by its input"), 30.0, "the stop")
        rig.wait(lambda: held(rig) and says(rig, "input is pressed"), 30.0, "holding, pressed")
        where = rig.commands[-1][1]
        rig.command("REARM")
        sleep_s(CLOCK, 0.3)
        assert held(rig) and (rig.commands[-1][1] == where).all() and not rig.statuses[-1].rearm_ready
        button.pressed = False
        rig.wait(lambda: rig.statuses[-1].rearm_ready, 60.0, "released and ready")
        assert (rig.commands[-1][1] == where).all()  # releasing alone moves nothing
        for _ in range(5):
            button.pressed = False
            start_moving(rig)
            button.pressed = None
            rig.wait(lambda: held(rig), 30.0, "holding")
            if says(rig, "emergency stop input fell silent"):
                break
            # A busy machine stopped it before the button had been silent for long enough. Once more.
        assert says(rig, "emergency stop input fell silent"), "silence counts as pressed"
        check_limits(rig)
    finally:
        button.close()


def test_the_button_is_watched_unless_it_is_switched_off(make_rig):
    rig = make_rig()
    button = Button(rig)
    try:
        start_moving(rig)  # never heard: under 'watch' that is no obstacle
        button.pressed = True
        rig.wait(lambda: says(rig, "emergency stop by its input"), 30.0, "the stop")
        button.pressed = None  # silent, but the last word was: pressed
        rig.wait(lambda: held(rig) and says(rig, "input is pressed"), 30.0, "still pressed")
        # Another io process does not forget it.
        before = own_children(rig.edge.pid)["io"]
        os.kill(before, signal.SIGKILL)
        rig.wait(lambda: own_children(rig.edge.pid).get("io", before) != before, 60.0, "another io process")
        seen = len(rig.statuses)
        rig.wait(lambda: len(rig.statuses) > seen and says(rig, "input is pressed"), 60.0, "still pressed")
        button.pressed = False
        rig.wait(lambda: rig.statuses[-1].rearm_ready, 60.0, "released")
        check_limits(rig)
    finally:
        button.close()


def stop_in_motion(rig):
    """Stop the motor process, whose last command has arrived and was one in motion; returns its process id."""
    for _ in range(10):
        start_moving(rig)
        pid = own_children(rig.edge.pid)["motor"]
        os.kill(pid, signal.SIGSTOP)
        seen = [0, 0]  # commands, and at which turn of the robot the newest was there

        def is_quiet(seen=seen):
            if len(rig.commands) != seen[0]:
                seen[:] = len(rig.commands), rig.turns
            return rig.turns >= seen[1] + 20

        rig.wait(is_quiet, 30.0, "the end of the commands")
        if moving(rig) and rig.commands[-1][0] >= rig.ticks[-1][-1]["stamp_ns"]:
            return pid
        # On a busy machine the arm may stop, or the bus lose a command, just before. Once more.
        os.kill(pid, signal.SIGCONT)
    raise AssertionError("never stopped in motion")


def test_a_stopped_motor_process_breaks_the_stream_off(make_rig):
    rig = make_rig()
    pid = stop_in_motion(rig)
    last = rig.commands[-1][1]
    before = len(rig.commands)
    rig.wait(lambda: says(rig, "THE MOTOR PROCESS DOES NOT TICK"), 30.0, "the io process tells it")
    assert not rig.statuses[-1].rearm_ready
    measured = last + np.array([0.02] * 7 + [0.0])  # where the robot's own time-out took it
    rig.position = measured
    rig.command("REARM")  # of no use now, and not to be kept for later
    sleep_s(CLOCK, 1.0)
    assert len(rig.commands) == before
    os.kill(pid, signal.SIGCONT)
    rig.wait(lambda: says(rig, "the motor process did not run"), 30.0, "the stall is told")
    assert rig.state() == HOLDING
    rig.wait(lambda: len(rig.commands) > before + 30, 30.0, "commands again")
    after = np.array([position for _, position, _ in rig.commands[before:]])
    speeds = np.array([velocity for _, _, velocity in rig.commands[before:]])
    assert rig.state() == HOLDING and len(after) > 10
    # At rest, at one pose: where it was measured, or (no fresh measurement on a busy machine) the last command.
    assert (after == after[0]).all() and (speeds == 0).all()
    assert np.allclose(after[0], measured, atol=1e-12) or (np.abs(after[0] - last) < 0.02).all()
    rig.wait(lambda: "the motor process ticks again after" in rig.log.read_text(), 30.0, "the supervisor tells it")
    assert "THE MOTOR PROCESS DOES NOT TICK" in rig.log.read_text()
    check_limits(rig, end=before)
    rig.arm()
    rig.persist(lambda: moving(rig), 60.0, "moving again after a re-arm")
    # The re-entry rule: no joint jumps on the re-arm, for it was measured where it was commanded.
    check_limits(rig, before)
