"""The report of a synthetic run: figures known in advance, a page without external resources."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.writer import Writer

from vla_common.messages import new, typestore
from vla_common.topics import topic_spec
from vla_common.wire import encode, make_header
from vla_sim.config import JOINT_NAMES
from vla_sim.episodes import SUCCESS, TIMEOUT, EpisodeResult, RunResults
from vla_sim.recording import Recording, RecordingError
from vla_sim.report import main, table_lines, write_report
from vla_sim.report_data import load_run

MS, S = 1_000_000, 1_000_000_000
ROBOT_FILE = Path(__file__).parents[2] / "config" / "robots" / "panda_2f85.yaml"
START_NS = 100 * S


def write_mcap(path: Path, messages: list[tuple[str, int, Any]], finish: bool = True) -> None:
    with path.open("wb") as file:
        writer = Writer(file, chunk_size=4096)
        writer.start()
        channels: dict[str, int] = {}
        for name, at_ns, message in messages:
            if name not in channels:
                spec = topic_spec(name)
                text, _ = typestore().generate_msgdef(spec.type_name, ros_version=2)
                schema = writer.register_schema(spec.type_name, "ros2msg", text.encode())
                channels[name] = writer.register_channel(spec.topic("arm1", "front"), "cdr", schema)
            writer.add_message(channels[name], at_ns, encode(message), at_ns)
        if finish:
            writer.finish()


def motion() -> np.ndarray:
    """12 s of a smooth reach on joint 1, from rest to rest, well inside the limits; ticks 5000 .. 6199."""
    x = np.clip((np.arange(1200) * 0.01 - 2.0) / 4.0, 0, 1)
    command = np.tile(np.array([0.0, -0.1294, 0.0, -2.1575, 0.0, 2.0280, 0.0008, 0.0]), (1200, 1))
    command[:, 0] += 0.6 * (10 * x**3 - 15 * x**4 + 6 * x**5)
    return command


def messages(command: np.ndarray) -> list[tuple[str, int, Any]]:
    out: list[tuple[str, int, Any]] = []
    states = np.where(np.arange(1200) < 900, 0, np.where(np.arange(1200) < 940, 2, 3)).astype(np.uint8)
    for first in range(0, 1200, 10):
        rows, at_ns = slice(first, first + 10), START_NS + (first + 9) * 10 * MS
        out.append(("motor_ticks", at_ns, new(
            "MotorTicks", header=make_header(at_ns + 2 * MS), joints=8, tick=np.arange(5000 + first, 5010 + first),
            lateness_ns=np.linspace(40_000, 80_000, 10).astype(np.int64), state=states[rows],
            segment=np.ones(10, np.uint32), chunk_sequence=np.zeros(10, np.uint64), command=command[rows])))
        header = make_header(at_ns)
        out.append(("joint_states", at_ns, new("sensor_msgs/JointState", header=header, name=list(JOINT_NAMES),
                                               position=command[first + 9] + 0.001)))
        out.append(("policy_status", at_ns, new(
            "PolicyStatus", header=header, denoise_s=0.003, reject_names=["context_late"], reject_counts=[first // 100],
            engine="onnxruntime test cpu")))
        out.append(("shield_status", at_ns, new("ShieldStatus", header=header, scheduling="ordinary", tick=first)))
        out.append(("task_status", at_ns, new("TaskStatus", header=header, phase="running")))
        base_ns = START_NS + first * 10 * MS
        out.append(("action_chunk", at_ns, new(
            "ActionChunk", header=make_header(base_ns), base_tick=5000 + first, horizon=0,
            observation_stamp_ns=base_ns - 120 * MS)))
    return out


def make_run(folder: Path, command: np.ndarray | None = None, finish: bool = True) -> Path:
    write_mcap(folder / "recording.mcap", messages(motion() if command is None else command), finish)
    shutil.copy(ROBOT_FILE, folder / "robot.yaml")
    results = RunResults(4, "normal", 14.0, False, 2, rearms=1)
    results.episodes = [
        EpisodeResult(0, 1, "touch", "red cube", False, "touch the <red> block", SUCCESS, START_NS + S, START_NS + 5 * S,
                      4.0, 0, 0.0),
        EpisodeResult(1, 2, "pick", "blue cube", True, "lift the blue cube", TIMEOUT, START_NS + 7 * S,
                      START_NS + 11 * S, 4.0, 1, 0.5)]
    robot = {"slips": 0, "slipped_s": 0.0, "worst_lag_s": 0.004, "command_timeouts": 0,
             "commands_refused": dataclasses.asdict(results)["episodes"] and {"stale": 0}}
    (folder / "results.json").write_text(json.dumps({**results.to_json(), "robot": robot}))
    (folder / "run.json").write_text(json.dumps({"title": "demo & test", "robot": "arm1", "camera": "front",
                                                 "faults": "wifi", "model": "tiny", "versions": {"mujoco": "4.0.0"}}))
    (folder / "events.jsonl").write_text(
        json.dumps({"kind": "outage", "at_ns": 0, "start_ns": START_NS + 2 * S, "end_ns": START_NS + 4 * S}) + "\n"
        + json.dumps({"kind": "process", "at_ns": START_NS + 8 * S, "process": "cloud", "step": "kill"}) + "\n")
    (folder / "cpu.json").write_text(json.dumps({"motor": [0.05, 0.06], "sim": [0.3, 0.4]}))
    (folder / "link.json").write_text(json.dumps({"up": {"received": 10, "lost": 1}, "down": {"received": 9, "lost": 0}}))
    return folder


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawing takes seconds, so one ordinary report serves several tests."""
    folder = make_run(tmp_path_factory.mktemp("run"))
    assert main([str(folder)]) == 0
    return folder


def test_summary_holds_the_known_figures(reported: Path) -> None:
    summary = json.loads((reported / "summary.json").read_text())
    motor = summary["motor"]
    assert (motor["ticks"], motor["ticks_missing"], motor["limit_violations_total"]) == (1200, 0, 0)
    assert motor["lateness_s"]["p50"] == pytest.approx(60e-6, abs=1e-6)
    # A minimum-jerk reach of 0.6 rad in 4 s peaks at 15/8 of its mean speed; the limit is 0.9 x 2.175 rad/s.
    assert motor["peak_of_limit"]["velocity"]["panda_joint1"] == pytest.approx(0.6 / 4 * 15 / 8 / (0.9 * 2.175), rel=1e-3)
    assert summary["context"]["rate_hz"] == pytest.approx(10.0, abs=0.2)
    assert summary["context"]["age_s"]["p50"] == pytest.approx(0.12)
    assert summary["context"]["longest_gap_s"] == pytest.approx(0.1, abs=0.03)
    assert summary["denoise_s"]["p50"] == pytest.approx(0.003)
    assert summary["shield"]["share"] == pytest.approx({"NOMINAL": 0.75, "BRAKING": 40 / 1200, "HOLDING": 260 / 1200})
    assert (summary["shield"]["brakings"], summary["shield"]["holds"], summary["shield"]["operator_rearms"]) == (1, 1, 1)
    assert summary["rejected"] == {"context_late": 11}
    assert summary["cpu_share"]["sim"] == pytest.approx({"mean": 0.35, "max": 0.4})
    assert summary["tasks"][-1]["successes"] == 1


def test_page_is_self_contained_and_escaped(reported: Path) -> None:
    page = (reported / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", page) and "http" not in page and "@import" not in page
    assert "touch the &lt;red&gt; block" in page and "demo &amp; test" in page
    assert "$" not in re.sub(r"base64,[^\"]*", "", page)


def test_violations_are_counted_and_shown(tmp_path: Path) -> None:
    command = motion()
    command[600:, 2] += 0.01
    summary = write_report(make_run(tmp_path, command))
    assert summary["motor"]["limit_violations_total"] > 0
    assert "tick 5600: acceleration of panda_joint3" in summary["motor"]["first_violation"]
    assert "Limits were violated" in (tmp_path / "report.html").read_text()


def test_a_recording_that_was_cut_short_and_its_successor_are_read(tmp_path: Path) -> None:
    whole = messages(motion())
    half = len(whole) // 2
    write_mcap(tmp_path / "recording.mcap", whole[:half], finish=False)
    write_mcap(tmp_path / "recording-2.mcap", whole[half:])
    found = list(Recording(tmp_path / "recording.mcap", "arm1").messages(["motor_ticks"]))
    assert 90 <= len(found) <= 120
    assert found[-1].message.tick[-1] == 6199


def test_missing_recording_names_the_remedy(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "recording.mcap").unlink()
    with pytest.raises(RecordingError, match="--record"):
        load_run(tmp_path)
    assert main([str(tmp_path)]) == 2


def test_table_for_the_terminal(reported: Path) -> None:
    lines = table_lines(json.loads((reported / "summary.json").read_text())["tasks"])
    assert len(lines) == 4 and "95 % interval" in lines[0] and lines[1].startswith("touch still")


def test_an_empty_run_still_gives_a_report(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_mcap(tmp_path / "recording.mcap", [])
    (tmp_path / "results.json").unlink()
    summary = write_report(tmp_path)
    assert summary["motor"]["ticks"] == 0 and summary["context"]["rate_hz"] is None
