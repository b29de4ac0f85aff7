"""What robots say of their shields is shown, bounded, and never trusted."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("zenoh")
from vla_cloud.context.shield_reports import REPORT, ShieldReports
from vla_cloud.core.robot_board import MAX_TEXT, RobotBoard
from vla_common import messages, wire
from vla_common.topics import data_key
from vla_common.zenoh_session import Received

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
NS = 1_000_000_000


def sample(robot="arm1", payload=None, received_ns=5 * NS, **fields):
    if payload is None:
        fields = {"state": 3, "reason": "not armed", "rearm_ready": True, "missed_ticks": 2, "lateness_p99_s": 0.001, **fields}
        payload = wire.encode(messages.new("ShieldStatus", header=wire.make_header(1), **fields))
    key = data_key(REPORT.topic("R"), REPORT.type_name).replace("/R/", f"/{robot}/", 1)
    return Received(payload, None, received_ns, key)


@pytest.fixture
def board():
    return RobotBoard(max_robots=3, forget_after_ns=60 * NS)


def test_a_report_is_shown_with_its_age(board):
    ShieldReports(board).receive(sample())
    (row,) = board.rows(7 * NS)
    assert row["robot"] == "arm1" and row["context_age_s"] is None and row["observation_age_s"] is None
    assert row["shield"] == {"state": "HOLDING", "reason": "not armed", "rearm_ready": True, "missed_ticks": 2,
                             "limit_interventions": 0, "lateness_p99_s": pytest.approx(0.001), "age_s": 2.0}
    assert board.rows(66 * NS) == []


@pytest.mark.parametrize("wrong", [
    sample(payload=b""), sample(payload=b"\x00" * 64), sample(state=4), sample(state=255), sample("a b"), sample("*"), sample("<img>")],
    ids=["empty", "zeros", "state4", "state255", "space", "any", "tag"])  # fmt: skip
def test_what_is_no_report_is_refused(board, wrong):
    reports = ShieldReports(board)
    reports.receive(wrong)
    assert reports.refused == 1 and board.rows(5 * NS) == []


def test_words_are_cut_and_numbers_finite(board):
    ShieldReports(board).receive(sample(reason="x" * 5000, lateness_p99_s=float("nan")))
    (row,) = board.rows(5 * NS)
    assert len(row["shield"]["reason"]) == MAX_TEXT and row["shield"]["lateness_p99_s"] == 0.0


def test_robots_that_only_report_are_bounded(board):
    reports = ShieldReports(board)
    for number in range(100):
        reports.receive(sample(f"r{number}"))
    assert len(board.rows(5 * NS)) == 3
