"""Configuration, command lines, live view, events and process table of the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from vla_common.clock import ManualClock, SystemClock, sleep_s
from vla_common.config import ConfigError, load_config
from vla_common.messages import new
from vla_common.metrics import Histogram
from vla_sim import demo_config, sim_main
from vla_sim.demo_config import DemoConfig, project_path, read_config
from vla_sim.demo_processes import Endpoints, command_lines, how
from vla_sim.demo_watch import LiveState, batch_rate_hz
from vla_sim.event_log import EventLog, EventTail, read_events
from vla_sim.faults import FaultPlan
from vla_sim.ports import with_free_port
from vla_sim.process_table import CpuSampler, edge_children, parent_of
from vla_sim.terminal_view import draw

ROOT = Path(__file__).resolve().parents[2]
S = 1_000_000_000


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


def test_shipped_settings_are_the_defaults() -> None:
    assert load_config(DemoConfig, ROOT / "config" / "demo.yaml") == DemoConfig()


def test_options_reach_the_configuration(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    config = read_config(["--episodes", "3", "--tasks", "pick", "--motion", "both", "--seed", "4", "--model", str(model),
                          "--shuffled", "--no-video", "--headless", "--set", "video.max_s=5"])
    assert (config.episodes, config.tasks, config.motion, config.seed) == (3, ("pick",), "both", 4)
    assert config.shuffled and config.headless and not config.video.enabled and config.video.max_s == 5.0


@pytest.mark.parametrize(("arguments", "message"), [
    (["--set", "epsodes=3"], "episodes"),
    (["--tasks", "push"], "touch, pick"),
    (["--episodes", "0"], "at least 1"),
    (["--model", "/nowhere"], "vla train"),
])
def test_wrong_options_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(arguments)


def test_paths_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert project_path(Path("config/demo.yaml")) == ROOT / "config" / "demo.yaml"
    assert project_path(Path("nowhere.yaml")) == tmp_path / "nowhere.yaml"
    assert demo_config.project_path(tmp_path) == tmp_path


def test_command_lines_are_accepted_by_the_simulator(tmp_path: Path) -> None:
    config = DemoConfig(episodes=7, seed=3, tasks=("pick",), motion="both", shuffled=True,
                        faults=ROOT / "config/faults/wifi.yaml")
    plan = load_config(FaultPlan, config.faults)
    at = Endpoints.pick(with_link=True)
    lines = command_lines(config, plan, at, tmp_path)
    assert list(lines) == ["cloud", "sim", "link", "edge"]
    assert lines["link"][lines["link"].index("--listen") + 1] == lines["edge"][lines["edge"].index("--cloud") + 1]
    given, results = sim_main.parse(lines["sim"][lines["sim"].index("sim") + 1:])
    assert (given.episodes.count, given.episodes.seed, given.episodes.tasks) == (7, 3, ("pick",))
    assert given.episodes.motion == "both" and given.episodes.shuffled and results == tmp_path / "results.json"
    assert given.operator.timeout_s == plan.episode_timeout_s == 14.0
    runner = sim_main.make_runner(given)
    assert len(runner.episodes) == 7 and runner.results.mode == "shuffled"


def test_without_a_link_the_edge_talks_to_the_cloud(tmp_path: Path) -> None:
    at = Endpoints.pick(with_link=False)
    lines = command_lines(DemoConfig(cloud_command=("prog", "--bus", "{bus}")), None, at, tmp_path)
    assert at.cloud == at.edge_cloud and "link" not in lines
    assert lines["cloud"][:5] == ["prog", "--bus", at.bus, "--listen", at.cloud]
    assert "operator.timeout_s=8.0" in lines["sim"]


def test_simulator_refuses_an_unknown_motion() -> None:
    config, _ = sim_main.parse(["--motion", "jumping"])
    with pytest.raises(ConfigError, match="still, moving or both"):
        sim_main.make_runner(config)


def test_words_for_exit_codes_and_ports() -> None:
    assert how(-9) == "killed by SIGKILL" and how(3) == "exit code 3"
    assert with_free_port("tcp/127.0.0.1:7447") == "tcp/127.0.0.1:7447"
    assert 1024 < int(with_free_port("tcp/127.0.0.1:0").rpartition(":")[2]) < 65536


def test_events_of_several_writers_are_read_as_they_come(tmp_path: Path) -> None:
    path, clock = tmp_path / "events.jsonl", ManualClock(5)
    tail = EventTail(path)
    assert tail.read() == []
    EventLog(path, clock).write("outage", start_ns=1, end_ns=2)
    assert tail.read() == [{"kind": "outage", "at_ns": 5, "start_ns": 1, "end_ns": 2}]
    with path.open("a") as file:
        file.write('{"kind": "process", ')
    assert tail.read() == []
    with path.open("a") as file:
        file.write('"at_ns": 7}\n')
    assert tail.read() == [{"kind": "process", "at_ns": 7}]
    assert len(read_events(path)) == 2
    EventLog(None, clock).write("forgotten")


def test_process_table_knows_children_and_their_cpu() -> None:
    program = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    child = subprocess.Popen([sys.executable, "-c", program, "-m", "vla_edge.policy_main"])
    try:
        assert parent_of(child.pid) == os.getpid()
        sampler = CpuSampler()
        assert sampler.sample(0, {"child": child.pid}) == {}
        for second in range(1, 200):
            sleep_s(SystemClock(), 0.05)
            if sampler.sample(second * S, {"child": child.pid})["child"] > 0.0:
                break
        assert max(sampler.shares["child"]) > 0.0
    finally:
        child.kill()
        child.wait()
    assert parent_of(child.pid) is None
    assert CpuSampler().sample(0, {"child": child.pid}) == {}
    assert edge_children(os.getpid()) == {}


def live_text(state: LiveState, now_ns: int) -> str:
    console = Console(width=150, record=True, file=open(os.devnull, "w"))
    with console.file:
        console.print(draw(state, now_ns))
    return console.export_text()


def test_live_view_shows_what_matters() -> None:
    state = LiveState("vla demo", "wifi", events=deque(["fault: cloud kill"]))
    assert "waiting for the simulator" in live_text(state, S)
    late = Histogram(10)
    late.record(0.00012)
    state.task = new("TaskStatus", phase="running", instruction="touch the red block", target="red cube", task="touch",
                     episode=1, episodes_total=5, successes=1, failures=1, wrong_object=1, elapsed_s=2.5)
    state.shield = new("ShieldStatus", state=2, reason="chunks ran out")
    state.policy = new("PolicyStatus", context_age_s=0.12, context_rate_hz=9.9, denoise_s=0.003, denoise_p50_s=0.003,
                       denoise_p99_s=0.004)
    state.heard_ns = {"task": S, "shield": S, "policy": S}
    state.lateness, state.cpu, state.tick_rate_hz = late.summary(), {"motor": 0.05}, 100.0
    state.results = [("success", ""), ("wrong_object", "")]
    text = live_text(state, S + 1)
    for words in ("touch the red block", "BRAKING", "chunks ran out", "9.9 Hz", "age  120 ms", "p99 4.0 ms", "100.0 Hz",
                  "p99.9 0.12 ms", "1 of 2  (50 %)", "●▲", "motor 5 %", "fault: cloud kill", "wifi", "2 of 5"):
        assert words in text, words
    assert "not heard" in live_text(state, 5 * S)


def test_rate_of_commands_from_batches() -> None:
    assert batch_rate_hz([(0, 7), (S // 10, 10), (S // 5, 10)]) == pytest.approx(100.0)
    assert batch_rate_hz([(0, 7)]) == 0.0


def test_video_overlay_keeps_the_frame_and_draws_on_it() -> None:
    video = pytest.importorskip("vla_sim.video")
    frame = np.zeros((480, 640, 3), np.uint8)
    task = new("TaskStatus", phase="running", instruction="lift the blue cube", episodes_total=2)
    out = video.overlay(frame, 1.5, task, new("ShieldStatus", state=3), new("PolicyStatus", context_age_s=0.1))
    assert out.shape == frame.shape and out[:46].any() and out[-26:].any() and not out[100:400].any()
    track = video.Track([10, 20], ["a", "b"])
    assert (track.at(5), track.at(10), track.at(99)) == (None, "a", "b")


def test_video_frames_follow_the_robots_clock() -> None:
    video = pytest.importorskip("vla_sim.video")
    tracks = {name: video.Track() for name in ("sim_state", "task_status", "shield_status", "policy_status")}
    tracks["sim_state"] = video.Track([0, 40_000_000, 400_000_000], ["x", "y", "z"])
    drawn: list[str] = []

    def draw_state(state: str) -> np.ndarray:
        drawn.append(state)
        return np.zeros((60, 80, 3), np.uint8)

    assert len(list(video.frames(0, tracks, 60.0, draw_state))) == 11
    assert drawn == ["x", *["y"] * 9, "z"]
    assert len(list(video.frames(0, tracks, 0.2, draw_state))) == 5
