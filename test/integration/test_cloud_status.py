"""A real cloud process without chat: what robots send and say appears on its metrics page, and its log is JSON."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'vla-runtime[gateway]'")
pytest.importorskip("torch", reason="contexts are computed")
sys.path.insert(0, str(Path(__file__).parent))
from prometheus_client.parser import text_string_to_metric_families
from test_cloud_process import CLOCK, PERIOD_S, Cloud, Robot, endpoint, model  # noqa: F401

from vla_common import messages, wire
from vla_common.clock import sleep_s


def samples(url: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return {(s.name, *s.labels.values()): s.value for one in text_string_to_metric_families(page) for s in one.samples}


@pytest.mark.timeout(900)  # on a busy machine a start takes a minute
def test_robots_are_on_the_page_with_their_shields(endpoint: str, model: Path, tmp_path: Path) -> None:  # noqa: F811
    cloud = Cloud(endpoint, model, tmp_path / "log", "--set", "status_listen=127.0.0.1:0", "--log-format", "json")
    robot = Robot("alpha", endpoint, 1)
    report = robot.bus.publisher("shield_report", "alpha")
    try:
        lines = [json.loads(line) for line in cloud.log.read_text().splitlines()]
        assert all(line["process"] == "cloud" for line in lines)
        url = "http://" + next(m[1] for line in lines if (m := re.fullmatch(r"status on http://(.*)", line["message"])))
        robot.bus.wait_connected(60.0)

        def play() -> None:
            robot.send()
            report.put(wire.encode(messages.new("ShieldStatus", header=wire.make_header(1), state=1, reason="no fresh chunk")))
            report.put(b"no report")
            sleep_s(CLOCK, PERIOD_S)

        state, contexts = ("vla_robot_shield_state", "alpha", "COASTING"), ("vla_robot_contexts_total", "alpha")
        end = time.monotonic() + 60.0
        while (got := samples(url)).get(state) != 1.0 or got.get(contexts, 0.0) < 5.0:
            assert time.monotonic() < end, got
            play()
        assert got[("vla_robots",)] == 1
        assert got[("vla_robot_context_age_seconds", "alpha")] < 10.0
        while got[("vla_contexts_total", "published")] != got[("vla_context_seconds_count",)]:
            assert time.monotonic() < end, got  # the page may have been made between the two counts
            got = samples(url)
        with urllib.request.urlopen(f"{url}/vla/status", timeout=10) as answer:
            (row,) = json.load(answer)["robots"]["robots"]
        assert row["shield"]["reason"] == "no fresh chunk"
        for line in cloud.stop_quickly(play).splitlines():
            assert {"time", "level", "process", "message"} <= set(json.loads(line)), line
    finally:
        robot.bus.close()
        cloud.process.kill()
        cloud.process.wait()
    assert "VLA_LOG_FORMAT" not in os.environ


def test_an_address_that_others_reach_needs_leave(model: Path, endpoint: str, capsys) -> None:  # noqa: F811
    from vla_cloud.cloud_main import EXIT_USAGE, main

    arguments = ["--listen", endpoint, "--model", str(model), "--set", "status_listen=0.0.0.0:0"]
    assert main(arguments) == EXIT_USAGE
    assert "status_listen" in capsys.readouterr().err
