"""Shared memory: whole records or none, whoever dies when; files that do not outlive their owner."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vla_common.clock import SystemClock, sleep_s
from vla_edge.core import shared_buffer
from vla_edge.core.chunk import ActionChunk
from vla_edge.core.records import MAX_HORIZON, ChunkReader, EdgeMemory, fill_chunk, pack_names
from vla_edge.core.shared_buffer import LogRing, SharedMemoryFile, SlotRing, process_start, remove_leftovers

ROOT = Path(__file__).parents[2]
NAMES = ("j1", "j2", "gripper")


@pytest.fixture
def file(tmp_path):
    made = SharedMemoryFile.create("test", 1 << 16, tmp_path)
    yield made
    made.close()
    made.unlink()


def run_child(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)],
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)


# ------------------------------------------------------------------ newest-only ring


def test_the_newest_record_is_read_once(file):
    ring = SlotRing(file.buffer, 0, 8)
    assert ring.read() is None
    for k in range(1, 12):
        assert ring.write(b"%08d" % k) == k
    assert ring.read() == (11, b"00000011")
    assert ring.read(newer_than=11) is None


def test_two_mappings_see_the_same(file):
    other = SharedMemoryFile.open(file.path)
    SlotRing(file.buffer, 64, 4).write(b"abcd")
    assert SlotRing(other.buffer, 64, 4).read() == (1, b"abcd")
    other.close()


def test_a_record_of_another_size_is_refused(file):
    with pytest.raises(ValueError, match="record of 3 bytes in a ring of 8"):
        SlotRing(file.buffer, 0, 8).write(b"abc")


def test_a_damaged_slot_falls_back_to_the_one_before(file):
    ring = SlotRing(file.buffer, 0, 8)
    for k in range(1, 4):
        ring.write(b"%08d" % k)
    slot = ring._slot_at(3)
    file.buffer[slot + 14] ^= 1
    assert ring.read() == (2, b"00000002")
    assert ring.read(newer_than=2) is None
    file.buffer[ring._slot_at(2)] ^= 1  # its sequence number
    assert ring.read() == (1, b"00000001")


def test_any_flipped_bit_is_noticed(file):
    ring = SlotRing(file.buffer, 0, 16)
    ring.write(b"0123456789abcdef")
    slot = ring._slot_at(1)
    for at in range(28):
        for bit in range(8):
            file.buffer[slot + at] ^= 1 << bit
            assert ring.read() is None, (at, bit)
            file.buffer[slot + at] ^= 1 << bit
    assert ring.read() is not None


def test_a_torn_hint_hurts_no_one(file):
    ring = SlotRing(file.buffer, 0, 8)
    ring.write(b"12345678")
    file.buffer[0:8] = b"\xff" * 8
    assert ring.read() is None
    file.buffer[0:8] = b"\0" * 8
    assert ring.read() is None


def test_a_restarted_writer_goes_on_counting(file):
    SlotRing(file.buffer, 0, 8).write(b"first ..")
    assert SlotRing(file.buffer, 0, 8).write(b"second .") == 2


WRITER = """
import sys
from pathlib import Path
from vla_edge.core.shared_buffer import SharedMemoryFile, SlotRing
ring = SlotRing(SharedMemoryFile.open(Path(sys.argv[1])).buffer, 0, 4096)
k = 0
print("writing", flush=True)
while True:
    k += 1
    ring.write(bytes([k % 251]) * 4096)
"""


def test_a_reader_never_sees_a_torn_record_even_when_the_writer_is_killed(file):
    child = run_child(WRITER, file.path)
    clock = SystemClock()
    try:
        assert child.stdout.readline()
        ring, last, reads = SlotRing(file.buffer, 0, 4096), 0, 0
        end_ns, at_most_ns = (clock.monotonic_ns() + s * 1_000_000_000 for s in (1, 60))
        while clock.monotonic_ns() < end_ns or reads <= 100:  # on a busy machine the writer comes to it later
            assert clock.monotonic_ns() < at_most_ns, f"only {reads} records within a minute"
            found = ring.read(last)
            if found is not None:
                sequence, payload = found
                assert sequence > last and payload == bytes([sequence % 251]) * 4096
                last, reads = sequence, reads + 1
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    found = ring.read(last)
    assert found is None or found[1] == bytes([found[0] % 251]) * 4096


# ------------------------------------------------------------------ log


def test_every_record_is_read_in_order(file):
    log = LogRing(file.buffer, 0, 8, 16)
    assert log.drain(0) == (0, [], 0)
    for k in range(10):
        log.append(b"%08d" % k)
    following, records, lost = log.drain(0, limit=4)
    assert (following, lost) == (4, 0) and records == [b"%08d" % k for k in range(4)]
    following, records, lost = log.drain(following)
    assert (following, lost) == (10, 0) and records[-1] == b"00000009"


def test_overwritten_records_are_counted(file):
    log = LogRing(file.buffer, 0, 8, 16)
    for k in range(50):
        log.append(b"%08d" % k)
    following, records, lost = log.drain(10)
    assert (following, lost) == (50, 24) and records == [b"%08d" % k for k in range(34, 50)]


def test_a_record_that_is_not_visible_yet_is_waited_for_and_a_damaged_old_one_is_lost(file):
    log = LogRing(file.buffer, 0, 8, 4)
    for k in range(3):
        log.append(b"%08d" % k)
    at = 8 + 1 * 20 + 15
    file.buffer[at] ^= 1
    assert log.drain(0) == (1, [b"00000000"], 0)
    assert log.drain(1) == (1, [], 0)
    for k in range(3, 6):
        log.append(b"%08d" % k)
    following, records, lost = log.drain(1)
    assert (following, lost) == (6, 1) and records == [b"%08d" % k for k in range(2, 6)]


LOGGER = """
import sys
from pathlib import Path
from vla_edge.core.shared_buffer import LogRing, SharedMemoryFile
log = LogRing(SharedMemoryFile.open(Path(sys.argv[1])).buffer, 0, 100, 64)
print("writing", flush=True)
for k in range(60_000):
    log.append(b"%0100d" % k)
"""


def test_no_record_is_torn_or_repeated_while_another_process_writes(file):
    child = run_child(LOGGER, file.path)
    try:
        assert child.stdout.readline()
        log, following, read, lost = LogRing(file.buffer, 0, 100, 64), 0, [], 0
        while child.poll() is None or following < log.count():
            following, records, missing = log.drain(following)
            read += [int(record) for record in records]
            lost += missing
        assert read == sorted(set(read)) and len(read) + lost == 60_000 and read[-1] == 59_999
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


# ------------------------------------------------------------------ files


def test_leftovers_of_dead_owners_are_removed_and_no_others(tmp_path, file):
    dead = tmp_path / "vla-edge.arm1.999999999.123"
    reused = tmp_path / f"vla-edge.arm1.{os.getpid()}.1"  # this process's id, but another start
    strange = tmp_path / "vla-edge.something"
    for path in (dead, reused, strange):
        path.write_bytes(b"x")
    assert sorted(remove_leftovers(tmp_path)) == sorted([dead, reused])
    assert file.path.exists() and strange.exists()
    assert remove_leftovers(tmp_path) == []


def test_a_killed_owner_leaves_a_file_that_the_next_start_removes(tmp_path):
    child = run_child("""
import os, signal, sys
from pathlib import Path
from vla_edge.core.shared_buffer import SharedMemoryFile
SharedMemoryFile.create("arm1", 4096, Path(sys.argv[1]))
print("made", flush=True)
signal.pause()
""", tmp_path)
    assert child.stdout.readline()
    assert len(list(tmp_path.iterdir())) == 1 and remove_leftovers(tmp_path) == []
    child.kill()
    child.wait()
    child.stdout.close()
    assert len(remove_leftovers(tmp_path)) == 1 and not list(tmp_path.iterdir())


def test_process_start_tells_the_living_from_the_dead():
    assert process_start(os.getpid()) == process_start(os.getpid()) is not None
    assert process_start(999_999_999) is None


def test_a_full_memory_file_system_is_an_error_at_once_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_buffer.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        SharedMemoryFile.create("test", 4096, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_same_name_is_never_taken_twice(tmp_path, file):
    with pytest.raises(FileExistsError):
        SharedMemoryFile.create("test", 4096, tmp_path)


# ------------------------------------------------------------------ records


@pytest.fixture
def memory(tmp_path):
    made = EdgeMemory.create("test", 3, tmp_path)
    yield made
    made.file.unlink()
    made.close()


def a_chunk(horizon=16, names=NAMES, session="0123456789abcdef"):
    return ActionChunk(session, 7, -3, 123, 0.01, names, np.arange(horizon * 3.0).reshape(horizon, 3))


@pytest.mark.parametrize("names", [NAMES, ("j2", "j1", "gripper")])
def test_a_chunk_comes_out_as_it_went_in(memory, names):
    record = memory.blank("chunk")
    fill_chunk(record, a_chunk(names=names))
    memory.write("chunk", record)
    sequence, found = EdgeMemory.open(memory.file.path, 3).read("chunk")
    chunk = ChunkReader(NAMES).chunk(found)
    assert sequence == 1 and chunk.names == names and chunk.session == "0123456789abcdef"
    assert (chunk.sequence, chunk.base_tick, chunk.observation_stamp_ns, chunk.period_s) == (7, -3, 123, 0.01)
    np.testing.assert_array_equal(chunk.positions, a_chunk().positions)


@pytest.mark.parametrize("bad", [a_chunk(MAX_HORIZON + 1), a_chunk(names=("j1", "j2")),
                                 ActionChunk("s", 1, 1, 1, 0.01, NAMES, np.zeros((4, 2)))])
def test_a_chunk_that_does_not_fit_is_refused(memory, bad):
    with pytest.raises(ValueError, match="does not fit"):
        fill_chunk(memory.blank("chunk"), bad)


def test_a_name_is_never_cut():
    with pytest.raises(ValueError, match="longer than 32 bytes"):
        pack_names(("x" * 33,))


def test_every_record_has_its_own_place(memory):
    for value, name in enumerate(memory.rings, start=1):
        record = memory.blank(name)
        record[record.dtype.names[0]] = value if record.dtype.names[0] != "session" else str(value).encode()
        memory.write(name, record)
    for value, name in enumerate(memory.rings, start=1):
        _, found = memory.read(name)
        assert int(found[found.dtype.names[0]].item()) == value
    memory.ticks.append(memory.blank("ticks").tobytes())
    assert memory.read("chunk") is not None


def test_another_layout_is_refused(memory):
    with pytest.raises(ValueError, match="another layout"):
        EdgeMemory.open(memory.file.path, 4)
    memory.file.buffer[0] ^= 1
    with pytest.raises(ValueError, match="one release"):
        EdgeMemory.open(memory.file.path, 3)


def test_a_gone_supervisor_is_named(tmp_path):
    with pytest.raises(FileNotFoundError):
        EdgeMemory.open(tmp_path / "gone", 3)


def test_a_slow_reader_does_not_slow_the_writer(memory):
    """The writer never waits: ten thousand records while no one reads."""
    clock, record = SystemClock(), memory.blank("joints")
    rounds_ns = []
    for _ in range(3):  # the machine may stand still in one
        start_ns = clock.monotonic_ns()
        for _ in range(10_000):
            memory.write("joints", record)
        rounds_ns.append(clock.monotonic_ns() - start_ns)
    assert min(rounds_ns) < 5_000_000_000
    sleep_s(clock, 0.0)
