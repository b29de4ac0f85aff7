"""Rings and logs byte by byte, and what a half-finished writer leaves."""

import struct
import zlib

import pytest

from vla_edge.core.shared_buffer import LogRing, SharedMemoryFile, SlotRing


@pytest.fixture
def file(tmp_path):
    made = SharedMemoryFile.create("test", 4096, tmp_path)
    yield made
    made.close()
    made.unlink()


def header(sequence, payload):
    return struct.pack("<QI", sequence, zlib.crc32(payload, sequence & 0xFFFFFFFF))


# ------------------------------------------------------------------ newest-only ring


def test_the_ring_as_bytes(file):
    """Hint, then four slots of sequence, checksum and record; nothing outside is touched."""
    file.buffer[:] = b"\xaa" * 4096
    file.buffer[64:64 + 8] = b"\0" * 8
    ring = SlotRing(file.buffer, 64, 5)
    for k in range(1, 7):
        ring.write(b"rec%02d" % k)
    expected = struct.pack("<Q", 6)
    for sequence in (4, 5, 6, 3):
        payload = b"rec%02d" % sequence
        expected += header(sequence, payload) + payload
    assert file.buffer[64:64 + len(expected)] == expected
    assert set(file.buffer[:64]) | set(file.buffer[64 + len(expected):]) == {0xAA}


def test_the_size_of_a_ring_is_whole_cache_lines():
    assert [SlotRing.size(n) for n in (0, 1, 2, 3, 16, 18, 19)] == [64, 64, 64, 128, 128, 128, 192]  # 8 + 4 (12 + n)
    assert [LogRing.size(n, 3) for n in (0, 6, 7, 28)] == [64, 64, 128, 128]  # 8 + 3 (12 + n)
    assert LogRing.size(52, 100) == 6464


def test_the_oldest_slot_is_never_looked_at_for_it_is_the_next_to_be_written(file):
    ring = SlotRing(file.buffer, 0, 8)
    for k in range(1, 5):
        ring.write(b"%08d" % k)
    for sequence in (2, 3, 4):
        file.buffer[8 + sequence % 4 * 20 + 13] ^= 1
    assert ring.read() is None
    file.buffer[8 + 2 * 20 + 13] ^= 1
    assert ring.read() == (2, b"00000002")


def test_a_hint_that_lags_or_leads_by_one_still_finds_a_whole_record(file):
    """Hint and slot become visible in any order."""
    ring = SlotRing(file.buffer, 0, 8)
    for k in range(1, 6):
        ring.write(b"%08d" % k)
    file.buffer[0:8] = struct.pack("<Q", 4)
    assert ring.read() == (4, b"00000004") and ring.read(4) is None
    file.buffer[0:8] = struct.pack("<Q", 6)
    assert ring.read() == (5, b"00000005") and ring.read(5) is None


def test_a_ring_that_was_never_written_has_nothing_whatever_is_asked(file):
    assert SlotRing(file.buffer, 0, 8).read(-9) is None
    assert SlotRing(file.buffer, 0, 0).read(-9) is None  # zeros are a valid checksum of an empty record


def test_sequences_outgrow_the_checksum_seed(file):
    """The seed is 32 bits of the sequence; at 100 Hz that is passed after 497 days."""
    file.buffer[0:8] = struct.pack("<Q", 2**32 + 5)
    ring = SlotRing(file.buffer, 0, 8)
    assert ring.write(b"12345678") == 2**32 + 6
    assert ring.read() == (2**32 + 6, b"12345678")
    at = 8 + (2**32 + 6) % 4 * 20
    assert file.buffer[at:at + 12] == struct.pack("<QI", 2**32 + 6, zlib.crc32(b"12345678", 6))


def test_records_of_another_size_are_refused(file):
    ring = SlotRing(file.buffer, 0, 8)
    for size in (7, 9):
        with pytest.raises(ValueError) as error:
            ring.write(b"x" * size)
        assert str(error.value) == f"record of {size} bytes in a ring of 8"
    assert ring.hint() == 0


# ------------------------------------------------------------------ log


def log_of(file, records, capacity=4):
    log = LogRing(file.buffer, 0, 8, capacity)
    for k in range(records):
        log.append(b"%08d" % k)
    return log


def put(file, number, capacity=4, payload=None):
    """A record as its writer leaves it just before it publishes the count."""
    payload = b"%08d" % number if payload is None else payload
    at = 8 + number % capacity * 20
    file.buffer[at:at + 20] = header(number, payload) + payload


def test_the_log_as_bytes(file):
    file.buffer[:] = b"\xaa" * 4096
    file.buffer[128:136] = b"\0" * 8
    log = LogRing(file.buffer, 128, 5, 3)
    for k in range(5):
        log.append(b"rec%02d" % k)
    expected = struct.pack("<Q", 5)
    for number in (3, 4, 2):
        payload = b"rec%02d" % number
        expected += header(number, payload) + payload
    assert file.buffer[128:128 + len(expected)] == expected
    assert set(file.buffer[:128]) | set(file.buffer[128 + len(expected):]) == {0xAA}
    assert log.count() == 5 and log.drain(2) == (5, [b"rec02", b"rec03", b"rec04"], 0)


def test_at_most_256_records_come_at_once_unless_asked_otherwise(file):
    log = LogRing(file.buffer, 0, 0, 300)
    for _ in range(300):
        log.append(b"")
    assert log.drain(0) == (256, [b""] * 256, 0)
    assert log.drain(256) == (300, [b""] * 44, 0)
    assert log.drain(298, limit=1) == (299, [b""], 0)


def test_a_record_exists_once_its_count_is_published(file):
    """A writer killed in between is followed by one that gives the same number again."""
    log = log_of(file, 2)
    put(file, 2, payload=b"the dead")
    assert log.drain(0) == (2, [b"00000000", b"00000001"], 0)
    log.append(b"thealive")
    assert log.drain(2) == (3, [b"thealive"], 0)


def test_the_oldest_record_kept_is_waited_for_when_it_is_not_whole(file):
    log = log_of(file, 4)
    file.buffer[8 + 15] ^= 1
    assert log.drain(0) == (0, [], 0)
    log.append(b"%08d" % 4)
    assert log.drain(0) == (5, [b"%08d" % k for k in (1, 2, 3, 4)], 1)


def test_a_record_overwritten_before_the_count_shows_it_is_lost_and_the_rest_is_read(file):
    log = log_of(file, 10)
    put(file, 10)  # in the place of record 6
    assert log.drain(4) == (10, [b"%08d" % k for k in (7, 8, 9)], 3)


def test_a_record_overtaken_while_it_is_read_is_lost(file):
    """The slot still shows the record before, but the count has passed it meanwhile."""
    log = log_of(file, 8)
    file.buffer[8 + 4 % 4 * 20 + 15] ^= 1
    counts = iter([8, 9])
    log.count = lambda: next(counts, 9)
    assert log.drain(4) == (8, [b"%08d" % k for k in (5, 6, 7)], 1)


def test_numbers_outgrow_the_checksum_seed(file):
    start = 2**32 + 5
    file.buffer[0:8] = struct.pack("<Q", start)
    log = LogRing(file.buffer, 0, 8, 4)
    log.append(b"12345678")
    assert log.drain(start) == (start + 1, [b"12345678"], 0)
    at = 8 + start % 4 * 20
    assert file.buffer[at:at + 12] == struct.pack("<QI", start, zlib.crc32(b"12345678", 5))
