"""Fault schedules: ``config/faults/*.yaml`` as typed data. Unknown keys are refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Target = Literal["cloud", "policy", "io", "recorder"]
Action = Literal["kill", "stop", "terminate"]


@dataclass(frozen=True)
class DirectionFaults:
    """What one direction of the link does to messages. Delays in seconds, the rest are probabilities per message.

    The delay of a message is ``delay_s`` plus a uniform draw from ± ``jitter_s``; without ``keep_order`` jitter alone
    may let a message overtake another. ``reorder`` holds a message for ``reorder_hold_s`` more.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_hold_s: float = 0.15
    corrupt: float = 0.0
    corrupt_bits: int = 8
    keep_order: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot be meant."""
        for name in ("loss", "duplicate", "reorder", "corrupt"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is a probability, 0 .. 1, not {getattr(self, name):g}")
        if not 0.0 <= self.jitter_s <= self.delay_s:
            raise ValueError(f"jitter_s of {self.jitter_s:g} must lie in 0 .. delay_s ({self.delay_s:g})")
        if self.reorder_hold_s < 0 or self.corrupt_bits < 1:
            raise ValueError("reorder_hold_s must not be negative and corrupt_bits at least 1")


@dataclass(frozen=True)
class EpisodeOutage:
    """One outage in every episode; it starts at a uniform draw after the instruction was given. Seconds."""

    duration_s: float
    start_min_s: float = 0.2
    start_max_s: float = 0.8

    def __post_init__(self) -> None:
        """Refuse an empty or reversed window."""
        if self.duration_s <= 0 or not 0 <= self.start_min_s <= self.start_max_s:
            raise ValueError("an outage needs duration_s > 0 and 0 <= start_min_s <= start_max_s")


@dataclass(frozen=True)
class TimedOutage:
    """An outage at a time since the first episode began. Seconds."""

    at_s: float
    duration_s: float


@dataclass(frozen=True)
class LinkFaults:
    """The link between edge and cloud: ``up`` carries observations, ``down`` context tokens."""

    up: DirectionFaults = field(default_factory=DirectionFaults)
    down: DirectionFaults = field(default_factory=DirectionFaults)
    episode_outage: EpisodeOutage | None = None
    outages: tuple[TimedOutage, ...] = ()


@dataclass(frozen=True)
class ProcessFault:
    """A signal to one process, ``after_s`` seconds into the running phase of an episode.

    kill: SIGKILL. stop: SIGSTOP, continued after ``resume_after_s``. terminate: SIGTERM.
    ``restart_after_s`` starts the cloud again; None leaves it dead. The edge's own children are restarted by the edge.
    """

    process: Target
    episode: int
    after_s: float
    action: Action = "kill"
    restart_after_s: float | None = None
    resume_after_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse combinations that would do something else than they say."""
        if self.restart_after_s is not None and (self.process != "cloud" or self.action == "stop"):
            raise ValueError("restart_after_s is for a killed or terminated cloud; the edge restarts its own children")
        if self.action == "stop" and self.resume_after_s is None:
            raise ValueError("action: stop needs resume_after_s")
        if self.resume_after_s is not None and self.action != "stop":
            raise ValueError("resume_after_s is for action: stop")


@dataclass(frozen=True)
class FaultPlan:
    """A whole fault file.

    Attributes:
        title: one line for people.
        link: None for a direct connection without a link process.
        processes: signals to processes.
        episode_timeout_s: time-out of an episode, longer than without faults because outages count.
        timeout_extended_by_outages: time without a moving shield does not count instead.
        homing_timeout_s: after this long without reaching the ready pose the run ends, by name.
    """

    title: str
    link: LinkFaults | None = None
    processes: tuple[ProcessFault, ...] = ()
    episode_timeout_s: float = 14.0
    timeout_extended_by_outages: bool = False
    homing_timeout_s: float = 60.0
