"""A recording of the real edge, replayed: what the motor process sent comes out of the same code again, bit by bit."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from edge_rig import CLOCK, INSTRUCTION, Rig, own_children

from vla_cli import replay_main
from vla_common.clock import sleep_s
from vla_edge.core import tracking

NOMINAL, COASTING, BRAKING, HOLDING = range(4)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """One in which neither the robot nor io nor the recorder stood still, for then the bus loses messages: a busy machine
    gets a few tries."""
    for _ in range(5):
        folder = tmp_path_factory.mktemp("run")
        if not record(folder).found:
            break
    return folder / "run.mcap"


def record(folder):
    """Start, motion, a stopped motor process, a stopped policy, an outage, a re-arm, an emergency stop, the end."""
    rig = Rig(folder, "--record", str(folder / "run.mcap"))
    try:
        rig.wait(lambda: "recording to" in rig.log.read_text() and rig.statuses, 60.0, "the recorder")
        sleep_s(CLOCK, 0.3)
        rig.direction[:7] = 0.05
        rig.say(INSTRUCTION)
        rig.arm()
        rig.persist(lambda: np.abs(rig.commands[-1][2]).max() > 0.02, 60.0, "moving")
        children = own_children(rig.edge.pid)
        for name, seconds in (("motor", 0.06), ("motor", 0.2), ("policy", 0.12)):
            os.kill(children[name], signal.SIGSTOP)
            sleep_s(CLOCK, seconds)
            os.kill(children[name], signal.SIGCONT)
            rig.persist(lambda: rig.state() == NOMINAL, 60.0, f"NOMINAL after {name} was stopped")
            sleep_s(CLOCK, 0.3)
        rig.cloud_answers = False
        rig.wait(lambda: rig.state() == HOLDING, 60.0, "holding without a cloud")
        rig.cloud_answers = True
        rig.direction[:7] = -0.05
        rig.arm()
        sleep_s(CLOCK, 0.5)
        rig.insist("ESTOP", lambda: rig.state() == HOLDING, "holding after the stop")
        rig.persist(lambda: rig.state() == NOMINAL, 60.0, "armed once more")
        sleep_s(CLOCK, 0.3)
        rig.edge.terminate()
        assert rig.edge.wait(60.0) == 0
    finally:
        rig.close()
    return rig.pauses


def test_the_replay_is_the_recording(recording, capsys):
    assert replay_main.main([str(recording)]) == 0
    text = capsys.readouterr().out
    assert "identical, bit by bit" in text, text
    recorded = replay_main.read([recording])
    result = replay_main.replay(recorded.trace, replay_main.loop_maker(recorded.config, recorded.limits))
    assert set(result.states) == {"NOMINAL", "COASTING", "BRAKING", "HOLDING"}
    # The last message of a process that ends may not arrive any more; all others did.
    assert result.begun <= 2 and sum(result.missing.values()) <= 1 and result.lost == 0 and result.missed > 0
    assert result.compared > 200 and result.unknown < 20
    assert result.published > 0.9 * result.compared


def test_other_code_is_found_out(recording, monkeypatch, capsys):
    """A limit that is wrong by one part in a hundred million."""
    monkeypatch.setattr(tracking, "LIMIT_MARGIN", 1.1e-8)
    assert replay_main.main([str(recording)]) == 1
    assert "DIFFERENT at" in capsys.readouterr().out


def test_another_robot_file_is_found_out(recording, tmp_path, capsys):
    robot = (Path(__file__).parents[2] / "config/robots/panda_2f85.yaml").read_text()
    (tmp_path / "robot.yaml").write_text(robot.replace("jerk: 0.2", "jerk: 0.19"))
    assert replay_main.main([str(recording), "--robot", str(tmp_path / "robot.yaml")]) == 1
    assert "DIFFERENT at" in capsys.readouterr().out


def test_a_recording_cut_short_is_replayed_as_far_as_it_goes(recording, tmp_path, capsys):
    whole = recording.read_bytes()
    (tmp_path / "cut.mcap").write_bytes(whole[:len(whole) * 2 // 3])
    assert replay_main.main([str(tmp_path / "cut.mcap")]) == 0
    assert "identical" in capsys.readouterr().out
