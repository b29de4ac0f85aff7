"""A process that opens the edge's shared memory and writes chunks in the place of the policy: good ones and bad ones."""

from __future__ import annotations

import argparse
import dataclasses
import struct
import zlib
from pathlib import Path

import numpy as np
from edge_rig import CLOCK, HORIZON, LIMITS
from mangle import AMPLITUDE, DELTA, SWING, Fault, Orders, Pendulum, Share

from vla_common.clock import sleep_s
from vla_common.process import end_with_parent
from vla_edge.core.chunk import ActionChunk
from vla_edge.core.records import EdgeMemory, Record, fill_chunk
from vla_edge.core.shared_buffer import SLOTS, SlotRing

REPLAN_TICKS = 5


class Rogue:
    """Makes chunk records; see :meth:`turn`."""

    def __init__(self, memory: EdgeMemory) -> None:
        self._memory = memory
        self._record = memory.blank("chunk")
        self._swing = Pendulum(LIMITS.ready, SWING, AMPLITUDE)
        self._share = Share()
        self._random = np.random.default_rng(7)
        self._sequence = 0
        self._planned_tick = -REPLAN_TICKS
        self._later: list[tuple[int, bytes]] = []
        self._stuck: bytes | None = None
        self.fault: Fault | None = None
        """None: write nothing."""

    def turn(self) -> None:
        """Every REPLAN_TICKS ticks a chunk from the newest command, with the fault asked for."""
        now_ns = CLOCK.monotonic_ns()
        due = [payload for at_ns, payload in self._later if at_ns <= now_ns]
        self._later = [item for item in self._later if item[0] > now_ns]
        for payload in due:
            self._memory.rings["chunk"].write(payload)
        found = self._memory.read("motor")
        if self.fault is None or found is None or int(found[1]["tick"]) < self._planned_tick + REPLAN_TICKS:
            return
        motor = found[1]
        self._planned_tick = int(motor["tick"])
        self._sequence += 1
        steps = np.arange(1, HORIZON + 1)[:, None] / HORIZON
        rows = motor["position"] + DELTA * self._swing.direction(motor["position"]) * steps
        chunk = ActionChunk("rogue", self._sequence, self._planned_tick, int(motor["stamp_ns"]), 0.01, LIMITS.names,
                            rows)
        fill_chunk(self._record, chunk)
        self._write(now_ns, self._share.hit(self.fault.share))

    def _write(self, now_ns: int, is_hit: bool) -> None:
        assert self.fault is not None
        kind, ring = self.fault.kind if is_hit else "none", self._memory.rings["chunk"]
        later_ns = now_ns + round(self.fault.delay_s * 1e9)
        if kind == "drop":
            return
        if kind in ("delay", "reorder"):
            self._later.append((later_ns, self._record.tobytes()))
        elif kind == "duplicate":
            ring.write(self._record.tobytes())
            self._later.append((later_ns, self._record.tobytes()))
        elif kind == "stuck":
            self._stuck = self._stuck or self._record.tobytes()
            ring.write(self._stuck)
        elif kind == "garbage_slot":  # bytes without a valid checksum where the next record would be
            self._scribble(ring, ring.hint() + 1)
        elif kind == "garbage_ring":
            for sequence in range(ring.hint() + 1, ring.hint() + 1 + SLOTS):
                self._scribble(ring, sequence)
        elif kind == "garbage_record":  # a valid checksum over nonsense
            ring.write(self._random.bytes(self._record.nbytes))
        else:
            ring.write(spoil(self._record, kind).tobytes())
        if kind != "stuck":
            self._stuck = None

    def _scribble(self, ring: SlotRing, sequence: int) -> None:
        """Random bytes over a slot behind a true sequence number and a wrong checksum, and the front saying it is new."""
        payload = self._random.bytes(self._record.nbytes)
        at = ring._slot_at(sequence)
        wrong = zlib.crc32(payload, sequence & 0xFFFFFFFF) ^ 1
        ring._buffer[at:at + 12 + len(payload)] = struct.pack("<QI", sequence, wrong) + payload
        ring._buffer[ring._offset:ring._offset + 8] = struct.pack("<Q", sequence)


def spoil(record: Record, kind: str) -> Record:
    """A copy of a chunk record with one thing wrong."""
    record = record.copy()
    if kind in ("nan", "inf"):
        record["positions"][3, 2] = {"nan": np.nan, "inf": np.inf}[kind]
    elif kind == "order":
        record["names"][[0, 1]] = record["names"][[1, 0]]
    elif kind == "width":
        record["width"] = 7
    elif kind == "wider":
        record["width"] = 9
    elif kind == "longer":
        record["horizon"] = 500
    elif kind == "future":
        record["observation_stamp_ns"] += 3_600_000_000_000
    elif kind == "past":
        record["observation_stamp_ns"] -= 5_000_000_000
    elif kind == "future_tick":
        record["base_tick"] += 50
    elif kind != "none":
        raise ValueError(kind)
    return record


def main() -> None:
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=Path, required=True)
    memory = EdgeMemory.open(parser.parse_args().memory, len(LIMITS))
    orders, rogue = Orders(), Rogue(memory)
    while orders.open:
        for order in orders.poll():
            rogue.fault = None if order["fault"] is None else dataclasses.replace(Fault(), **order["fault"])
        rogue.turn()
        sleep_s(CLOCK, 0.002)


if __name__ == "__main__":
    main()
