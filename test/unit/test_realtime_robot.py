"""Pacing of the physics and the gate for joint commands."""

from __future__ import annotations

import numpy as np
import pytest

from vla_common import messages
from vla_sim.realtime import CommandGate, Due, Pacer, is_at_home

MS = 1_000_000
NAMES = ("a", "b")


def command(names: tuple[str, ...] = NAMES, position: tuple[float, ...] = (0.1, 0.2)) -> object:
    return messages.new("sensor_msgs/JointState", name=list(names), position=np.array(position))


def test_pacer_keeps_an_absolute_grid_and_catches_up_small_lags() -> None:
    pacer = Pacer(10 * MS, 100 * MS, 1000 * MS)
    assert pacer.deadline_ns() == 1000 * MS
    assert pacer.begin(1003 * MS) == 0 and pacer.deadline_ns() == 1010 * MS
    assert pacer.begin(1060 * MS) == 0 and pacer.deadline_ns() == 1020 * MS
    assert pacer.worst_lag_ns == 50 * MS and pacer.slips == 0


def test_pacer_gives_up_a_large_lag_and_counts_it() -> None:
    pacer = Pacer(10 * MS, 100 * MS, 0)
    pacer.begin(0)
    assert pacer.begin(310 * MS) == 300 * MS
    assert pacer.deadline_ns() == 320 * MS
    assert (pacer.slips, pacer.slipped_ns, pacer.step) == (1, 300 * MS, 2)


def test_pacer_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="period"):
        Pacer(0, 10, 0)


def test_gate_takes_good_commands() -> None:
    gate = CommandGate(NAMES, np.array([1.0, 2.0]), 0.1)
    assert gate.command.tolist() == [1.0, 2.0] and gate.check(10**12) is None
    assert gate.offer(command(), 995 * MS, 1000 * MS)
    assert gate.command.tolist() == [0.1, 0.2] and gate.accepted == 1


@pytest.mark.parametrize(("bad", "cause"), [
    (command(("b", "a")), "wrong_names"),
    (command(("a",), (0.1,)), "wrong_names"),
    (command(position=(0.1,)), "wrong_width"),
    (command(position=(0.1, float("nan"))), "not_finite"),
    (command(position=(0.1, float("inf"))), "not_finite"),
])
def test_gate_refuses_by_name(bad: object, cause: str) -> None:
    gate = CommandGate(NAMES, np.zeros(2), 0.1)
    assert not gate.offer(bad, 0, 0)
    assert gate.refused[cause] == 1 and gate.refused.total() == 1 and gate.command.tolist() == [0.0, 0.0]


def test_gate_refuses_stale_commands_and_reports_silence_once() -> None:
    gate = CommandGate(NAMES, np.zeros(2), 0.1)
    assert not gate.offer(command(), 0, 101 * MS) and gate.refused["stale"] == 1
    gate.offer(command(), 200 * MS, 200 * MS)
    assert gate.check(299 * MS) is None
    report = gate.check(301 * MS)
    assert report is not None and report.is_timed_out and gate.is_timed_out and gate.timeouts == 1
    assert gate.check(400 * MS) is None and gate.command.tolist() == [0.1, 0.2]
    gate.offer(command(position=(0.3, 0.4)), 500 * MS, 500 * MS)
    report = gate.check(500 * MS)
    assert report is not None and not report.is_timed_out and not gate.is_timed_out and gate.timeouts == 1
    gate.refuse("malformed")
    assert gate.refused["malformed"] == 1


def test_due_spreads_jobs() -> None:
    image, state = Due(100, 10), Due(100, 25, offset=1)
    assert [t for t in range(21) if image(t)] == [0, 10, 20]
    assert [t for t in range(10) if state(t)] == [1, 5, 9]
    with pytest.raises(ValueError, match="divide"):
        Due(100, 30)


def test_home() -> None:
    home = np.array([0.0, 1.0, 0.0])
    assert is_at_home(np.array([0.01, 0.99, 0.04]), home, 0.02, 0.05)
    assert not is_at_home(np.array([0.03, 1.0, 0.0]), home, 0.02, 0.05)
    assert not is_at_home(np.array([0.0, 1.0, 0.1]), home, 0.02, 0.05)
