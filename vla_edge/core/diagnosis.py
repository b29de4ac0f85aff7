"""The state of the edge as a few findings, for tools that watch many devices at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy.typing as npt

from vla_edge.core.health import HEARTBEAT_MAX_AGE_S, JOINTS_MAX_AGE_S, PolicyHealth, Tick
from vla_edge.core.shield_words import Reason, State


class Level(IntEnum):
    """Values as in diagnostic_msgs/DiagnosticStatus."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class Finding:
    """One line. ``values``: details by name."""

    name: str
    level: Level
    message: str
    values: dict[str, str] = field(default_factory=dict)


_CALM = (Reason.NOT_ARMED, Reason.SHUTDOWN, Reason.FOLLOWING, Reason.WAITING_FIRST_CHUNK)
_LOUD = (Reason.ESTOP_INPUT, Reason.ESTOP_SILENT, Reason.MOTOR_STALLED, Reason.NOT_FINITE)


def shield_finding(motor: npt.NDArray[Any] | None, text: str) -> Finding:
    """Of the shield. ``motor``: the motor's record or None; ``text``: the reason in words."""
    if motor is None:
        return Finding("shield", Level.STALE, text or "not running")
    state, reason = State(int(motor["state"])), Reason(int(motor["reason"]))
    level = Level.OK if reason in _CALM else Level.ERROR if reason in _LOUD else Level.WARN
    return Finding("shield", level, f"{state.name}: {text}", {
        "state": state.name, "segment": str(int(motor["segment"])), "stops": str(int(motor["stops"])),
        "stalls": str(int(motor["stalls"])), "limit_interventions": str(int(motor["limited"])),
        "chunks_accepted": str(int(motor["accepted"])), "chunks_rejected": str(int(motor["rejects"].sum()))})


def clock_finding(motor: npt.NDArray[Any] | None, tick: Tick, silent_s: float, lateness_p99_s: float) -> Finding:
    """Of the motor clock. ``silent_s``: since it last ticked."""
    if motor is None or tick is not Tick.TICKING:
        return Finding("motor clock", Level.ERROR, f"{tick.value} ({silent_s:.1f} s)")
    return Finding("motor clock", Level.OK, "ticking", {
        "tick": str(int(motor["tick"])), "missed_ticks": str(int(motor["missed"])),
        "lateness_p99_s": f"{lateness_p99_s:.6f}", "scheduling": motor["scheduling"].item().decode()})


def policy_finding(policy: PolicyHealth | None, cause: str) -> Finding:
    """Of the policy process. ``cause``: what keeps the robot from moving, or empty."""
    if policy is None:
        return Finding("policy", Level.ERROR, "the policy process has not started")
    values = {"skill": policy.skill, "heartbeat_age_s": f"{policy.age_s:.3f}",
              "context_age_s": "" if policy.context_age_s is None else f"{policy.context_age_s:.3f}"}
    if policy.age_s > HEARTBEAT_MAX_AGE_S:
        return Finding("policy", Level.ERROR, cause or f"no heartbeat for {policy.age_s:.1f} s", values)
    if not policy.ready:
        return Finding("policy", Level.WARN, cause or "no plan can be made now", values)
    return Finding("policy", Level.OK, "can plan", values)


def inputs_finding(joints_age_s: float | None, rejects: dict[str, int], cameras: str = "") -> Finding:
    """Of what comes in.

    Args:
        joints_age_s: of the newest joint state taken, None without one.
        rejects: number of what was refused, by name. cameras: what is wrong with them in words, or empty.
    """
    values = {f"refused {name}": str(count) for name, count in rejects.items()}
    values["cameras"] = cameras.partition(":")[0] or "ok"
    if joints_age_s is None:
        return Finding("inputs", Level.ERROR, "no joint state was taken yet: check the driver, its topic and names",
                       values)
    values["joints_age_s"] = f"{joints_age_s:.3f}"
    if joints_age_s > JOINTS_MAX_AGE_S:
        return Finding("inputs", Level.ERROR, f"no fresh joint state from the robot for {joints_age_s:.1f} s", values)
    if cameras:
        return Finding("inputs", Level.ERROR, cameras, values)
    return Finding("inputs", Level.OK, "joint states and images are fresh", values)
