"""The robot's spans of an observation: what io and the policy process tell of it, and which command it led to. Pure.

The motor process makes none. Its log of ticks, which the io process publishes anyway, says which chunk came in at which
tick; see docs/tracing.md.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from vla_common.tracing import Tracer, span_id, tick_trace
from vla_edge.core.chunk import REJECTS, ActionChunk
from vla_edge.core.records import Record

KEPT: Final = 64
"""Observations, and chunks, that are remembered: far more than live at a time."""


class _Recent(OrderedDict[int, bytes]):
    """The newest KEPT traces by some number."""

    def add(self, key: int, trace: bytes) -> None:
        self[key] = trace
        while len(self) > KEPT:
            self.popitem(last=False)


class PolicyTrace:
    """Of the policy process."""

    def __init__(self, tracer: Tracer, robot: str) -> None:
        """``robot``: its id in topics."""
        self._tracer, self._robot = tracer, robot
        self._contexts = _Recent()  # by stamp

    def received(self, stamp_ns: int, sequence: int, arrived_ns: int, now_ns: int, refused: str = "") -> None:
        """A context was looked at. ``stamp_ns``: of its observation. ``refused``: why it was not taken."""
        trace = tick_trace(self._robot, stamp_ns)
        if not self._tracer.samples(trace):
            return
        if not refused:
            self._contexts.add(stamp_ns, trace)
        span, parent = span_id(trace, "received", sequence), span_id(trace, "observation")
        self._tracer.span(trace, span, parent, "context received", arrived_ns, now_ns, refused)

    def chunk(self, chunk: ActionChunk, began_ns: int, planned_ns: int, sent_ns: int) -> None:
        """A chunk was planned and handed over. Those that come of no context (to the ready pose, or standing) have no
        trace."""
        trace = self._contexts.get(chunk.observation_stamp_ns)
        if trace is None:
            return
        which = (chunk.session, chunk.sequence)
        parent = span_id(trace, "chunk", *which)
        self._tracer.span(trace, parent, span_id(trace, "observation"), "chunk", began_ns, sent_ns,
                          sequence=chunk.sequence, base_tick=chunk.base_tick,
                          context_age_s=(began_ns - chunk.observation_stamp_ns) * 1e-9)
        self._tracer.span(trace, span_id(trace, "denoise", *which), parent, "denoise", began_ns, planned_ns)
        self._tracer.span(trace, span_id(trace, "hand over", *which), parent, "hand over", planned_ns, sent_ns)


class IoTrace:
    """Of the io process."""

    def __init__(self, tracer: Tracer, robot: str) -> None:
        """``robot``: its id in topics."""
        self._tracer, self._robot = tracer, robot
        self._observations = _Recent()  # by stamp
        self._chunks = _Recent()  # by sequence, of the present policy process
        self._session = ""

    def observed(self, stamp_ns: int, sequence: int, sent_ns: int) -> None:
        """An observation was sent. It begins with its image, whose stamp is of this host's CLOCK_MONOTONIC."""
        trace = tick_trace(self._robot, stamp_ns)
        if self._tracer.samples(trace):
            self._observations.add(stamp_ns, trace)
            self._tracer.span(trace, span_id(trace, "observation"), b"", "observation", stamp_ns, sent_ns,
                              robot=self._robot, sequence=sequence)

    def chunk(self, record: Record) -> None:
        """The policy process's newest chunk, before the ticks that may hold it."""
        trace = self._observations.get(int(record["observation_stamp_ns"]))
        session = record["session"].item().decode(errors="replace")
        if session != self._session:
            self._session = session
            self._chunks.clear()
        if trace is not None:
            self._chunks.add(int(record["sequence"]), trace)

    def ticks(self, ticks: Record) -> None:
        """Rows of the motor's log, each once: the tick that took a chunk sends the first command that it shaped."""
        if not self._chunks:
            return
        for row in ticks[ticks["offered_sequence"] != 0]:
            sequence = int(row["offered_sequence"])
            trace = self._chunks.pop(sequence, None)
            if trace is None:
                continue
            verdict = int(row["offered_verdict"])
            error = "" if verdict == 0 else "the robot does not act" if verdict == 1 else REJECTS[verdict - 2].value
            woke_ns = int(row["stamp_ns"]) + int(row["lateness_ns"])
            self._tracer.span(trace, span_id(trace, "command", self._session, sequence),
                              span_id(trace, "chunk", self._session, sequence), "command", woke_ns,
                              woke_ns + int(row["work_ns"]), error, tick=int(row["tick"]),
                              lateness_us=int(row["lateness_ns"]) / 1000)
