"""Physical judgements of a command stream: limits by finite differences, and the course of a stop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from edge_rig import LIMITS

PERIOD_S = 0.01
BRAKING, HOLDING = 2, 3
SLACK = 1 + 1e-9
# A position of 3 rad is rounded to 4e-16, which a third difference turns into 2e-9 rad/s³, a second into 2e-11 rad/s².
ROUNDING = {"velocity": 1e-12, "acceleration": 1e-10, "jerk": 1e-8}
QUANTITIES = tuple(ROUNDING)


def ratios(position: np.ndarray) -> dict[str, float]:
    """Largest speed, acceleration and jerk of consecutive commands over their limits, and the most that a position
    limit is exceeded by (negative inside)."""
    found = {"position": float(np.max(np.maximum(LIMITS.position_lower - position, position - LIMITS.position_upper)))}
    for order, name in enumerate(QUANTITIES, start=1):
        change = np.abs(np.diff(position, order, axis=0)) / PERIOD_S**order - ROUNDING[name]
        found[name] = float(np.max(change / getattr(LIMITS, name), initial=0.0))
    return found


def worst(parts: list[np.ndarray]) -> dict[str, float]:
    """:func:`ratios` over several stretches, each of consecutive commands."""
    each = [ratios(part) for part in parts if len(part)]
    return {name: max(one[name] for one in each) for name in ("position", *QUANTITIES)}


def stretches(ticks: np.ndarray, received: dict[int, np.ndarray] | None = None) -> list[np.ndarray]:
    """Positions split where a segment begins; with ``received``, only those that arrived, split where some did not."""
    cuts = np.flatnonzero(np.diff(ticks["segment"].astype(np.int64))) + 1
    parts = []
    for part in np.split(ticks, cuts):
        if received is None:
            parts.append(part["position"])
            continue
        got = np.array([int(stamp) in received for stamp in part["stamp_ns"]])
        for run in np.split(np.arange(len(part)), np.flatnonzero(np.diff(got.astype(int))) + 1):
            if len(run) and got[run[0]]:
                parts.append(np.array([received[int(stamp)] for stamp in part["stamp_ns"][run]]))
    return parts


@dataclass(frozen=True)
class Stop:
    """Course of one stop.

    Attributes:
        reaction_s: onset of the fault to the first braking command. brake_s: from there to rest.
        distance: rad (closure), of the joint that went farthest, from the last command before braking.
        faults: what was wrong with it, in words.
    """

    reaction_s: float
    brake_s: float
    distance: float
    faults: tuple[str, ...]

    @property
    def time_to_stop_s(self) -> float:
        """Onset of the fault to rest."""
        return self.reaction_s + self.brake_s


def judge_stop(ticks: np.ndarray, onset_ns: int) -> Stop | None:
    """The first stop that begins after ``onset_ns``; None without one. ``ticks`` must reach to its end."""
    braking = (ticks["state"] == BRAKING) & (ticks["stamp_ns"] > onset_ns)
    # A stop that ends within its first tick goes straight to HOLDING.
    held = (ticks["state"] == HOLDING) & (ticks["stamp_ns"] > onset_ns)
    if not braking.any() and not held.any():
        return None
    first = int(np.flatnonzero(braking | held)[0])
    rest = first + int(np.flatnonzero(ticks["state"][first:] == HOLDING)[0])
    q = ticks["position"][first - 3:rest + 1]
    v = np.diff(q, axis=0) / PERIOD_S  # v[1] is the last speed before braking, v[2] the first under braking
    a = np.diff(v, axis=0) / PERIOD_S  # a[0] is the acceleration at v[1]
    v0, a0, speeds = v[1], a[0], v[2:]
    faults = _faults_of_course(v0, a0, speeds)
    # Independent of the code under test: fade the acceleration, then a trapezium of deceleration; sampled, so 4 ticks.
    top = np.abs(v0) + a0**2 / (2 * LIMITS.jerk)
    time_s = np.abs(a0) / LIMITS.jerk + top / LIMITS.acceleration + LIMITS.acceleration / LIMITS.jerk + 4 * PERIOD_S
    reach = top * (np.abs(a0) / LIMITS.jerk + 0.5 * top / LIMITS.acceleration
                   + 0.5 * LIMITS.acceleration / LIMITS.jerk + 4 * PERIOD_S)
    brake_s = float((ticks["stamp_ns"][rest] - ticks["stamp_ns"][first]) / 1e9) + PERIOD_S
    moved = np.abs(q[-1] - q[2])
    # Missed ticks stretch the time but not the commands.
    if (rest - first + 1) * PERIOD_S > time_s.max():
        faults.append(f"braked for {rest - first + 1} commands, at most {time_s.max() / PERIOD_S:.1f} expected")
    if (moved > reach + 1e-9).any():
        faults.append(f"stopping distance {moved} beyond {reach}")
    if (np.abs(a) > SLACK * LIMITS.acceleration + 1e-9).any():
        faults.append("acceleration above its limit while braking")
    return Stop(float(ticks["stamp_ns"][first] - onset_ns) / 1e9, brake_s, float(moved.max()), tuple(faults))


def _faults_of_course(v0: np.ndarray, a0: np.ndarray, speeds: np.ndarray) -> list[str]:
    """|v| <= |v0| + a0²/2j, then monotone to exactly zero without reversing."""
    faults = []
    fade = a0**2 / (2 * LIMITS.jerk)
    if (np.abs(speeds) > np.abs(v0) + fade + 1e-9).any():
        faults.append("sped up by more than a0²/2j while braking")
    for joint, column in enumerate(speeds.T):
        # An acceleration that points against a small speed carries the joint through zero whatever is done.
        carried = v0[joint] * a0[joint] < 0 and np.abs(v0[joint]) <= fade[joint] + np.abs(a0[joint]) * PERIOD_S
        direction = np.sign(v0[joint]) if abs(v0[joint]) > 1e-9 else 0.0
        if direction and not carried and (column * direction < -1e-9).any():
            faults.append(f"{LIMITS.names[joint]} reversed while braking")
        size = np.abs(column)
        peak = int(size.argmax()) if len(size) else 0
        if not carried and (np.diff(size[peak:]) > 1e-9).any():
            faults.append(f"{LIMITS.names[joint]} sped up again while braking")
    if len(speeds) and np.abs(speeds[-1]).max() > 1e-12:
        faults.append("not at rest in HOLDING")
    return faults
