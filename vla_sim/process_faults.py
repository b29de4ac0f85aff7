"""When to signal which process, pure: from the fault file and the course of the episodes to due steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vla_sim.faults import ProcessFault

NS_PER_S: Final = 1_000_000_000
Step = Literal["kill", "terminate", "stop", "resume", "restart"]


@dataclass(frozen=True)
class DueStep:
    """Do ``step`` to ``process`` now."""

    process: str
    step: Step


class ProcessFaultSchedule:
    """Steps become due by the time in the running phase of their episode, follow-ups by the clock alone."""

    def __init__(self, faults: Sequence[ProcessFault]) -> None:
        """Each fault happens once; one whose episode ended sooner happens when the next episode is seen."""
        self._waiting = list(faults)
        self._later: list[tuple[int, DueStep]] = []

    def due(self, now_ns: int, phase: str, episode: int, elapsed_s: float) -> list[DueStep]:
        """Steps due now.

        Args:
            now_ns: monotonic clock.
            phase, episode, elapsed_s: of the newest task status.
        """
        steps = []
        for fault in [f for f in self._waiting if _has_come(f, phase, episode, elapsed_s)]:
            self._waiting.remove(fault)
            steps.append(DueStep(fault.process, fault.action))
            if fault.resume_after_s is not None:
                self._later.append((now_ns + round(fault.resume_after_s * NS_PER_S), DueStep(fault.process, "resume")))
            if fault.restart_after_s is not None:
                restart_ns = now_ns + round(fault.restart_after_s * NS_PER_S)
                self._later.append((restart_ns, DueStep(fault.process, "restart")))
        for item in [item for item in self._later if item[0] <= now_ns]:
            self._later.remove(item)
            steps.append(item[1])
        return steps


def _has_come(fault: ProcessFault, phase: str, episode: int, elapsed_s: float) -> bool:
    if episode > fault.episode:
        return True
    return phase == "running" and episode == fault.episode and elapsed_s >= fault.after_s
