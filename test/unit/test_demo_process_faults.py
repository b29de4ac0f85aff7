"""Process faults happen once, at their time, with their follow-ups."""

from __future__ import annotations

from vla_sim.faults import ProcessFault
from vla_sim.process_faults import DueStep, ProcessFaultSchedule

S = 1_000_000_000


def test_kill_and_restart() -> None:
    schedule = ProcessFaultSchedule([ProcessFault("cloud", 1, 0.5, "kill", restart_after_s=5.0)])
    assert schedule.due(0, "running", 0, 3.0) == []
    assert schedule.due(1 * S, "homing", 1, 2.0) == []
    assert schedule.due(2 * S, "running", 1, 0.4) == []
    assert schedule.due(3 * S, "running", 1, 0.5) == [DueStep("cloud", "kill")]
    assert schedule.due(7 * S, "running", 1, 4.5) == []
    assert schedule.due(8 * S, "homing", 2, 0.0) == [DueStep("cloud", "restart")]
    assert schedule.due(99 * S, "running", 5, 9.0) == []


def test_stop_and_resume() -> None:
    schedule = ProcessFaultSchedule([ProcessFault("policy", 0, 0.0, "stop", resume_after_s=1.0)])
    assert schedule.due(0, "running", 0, 0.0) == [DueStep("policy", "stop")]
    assert schedule.due(S, "running", 0, 1.0) == [DueStep("policy", "resume")]


def test_an_episode_that_ends_early_does_not_swallow_its_fault() -> None:
    schedule = ProcessFaultSchedule([ProcessFault("io", 0, 5.0)])
    assert schedule.due(0, "running", 0, 1.0) == []
    assert schedule.due(S, "homing", 1, 0.0) == [DueStep("io", "kill")]
