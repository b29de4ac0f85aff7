"""The records that the edge's processes exchange, and where each lies in the shared memory.

| record | writer → readers | carrier |
|---|---|---|
| chunk | policy → motor | newest only |
| motor | motor → policy, io | newest only |
| joints | io → motor, policy | newest only |
| control | io → motor | newest only; counts, so that no event is lost |
| policy, io, recorder | each → the others | newest only; heartbeat of the loop itself |
| ticks | motor → io | every record |

Layouts are fixed (little-endian numpy structures); the file's first bytes hold their digest, so two releases never
misread each other.
"""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vla_edge.core.chunk import REJECTS, ActionChunk
from vla_edge.core.shared_buffer import LogRing, SharedMemoryFile, SlotRing

MAX_HORIZON: Final = 64
NAME_BYTES: Final = 32
TICK_LOG: Final = 2048
_DIGEST_BYTES: Final = 64

Record = npt.NDArray[Any]


def _dtypes(joints: int) -> dict[str, np.dtype[Any]]:
    vector = ("<f8", (joints,))
    return {
        "chunk": np.dtype([
            ("session", "S16"), ("sequence", "<u8"), ("base_tick", "<i8"), ("observation_stamp_ns", "<i8"),
            ("period_s", "<f8"), ("names", f"S{NAME_BYTES}", (joints,)), ("horizon", "<u4"), ("width", "<u4"),
            ("positions", "<f8", (MAX_HORIZON, joints))]),
        "motor": np.dtype([
            ("tick", "<i8"), ("stamp_ns", "<i8"), ("position", *vector), ("velocity", *vector),
            ("acceleration", *vector), ("state", "u1"), ("reason", "u1"), ("rearm", "u1"),
            ("segment", "<u4"), ("missed", "<u8"), ("limited", "<u8"), ("accepted", "<u8"),
            ("rejects", "<u4", (len(REJECTS),)), ("stops", "<u4"), ("stalls", "<u4"),
            ("scheduling", "S96"), ("pid", "<u4"),
            # What the queue holds from tick + 1 on: plan_rows rows, the others mean nothing.
            ("plan_rows", "<u4"), ("plan", "<f8", (MAX_HORIZON, joints))]),
        "joints": np.dtype([
            ("sequence", "<u8"), ("stamp_ns", "<i8"), ("position", *vector), ("velocity", *vector)]),
        # Operator's commands and presses of the emergency stop input are counted. pressed: the input's level; heard_ns:
        # when it was last heard (CLOCK_MONOTONIC, 0: never).
        "control": np.dtype([
            ("rearm", "<u8"), ("estop", "<u8"), ("presses", "<u8"), ("pressed", "u1"), ("heard_ns", "<i8")]),
        # context_ns: stamp of the newest context taken, 0: none. refused: name and count of refusals since then, and
        # when the last one was. skill, why_not: of the planner, see vla_edge.core.health.
        "policy": np.dtype([
            ("loops", "<u8"), ("stamp_ns", "<i8"), ("pid", "<u4"), ("ready", "u1"), ("skill", "u1"), ("why_not", "S32"),
            ("context_ns", "<i8"), ("refused", "S32"), ("refused_count", "<u4"), ("refused_ns", "<i8")]),
        "io": np.dtype([
            ("loops", "<u8"), ("stamp_ns", "<i8"), ("pid", "<u4"), ("session", "S16"), ("tick_cursor", "<u8")]),
        "recorder": np.dtype([("loops", "<u8"), ("stamp_ns", "<i8"), ("pid", "<u4")]),
        "ticks": np.dtype([
            ("tick", "<i8"), ("stamp_ns", "<i8"), ("lateness_ns", "<i8"), ("work_ns", "<i8"), ("state", "u1"),
            ("reason", "u1"), ("segment", "<u4"), ("chunk_sequence", "<u8"), ("offered_sequence", "<u8"),
            ("offered_verdict", "u1"), ("measured_stamp_ns", "<i8"), ("rearms", "<u8"), ("estops", "<u8"),
            ("estop_presses", "<u8"), ("estop_input", "u1"), ("missed", "<u8"), ("position", *vector),
            ("velocity", *vector)]),
    }


class EdgeMemory:
    """The shared memory of one edge: a file, its rings by name, and their record types.

    Attributes:
        dtypes: structure of each record by name.
        rings: newest-only rings by name. ticks: the log of the motor's ticks.
    """

    def __init__(self, file: SharedMemoryFile, joints: int) -> None:
        """Use :meth:`create` or :meth:`open`."""
        self.file = file
        self.joints = joints
        self.dtypes = _dtypes(joints)
        self.rings: dict[str, SlotRing] = {}
        offset = _DIGEST_BYTES
        for name, dtype in self.dtypes.items():
            if name == "ticks":
                self.ticks = LogRing(file.buffer, offset, dtype.itemsize, TICK_LOG)
            else:
                self.rings[name] = SlotRing(file.buffer, offset, dtype.itemsize)
                offset += SlotRing.size(dtype.itemsize)

    @staticmethod
    def _size(joints: int) -> int:
        total = _DIGEST_BYTES
        for name, dtype in _dtypes(joints).items():
            total += LogRing.size(dtype.itemsize, TICK_LOG) if name == "ticks" else SlotRing.size(dtype.itemsize)
        return total

    @staticmethod
    def _digest(joints: int) -> bytes:
        return hashlib.sha256(repr(sorted(_dtypes(joints).items())).encode()).digest()

    @classmethod
    def create(cls, label: str, joints: int, folder: Path | None = None) -> EdgeMemory:
        """Make the memory; the caller unlinks it.

        Raises:
            OSError: see :meth:`SharedMemoryFile.create`.
        """
        file = SharedMemoryFile.create(label, cls._size(joints), folder)
        file.buffer[:32] = cls._digest(joints)
        return cls(file, joints)

    @classmethod
    def private(cls, joints: int) -> EdgeMemory:
        """Memory of this process alone, for replays and tests: no file, gone with its last reference."""
        return cls(SharedMemoryFile(Path(), mmap.mmap(-1, cls._size(joints))), joints)

    @classmethod
    def open(cls, path: Path, joints: int) -> EdgeMemory:
        """Map the memory of a running supervisor.

        Raises:
            FileNotFoundError: the supervisor has ended.
            ValueError: another release or another number of joints made it.
        """
        file = SharedMemoryFile.open(path)
        if len(file.buffer) != cls._size(joints) or file.buffer[:32] != cls._digest(joints):
            file.close()
            raise ValueError(f"{path} has another layout: stop the edge and start all of it from one release")
        return cls(file, joints)

    def blank(self, name: str) -> Record:
        """A zeroed record to fill and :meth:`write`; reuse it."""
        return np.zeros((), dtype=self.dtypes[name])

    def write(self, name: str, record: Record) -> int:
        """Publish a record; returns its sequence number."""
        return self.rings[name].write(record.tobytes())

    def read(self, name: str, newer_than: int = 0) -> tuple[int, Record] | None:
        """Newest whole record with its sequence number, or None if there is none newer."""
        found = self.rings[name].read(newer_than)
        if found is None:
            return None
        return found[0], np.frombuffer(found[1], dtype=self.dtypes[name]).reshape(())

    def close(self) -> None:
        """Unmap."""
        self.file.close()


def pack_names(names: tuple[str, ...]) -> Record:
    """Joint names as fixed-width bytes for a chunk record.

    Raises:
        ValueError: a name does not fit; a cut name could equal another one.
    """
    for name in names:
        if len(name.encode()) > NAME_BYTES:
            raise ValueError(f"joint name {name!r} is longer than {NAME_BYTES} bytes")
    return np.array([name.encode() for name in names], dtype=f"S{NAME_BYTES}")


def fill_chunk(record: Record, chunk: ActionChunk) -> None:
    """Put a chunk into a record.

    Raises:
        ValueError: more steps or another width than the record holds.
    """
    horizon, width = chunk.positions.shape
    if horizon > MAX_HORIZON or width != record["positions"].shape[1] or len(chunk.names) != width:
        raise ValueError(f"chunk of {horizon} x {width} for {len(chunk.names)} joints does not fit the shared memory")
    record["session"] = chunk.session.encode()
    record["sequence"], record["base_tick"] = chunk.sequence, chunk.base_tick
    record["observation_stamp_ns"], record["period_s"] = chunk.observation_stamp_ns, chunk.period_s
    record["names"] = pack_names(chunk.names)
    record["horizon"], record["width"] = horizon, width
    record["positions"][:horizon] = chunk.positions


class ChunkReader:
    """Chunk records back into chunks; names equal to the expected ones cost no decoding."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """``names``: the robot's own joint names."""
        self._names = names
        self._packed = pack_names(names).tobytes()

    def chunk(self, record: Record) -> ActionChunk:
        """The chunk as the writer meant it, right or wrong; the gate judges it.

        A number of steps or joints that the record cannot hold becomes 0, which is as wrong.
        """
        packed = record["names"].tobytes()
        names = self._names if packed == self._packed else tuple(
            bytes(name).decode(errors="replace") for name in record["names"])
        horizon, width = int(record["horizon"]), int(record["width"])
        positions = record["positions"][:horizon if horizon <= MAX_HORIZON else 0,
                                        :width if width <= len(self._names) else 0]
        return ActionChunk(record["session"].item().decode(errors="replace"), int(record["sequence"]),
                           int(record["base_tick"]), int(record["observation_stamp_ns"]), float(record["period_s"]),
                           names, positions)
