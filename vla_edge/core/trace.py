"""What a recording holds of the motor loop: its inputs and its outputs, tick by tick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vla_common.wire import stamp_ns
from vla_edge.core.chunk import ActionChunk

Array = npt.NDArray[np.float64]

METADATA: Final = "vla_edge"
"""Name of the metadata record at the start of a recording; its keys are ``settings`` (JSON of EdgeConfig) and
``robot_file`` (text of the robot file)."""

COLUMNS: Final[dict[str, str]] = {
    "tick": "<i8", "lateness_ns": "<i8", "work_ns": "<i8", "missed": "<u8", "state": "u1", "reason": "u1",
    "segment": "<u4", "chunk_sequence": "<u8", "offered_sequence": "<u8", "offered_verdict": "u1",
    "measured_stamp_ns": "<i8", "rearms": "<u8", "estops": "<u8", "estop_presses": "<u8", "estop_input": "u1"}
"""Columns of msg/MotorTicks.msg that are needed, beside the command."""

TOPICS: Final = ("motor_ticks", "action_chunk", "joint_states", "measured_joints", "joint_command")
"""Topics that a trace is made from, names as in vla_common.topics."""


class TraceError(ValueError):
    """A recording that cannot be replayed; the message holds the remedy."""


@dataclass(frozen=True)
class Trace:
    """The motor loop as recorded.

    Attributes:
        ticks: structured array [n] with COLUMNS and ``command`` float64[joints], ascending ticks, each once.
        origin_ns: robot's CLOCK_MONOTONIC of tick 0. period_ns: of the motor clock.
        chunks: in order of their base ticks.
        measured: measured positions by stamp, float64[joints].
        sent: (position, velocity) of the commands as published, by stamp; may be empty.
    """

    ticks: npt.NDArray[Any]
    origin_ns: int
    period_ns: int
    chunks: tuple[ActionChunk, ...]
    measured: Mapping[int, Array]
    sent: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)

    @property
    def joints(self) -> int:
        """Width of a command."""
        return int(self.ticks["command"].shape[1])

    def deadline_ns(self, tick: int) -> int:
        """When a tick was due."""
        return self.origin_ns + tick * self.period_ns


def tick_dtype(joints: int) -> np.dtype[Any]:
    """Structure of one row of :attr:`Trace.ticks`."""
    return np.dtype([*COLUMNS.items(), ("command", "<f8", (joints,))])


class TraceBuilder:
    """Gathers decoded messages in any order. A topic's messages of another robot must be kept away from it."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._batches: list[Any] = []
        self._chunks: list[tuple[int, ActionChunk]] = []
        self._measured: dict[int, Array] = {}
        self._sent: dict[int, tuple[Array, Array]] = {}

    def take(self, name: str, message: Any) -> None:
        """One message of a topic in TOPICS."""
        if name == "motor_ticks":
            if len(message.tick):
                self._batches.append(message)
        elif name == "action_chunk":
            self._chunks.append((stamp_ns(message.header), chunk_of(message)))
        elif name in ("joint_states", "measured_joints"):
            # The first one counts: a repeated stamp is refused by the edge.
            self._measured.setdefault(stamp_ns(message.header), np.array(message.position, dtype=np.float64))
        elif name == "joint_command":
            self._sent[stamp_ns(message.header)] = (np.array(message.position, dtype=np.float64),
                                                    np.array(message.velocity, dtype=np.float64))

    def trace(self, period_ns: int) -> Trace:
        """What was gathered.

        Args:
            period_ns: of the motor clock.

        Raises:
            TraceError: no ticks, or ticks of different robots.
        """
        if not self._batches:
            raise TraceError("no motor ticks in the recording: was the edge running, and is the robot id right?")
        widths = {int(batch.joints) for batch in self._batches}
        if len(widths) != 1:
            raise TraceError(f"motor ticks of robots with {sorted(widths)} joints in one recording: replay one robot")
        joints = widths.pop()
        parts = []
        for batch in self._batches:
            part = np.zeros(len(batch.tick), dtype=tick_dtype(joints))
            for name in COLUMNS:
                part[name] = getattr(batch, name)
            part["command"] = np.asarray(batch.command).reshape(-1, joints)
            parts.append(part)
        rows = np.concatenate(parts)
        _, first = np.unique(rows["tick"], return_index=True)
        chunks = tuple(chunk for _, chunk in sorted(self._chunks, key=lambda item: item[1].base_tick))
        return Trace(rows[first], self._origin_ns(period_ns), period_ns, chunks, self._measured, self._sent)

    def _origin_ns(self, period_ns: int) -> int:
        """Instant of tick 0.

        A chunk is stamped with the instant of its base tick. Without chunks the commands give the grid of instants,
        and the batches, published up to a few milliseconds after their last tick, say which point of it tick 0 is.
        """
        from_chunks = Counter(at_ns - chunk.base_tick * period_ns for at_ns, chunk in self._chunks)
        if from_chunks:
            return from_chunks.most_common(1)[0][0]
        latest = min(stamp_ns(batch.header) - int(batch.tick[-1]) * period_ns for batch in self._batches)
        if not self._sent:
            return latest
        phase, _ = Counter(at_ns % period_ns for at_ns in self._sent).most_common(1)[0]
        return latest - (latest - phase) % period_ns


def chunk_of(message: Any) -> ActionChunk:
    """The chunk that an ActionChunk message is the record of.

    Raises:
        TraceError: positions that do not fit horizon and joint names.
    """
    horizon, names = int(message.horizon), tuple(message.joint_names)
    positions = np.array(message.positions, dtype=np.float64)
    if positions.size != horizon * len(names):
        raise TraceError(f"chunk {message.sequence} has {positions.size} numbers for {horizon} x {len(names)}: "
                         "not written by this edge")
    return ActionChunk(message.session, int(message.sequence), int(message.base_tick),
                       int(message.observation_stamp_ns), float(message.period_s), names,
                       positions.reshape(horizon, len(names)))


def cut(trace: Trace, first_tick: int, last_tick: int) -> Trace:
    """The part from ``first_tick`` to ``last_tick`` with only the inputs that it needs.

    Measurements: those known at the first tick, when a re-arm was asked for, and when a segment began. They decide
    nothing else.
    """
    ticks = trace.ticks[(trace.ticks["tick"] >= first_tick) & (trace.ticks["tick"] <= last_tick)]
    if not len(ticks):
        raise TraceError(f"no ticks from {first_tick} to {last_tick} in the recording")
    used = np.concatenate([[True], (np.diff(ticks["rearms"]) != 0) | (np.diff(ticks["segment"]) != 0)])
    stamps = {int(stamp) for stamp in ticks["measured_stamp_ns"][used]}
    offered = set(ticks["offered_sequence"].tolist())
    return Trace(ticks, trace.origin_ns, trace.period_ns,
                 tuple(chunk for chunk in trace.chunks if chunk.sequence in offered),
                 {stamp: position for stamp, position in trace.measured.items() if stamp in stamps},
                 {stamp: sent for stamp, sent in trace.sent.items()
                  if trace.deadline_ns(first_tick) <= stamp <= trace.deadline_ns(last_tick)})


class ChunkShelf:
    """Finds the chunk that a tick was offered: sequence numbers start again with every policy process."""

    def __init__(self, chunks: Iterable[ActionChunk]) -> None:
        """Chunks in any order."""
        self._by_sequence: dict[int, list[ActionChunk]] = {}
        for chunk in chunks:
            self._by_sequence.setdefault(chunk.sequence, []).append(chunk)

    def find(self, sequence: int, tick: int) -> ActionChunk | None:
        """The chunk of that number whose base tick is the nearest before ``tick``; one from the future if need be."""
        candidates = self._by_sequence.get(sequence)
        if not candidates:
            return None
        return min(candidates, key=lambda chunk: (chunk.base_tick >= tick, abs(tick - chunk.base_tick)))
