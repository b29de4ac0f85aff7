"""Runs the motor loop again on recorded inputs, at the recorded clock, and compares every command bit by bit.

What is fed: per tick the operator's counts, the newest joint state, the chunk that was offered; the clock is the
tick's deadline plus the recorded lateness. What is compared: command, state, reason, segment, what became of the chunk
offered and the newest accepted one; where the published commands were recorded too, also their velocities.

*From where.* The loop's state is not recorded, but at a HOLDING tick all of it is known that matters: at rest at the
command, and only a re-arm, which forgets all chunks, leads on. (Which chunk was accepted last before that is not known
and not compared until then.) So a replay begins at the first HOLDING tick. Where
the recording lost ticks, or an input that matters, the state is unknown; it goes on from the next HOLDING tick.
Deadlines that the motor process itself missed are no loss: their count is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vla_common.clock import Clock
from vla_edge.core.chunk import ActionChunk
from vla_edge.core.motor_loop import OFFER_NOT_LOOKED_AT, MotorLoop, Send
from vla_edge.core.records import MAX_HORIZON, EdgeMemory, fill_chunk
from vla_edge.core.shield import EstopInput, Rearm, Reason, State
from vla_edge.core.trace import ChunkShelf, Trace, TraceError

Array = npt.NDArray[np.float64]
Row = npt.NDArray[Any]
"""One record of the ticks' structured arrays."""

MakeLoop = Callable[[EdgeMemory, Clock, Send], MotorLoop]
"""A motor loop with the recorded settings; the same function that the motor process uses."""

COMPARED: Final = ("state", "reason", "segment", "chunk_sequence", "offered_verdict")


@dataclass(frozen=True)
class Difference:
    """The first tick at which the replay is not the recording."""

    tick: int
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        """One line."""
        return f"tick {self.tick}: {self.what} was {self.recorded}, replayed {self.replayed}"


@dataclass
class Replayed:
    """Result.

    Attributes:
        recorded: ticks in the recording. compared: of these, replayed and compared.
        different: of the compared ones, those that differ. first: the first of them.
        begun: how often the loop's state was taken from a HOLDING tick (1: no interruption).
        unknown: ticks not compared because the state before them is not known.
        lost: ticks that the recording lacks. missed: deadlines that the motor process missed.
        missing: inputs that were needed and are not in the recording, by kind.
        published: commands compared with the message that was published, velocity included.
        states: compared ticks by state.
    """

    recorded: int
    compared: int = 0
    different: int = 0
    first: Difference | None = None
    begun: int = 0
    unknown: int = 0
    lost: int = 0
    missed: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    published: int = 0
    states: Counter[str] = field(default_factory=Counter)

    @property
    def identical(self) -> bool:
        """At least one tick was compared, and none differs."""
        return self.compared > 0 and self.different == 0


class _MissingInputError(Exception):
    """An input that decides something is not in the recording."""


class _Bench:
    """One motor loop on the bench: state taken from a HOLDING tick, fed and asked tick by tick."""

    def __init__(self, trace: Trace, row: Row, make_loop: MakeLoop, shelf: ChunkShelf) -> None:
        self._trace, self._shelf = trace, shelf
        self._memory = EdgeMemory.private(trace.joints)
        self._clock = _ReplayClock()
        self._joints, self._control = self._memory.blank("joints"), self._memory.blank("control")
        self._chunk = self._memory.blank("chunk")
        self._have_measurement = False
        self._before = row
        self.knows_chunks = False
        self._drained = 0
        self.sent: tuple[int, Array, Array] | None = None
        self._feed_operator(row, self._woke_ns(row))
        self._loop = make_loop(self._memory, self._clock, self._send)
        self._take_over(row)

    def _send(self, stamp_ns: int, position: Array, velocity: Array) -> None:
        self.sent = (stamp_ns, position.copy(), velocity.copy())

    def _take_over(self, row: Row) -> None:
        """Hold as recorded, and serve that tick, so that the loop knows when it last woke and what it has seen."""
        shield = self._loop.shield
        verdict = shield.start(np.array(row["command"]))
        if verdict is not Rearm.ACCEPTED:
            raise TraceError(f"the pose held at tick {int(row['tick'])} cannot be held with these limits "
                             f"({verdict.name}): the robot file is not the one of the recording")
        self._closing = int(row["reason"]) == Reason.SHUTDOWN
        if self._closing:
            shield.shut_down()
        shield.segment, shield.reason = int(row["segment"]), Reason(int(row["reason"]))
        shield.estop_level = EstopInput(int(row["estop_input"]))
        self.tick(row)

    def _woke_ns(self, row: Row) -> int:
        return self._trace.deadline_ns(int(row["tick"])) + int(row["lateness_ns"])

    def _feed_operator(self, row: Row, woke_ns: int) -> None:
        control, level = self._control, int(row["estop_input"])
        control["rearm"], control["estop"] = row["rearms"], row["estops"]
        control["presses"], control["pressed"] = row["estop_presses"], level == EstopInput.PRESSED
        control["heard_ns"] = 0 if level == EstopInput.SILENT else woke_ns
        self._memory.write("control", control)

    def _feed_measurement(self, row: Row) -> None:
        stamp = int(row["measured_stamp_ns"])
        if stamp != int(self._joints["stamp_ns"]) and stamp != 0:
            position = self._trace.measured.get(stamp)
            self._have_measurement = position is not None
            if position is not None:
                self._joints["position"] = position
            self._joints["stamp_ns"] = stamp
            self._joints["sequence"] += 1
            self._memory.write("joints", self._joints)
        # Positions decide nothing but where a re-arm or a stall goes on: one that was not recorded matters only there.
        is_used = any(int(row[name]) != int(self._before[name]) for name in ("rearms", "segment"))
        if is_used and not self._have_measurement:
            raise _MissingInputError("measurement at a re-arm or stall")

    def _feed_chunk(self, row: Row) -> None:
        sequence = int(row["offered_sequence"])
        if sequence == 0:
            return
        chunk = self._shelf.find(sequence, int(row["tick"]))
        if chunk is None or len(chunk.positions) > MAX_HORIZON or chunk.positions.shape[1] != self._trace.joints:
            if int(row["offered_verdict"]) != OFFER_NOT_LOOKED_AT:
                raise _MissingInputError("chunk")
            chunk = _unseen(sequence, self._trace.joints)
        fill_chunk(self._chunk, chunk)
        self._memory.write("chunk", self._chunk)

    def tick(self, row: Row) -> Row:
        """Serve a tick; returns the record that the loop logged.

        Raises:
            _MissingInputError: names the kind of input.
        """
        woke_ns = self._woke_ns(row)
        self._feed_measurement(row)
        self._feed_operator(row, woke_ns)
        self._feed_chunk(row)
        shield = self._loop.shield
        if int(row["reason"]) == Reason.SHUTDOWN and not self._closing:
            self._closing = True
            shield.shut_down()
        # Two events show only in their effects: the end of the process, and a process stopped in the middle of a tick.
        stopped_within = (int(row["work_ns"]) > shield.stall_ns and int(row["state"]) == State.HOLDING
                          and int(row["segment"]) != int(self._before["segment"]))
        self._clock.now_ns = woke_ns + (int(row["work_ns"]) if stopped_within else 0)
        self._loop.serve(int(row["tick"]), self._trace.deadline_ns(int(row["tick"])), woke_ns, int(row["missed"]))
        self._before = row
        self._drained, records, _ = self._memory.ticks.drain(self._drained)
        logged = np.asarray(np.frombuffer(records[-1], dtype=self._memory.dtypes["ticks"])[0])
        self.knows_chunks = self.knows_chunks or int(logged["state"]) != State.HOLDING
        return logged


class _ReplayClock:
    """Says what it is told; nobody waits on it."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns

    def sleep_until_ns(self, deadline_ns: int) -> None:
        raise NotImplementedError(f"nothing waits in a replay, but something did until {deadline_ns} ns")


def _unseen(sequence: int, joints: int) -> ActionChunk:
    """Stands for a chunk that the loop did not look at."""
    return ActionChunk("", sequence, 0, 0, 0.0, tuple(f"j{i}" for i in range(joints)), np.zeros((1, joints)))


def replay(trace: Trace, make_loop: MakeLoop) -> Replayed:
    """Run a recording through the motor loop.

    Args:
        trace: the recording.
        make_loop: makes the loop, with the recorded settings and robot file.

    Returns:
        What was compared, and the first difference.

    Raises:
        TraceError: limits under which a recorded pose cannot be.
    """
    ticks, result, shelf = trace.ticks, Replayed(len(trace.ticks)), ChunkShelf(trace.chunks)
    bench: _Bench | None = None
    for i, row in enumerate(ticks):
        if i:
            absent = int(row["tick"]) - int(ticks[i - 1]["tick"]) - 1
            missed = int(row["missed"]) - int(ticks[i - 1]["missed"])
            result.missed += missed
            result.lost += absent - missed
            if absent != missed:
                bench = None
        if bench is not None:
            try:
                _compare(trace, row, bench, result)
                continue
            except _MissingInputError as error:
                result.missing[str(error)] += 1
                bench = None
        result.unknown += 1
        if int(row["state"]) == State.HOLDING:
            bench = _Bench(trace, row, make_loop, shelf)
            result.begun += 1
    return result


def _compare(trace: Trace, row: Row, bench: _Bench, result: Replayed) -> None:
    logged = bench.tick(row)
    difference = _difference(row, logged, bench.knows_chunks)
    difference = difference or _published_difference(trace, int(row["tick"]), bench, result)
    result.compared += 1
    result.states[State(int(row["state"])).name] += 1
    if difference is not None:
        result.different += 1
        result.first = result.first or difference


def _difference(row: Row, logged: Row, knows_chunks: bool) -> Difference | None:
    tick = int(row["tick"])
    for name in COMPARED:
        if name == "chunk_sequence" and not knows_chunks:
            continue
        if int(row[name]) != int(logged[name]):
            return Difference(tick, name, _named(name, int(row[name])), _named(name, int(logged[name])))
    return _different_bits(tick, "command", row["command"], logged["position"])


def _published_difference(trace: Trace, tick: int, bench: _Bench, result: Replayed) -> Difference | None:
    if bench.sent is None:
        return None
    stamp_ns, position, velocity = bench.sent
    published = trace.sent.get(stamp_ns)
    if published is None:
        return None
    result.published += 1
    return (_different_bits(tick, "published position", published[0], position)
            or _different_bits(tick, "published velocity", published[1], velocity))


def _different_bits(tick: int, what: str, recorded: Array, replayed: Array) -> Difference | None:
    same = np.asarray(recorded).view(np.uint64) == np.asarray(replayed).view(np.uint64)
    if same.all():
        return None
    joint = int(np.argmin(same))
    return Difference(tick, f"{what} of joint {joint}", repr(float(recorded[joint])), repr(float(replayed[joint])))


def _named(column: str, value: int) -> str:
    if column == "state":
        return State(value).name
    return Reason(value).name if column == "reason" else str(value)
