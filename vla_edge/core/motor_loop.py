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
from vla_edge.core.shield import EstopInput, Rearm, Shield, State

Array = npt.NDArray[np.float64]

Send = Callable[[int, Array, Array], None]
"""Called once per tick with the stamp (ns), position and velocity of the command; must not block."""


class MotorLoop:
    """Stages 10 (reading) to 13 for one robot.

    Nothing is sent before the first usable measured pose: there is no pose yet that would be safe to send.

    If the process did not run for longer than the robot waits for commands (``Shield.stall_ns``, on the monotonic
    clock), the stream is broken off before anything more is sent.

    Attributes:
        shield: state machine and last command.
        last_rearm: answer to the last re-arm.
    """

    def __init__(self, memory: EdgeMemory, limits: JointLimits, gate: ChunkGate, queue: ChunkQueue, shield: Shield,
                 clock: Clock, send: Send, scheduling: str = "ordinary", pid: int = 0,
                 estop_silence_s: float | None = None) -> None:
        """Wire the parts.

        Args:
            memory, limits, gate, queue, shield, clock, send: see their types.
            scheduling, pid: only reported.
            estop_silence_s: an emergency stop input not heard for this long counts as pressed; None: it may be silent.
        """
        self._memory = memory
        self._clock = clock
        self._send = send
        self._gate, self._queue, self.shield = gate, queue, shield
        self._reader = ChunkReader(limits.names)
        self._desired, self._desired_velocity = np.zeros(len(limits)), np.zeros(len(limits))
        self._measured = np.zeros(len(limits))
        self._measured_stamp_ns: int | None = None
        self._seen = {"joints": 0, "control": 0, "chunk": memory.rings["chunk"].hint()}
        self._estop_silence_ns = None if estop_silence_s is None else round(estop_silence_s * 1e9)
        found = memory.read("control")
        control = found[1] if found else memory.blank("control")
        self._rearms, self._estops, self._presses = (int(control[name]) for name in ("rearm", "estop", "presses"))
        self._pressed, self._heard_ns = bool(control["pressed"]), int(control["heard_ns"])
        self._woke_ns: int | None = None
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
            self._report(tick, deadline_ns, woke_ns, missed)
            return False
        before_ns, self._woke_ns = self._woke_ns, woke_ns
        is_stalled = before_ns is not None and self._break_off(woke_ns - before_ns, woke_ns)
        self._obey(tick, woke_ns, is_stalled)
        offered, verdict = self._take_chunk(tick, woke_ns)
        newest = self._gate.newest
        if newest is not None and self._queue.sample(tick, self._desired, self._desired_velocity):
            self.shield.step(self._desired, self._desired_velocity, tick - 1 - newest.base_tick)
        else:
            self.shield.step(None)
        now_ns = self._clock.monotonic_ns()
        self._break_off(now_ns - woke_ns, now_ns)  # stopped within this tick: its command is of another time
        self._send(deadline_ns, self.shield.position, self.shield.velocity)
        log = self._tick
        log["offered_sequence"], log["offered_verdict"] = offered, verdict
        log["chunk_sequence"] = 0 if newest is None else newest.sequence
        self._report(tick, deadline_ns, woke_ns, missed)
        self._log(tick, deadline_ns, woke_ns, missed)
        return True

    def _break_off(self, silence_ns: int, now_ns: int) -> bool:
        """Tell the shield if nothing was sent for too long; returns whether that was so."""
        if silence_ns <= self.shield.stall_ns:
            return False
        self._read_joints()
        self.shield.stall(self._measured_or_none(), self._age_s(now_ns))
        return True

    def _read_joints(self) -> None:
        found = self._memory.read("joints", self._seen["joints"])
        if found is not None:
            self._seen["joints"], record = found
            self._measured[:] = record["position"]
            self._measured_stamp_ns = int(record["stamp_ns"])

    def _measured_or_none(self) -> Array | None:
        return None if self._measured_stamp_ns is None else self._measured

    def _age_s(self, now_ns: int) -> float:
        return float("inf") if self._measured_stamp_ns is None else (now_ns - self._measured_stamp_ns) * 1e-9

    def _start(self, now_ns: int) -> bool:
        if not 0.0 <= self._age_s(now_ns) <= 0.5:
            return False
        return self.shield.start(self._measured) is Rearm.ACCEPTED

    def _obey(self, tick: int, now_ns: int, is_stalled: bool) -> None:
        """Operator's commands and the emergency stop input. They come as counts, so one that falls between two ticks is
        not lost; of all, stop. A re-arm from a time when this process did not run is not carried out: it was meant for
        what the operator saw then."""
        rearms, estops, presses = self._rearms, self._estops, self._presses
        found = self._memory.read("control", self._seen["control"])
        if found is not None:
            self._seen["control"], record = found
            rearms, estops, presses = int(record["rearm"]), int(record["estop"]), int(record["presses"])
            self._pressed, self._heard_ns = bool(record["pressed"]), int(record["heard_ns"])
        if estops != self._estops:
            self.shield.estop()
        if presses != self._presses:
            self.shield.estop_input(EstopInput.PRESSED)
        self.shield.estop_input(self._estop_level(now_ns))
        is_stop = estops != self._estops or presses != self._presses
        if rearms != self._rearms and not is_stop and not is_stalled:
            self.last_rearm = self.shield.rearm(self._measured_or_none(), self._age_s(now_ns))
            if self.last_rearm is Rearm.ACCEPTED:
                self._queue.clear()
                self._gate.restart(tick)
        self._rearms, self._estops, self._presses = rearms, estops, presses

    def _estop_level(self, now_ns: int) -> EstopInput:
        if self._pressed:
            return EstopInput.PRESSED
        if self._estop_silence_ns is not None and (
                self._heard_ns == 0 or now_ns - self._heard_ns > self._estop_silence_ns):
            return EstopInput.SILENT
        return EstopInput.RELEASED

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
        # The gate takes only what the queue took too: a chunk refused for the gap it would leave must not age the plan.
        reject = self._gate.check(chunk, tick, now_ns) or self._queue.insert(chunk, tick, tick - rest if rest else None)
        if reject is None:
            self._gate.take(chunk)
            self._motor["accepted"] += 1
            return chunk.sequence, OFFER_ACCEPTED
        index = _REJECT_INDEX[reject]
        self._motor["rejects"][index] += 1
        return chunk.sequence, OFFER_REFUSED + index

    def _report(self, tick: int, deadline_ns: int, woke_ns: int, missed: int) -> None:
        """The newest state, for the other processes; from before the first command on."""
        shield, motor = self.shield, self._motor
        motor["tick"], motor["stamp_ns"], motor["missed"] = tick, deadline_ns, missed
        motor["position"], motor["velocity"] = shield.position, shield.velocity
        motor["acceleration"] = shield.acceleration
        motor["state"], motor["reason"], motor["segment"] = shield.state, shield.reason, shield.segment
        motor["limited"], motor["stops"], motor["stalls"] = shield.limit_interventions, shield.stops, shield.stalls
        motor["rearm"] = shield.rearm_verdict(self._measured_or_none(), self._age_s(woke_ns))
        acting = shield.state is State.NOMINAL or shield.state is State.COASTING
        motor["plan_rows"] = self._queue.ahead(tick + 1, motor["plan"]) if acting else 0
        self._memory.write("motor", motor)

    def _log(self, tick: int, deadline_ns: int, woke_ns: int, missed: int) -> None:
        """What this tick saw and did, every tick once."""
        shield, log = self.shield, self._tick
        log["tick"], log["stamp_ns"], log["lateness_ns"] = tick, deadline_ns, woke_ns - deadline_ns
        log["state"], log["reason"], log["segment"] = shield.state, shield.reason, shield.segment
        log["measured_stamp_ns"] = self._measured_stamp_ns or 0
        log["rearms"], log["estops"], log["missed"] = self._rearms, self._estops, missed
        log["estop_presses"], log["estop_input"] = self._presses, shield.estop_level
        log["position"], log["velocity"] = shield.position, shield.velocity
        log["work_ns"] = self._clock.monotonic_ns() - woke_ns
        self._memory.ticks.append(log.tobytes())


OFFER_ACCEPTED, OFFER_NOT_LOOKED_AT, OFFER_REFUSED = 0, 1, 2
"""What became of a chunk, as logged per tick; OFFER_REFUSED + i: refused for REJECTS[i]."""

_REJECT_INDEX: dict[Reject, int] = {reject: index for index, reject in enumerate(REJECTS)}
