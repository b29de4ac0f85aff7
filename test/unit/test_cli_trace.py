"""``vla trace``: files of several processes in, one tree out."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_cli.main import main
from vla_common.span_file import SpanFile
from vla_common.tracing import Span, span_id, tick_trace, trace_id

MS = 1_000_000
WALL_NS = 1_700_000_000_000_000_000
CHAT = trace_id("chat", 1)


def file(folder: Path, service: str, instance: str, *spans: Span, skew_ns: int = 0) -> None:
    made = SpanFile.create(folder, service, instance, 1 << 20)
    made.path.rename(folder / f"{service}-{instance}.jsonl")
    made.export(list(spans), WALL_NS + skew_ns)
    made.close()


def span(trace: bytes, name: str, parent: str, begin_ms: float, end_ms: float, error: str = "", **attributes: object) -> Span:
    above = span_id(trace, parent) if parent else b""
    return Span(trace, span_id(trace, name), above, name, round(begin_ms * MS), round(end_ms * MS), attributes, error)


def tick(number: int, begin_ms: float, whole: bool) -> list[Span]:
    trace = tick_trace("arm1", number)
    spans = [span(trace, "observation", "", begin_ms, begin_ms + 1, robot="arm1", sequence=number)]
    return [*spans, span(trace, "command", "observation", begin_ms + 50, begin_ms + 50.2, tick=7)] if whole else spans


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file(tmp_path, "vla-gateway", "8000",
         span(CHAT, "chat", "", 0, 80, request_id="mine", door="http", tokens=3, first_token_s=0.0123456),
         span(CHAT, "attempt 1", "chat", 1, 20, "worker d0.1 died", decode="d0.1"),
         span(CHAT, "attempt 2", "chat", 20, 79))  # fmt: skip
    file(tmp_path, "vla-worker", "d1.1", span(CHAT, "decode", "attempt 2", 30, 78, stopped=True), skew_ns=-40 * MS)
    file(tmp_path, "vla-worker", "p0.1", span(CHAT, "chunk", "prefill", 5, 9))  # killed before its prefill was over
    file(tmp_path, "vla-io", "arm1", *tick(1, 100, True), *tick(2, 200, True), *tick(3, 300, False))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["trace", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_a_request_as_a_tree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *sorted(folder.iterdir()), "--request", "mine")
    assert text.splitlines() == [
        f"trace {CHAT.hex()}: chat mine over http; 5 spans of 3 processes, 90.0 ms",
        "    at ms   took ms",
        "    10.00     80.00  chat          gateway 8000  tokens=3 first_token_s=0.01235",
        "    11.00     19.00  ├─ attempt 1  gateway 8000  decode=d0.1  FAILED: worker d0.1 died",
        "    30.00     59.00  └─ attempt 2  gateway 8000",
        # A machine whose clock is 40 ms behind: the picture says so.
        "     0.00     48.00     └─ decode  worker d1.1   stopped=True",
        "    15.00      4.00  chunk         worker p0.1",
    ]  # fmt: skip
    assert text == shown(capsys, folder, "--trace", CHAT.hex()[:8].upper())


def test_a_robots_newest_observation_that_led_to_a_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "robot arm1, observation 2; 2 spans" in shown(capsys, folder, "--robot", "arm1")
    assert "robot arm1, observation 3; 1 spans" in shown(capsys, folder, "--robot", "arm1", "--latest")


def test_without_a_choice_the_traces_are_listed_oldest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, folder).splitlines()
    assert [line.split(" ms  ")[1] for line in lines] == [
        "chat mine over http", *(f"robot arm1, observation {number}" for number in (1, 2, 3))
    ]  # fmt: skip


def test_what_is_missing_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such trace among 4" in shown(capsys, folder, "--request", "other", code=1)
    assert "none.jsonl: No such file" in shown(capsys, folder / "none.jsonl", code=1)
    (folder / "empty").mkdir()
    shown(capsys, folder / "empty", code=1)
    whole = (folder / "vla-io-arm1.jsonl").read_bytes()
    (folder / "vla-io-arm1.jsonl").write_bytes(whole + whole[:-9])
    assert main(["trace", str(folder)]) == 0
    assert "1 lines could not be read" in capsys.readouterr().err


def test_a_trace_whose_first_span_is_missing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file(tmp_path, "vla-policy", "arm1", span(CHAT, "chunk", "observation", 1, 2))
    assert "without its first span, from chunk; 1 spans" in shown(capsys, tmp_path, "--trace", CHAT.hex())
