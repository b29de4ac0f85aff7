"""One tick of the motor process: read, decide, send, report. Bounded work; no waiting, no I/O but shared memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vla_common.clock import Clock
from vla_edge.core.chunk import REJECTS, ChunkGate, Reject
from vla_edge.core.chunk_queue import ChunkQueue
from vla_edge.core.joint_limits import JointLimits
from vla_edge.core.records import ChunkReader, EdgeMemory
from vla_edge.core.shield import Rearm, Shield, State

Array = npt.NDArray[np.float64]

Send = Callable[[int, Array, Array], None]
"""Called once per tick with the stamp (ns), position and velocity of the command; must not block."""


class MotorLoop:
    """Stages 10 (reading) to 13 for one robot.

    Nothing is sent before the first usable measured pose: there is no pose yet that would be safe to send.

    Attributes:
        shield: state machine and last command.
    """

    def __init__(self, memory: EdgeMemory, limits: JointLimits, gate: ChunkGate, queue: ChunkQueue, shield: Shield,
                 clock: Clock, send: Send, scheduling: str = "ordinary", pid: int = 0) -> None:
        """Wire the parts; ``scheduling`` and ``pid`` are only reported."""
        self._memory = memory
        self._clock = clock
        self._send = send
        self._gate, self._queue, self.shield = gate, queue, shield
        self._reader = ChunkReader(limits.names)
        self._desired, self._desired_velocity = np.zeros(len(limits)), np.zeros(len(limits))
        self._measured = np.zeros(len(limits))
        self._measured_stamp_ns: int | None = None
        self._seen = {"joints": 0, "control": 0, "chunk": memory.rings["chunk"].hint()}
        found = memory.read("control")
        self._rearms, self._estops = (int(found[1]["rearm"]), int(found[1]["estop"])) if found else (0, 0)
        self._motor, self._tick = memory.blank("motor"), memory.blank("ticks")
        self._motor["scheduling"], self._motor["pid"] = scheduling.encode(), pid
        self.last_rearm = Rearm.ACCEPTED

    def serve(self, tick: int, deadline_ns: int, woke_ns: int, missed: int) -> bool:
        """Do a tick.

        Args:
            tick: its index. deadline_ns: when it was due. woke_ns: when the loop woke for it.
            missed: deadlines missed so far, reported on.

        Returns:
            True if a command was sent.
        """
        self._read_joints()
        if not self.shield.started and not self._start(woke_ns):
            return False
        self._obey(tick, woke_ns)
        offered, verdict = self._take_chunk(tick, woke_ns)
        newest = self._gate.newest
        if newest is not None and self._queue.sample(tick, self._desired, self._desired_velocity):
            self.shield.step(self._desired, self._desired_velocity, tick - 1 - newest.base_tick)
        else:
            self.shield.step(None)
        self._send(deadline_ns, self.shield.position, self.shield.velocity)
        log = self._tick
        log["offered_sequence"], log["offered_verdict"] = offered, verdict
        log["chunk_sequence"] = 0 if newest is None else newest.sequence
        self._report(tick, deadline_ns, woke_ns, missed)
        return True

    def _read_joints(self) -> None:
        found = self._memory.read("joints", self._seen["joints"])
        if found is not None:
            self._seen["joints"], record = found
            self._measured[:] = record["position"]
            self._measured_stamp_ns = int(record["stamp_ns"])

    def _age_s(self, now_ns: int) -> float:
        return float("inf") if self._measured_stamp_ns is None else (now_ns - self._measured_stamp_ns) * 1e-9

    def _start(self, now_ns: int) -> bool:
        if not 0.0 <= self._age_s(now_ns) <= 0.5:
            return False
        return self.shield.start(self._measured) is Rearm.ACCEPTED

    def _obey(self, tick: int, now_ns: int) -> None:
        """Operator's commands. They come as counts, so one that falls between two ticks is not lost; of both, stop."""
        found = self._memory.read("control", self._seen["control"])
        if found is None:
            return
        self._seen["control"], record = found
        rearms, estops = int(record["rearm"]), int(record["estop"])
        if estops != self._estops:
            self.shield.estop()
        elif rearms != self._rearms:
            measured = None if self._measured_stamp_ns is None else self._measured
            self.last_rearm = self.shield.rearm(measured, self._age_s(now_ns))
            if self.last_rearm is Rearm.ACCEPTED:
                self._queue.clear()
                self._gate.restart(tick)
        self._rearms, self._estops = rearms, estops

    def _take_chunk(self, tick: int, now_ns: int) -> tuple[int, int]:
        """Merge a new chunk; returns its sequence number (0: there was none) and what became of it."""
        found = self._memory.read("chunk", self._seen["chunk"])
        if found is None:
            return 0, OFFER_ACCEPTED
        self._seen["chunk"], record = found
        if self.shield.state is State.BRAKING or self.shield.state is State.HOLDING:
            return int(record["sequence"]), OFFER_NOT_LOOKED_AT
        chunk = self._reader.chunk(record)
        rest = self.shield.rest_ticks
        reject = self._gate.admit(chunk, tick, now_ns) or self._queue.insert(chunk, tick, tick - rest if rest else None)
        if reject is None:
            self._motor["accepted"] += 1
            return chunk.sequence, OFFER_ACCEPTED
        index = _REJECT_INDEX[reject]
        self._motor["rejects"][index] += 1
        return chunk.sequence, OFFER_REFUSED + index

    def _report(self, tick: int, deadline_ns: int, woke_ns: int, missed: int) -> None:
        shield, motor, log = self.shield, self._motor, self._tick
        motor["tick"], motor["stamp_ns"], motor["missed"] = tick, deadline_ns, missed
        motor["position"], motor["velocity"] = shield.position, shield.velocity
        motor["acceleration"] = shield.acceleration
        motor["state"], motor["reason"], motor["segment"] = shield.state, shield.reason, shield.segment
        motor["limited"], motor["stops"] = shield.limit_interventions, shield.stops
        measured = None if self._measured_stamp_ns is None else self._measured
        motor["rearm"] = shield.rearm_verdict(measured, self._age_s(woke_ns))
        self._memory.write("motor", motor)
        log["tick"], log["stamp_ns"], log["lateness_ns"] = tick, deadline_ns, woke_ns - deadline_ns
        log["state"], log["reason"], log["segment"] = shield.state, shield.reason, shield.segment
        log["measured_stamp_ns"] = self._measured_stamp_ns or 0
        log["rearms"], log["estops"], log["missed"] = self._rearms, self._estops, missed
        log["position"], log["velocity"] = shield.position, shield.velocity
        log["work_ns"] = self._clock.monotonic_ns() - woke_ns
        self._memory.ticks.append(log.tobytes())


OFFER_ACCEPTED, OFFER_NOT_LOOKED_AT, OFFER_REFUSED = 0, 1, 2
"""What became of a chunk, as logged per tick; OFFER_REFUSED + i: refused for REJECTS[i]."""

_REJECT_INDEX: dict[Reject, int] = {reject: index for index, reject in enumerate(REJECTS)}
