"""A cell of the matrix: what it does, and how it is run and judged."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from matrix_rig import BRAKING, CLOCK, COASTING, HOLDING, MatrixRig
from motion import QUANTITIES, SLACK, Stop, judge_stop, stretches, worst

from vla_edge.core.shield import Reason

MS = 1_000_000
FAULTS = ("drop", "duplicate", "reorder", "delay", "freeze", "kill -9", "garbage bytes", "NaN", "wrong joint order",
          "wrong width", "future stamp", "clock +1 h", "clock -1 h", "disk full")
TARGETS = ("cloud", "link", "policy", "recorder", "robot")
ATTEMPTS = 10
LOST_SHARE = 0.2
"""Of the commands of a cell; the bus drops rather than blocks, and the observer competes for the processor too."""
HOLD_CHECK_S = 0.3
"""How long HOLDING is watched while the fault lasts, and again after it has gone."""
LOAD_SLACK_S = 1.0
"""A fault takes effect when its process is scheduled; on a busy machine that adds to the reaction as measured."""
STATUS_DELAY_NS, LOG_DELAY_NS = 300 * MS, 10_000 * MS
"""How long after a cell its messages still come; the io process logs what it refused every five seconds."""

Step = Callable[[MatrixRig], None]


def nothing(rig: MatrixRig) -> None:
    """No step needed."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault at one target while the arm moves.

    Attributes:
        fault, target: row and column. variant: what exactly.
        begin, end: bring the fault about and take it away.
        stops: the arm must stop (and stay stopped until an operator re-arms); otherwise it must not.
        within_s: of a fault that stops: bound on onset to the first braking command, by the settings of the edge.
        message: regular expression; what the operator must be able to read. Empty: nothing need be said.
        lasts_s: how long a fault that does not stop the arm is watched.
        until: of such a fault: condition that must come true while it is watched.
        check: raises AssertionError; called after the cell.
        lasting: the fault cannot be taken away; what was said of it in an earlier attempt counts in later ones.
        why: not empty: not applicable, and why.
    """

    fault: str
    target: str
    variant: str = ""
    begin: Step = nothing
    end: Step = nothing
    stops: bool = False
    within_s: float = 0.0
    message: str = ""
    lasts_s: float = 1.0
    until: Callable[[MatrixRig], Any] | None = None
    check: Step = nothing
    lasting: bool = False
    why: str = ""


@dataclasses.dataclass
class Row:
    """Result of a cell; see :class:`Cell`. ``deviations`` is empty where all is as it must be."""

    fault: str
    target: str
    variant: str
    effect: str = ""
    time_to_stop_s: float | None = None
    brake_s: float | None = None
    distance: float | None = None
    velocity: float = 0.0
    acceleration: float = 0.0
    jerk: float = 0.0
    coasted_ticks: int = 0
    lost: int = 0
    rearmed: str = ""
    message: str = ""
    attempts: int = 1
    is_disturbed: bool = False
    """The motor process, io or the observer did not run for a while, which broke the command stream off or lost a part of
    it: nothing can be said."""
    deviations: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Pending:
    """A row whose message is still looked for: log lines of the edge come up to five seconds later."""

    row: Row
    cell: Cell
    onset_ns: int
    log_from: int
    before: dict[str, int]
    held_ns: int = 0  # until when the fault lasted
    end_ns: int = 0


def run_cell(rig: MatrixRig, cell: Cell) -> tuple[Row, Pending]:
    """Move, fault, judge, recover.

    On a busy machine any process may lose a fifth of a second without a fault of ours. So a cell that must not stop the
    arm is tried again if it did, and any cell if the motor process, io or the observer was held up; ATTEMPTS in all.
    """
    log_from = rig.log.stat().st_size
    for attempt in range(1, ATTEMPTS + 1):
        row, pending = _attempt(rig, cell)
        row.attempts = attempt
        if cell.lasting:
            pending.log_from = log_from
        if not row.is_disturbed and (cell.stops or row.effect != "stopped"):
            break
    return row, pending


def _attempt(rig: MatrixRig, cell: Cell) -> tuple[Row, Pending]:
    row = Row(cell.fault, cell.target, cell.variant)
    rig.get_moving()
    before = reject_counts(rig)
    pending = Pending(row, cell, 0, rig.log.stat().st_size, before)
    onset_ns = pending.onset_ns = CLOCK.monotonic_ns()
    for step in (partial(_fault, cell=cell, row=row), cell.end, partial(_recover, cell=cell, row=row), cell.check):
        try:
            step(rig)
        except AssertionError as error:
            row.deviations.append(str(error).strip().replace("\n", " | ")[:1500])
        pending.held_ns = pending.held_ns or CLOCK.monotonic_ns()
    rig.wait(lambda: rig.state() != BRAKING, 20.0, "the end of a stop that just began")
    pending.end_ns = CLOCK.monotonic_ns()
    newest_ns = int(rig.last()["stamp_ns"])
    rig.wait(lambda: rig.seen.commands and rig.seen.commands[-1][0] >= newest_ns, 20.0, "commands on the bus")
    _judge(rig, cell, row, onset_ns, newest_ns)
    return row, pending


def _sleep_ticks(rig: MatrixRig, seconds: float) -> None:
    """Wait until the command stream, not the wall clock, has gone on for so long."""
    from_ns = int(rig.last()["stamp_ns"])
    rig.wait(lambda: int(rig.last()["stamp_ns"]) - from_ns >= seconds * 1e9, seconds + 20.0, "the command stream goes on")


def _fault(rig: MatrixRig, cell: Cell, row: Row) -> None:
    cell.begin(rig)
    if cell.stops:
        rig.wait(lambda: rig.state() == HOLDING, cell.within_s + 60.0, "the arm stops")
        _stays_held(rig, row, "under the fault")
        return
    _sleep_ticks(rig, cell.lasts_s)
    if cell.until is not None:
        until = cell.until
        rig.wait(lambda: until(rig), 60.0, "the fault has its effect")


def _stays_held(rig: MatrixRig, row: Row, when: str) -> None:
    from_ns = int(rig.last()["stamp_ns"])
    _sleep_ticks(rig, HOLD_CHECK_S)
    ticks = ticks_since(rig, from_ns)
    if (ticks["state"] != HOLDING).any():
        row.deviations.append(f"left HOLDING {when} without a re-arm")
    elif (ticks["position"] != ticks["position"][0]).any():
        row.deviations.append(f"moved in HOLDING {when}")


def _recover(rig: MatrixRig, cell: Cell, row: Row) -> None:
    if not cell.stops:
        _sleep_ticks(rig, 0.2)
        row.rearmed = "not needed" if rig.state() != HOLDING else ""
        return
    rig.wait(rig.ready, 60.0, "a re-arm is possible again")
    _stays_held(rig, row, "after the fault had gone")
    segment = int(rig.last()["segment"])
    rearms = rig.get_moving()
    row.rearmed = f"operator, {rearms}x" + ("" if int(rig.last()["segment"]) == segment else ", from the measured pose")


def ticks_since(rig: MatrixRig, stamp_ns: int) -> np.ndarray:
    """The motor's log after an instant."""
    parts = [part for part in rig.seen.ticks if int(part["stamp_ns"][-1]) > stamp_ns]
    ticks = np.concatenate(parts)
    return ticks[ticks["stamp_ns"] > stamp_ns]


def _judge(rig: MatrixRig, cell: Cell, row: Row, onset_ns: int, newest_ns: int) -> None:
    ticks = ticks_since(rig, onset_ns - 200 * MS)
    ticks = ticks[ticks["stamp_ns"] <= newest_ns]
    after = ticks[ticks["stamp_ns"] > onset_ns]
    row.coasted_ticks = int((after["state"] == COASTING).sum())
    stopped = bool(((after["state"] == BRAKING) | (after["state"] == HOLDING)).any())
    row.effect = "stopped" if stopped else "coasted" if row.coasted_ticks else "unaffected"
    is_stalled = bool((after["reason"] == Reason.MOTOR_STALLED).any())
    row.is_disturbed = is_stalled or any(end_ns > onset_ns for _, _, end_ns in rig.pauses.found)
    if stopped != cell.stops:
        row.deviations.append("stopped although it need not" if stopped else "did not stop")
    stop = judge_stop(ticks, onset_ns) if stopped and not is_stalled else None
    if stop is not None:
        _judge_stop(stop, cell, row)
    _judge_limits(rig, ticks, row)


def _judge_stop(stop: Stop, cell: Cell, row: Row) -> None:
    row.time_to_stop_s, row.brake_s, row.distance = stop.time_to_stop_s, stop.brake_s, stop.distance
    row.deviations += stop.faults
    if cell.stops and stop.reaction_s > cell.within_s + LOAD_SLACK_S:
        row.deviations.append(f"first braking command after {stop.reaction_s:.2f} s, {cell.within_s:.2f} s stated")


def _judge_limits(rig: MatrixRig, ticks: np.ndarray, row: Row) -> None:
    """As sent, and as received; what was received must be what was sent."""
    sent = worst(stretches(ticks))
    row.velocity, row.acceleration, row.jerk = (sent[name] for name in QUANTITIES)
    by_stamp = {int(tick["stamp_ns"]): tick["position"] for tick in ticks}
    commands = list(rig.seen.commands)
    received = {stamp: position for stamp, position, _ in commands[-len(ticks) - 400:] if stamp in by_stamp}
    if any((position != by_stamp[stamp]).any() for stamp, position in received.items()):
        row.deviations.append("a command arrived changed")
    stamps = [stamp for stamp, _, _ in commands[-len(ticks) - 400:]]
    if any(late <= early for early, late in zip(stamps, stamps[1:], strict=False)):
        row.deviations.append("commands arrived out of order or twice")
    row.lost = len(by_stamp) - len(received)
    if row.target != "robot" and row.lost > LOST_SHARE * len(by_stamp):  # a dead robot takes the bus with it
        row.deviations.append(f"{row.lost} of {len(by_stamp)} commands did not arrive")
    for found, what in ((sent, "sent"), (worst(stretches(ticks, received)) if received else sent, "received")):
        if found["position"] > 0:
            row.deviations.append(f"{what}: beyond a position limit by {found['position']:.3g}")
        row.deviations += [f"{what}: {name} {found[name]:.4g} of its limit" for name in QUANTITIES if found[name] > SLACK]


# -- what the operator can read ---------------------------------------------------------------------------------------


def reject_counts(rig: MatrixRig) -> dict[str, int]:
    """Of the newest PolicyStatus."""
    if not rig.seen.policies:
        return {}
    status = rig.seen.policies[-1][1]
    return {name: int(count) for name, count in zip(status.reject_names, status.reject_counts, strict=True)}


def messages(rig: MatrixRig, pending: Pending) -> Iterator[str]:
    """ShieldStatus.reason while it did not follow and the fault lasted, PolicyStatus names that were counted, warnings in
    the log."""
    said: set[str] = set()
    first_ns, last_ns = pending.onset_ns, pending.end_ns + STATUS_DELAY_NS
    for at_ns, status in list(rig.seen.statuses):
        if first_ns < at_ns < pending.held_ns and status.state >= BRAKING and status.reason not in said:
            said.add(status.reason)
            yield f"status: {status.reason}"
    for at_ns, status in list(rig.seen.policies):
        if first_ns < at_ns < last_ns:
            for name, count in zip(status.reject_names, status.reject_counts, strict=True):
                if count > pending.before.get(name, 0) and name not in said:
                    said.add(name)
                    yield f"policy: {name}"
    log_end = max((size for at_ns, size in list(rig.seen.log_sizes) if at_ns < pending.end_ns + LOG_DELAY_NS), default=0)
    with rig.log.open("rb") as log:
        log.seek(pending.log_from)
        for line in log.read(log_end - pending.log_from).decode(errors="replace").splitlines():
            if re.search(r" (WARNING|ERROR|CRITICAL) ", line):
                yield "log: " + line.split(None, 1)[1].split(None, 1)[1]


def settle(rig: MatrixRig, pending: list[Pending]) -> None:
    """Wait for messages that are still to come, then put each into its row."""
    def found(item: Pending) -> bool:
        return not item.cell.message or any(re.search(item.cell.message, text) for text in messages(rig, item))

    try:
        rig.wait(lambda: all(map(found, pending)), 15.0, "messages for the operator")
    except AssertionError:
        pass  # the rows below say which
    for item in pending:
        texts = list(messages(rig, item))
        match = [text for text in texts if item.cell.message and re.search(item.cell.message, text)]
        if item.cell.message and not match:
            item.row.deviations.append(f"no message like {item.cell.message!r}; there were: {texts}")
        reasons = [text for text in texts if text.startswith("status: ")][-1:] if item.cell.stops else []
        item.row.message = " / ".join(dict.fromkeys([*match[:1], *reasons]))
