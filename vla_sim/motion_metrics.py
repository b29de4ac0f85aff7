"""Metrics of a recorded run, pure: the command stream against the limits, lateness, ages, rates, shield intervals.

Speed, acceleration and jerk are finite differences of *consecutive commands as sent*, over the nominal period: what a
joint's servo is asked for, not what a smoothing filter would make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vla_edge.core.joint_limits import JointLimits

Array = npt.NDArray[np.float64]

RELATIVE_TOLERANCE: Final = 1e-6
"""A command counts as a violation when it exceeds a limit by more than this fraction of the limit."""
NS_PER_S: Final = 1_000_000_000
HOLDING: Final = 3  # as in ShieldStatus.msg
QUANTITIES: Final = ("velocity", "acceleration", "jerk")


@dataclass(frozen=True)
class TickStream:
    """Motor ticks of a run in order, each once.

    Attributes:
        tick: int64[n] indices of the motor clock.
        stamp_ns: int64[n] robot's monotonic clock at the tick's deadline.
        lateness_s: float64[n] wake-up after the deadline.
        state: uint8[n] shield state.
        segment: uint32[n] counts starts of the command stream; steps from one to the next are no motion.
        chunk_sequence: uint64[n] chunk behind the command.
        command: float64[n, joints] rad (gripper: closure).
        opens_batch: bool[n] the tick is the first of its message: what is missing before it may just not be recorded.
        duplicates: ticks that arrived more than once.
        gaps: ticks missing between the first and the last.
    """

    tick: npt.NDArray[np.int64]
    stamp_ns: npt.NDArray[np.int64]
    lateness_s: Array
    state: npt.NDArray[np.uint8]
    segment: npt.NDArray[np.uint32]
    chunk_sequence: npt.NDArray[np.uint64]
    command: Array
    opens_batch: npt.NDArray[np.bool_]
    duplicates: int
    gaps: int


def merge_ticks(batches: Sequence[Any], period_s: float, anchor: tuple[int, int] | None = None) -> TickStream:
    """One stream from ``MotorTicks`` messages in any order.

    Args:
        batches: the messages.
        period_s: of the motor clock.
        anchor: a tick and the instant at which it was due, ns. Without one the earliest publication of the last tick
            of a batch places the ticks in time, up to some milliseconds.

    Raises:
        ValueError: a batch whose columns differ in length.
    """
    batches = [batch for batch in batches if len(batch.tick)]
    for batch in batches:
        if not len(batch.tick) == len(batch.state) == len(batch.segment) == len(batch.lateness_ns):
            raise ValueError(f"MotorTicks with {len(batch.tick)} ticks and columns of other lengths: not recorded by "
                             "this release?")
    if not batches:
        return _empty_stream()
    tick = np.concatenate([batch.tick for batch in batches]).astype(np.int64)
    order = np.argsort(tick, kind="stable")
    keep = order[np.concatenate([[True], np.diff(tick[order]) > 0])]
    opens = np.concatenate([np.arange(len(batch.tick)) == 0 for batch in batches])
    merged = tick[keep]

    def column(name: str) -> npt.NDArray[Any]:
        return np.asarray(np.concatenate([getattr(batch, name) for batch in batches])[keep])

    command = np.concatenate([batch.command.reshape(-1, int(batch.joints)) for batch in batches])[keep]
    return TickStream(
        merged, _tick_stamps(batches, merged, period_s, anchor), column("lateness_ns") / NS_PER_S, column("state"),
        column("segment"), column("chunk_sequence"), command.astype(np.float64), opens[keep], len(tick) - len(merged),
        int(merged[-1] - merged[0]) + 1 - len(merged))


def _empty_stream() -> TickStream:
    whole = np.zeros(0, dtype=np.int64)
    return TickStream(whole, whole, np.zeros(0), whole.astype(np.uint8), whole.astype(np.uint32),
                      whole.astype(np.uint64), np.zeros((0, 0)),
                      whole.astype(bool), 0, 0)


def _tick_stamps(batches: Sequence[Any], tick: npt.NDArray[np.int64], period_s: float,
                 anchor: tuple[int, int] | None) -> npt.NDArray[np.int64]:
    period_ns = round(period_s * NS_PER_S)
    if anchor is not None:
        return anchor[1] + (tick - anchor[0]) * period_ns
    offsets = [int(batch.header.stamp.sec) * NS_PER_S + int(batch.header.stamp.nanosec)
               - int(batch.tick[-1]) * period_ns for batch in batches]
    return tick * period_ns + min(offsets)


@dataclass(frozen=True)
class Derivatives:
    """Finite differences of a command stream; row i belongs to command i, the first rows are missing.

    velocity [n-1, joints] per s, acceleration [n-2, joints] per s², jerk [n-3, joints] per s³.
    """

    velocity: Array
    acceleration: Array
    jerk: Array


def differentiate(command: Array, period_s: float) -> Derivatives:
    """Differences of consecutive rows of ``command`` [n, joints]."""
    return Derivatives(np.diff(command, axis=0) / period_s, np.diff(command, n=2, axis=0) / period_s**2,
                       np.diff(command, n=3, axis=0) / period_s**3)


@dataclass(frozen=True)
class LimitReport:
    """Use of the limits, per joint, and violations.

    Attributes:
        peak: largest |value| / limit per quantity (``velocity``, ``acceleration``, ``jerk``), float64[joints] each.
        violations: number of commands beyond a limit per quantity, ``position`` included.
        first_violation: words on the first one, empty without any.
        reentries: re-arms that started a new segment of the stream at a measured pose away from the last command.
        largest_reentry: largest such step, rad (gripper: closure).
        stalls: segments begun because the motor process had not run. largest_stall: as above.
        holes: places at which commands were sent but not recorded, so that nothing can be said about them.
    """

    names: tuple[str, ...]
    peak: dict[str, Array]
    violations: dict[str, int]
    first_violation: str
    reentries: int
    largest_reentry: float
    stalls: int
    largest_stall: float
    holes: int

    @property
    def total(self) -> int:
        """All violations."""
        return sum(self.violations.values())


class Starts(NamedTuple):
    """Rows at which the stream begins anew, see :func:`segment_starts`."""
    reentries: list[int]
    stalls: list[int]
    holes: list[int]


def segment_starts(stream: TickStream, missed_deadlines: int) -> Starts:
    """Rows at which the stream begins anew. Steps onto them are no motion, and no other step is excused.

    *Re-entry*: the segment number changes at the re-arm of an arm that was holding at rest. The shield re-enters from
    the measured pose, which may lie away from the last command (somebody moved the arm).
    *Stall*: the segment number changes into HOLDING. The motor process had not run, the robot was on its own time-out.
    *Hole*: more ticks are missing than the motor clock missed deadlines, so some were sent but not recorded (a killed
    recorder). Then gaps between messages, never those inside one, separate what is compared.
    """
    reentries, stalls = [], []
    for row in (np.flatnonzero(np.diff(stream.segment.astype(np.int64))) + 1).tolist():
        at_rest = row >= 3 and bool((stream.command[row - 3:row] == stream.command[row - 1]).all())
        if stream.state[row] == HOLDING:
            stalls.append(row)
        elif stream.state[row - 1] == HOLDING and at_rest:
            reentries.append(row)
    holes = []
    if stream.gaps > missed_deadlines:
        holes = (np.flatnonzero((np.diff(stream.tick) > 1) & stream.opens_batch[1:]) + 1).tolist()
    return Starts(reentries, stalls, holes)


def check_limits(stream: TickStream, limits: JointLimits, period_s: float, missed_deadlines: int = 0) -> LimitReport:
    """Compare the stream as sent with the robot file's limits.

    Args:
        stream, limits, period_s: to compare.
        missed_deadlines: as the motor clock counted them; see :func:`segment_starts`.

    Raises:
        ValueError: the stream has another number of joints than the limits.
    """
    command = stream.command
    if len(command) and command.shape[1] != len(limits):
        raise ValueError(f"commands of {command.shape[1]} joints, the robot file names {len(limits)}: wrong robot "
                         "file?")
    command = command.reshape(-1, len(limits))
    begins = segment_starts(stream, missed_deadlines)
    at_rest = {*begins.reentries, *begins.stalls}
    starts = sorted({0, *at_rest, *begins.holes}) if len(command) else []
    peak = {name: np.zeros(len(limits)) for name in QUANTITIES}
    violations = dict.fromkeys(("position", *QUANTITIES), 0)
    named: list[tuple[int, str]] = []
    for first, end in zip(starts, [*starts[1:], len(command)][:len(starts)], strict=True):
        rows = command[first:end]
        if first in at_rest:  # a segment begins at rest: what its first command does is judged from there
            rows = np.concatenate([np.repeat(rows[:1], 3, axis=0), rows])
        excess = _excess(rows, limits, period_s)
        for name, values in excess.items():
            violations[name] += int((values > RELATIVE_TOLERANCE).sum())
            if name in peak:
                peak[name] = np.maximum(peak[name], values.max(axis=0, initial=-1.0) + 1.0)
        named += _first_violation(stream.tick[first:end], limits, excess)
    return LimitReport(limits.names, peak, violations, min(named)[1] if named else "", len(begins.reentries),
                       _largest_step(command, begins.reentries), len(begins.stalls),
                       _largest_step(command, begins.stalls), len(begins.holes))


def _largest_step(command: Array, rows: list[int]) -> float:
    return max((float(np.abs(command[row] - command[row - 1]).max()) for row in rows), default=0.0)


def _excess(command: Array, limits: JointLimits, period_s: float) -> dict[str, Array]:
    """By how much of the limit each value exceeds it; negative inside."""
    found = differentiate(command, period_s)
    excess = {"position": np.maximum(limits.position_lower - command, command - limits.position_upper)
              / (limits.position_upper - limits.position_lower)}
    for name in QUANTITIES:
        excess[name] = np.abs(getattr(found, name)) / getattr(limits, name) - 1.0
    return excess


def _first_violation(ticks: npt.NDArray[np.int64], limits: JointLimits,
                     excess: dict[str, Array]) -> list[tuple[int, str]]:
    rows = []
    for name, values in excess.items():
        where = np.argwhere(values > RELATIVE_TOLERANCE)
        if len(where):
            row, joint = where[0]
            tick = int(ticks[len(ticks) - len(values) + row])
            rows.append((tick, f"tick {tick}: {name} of {limits.names[joint]} exceeds its limit by "
                               f"{values[row, joint]:.3g} of it"))
    return rows


@dataclass(frozen=True)
class Summary:
    """Percentiles of a sample; NaN when there is none."""

    count: int
    p50: float
    p99: float
    p999: float
    most: float


def summarise(values: npt.ArrayLike) -> Summary:
    """Percentiles of the finite values."""
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    array = array[np.isfinite(array)]
    if not len(array):
        return Summary(0, *[float("nan")] * 4)
    p50, p99, p999 = np.percentile(array, [50, 99, 99.9])
    return Summary(len(array), float(p50), float(p99), float(p999), float(array.max()))


@dataclass(frozen=True)
class Interval:
    """Shield state over a half-open interval of the robot's clock."""

    state: int
    start_ns: int
    end_ns: int


def state_intervals(stream: TickStream, period_s: float) -> list[Interval]:
    """Runs of equal shield state."""
    if not len(stream.tick):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(stream.state)) + 1])
    ends = np.append(stream.stamp_ns[starts[1:]], stream.stamp_ns[-1] + round(period_s * NS_PER_S))
    return [Interval(int(stream.state[row]), int(stream.stamp_ns[row]), int(end_ns))
            for row, end_ns in zip(starts, ends, strict=True)]


def state_shares(intervals: Sequence[Interval]) -> dict[int, float]:
    """Fraction of the time in each state."""
    total = sum(interval.end_ns - interval.start_ns for interval in intervals)
    shares: dict[int, float] = {}
    for interval in intervals:
        shares[interval.state] = shares.get(interval.state, 0.0) + (interval.end_ns - interval.start_ns) / total
    return shares


def max_gap_s(stamps_ns: Sequence[int]) -> float:
    """Longest time between consecutive events; NaN for fewer than two."""
    return float(np.diff(np.sort(np.asarray(stamps_ns))).max()) / NS_PER_S if len(stamps_ns) > 1 else float("nan")
