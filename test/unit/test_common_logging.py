"""JSON logs: one object per line whatever is logged, in processes that are started from here, too."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import threading

import pytest

from vla_common.logging_setup import FORMAT_VARIABLE, add_log_argument, setup_logging


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setenv(FORMAT_VARIABLE, "text")
    root = logging.getLogger()
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    yield
    root.handlers[:], root.level, sys.excepthook, threading.excepthook = before


def test_one_object_per_line(capsys, monkeypatch) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    setup_logging("motor")
    log = logging.getLogger("x")
    log.warning("late by %d us\nand more", 120, extra={"robot": "arm1", "request_id": None})
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("it failed: %s", "\x00é\udc80")
    written = capsys.readouterr().err.splitlines()
    late, failed = (json.loads(line) for line in written)
    assert late["time"].endswith("Z") and len(late["time"]) == len("2026-01-01T00:00:00.000Z")
    assert {key: late[key] for key in ("level", "process", "message", "robot")} == {
        "level": "warning", "process": "motor", "message": "late by 120 us\nand more", "robot": "arm1"}  # fmt: skip
    assert "request_id" not in late and late["pid"] > 0
    assert failed["level"] == "error" and "ValueError: no" in failed["error"] and "\n" in failed["error"]


def test_the_flag_counts_before_and_after_the_set_up_and_for_children(capsys) -> None:
    parser = argparse.ArgumentParser()
    add_log_argument(parser)
    setup_logging("edge")
    assert vars(parser.parse_args(["--log-format", "json"])) == {}
    logging.getLogger().info("a")
    assert json.loads(capsys.readouterr().err)["process"] == "edge"
    code = "from vla_common.logging_setup import setup_logging; import logging; setup_logging('child'); logging.info('b'); 1 / 0"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said, died = (json.loads(line) for line in child.stderr.splitlines())
    assert said["message"] == "b" and child.returncode == 1
    assert died["level"] == "critical" and "ZeroDivisionError" in died["error"] and died["process"] == "child"
    parser.parse_args(["--log-format", "text"])
    logging.getLogger().info("c")
    assert capsys.readouterr().err.endswith("INFO    edge: c\n")


def test_an_exception_in_a_thread_is_a_line_too(capsys, monkeypatch) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    setup_logging("cloud")
    hook = threading.excepthook
    hook(threading.ExceptHookArgs((RuntimeError, RuntimeError("boom"), None, None)))
    assert "boom" in json.loads(capsys.readouterr().err)["message"]


def test_an_unknown_format_names_the_nearest(monkeypatch) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "jsn")
    with pytest.raises(ValueError, match="did you mean 'json'"):
        setup_logging("x")
