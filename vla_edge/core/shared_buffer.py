"""Exchange between processes through one memory-mapped file: a reader never waits and never sees a half-written record.

No locks and no reliance on memory order: a record carries its sequence number and a CRC32 over both; the reader copies
a slot first and then judges its own copy. A writer that is killed half-way leaves a slot that no reader accepts.

A plain file in /dev/shm rather than ``multiprocessing.shared_memory``: the latter's resource tracker unlinks a segment
when any process that attached to it ends. The file's name holds the process that owns it, so files that a killed owner
left behind are found and removed at the next start.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOG = logging.getLogger(__name__)

PREFIX: Final = "vla-edge"
SLOTS: Final = 4
_SLOT_HEADER: Final = struct.Struct("<QI")
_SEQUENCE: Final = struct.Struct("<Q")
_ALIGN: Final = 64


def memory_dir() -> Path:
    """/dev/shm where there is one, else the folder for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def process_start(pid: int) -> str | None:
    """What tells a process from a later one of the same id: its start time on Linux, ``0`` elsewhere; None if dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        fields = text.rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, IndexError):
        return "0"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "0"


class SharedMemoryFile:
    """A file mapped into memory. The creator unlinks it; everyone closes it.

    Attributes:
        path: where it lies. buffer: the mapping.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        """Use :meth:`create` or :meth:`open`."""
        self.path = path
        self.buffer = buffer

    @classmethod
    def create(cls, label: str, size: int, folder: Path | None = None) -> SharedMemoryFile:
        """Make a zeroed file owned by this process.

        Args:
            label: part of the name: letters, digits, underscore.
            size: bytes.
            folder: default :func:`memory_dir`.

        Raises:
            OSError: no space or no permission; free some of /dev/shm.
        """
        pid = os.getpid()
        path = (folder or memory_dir()) / f"{PREFIX}.{label}.{pid}.{process_start(pid)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Reserves the pages now: a full /dev/shm is an error here, not a SIGBUS in the motor loop.
            os.posix_fallocate(descriptor, 0, size)
            return cls(path, mmap.mmap(descriptor, size))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> SharedMemoryFile:
        """Map a file that another process made.

        Raises:
            FileNotFoundError: its owner has ended.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(path, mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmap."""
        self.buffer.close()

    def unlink(self) -> None:
        """Remove the file; mappings of others stay valid. Safe to call twice."""
        self.path.unlink(missing_ok=True)


def remove_leftovers(folder: Path | None = None) -> list[Path]:
    """Remove files whose owner has ended; returns what was removed."""
    return [path for path in _leftovers(folder or memory_dir()) if _unlink(path)]


def _leftovers(folder: Path) -> Iterator[Path]:
    for path in folder.glob(f"{PREFIX}.*"):
        parts = path.name.split(".")
        if len(parts) == 4 and parts[2].isdigit() and process_start(int(parts[2])) != parts[3]:
            yield path


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        LOG.warning("cannot remove %s left by a killed process: %s", path, error)
        return False
    return True


class SlotRing:
    """Newest record of one writer for any number of readers: four slots, sequence numbers from 1.

    The sequence at the front is only a hint where to look; the slot's own copy decides.
    """

    def __init__(self, buffer: mmap.mmap, offset: int, payload_bytes: int) -> None:
        """A ring of fixed-size records at ``offset``; see :meth:`size`."""
        self._buffer = buffer
        self._offset = offset
        self._payload_bytes = payload_bytes
        self._stride = _SLOT_HEADER.size + payload_bytes

    @staticmethod
    def size(payload_bytes: int) -> int:
        """Bytes that a ring takes."""
        return _aligned(_SEQUENCE.size + SLOTS * (_SLOT_HEADER.size + payload_bytes))

    def _slot_at(self, sequence: int) -> int:
        return self._offset + _SEQUENCE.size + (sequence % SLOTS) * self._stride

    def write(self, payload: bytes) -> int:
        """Publish a record; one process and one thread only. A restarted writer goes on counting.

        Returns:
            Its sequence number.

        Raises:
            ValueError: wrong size.
        """
        if len(payload) != self._payload_bytes:
            raise ValueError(f"record of {len(payload)} bytes in a ring of {self._payload_bytes}")
        sequence = self.hint() + 1
        slot = self._slot_at(sequence)
        crc = zlib.crc32(payload, sequence & 0xFFFFFFFF)
        self._buffer[slot:slot + self._stride] = _SLOT_HEADER.pack(sequence, crc) + payload
        self._buffer[self._offset:self._offset + _SEQUENCE.size] = _SEQUENCE.pack(sequence)
        return sequence

    def hint(self) -> int:
        """Sequence number last written, as far as this process sees it; 0 before the first."""
        return int(_SEQUENCE.unpack_from(self._buffer, self._offset)[0])

    def read(self, newer_than: int = 0) -> tuple[int, bytes] | None:
        """Newest whole record.

        Args:
            newer_than: sequence number of the last record read.

        Returns:
            ``(sequence, payload)``, or None if there is nothing newer that is whole; then the caller keeps what it
            has. At most SLOTS - 1 slots are looked at.
        """
        newest = self.hint()
        for sequence in range(newest, max(newer_than, newest - SLOTS + 1, 0), -1):
            slot = self._slot_at(sequence)
            copy = self._buffer[slot:slot + self._stride]
            found, crc = _SLOT_HEADER.unpack_from(copy)
            payload = copy[_SLOT_HEADER.size:]
            if found == sequence and zlib.crc32(payload, sequence & 0xFFFFFFFF) == crc:
                return sequence, payload
        return None


class LogRing:
    """Every record of one writer for one reader, in order; the writer overwrites what was not read in time.

    Numbers count from 0; the reader learns how many it lost.
    """

    def __init__(self, buffer: mmap.mmap, offset: int, record_bytes: int, capacity: int) -> None:
        """A log of fixed-size records at ``offset``; see :meth:`size`."""
        self._buffer = buffer
        self._offset = offset
        self._capacity = capacity
        self._stride = _SLOT_HEADER.size + record_bytes

    @staticmethod
    def size(record_bytes: int, capacity: int) -> int:
        """Bytes that a log takes."""
        return _aligned(_SEQUENCE.size + capacity * (_SLOT_HEADER.size + record_bytes))

    def count(self) -> int:
        """Records written so far, as far as this process sees it."""
        return int(_SEQUENCE.unpack_from(self._buffer, self._offset)[0])

    def append(self, record: bytes) -> None:
        """Write one; one process and one thread only."""
        number = self.count()
        slot = self._offset + _SEQUENCE.size + (number % self._capacity) * self._stride
        crc = zlib.crc32(record, number & 0xFFFFFFFF)
        self._buffer[slot:slot + self._stride] = _SLOT_HEADER.pack(number, crc) + record
        self._buffer[self._offset:self._offset + _SEQUENCE.size] = _SEQUENCE.pack(number + 1)

    def drain(self, following: int, limit: int = 256) -> tuple[int, list[bytes], int]:
        """Read on.

        Args:
            following: number of the next record to read.
            limit: most records returned at once.

        Returns:
            ``(next number, records, lost)``; ``lost`` were overwritten before they were read.
        """
        count = self.count()
        lost = max(0, count - self._capacity - following)
        following += lost
        records: list[bytes] = []
        while following < count and len(records) < limit:
            slot = self._offset + _SEQUENCE.size + (following % self._capacity) * self._stride
            copy = self._buffer[slot:slot + self._stride]
            found, crc = _SLOT_HEADER.unpack_from(copy)
            record = copy[_SLOT_HEADER.size:]
            if found == following and zlib.crc32(record, following & 0xFFFFFFFF) == crc:
                records.append(record)
            elif found <= following and self.count() - self._capacity <= following:
                break  # not visible here yet: try again at the next call
            else:
                lost += 1
            following += 1
        return following, records, lost


def _aligned(size: int) -> int:
    """Rounded up to a cache line, so that neighbours do not share one."""
    return -(-size // _ALIGN) * _ALIGN
