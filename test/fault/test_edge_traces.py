"""Traces of a robot's observations by real processes: io, policy and motor here, and in the slow test the cloud as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from edge_rig import INSTRUCTION, ROOT, Rig

from vla_cli.trace_tree import Trace, of_robot, render, traces_of
from vla_common.span_file import read_spans


def whole_traces(traces: list[Trace], robot: str) -> list[Trace]:
    """Those that came to a command, with all spans and no error: of one that a busy machine held up some are missing."""
    return [
        trace
        for trace in of_robot(traces, robot, whole=True)
        if set(origins(trace)) >= set(EDGE) and not any(span.error for span in trace.spans)
    ]


def tree_of(traces: list[Trace], robot: str) -> Trace:
    """A trace that came to a command, with whole spans: the quickest, which nothing held up."""
    trace = min(
        whole_traces(traces, robot), key=lambda trace: max(span.end_ns for span in trace.spans) - trace.begin_ns
    )
    known = {span.id for span in trace.spans}
    assert len(known) == len(trace.spans)
    assert [span.name for span in trace.spans if span.parent not in known] == ["observation"]
    assert not any(span.error for span in trace.spans), render(trace)
    return trace


def origins(trace: Trace) -> dict[str, str]:
    return {span.name: span.service for span in trace.spans}


EDGE = {
    "observation": "vla-io", "context received": "vla-policy", "chunk": "vla-policy", "denoise": "vla-policy",
    "hand over": "vla-policy", "command": "vla-io",
}  # fmt: skip


def test_the_processes_of_an_edge_tell_one_tree(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    rig = Rig(tmp_path, "--set", "tracing.sample=1.0", "--set", f"tracing.folder={folder}")
    try:
        rig.direction[:7] = 0.05
        rig.say(INSTRUCTION)
        rig.arm()

        acted = [0, 0]  # how many, and at which turn of the robot they were counted: the files grow long

        def have_acted() -> bool:
            if rig.turns >= acted[1] + 50:
                acted[:] = len(whole_traces(traces_of(read_spans([folder])[0]), rig.robot)), rig.turns
            return acted[0] >= 5

        rig.persist(have_acted, 60.0, "five observations that led to a command")
    finally:
        rig.close()
    names = {path.name.rpartition("-")[0] for path in folder.iterdir()}
    assert names == {f"vla-io-{rig.robot}", f"vla-policy-{rig.robot}"}, "the motor process writes none"
    spans, unread = read_spans([folder])
    assert not unread
    trace = tree_of(traces_of(spans), rig.robot)
    assert origins(trace) == EDGE
    by_name = {span.name: span for span in trace.spans}
    root, received = by_name["observation"], by_name["context received"]
    assert root.begin_ns < received.begin_ns < by_name["command"].begin_ns
    for command in (span for span in trace.spans if span.name == "command"):
        (chunk,) = [span for span in trace.spans if span.id == command.parent]
        # Within two ticks of the motor, and by one clock, as all of them are of this machine.
        assert 0 < command.begin_ns - chunk.begin_ns < 200e6


@pytest.mark.slow
def test_a_tick_of_the_demo_is_one_tree_from_camera_to_command(tmp_path: Path) -> None:
    folder, robot = tmp_path / "traces", f"demo_trace_{os.getpid()}"
    on = f"[tracing.sample=1.0, tracing.folder={folder}]"
    command = [sys.executable, "-m", "vla_cli", "demo", "--headless", "--set", "episodes=1", "--set", "video.enabled=false",
               "--set", f"robot={robot}", "--set", f"runs={tmp_path / 'runs'}", "--set", f"cloud={on}", "--set",
               f"edge={on}"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    traces = traces_of(read_spans([folder])[0])
    trace = tree_of(traces, robot)
    cloud = dict.fromkeys(("context", "queue", "encode and prefill", "publish"), "vla-gateway")
    assert origins(trace) == EDGE | cloud, render(trace)
    print(render(trace))
