"""What follows a run: report, table, video. A failure here is told and costs nothing of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_common.process import StopFlag, spawn, stop_all
from vla_sim.demo_config import DemoConfig
from vla_sim.demo_processes import environment
from vla_sim.episodes import RunResults
from vla_sim.recording import RecordingError
from vla_sim.report import table_lines, write_report
from vla_sim.report_html import ms, number
from vla_sim.run_files import read_json


def make_report(folder: Path, config: DemoConfig, stop: StopFlag, say: Callable[[str], None]) -> None:
    """Write report and video, print the table and the figures that matter."""
    try:
        summary = write_report(folder, lambda text: say(f"report: {text}"))
    except RecordingError as error:
        say(f"report: {error}")
        results = read_json(folder / "results.json", None)
        if results is not None:
            say("\n".join(table_lines(RunResults.from_json(results).to_json()["table"])))
        return
    if config.video.enabled and not stop.is_set():
        _draw_video(folder, config.video.max_s, stop, say)
    say("")
    say("\n".join(table_lines(summary["tasks"])))
    say("")
    for line in figure_lines(summary):
        say(line)
    say(f"report      {folder / 'report.html'}")


def figure_lines(summary: dict[str, Any]) -> list[str]:
    """The figures that tell which share of the run was real."""
    motor, context, denoise, shield = (summary[name] for name in ("motor", "context", "denoise_s", "shield"))
    late, age = motor["lateness_s"], context["age_s"]
    cpu = summary["cpu_share"]
    lines = [
        f"commands    {motor['ticks']} sent, {motor['limit_violations_total']} limit violations, "
        f"{motor['missed_deadlines']} missed deadlines",
        f"clock       lateness p50 {ms(late['p50'], 2)}, p99 {ms(late['p99'], 2)}, p99.9 {ms(late['p99.9'], 2)}",
        f"context     {number(context['rate_hz'], 1)} Hz, age p50 {ms(age['p50'], 0)}, p99 {ms(age['p99'], 0)}",
        f"denoise     p50 {ms(denoise['p50'])}, p99 {ms(denoise['p99'])}",
        f"shield      {shield['brakings']} brakings, {shield['operator_rearms']} re-arms by the operator",
        "cpu         " + ", ".join(f"{name} {100 * share['mean']:.0f} %" for name, share in cpu.items()),
    ]
    if summary["aborted"]:
        lines.insert(0, f"ended early {summary['aborted']}")
    return lines


def _draw_video(folder: Path, max_s: float, stop: StopFlag, say: Callable[[str], None]) -> None:
    """In a process of its own: a graphics driver that fails must not cost the report."""
    say("video: drawing")
    child = spawn([sys.executable, "-m", "vla_sim.video", str(folder), "--max-s", str(max_s)],
                  environment=environment(), log_path=folder / "logs" / "video.log")
    try:
        while child.poll() is None:
            if stop.wait(0.1):
                return
    finally:
        stop_all([child], 0.5)
    if child.returncode != 0:
        say(f"video: failed; see {folder / 'logs' / 'video.log'}")
    else:
        say(f"video       {folder / 'video.mp4'}")
