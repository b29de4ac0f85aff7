"""Who is to blame: does the motor process tick, what keeps the robot from moving, and how an operator is told.

All ages are differences of this host's CLOCK_MONOTONIC. Neither stamps of messages nor simulated time nor the wall
clock can stop the watch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy.typing as npt

from vla_edge.core.chunk import REJECTS
from vla_edge.core.shield_words import REARM_TEXT, REASON_TEXT, Rearm, Reason, State

NS: Final = 1_000_000_000
JOINTS_MAX_AGE_S: Final = 0.2
HEARTBEAT_MAX_AGE_S: Final = 0.25
REFUSED_RECENTLY_S: Final = 1.0
"""A refusal older than this no longer explains anything."""

SKILLS: Final = ("none", "home", "policy")
"""Values of the planner's Skill, in the order of the heartbeat record's ``skill``."""

NOT_STARTED: Final = "THE MOTOR PROCESS HAS NOT STARTED: nothing is sent"
NOT_TICKING: Final = "THE MOTOR PROCESS DOES NOT TICK: the robot is on its own time-out"


class Tick(Enum):
    """What the motor process does."""

    NOT_STARTED = "not started"
    TICKING = "ticking"
    HANGS = "hangs"


class TickWatch:
    """Watches that the motor's record changes. It looks at nothing in the record, only at its sequence number.

    Attributes:
        state: as of the last look.
        silent_s: how long the record has not changed; after a hang that just ended, how long that one was.
    """

    def __init__(self, hang_s: float, now_ns: int) -> None:
        """``hang_s``: a record that has not changed for longer hangs. ``now_ns``: start of the watch."""
        self._hang_ns = round(hang_s * NS)
        self._sequence: int | None = None
        self._changed_ns = now_ns
        self.state = Tick.NOT_STARTED
        self.silent_s = 0.0

    def look(self, sequence: int | None, now_ns: int) -> bool:
        """Look at the record.

        Args:
            sequence: its number, None if there is none.
            now_ns: robot's CLOCK_MONOTONIC.

        Returns:
            True if the state has changed.
        """
        before, self.silent_s = self.state, (now_ns - self._changed_ns) / NS
        if sequence is not None and sequence != self._sequence:
            self._sequence, self._changed_ns = sequence, now_ns
            self.state = Tick.TICKING
        elif self._sequence is not None and now_ns - self._changed_ns > self._hang_ns:
            self.state = Tick.HANGS
        return self.state is not before


@dataclass(frozen=True)
class PolicyHealth:
    """The policy process as its heartbeat tells.

    Attributes:
        age_s: of the heartbeat.
        ready: a chunk could be made now. skill: one of SKILLS. why_not: why the last plan came to nothing, or empty.
        context_age_s: of the newest context taken, None without one.
        refused, refused_count, refused_age_s: contexts refused since then: name and number, age of the last.
    """

    age_s: float
    ready: bool
    skill: str
    why_not: str = ""
    context_age_s: float | None = None
    refused: str = ""
    refused_count: int = 0
    refused_age_s: float = 0.0

    @classmethod
    def of(cls, record: npt.NDArray[Any], now_ns: int) -> PolicyHealth:
        """From the heartbeat record."""
        context_ns = int(record["context_ns"])
        return cls(
            (now_ns - int(record["stamp_ns"])) / NS, bool(record["ready"]), SKILLS[int(record["skill"])],
            record["why_not"].item().decode(), None if context_ns == 0 else (now_ns - context_ns) / NS,
            record["refused"].item().decode(), int(record["refused_count"]), (now_ns - int(record["refused_ns"])) / NS)

    @property
    def can_plan(self) -> bool:
        """It lives and could make a chunk now."""
        return self.ready and self.age_s <= HEARTBEAT_MAX_AGE_S


class ContextStreak:
    """Contexts as the heartbeat tells of them: the newest one taken, and what was refused since."""

    def __init__(self) -> None:
        """None came yet."""
        self.forget()

    def forget(self) -> None:
        """Another instruction: contexts of the former one count no longer."""
        self._context_ns = self._count = self._refused_ns = 0
        self._name = b""

    def taken(self, stamp_ns: int) -> None:
        """A context with this stamp was taken."""
        self.forget()
        self._context_ns = stamp_ns

    def refused(self, name: str, now_ns: int) -> None:
        """A context was refused; the newest name is told, with the number of all."""
        self._name, self._refused_ns = name.encode()[:32], now_ns
        self._count += 1

    def fill(self, record: npt.NDArray[Any]) -> None:
        """Put it into a heartbeat record."""
        record["context_ns"], record["refused"] = self._context_ns, self._name
        record["refused_count"], record["refused_ns"] = self._count, self._refused_ns


class ChunkRefusals:
    """Chunks that the motor process refused since it last took one."""

    def __init__(self) -> None:
        """Nothing was refused yet."""
        self._accepted = -1
        self._base: list[int] = [0] * len(REJECTS)
        self._total = 0
        self._last_ns = 0
        self._worst = ("", 0)

    def look(self, accepted: int, rejects: list[int], now_ns: int) -> str:
        """Look at the motor's counts.

        Returns:
            Name and number, such as ``chunk_joint_names 3``; empty if none was refused within the last second.
        """
        if accepted != self._accepted:
            self._accepted, self._base, self._total = accepted, list(rejects), sum(rejects)
            self._worst = ("", 0)
        if sum(rejects) != self._total:
            self._total, self._last_ns = sum(rejects), now_ns
            grown = [count - base for count, base in zip(rejects, self._base, strict=True)]
            self._worst = (REJECTS[grown.index(max(grown))].value, max(grown))
        name, count = self._worst
        return f"{name} {count}" if count and now_ns - self._last_ns <= REFUSED_RECENTLY_S * NS else ""


def culprit(joints_age_s: float | None, policy: PolicyHealth | None, chunks_refused: str, cameras: str = "") -> str:
    """What keeps chunks from coming, in words; empty if nothing does.

    Args:
        joints_age_s: of the newest joint state, None if none was received.
        policy: its heartbeat, None if there was none yet.
        chunks_refused: see :meth:`ChunkRefusals.look`.
        cameras: name of what is wrong with the cameras, or empty.
    """
    if joints_age_s is None:
        return "no joint state from the robot yet"
    if joints_age_s > JOINTS_MAX_AGE_S:
        return f"no fresh joint state from the robot for {joints_age_s:.1f} s"
    if policy is None:
        return "the policy process has not started"
    if policy.age_s > HEARTBEAT_MAX_AGE_S:
        return f"policy process does not answer (no heartbeat for {policy.age_s:.1f} s)"
    if policy.skill == "none":
        return "no instruction given"
    if policy.skill == "policy" and not policy.ready:
        return _context_culprit(policy, cameras)
    if chunks_refused:
        return f"chunks are refused: {chunks_refused}"
    return f"the policy makes no chunk: {policy.why_not}" if policy.why_not else ""


def _context_culprit(policy: PolicyHealth, cameras: str) -> str:
    if policy.refused_count and policy.refused_age_s <= REFUSED_RECENTLY_S:
        return f"contexts are refused: {policy.refused} {policy.refused_count}"
    since = "yet" if policy.context_age_s is None else f"for {policy.context_age_s:.1f} s"
    return f"no context from the cloud {since}" + (f" ({cameras})" if cameras else "")


RUN_OUT: Final = (Reason.QUEUE_EMPTY, Reason.NO_FIRST_CHUNK)


def operator_text(state: State, reason: Reason, verdict: Rearm, can_plan: bool, cause: str, why: str = "") -> str:
    """Why the robot does what it does and what to do about it, in one line.

    Args:
        state, reason, verdict: of the shield.
        can_plan: the policy could make a chunk now.
        cause: see :func:`culprit`; after chunks ran out the last one that was found.
        why: of a stop that was asked for and is not an emergency.
    """
    text = f"stopped, {why}: re-arm to go on" if why and reason is Reason.ESTOP else REASON_TEXT[reason]
    names_cause = reason in RUN_OUT and cause
    if names_cause:
        text = f"{text.split(':', 1)[0]}: {cause}"
    if state is not State.HOLDING or reason in (Reason.SHUTDOWN, Reason.NO_POSE):
        if reason is Reason.NO_POSE and verdict is not Rearm.ACCEPTED:
            text += f" ({REARM_TEXT[verdict].removeprefix('refused: ')})"
        return text
    if verdict is not Rearm.ACCEPTED:
        return f"{text}; re-arm {REARM_TEXT[verdict]}"
    if not can_plan:
        return text if names_cause else f"{text}; not ready: {cause or 'no plan yet'}"
    return f"{text}; ready for a re-arm" if names_cause else text
